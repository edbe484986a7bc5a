"""Runs whose ranks hold parts of layers, or some layers only, go on on any other layout.

Float64; the loss and gradient norm of every step within 1e-10 of an unbroken run of one process,
AdamW's moments, momentum and averaged weights included. Every checkpoint is written beside
training, verified, and exported under the model's own names, bit for bit.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import resume_case
from cli_run import CommandLine, trajectory
from forks import shared
from shoal.fabric import start_world

BOUND, DEADLINE_S = 1e-10, 180.0
Legs = list[tuple[int, Any, int]]
"""(processes, layout, steps) of each leg; an epoch has three steps."""

GRID = {"tp": 2, "pp": 2}
CHAIN: Legs = [(4, GRID, 1), (4, GRID, 2), (4, "fsdp", 1), (1, "single", 1)]
COPIES: Legs = [(4, {"tp": 4}, 1), (4, {"pp": 2, "dp_shard": 2}, 1), (4, {"tp": 4}, 1)]
STAGES: Legs = [(2, {"pp": 2, "schedule": "interleaved"}, 1), (2, "zero1", 1)]
SHARDS: Legs = [
    (4, {"tp": 2, "dp_shard": 2}, 1),
    (4, {"tp": 2, "dp_shard": 2, "zero": 1}, 1),
]


def run_legs(
    worlds, folder: Path, wanted: list[tuple[str, str]], legs: Legs
) -> dict[str, list[list[dict[str, Any]]]]:
    """By "case optimizer", per leg: what every rank told."""
    told: dict[str, list[list[dict[str, Any]]]] = {}
    for size, layout, steps in legs:
        arguments = {"folder": str(folder), "wanted": wanted, "layout": layout, "steps": steps}
        if size == 1:
            answers = [resume_case.leg(start_world({}), **arguments)]
        else:
            answers = worlds(size).call("resume_case:leg", **arguments)
        for name in answers[0]:
            told.setdefault(name, []).append([answer[name] for answer in answers])
    return told


def alone(folder: Path, case: str, optimizer: str, steps: int) -> dict[str, Any]:
    """The unbroken run of one process."""
    return resume_case.train(start_world({}), folder, case, optimizer, "single", steps)


def assert_unbroken(told: list[list[dict[str, Any]]], legs: Legs, expected: dict[str, Any]) -> None:
    began = 0
    for (_, layout, steps), ranks in zip(legs, told, strict=True):
        assert [rank["began"] for rank in ranks] == [began or -1] * len(ranks), layout
        assert all(rank["saved"] and not rank["wrong"] for rank in ranks), (layout, ranks)
        for rank in ranks:
            for key in ("curve", "weights", "averages"):
                assert rank[key] == ranks[0][key], (layout, key)
        began += steps
    curve = [point for ranks in told for point in ranks[0]["curve"]]
    for step, (ours, theirs) in enumerate(zip(curve, expected["curve"], strict=True), 1):
        assert ours == pytest.approx(theirs, rel=BOUND, abs=0), f"step {step}"
    for key in ("weights", "averages"):
        assert told[-1][0][key] == pytest.approx(expected[key], rel=BOUND, abs=1e-12), key


@pytest.fixture(scope="module")
def chain(worlds, tmp_path_factory: pytest.TempPathFactory):
    """tp 2 × pp 2 → the same → fsdp 4 → single."""
    return run_legs(worlds, tmp_path_factory.mktemp("chain"), [("fused", "adamw")], CHAIN)


def test_a_grid_goes_on_over_all_layouts(chain, tmp_path: Path) -> None:
    """q, k and v in one projection."""
    assert_unbroken(chain["fused adamw"], CHAIN, alone(tmp_path, "fused", "adamw", 5))


@pytest.mark.proof  # bits: ddp (test_survival.py); a grid, to 1e-10: the legs above
def test_the_same_grid_goes_on_bit_for_bit(worlds, chain, tmp_path: Path) -> None:
    ((ranks,),) = run_legs(worlds, tmp_path, [("fused", "adamw")], [(4, GRID, 3)]).values()
    first, second = chain["fused adamw"][:2]
    assert first[0]["curve"] + second[0]["curve"] == ranks[0]["curve"]
    assert second[0]["weights"] == ranks[0]["weights"]
    assert second[0]["averages"] == ranks[0]["averages"]


@pytest.mark.proof
def test_fewer_key_heads_than_ranks_go_on(worlds, tmp_path: Path) -> None:
    """Ranks that share a key head offer the same slices."""
    told = run_legs(worlds, tmp_path / "legs", [("grouped", "sgd")], COPIES)
    assert_unbroken(told["grouped sgd"], COPIES, alone(tmp_path / "one", "grouped", "sgd", 3))


def test_stages_of_an_interleaved_pipeline_go_on(worlds, tmp_path: Path) -> None:
    told = run_legs(worlds, tmp_path / "legs", [("fused", "adamw")], STAGES)
    assert_unbroken(told["fused adamw"], STAGES, alone(tmp_path / "one", "fused", "adamw", 2))


@pytest.mark.proof
def test_columns_cut_within_segments_go_on(worlds, tmp_path: Path) -> None:
    """q, k and v in the columns of one weight, cut once more over data ranks; a tied head."""
    told = run_legs(worlds, tmp_path / "legs", [("columns", "adamw")], SHARDS)
    assert_unbroken(told["columns adamw"], SHARDS, alone(tmp_path / "one", "columns", "adamw", 2))


SLOW = """
import time
def slowly(event):
    if event["event"] == "step":
        time.sleep(0.25)
