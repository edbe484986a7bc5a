"""Two records of a step: the first tensor that differs, in bits or beyond rounding; environments."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from shoal.base.errors import ConfigError
from shoal.cli.replay_pair import pair_bound
from shoal.replay import script_replay
from shoal.replay.breakpoint_gate import BreakpointGate
from shoal.replay.first_difference import find_statistic_difference, find_tensor_difference
from shoal.replay.island_rounds import find_round_start, read_round
from shoal.replay.replay_folder import read_rewinds
from shoal.replay.replay_lines import Replay, opening_lines, repeats_bits, replay_lines
from shoal.replay.run_environment import collect_environment, list_environment_differences
from shoal.replay.step_marks import (
    AFTER,
    BEFORE,
    FORWARD,
    GRADIENTS,
    StepMarks,
    StepRecord,
    read_record,
    relative_gap,
)
from shoal.replay.step_recorder import mark_tensor, mark_tensors


def marks_of(**tensors: torch.Tensor) -> StepMarks:
    return StepMarks(3, {GRADIENTS: mark_tensors(tensors.items())})


def test_a_sketch_estimates_how_far_two_tensors_are() -> None:
    """Also where their norms are equal, and exactly where one element differs."""
    keys = torch.Generator().manual_seed(0)
    one = torch.randn(300, 40, generator=keys)
    other = one[torch.randperm(300, generator=keys)]
    gap = relative_gap(mark_tensor(one), mark_tensor(other))
    true = float((one - other).norm() / one.norm())
    assert 0.3 * true < gap < 3 * true, "four sums; the norms are equal"
    other = one.clone()
    other[7, 7] += 5.0
    gap = relative_gap(mark_tensor(one), mark_tensor(other))
    assert math.isclose(gap, 5.0 / float(max(one.norm(), other.norm())), rel_tol=1e-6)
    assert mark_tensor(torch.zeros(0)).sketch == (0.0,) * 4


def test_of_two_layouts_a_tensor_differs_by_more_than_rounding() -> None:
    keys = torch.Generator().manual_seed(0)
    first, second, tiny = (torch.randn(64, generator=keys) for _ in range(3))
    tiny = tiny * 1e-9  # noise around zero: no two layouts agree in it
    here = marks_of(first=first, second=second, tiny=tiny)
    there = marks_of(first=first * (1 + 1e-7), second=second, tiny=-tiny)
    assert find_tensor_difference(here, there).name == "tiny", "bits"
    assert find_tensor_difference(here, there, 1e-4) is None
    there = marks_of(first=first * 0.5, second=second, tiny=-tiny)
    found = find_tensor_difference(here, there, 1e-4)
    assert (found.name, found.differing, found.bound) == ("first", 1, 1e-4)


def test_outputs_are_compared_where_both_recorded_a_part() -> None:
    """A part of another name hides no later one; another layout may record fewer elements."""
    x = torch.ones(4)
    here = StepMarks(1, {FORWARD: mark_tensors([("drop", x), ("head", x)])})
    there = StepMarks(1, {FORWARD: mark_tensors([("noise", x), ("head", 2 * x)])})
    assert find_tensor_difference(here, there).name == "head"
    fewer = StepMarks(1, {FORWARD: mark_tensors([("drop", 2 * x)])})
    assert find_tensor_difference(here, fewer).name == "drop"
    assert find_tensor_difference(here, fewer, 1e-4).name == "drop"
    shorter = StepMarks(1, {FORWARD: mark_tensors([("drop", 2 * x[:2])])})
    assert find_tensor_difference(here, shorter, 1e-4) is None
    missing = StepMarks(1, {BEFORE: mark_tensors([("w", x)]), AFTER: {}})
    assert find_tensor_difference(StepMarks(1, {BEFORE: {}}), missing).gap == math.inf


def test_the_bound_of_a_pair() -> None:
    assert pair_bound(("single", "fp32", 4), ("ddp", "bf16", 4)) == 2e-2
    assert pair_bound(("single", "fp32", 4), ("single", "fp32", 2)) == 1e-4
    assert pair_bound(("single", "fp32", 4), ("single", "fp32", 0)) == 0.0, "an older record"


def test_gpus_without_deterministic_kernels_are_compared_to_rounding(tmp_path: Path) -> None:
    """Their kernels add in another order each time: that is no fault of a moment."""

    def is_exact(run_toml: str = "", **entry: object) -> bool:
        (tmp_path / "ranks.json").write_text(json.dumps({"ranks": [entry]}))
        (tmp_path / "run.toml").write_text(run_toml)
        return repeats_bits(tmp_path)

    asked = "[train]\ndeterministic = true\n"
    assert is_exact(device="cpu")
    assert is_exact(device="cuda:0", deterministic=True)
    assert is_exact(asked, device="cuda:0"), "a folder of an older version"
    assert not is_exact("[train]\ndeterministic = false\n", device="cuda:0")
    lines = opening_lines(tmp_path, (0, 3), "ddp", {})
    assert lines[-1].endswith("for equal bits, try in the next run: train.deterministic=true")
    (tmp_path / "run.toml").unlink()
    assert "use_deterministic_algorithms(True)" in opening_lines(tmp_path, (0, 3), "ddp", {})[-1]
    rows = [{1: {"step": 1, "loss": 1.0 + at * 1e-7, "grad_norm": 1.0}} for at in (0, 1)]
    record = StepRecord("a", "ddp", 2, "fp32", rows=rows[1])
    done = Replay(tmp_path, 0, record, rows[0], True, "fp32", repeats_bits=False)
    assert done.repeats_run()
    assert "rounding (GPUs without deterministic kernels; bound 1e-04)" in replay_lines(done, 1)[2]
    assert not replace(done, repeats_bits=True).repeats_run()
    other = replace(done, own_rows={1: {**rows[0][1], "tokens": 26}})
    record.rows[1]["tokens"] = 12
    assert "step 1: tokens 26 → 12 (54 % apart): the step met other" in replay_lines(other, 1)[2]
    assert not other.may_be_rounding()
    record.write(tmp_path / "step.json")
    assert read_record(tmp_path / "step.json").repeats_bits
    assert pair_bound(("ddp", "fp32", 2), ("ddp", "fp32", 2), exact=False) == 1e-4
    replace(record, repeats_bits=False).write(tmp_path / "step.json")
    assert not read_record(tmp_path / "step.json").repeats_bits


def test_the_library_of_a_script_is_read_from_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a module of the script imports it, and where losses are weighed by targets."""
    script, found = tmp_path / "train.py", []
    monkeypatch.setattr(
        script_replay,
        "importlib",
        SimpleNamespace(import_module=lambda name: found.append(name) or Mock()),
    )
    script.write_text("import loop\n")
    script_replay.import_neighbours(tmp_path, str(script))
    assert found == []
    write_events(tmp_path, {"event": "library_run", "library": "accelerate", "exact": True})
    script_replay.import_neighbours(tmp_path, str(script))
    assert found == ["shoal.neighbours.accelerate", "shoal.neighbours.exact"]
    (tmp_path / "events.jsonl").unlink()
    script.write_text("import deepspeed\n")
    script_replay.import_neighbours(tmp_path, str(script))
    assert found[2:] == ["shoal.neighbours.deepspeed"], "a folder of an older version"


def test_statistics_are_compared_in_the_order_of_a_step() -> None:
    line = {"weight_norm": {"a": 1.0, "b": 2.0}, "gradient_norm": {"a": 1.0, "b": 2.0}}
    other = {**line, "gradient_norm": {"a": 1.5, "b": 2.5}}
    found = find_statistic_difference({4: line, 5: line}, {4: line, 5: other})
    assert (found.step, found.kind, found.name) == (5, "gradient_norm", "b")
    other = {**other, "weight_norm": {"a": 1.0, "b": 2.5}}
    found = find_statistic_difference({5: line}, {5: other})
    assert (found.kind, found.name, found.values, found.differing) == (
        "weight_norm", "b", (2.0, 2.5), 1
    )  # fmt: skip
    assert find_statistic_difference({5: line}, {5: line}) is None


def test_an_environment_names_what_differs() -> None:
    record = {"versions": {"torch": "2.12.1"}, "code": {"net": ["src/net.py", "abc"]}}
    first = {"rank": 0, "device": "cuda:0", "device_name": "NVIDIA H100", "threads": 8,
             "processor": "EPYC", "instructions": "AVX512"}  # fmt: skip
    then = collect_environment(record, {"ranks": [first]})
    assert then["device"] == "NVIDIA H100"
    now = {**then, "version of torch": "2.13.0", "source of net.py": "abd", "threads": "2"}
    assert list_environment_differences(then, now) == [
        "version of torch: 2.12.1 → 2.13.0", "source of net.py: changed", "threads: 8 → 2",
    ]  # fmt: skip
    assert collect_environment({}, {}) == {}