"""


@pytest.mark.proof
def test_a_grid_is_killed_and_stopped_and_goes_on_in_two_parts(tmp_path: Path) -> None:
    """The real command, proven before it starts: killed, restarted, stopped, gone on as tp 2."""
    text = "".join(f"def plus_{k}(x):\n    return x + {k}\n" for k in range(120))
    (tmp_path / "text.py").write_text(text)
    (tmp_path / "hooks.py").write_text(SLOW)  # else the run may end before it is stopped
    said = [
        f"data.source=text:{tmp_path / 'text.py'}", "data.tokenizer=bpe:300", "data.sequence=16",
        "model.dim=16", "model.layers=2", "model.heads=4", "model.kv_heads=2", "train.steps=16",
        "train.batch=8", "train.micro_batch=4", "precision.compute=fp64", "checkpoint.every=1",
    ]  # fmt: skip
    grid = CommandLine(
        tmp_path, *said, "launch.processes=4", "layout.tp=2", "layout.pp=2",
        "train.on=hooks:slowly",
    )  # fmt: skip
    # A kill before the first save is complete is no resume: it begins anew.
    grid.wait_for(lambda: grid.steps() >= 2 and grid.events("checkpoint_saved") != [], DEADLINE_S)
    grid.kill(2)
    grid.wait_for(lambda: grid.events("resumed") != [] and grid.steps() >= 6, DEADLINE_S)
    grid.process.send_signal(signal.SIGTERM)
    code, output = grid.finish(DEADLINE_S)
    assert code == 143, output
    assert "proof: 3d (pp = 2, tp = 2, schedule = 1f1b) computes what one process" in output
    assert 6 <= grid.steps() < 16
    two = ("launch.processes=2", "layout.tp=2", "layout.pp=1")
    parts = CommandLine(tmp_path, "--resume", "runs/run", *two)
    code, output = parts.finish(DEADLINE_S)
    assert code == 0, output
    assert "layout: 3d (pp = 2, tp = 2, schedule = 1f1b) → tp (tp = 2)" in output
    alone = CommandLine(tmp_path, *said, "launch.processes=1", name="alone")
    code, output = alone.finish(DEADLINE_S)
    assert code == 0, output
    for ours, theirs in zip(trajectory(grid.run), trajectory(alone.run), strict=True):
        assert ours == (theirs[0], *(pytest.approx(n, rel=BOUND) for n in theirs[1:3]), theirs[3])
    out = tmp_path / "model.safetensors"
    words = ("-m", "shoal", "checkpoint", "export", "runs/run", str(out))
    done = shared().run(*words, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr
    names = load_file(out).keys()
    assert "blocks.0.attention.q.weight" in names
    assert "blocks.1.mlp.down.weight" in names