def write_events(folder: Path, *events: dict[str, object]) -> None:
    text = "".join(json.dumps({"time_s": 0.0, "rank": 0, **event}) + "\n" for event in events)
    (folder / "events.jsonl").write_text(text)


def test_rounds_of_an_island_are_those_of_its_last_pass(tmp_path: Path) -> None:
    end = {"event": "round_committed", "steps": 5, "admitted": [0, 1]}
    write_events(
        tmp_path,
        {**end, "step": 5, "round": 0},
        {**end, "step": 9, "round": 1, "steps": 4},  # a start that was broken off before its save
        {**end, "step": 10, "round": 1, "admitted": [1]},
        {**end, "step": 14, "round": 2, "steps": 4, "event": "round_discarded"},
    )
    assert read_round(tmp_path, 5).first_step == 1
    found = read_round(tmp_path, 6)
    assert (found.number, found.first_step, found.last_step, found.members) == (1, 6, 10, (1,))
    assert read_round(tmp_path, 14).members == ()
    assert (read_round(tmp_path, 15).first_step, read_round(tmp_path, 15).last_step) == (15, 0)
    assert find_round_start(tmp_path, 3) == []
    for step in (5, 14):
        folder = tmp_path / "checkpoints" / f"step-{step}"
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text("{}")
    assert [one.step for one in find_round_start(tmp_path, 8)] == [5]
    with pytest.raises(ConfigError, match=r"\(steps 11 to 14\) whose first state is deleted.*"):
        find_round_start(tmp_path, 12)


def test_rewinds_after_a_checkpoint(tmp_path: Path) -> None:
    write_events(
        tmp_path,
        {"event": "rewound", "step": 3, "to": 0},
        {"event": "checkpoint_saved", "step": 4},
        {"event": "rewound", "step": 8, "to": 4},
    )
    assert read_rewinds(tmp_path, 4) == ((8, 4),)
    assert read_rewinds(tmp_path, 0) == ((3, 0), (8, 4))


def test_breakpoints_stop_in_the_asked_step_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in steps before it, not in trials of guards, and not where no terminal is."""
    stopped: list[int] = []
    monkeypatch.setattr(sys, "breakpointhook", lambda: stopped.append(gate.step))
    right = sys.breakpointhook
    gate = BreakpointGate(5)
    trial = {"__name__": "shoal.trainer.guards.model_trial"}
    for step in (0, 4, 5):
        gate.begin_step(step)
        breakpoint()
        exec("breakpoint()", trial)
    assert stopped == [5]
    gate.close()
    assert sys.breakpointhook is right
    gate = BreakpointGate(5, has_terminal=False)
    gate.begin_step(4)
    breakpoint()
    assert not gate.passed_over
    gate.begin_step(5)
    breakpoint()
    gate.close()
    assert (stopped, gate.passed_over) == ([5], True)
