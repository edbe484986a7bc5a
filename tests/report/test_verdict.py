"""The verdict on made run folders: the cause alone, its share, and the step without it."""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from shoal.base.runlog.rank_records import PARTS, RankStep, encode_header
from shoal.report.verdict import find_verdict
from shoal.view.diagnose import diagnose
from shoal.view.script_lines import LOOP_CURE, loader_cure

OWN_S = {
    "other": 0.0,
    "data": 0.002,
    "passes": 0.02,
    "backward": 0.03,
    "update": 0.004,
    "hooks": 0.0,
}
SUM_S = 0.001
"""Seconds of the common part of a sum."""
Extra = Callable[[int, int, str], float]
"""(step, rank, part) → seconds more."""


def make_run(
    folder: Path,
    extra: Extra = lambda step, rank, part: 0.0,
    *,
    ranks: int = 2,
    steps: int = 100,
    seed: int = 0,
    sum_s: float = SUM_S,
    events: Sequence[Mapping[str, Any]] = (),
    plan: Mapping[str, Any] | None = None,
    row: Mapping[str, Any] | None = None,
) -> list[float]:
    """Write the folder of a run whose ranks meet in a sum; return the seconds of its steps.

    Updates and hooks of a step come after its sum, so they make the next one late.
    """
    drawn = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.toml").write_text("")
    (folder / "plan.json").write_text(json.dumps(plan or {"batch": 8}))
    told: list[Mapping[str, Any]] = [{"event": "run_started", "time_s": 999.0}, *events]
    (folder / "events.jsonl").write_text("".join(json.dumps(one) + "\n" for one in told))
    now_s, rows, whole_s = [1000.0] * ranks, [], []
    metrics = []
    for step in range(1, steps + 1):
        began_s = list(now_s)
        spent = [dict.fromkeys(PARTS, 0.0) for _ in range(ranks)]

        def spend(rank: int, part: str, spent: Any = spent, step: int = step) -> None:
            seconds = OWN_S[part] * (1 + 0.05 * drawn.random()) + extra(step, rank, part)
            spent[rank][part] += seconds
            now_s[rank] += seconds

        for rank in range(ranks):
            for part in ("other", "data", "passes", "backward"):
                spend(rank, part)
        met_s = max(now_s) + sum_s * (1 + 0.05 * drawn.random())
        for rank in range(ranks):
            spent[rank]["waiting"], now_s[rank] = met_s - now_s[rank], met_s
            spend(rank, "update")
            spend(rank, "hooks")
            seconds = tuple(spent[rank][part] for part in PARTS)
            rows.append(RankStep(step, rank, 1, now_s[rank], 1 << 28, seconds))
        whole_s.append(now_s[0] - began_s[0])
        metrics.append({
            "step": step, "loss": 1.0 + 0.01 * drawn.random(), "tokens": 8, "step_s": whole_s[-1],
            "data_wait_s": spent[0]["data"], "comm_exposed_s": spent[0]["waiting"],
            "comm_bytes": 100, **(row or {}),
        })  # fmt: skip
    (folder / "rank_steps").mkdir(exist_ok=True)
    raw = encode_header(0) + b"".join(one.encode() for one in rows)
    (folder / "rank_steps" / "node-0.bin").write_bytes(raw)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in metrics))
    return whole_s


def mean_s(steps_s: list[float]) -> float:
    return sum(steps_s[5:]) / len(steps_s[5:])


PARTS_OF_A_RANK = {
    "data": "rank 1's data",
    "passes": "rank 1's forward pass",
    "backward": "rank 1's backward pass",
    "update": "rank 1's optimizer update",
    "hooks": "rank 1's callbacks",
}


class SlowRows:
    """Rows whose reading takes 10 ms."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, place: int) -> tuple[torch.Tensor, torch.Tensor]:
        if place > 2:
            raise IndexError(place)
        time.sleep(0.01)
        return torch.full((4,), place / 3), torch.tensor(place)


class SlowStream(torch.utils.data.IterableDataset[Any]):
    """The same rows, read front to back."""

    def __iter__(self) -> Iterator[Any]:
        return iter(SlowRows())


def test_verdict_and_advice_on_a_loop_have_one_cure(tmp_path: Path) -> None:
    """`run.loader` is Shoal's own, so its time is told from that of the loop's code."""
    model, folder = torch.nn.Linear(4, 3), tmp_path / "own"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = shoal.parallelize(model, optimizer, batch=1, folder=folder)
    for data in (SlowRows(), SlowStream(), None):
        batches = [(torch.ones(1, 4), torch.tensor([1]))] if data is None else run.loader(data)
        for batch in batches:
            run.step(batch)
            time.sleep(0.02)
    run.close()
    file = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(rows) == 7
    assert all(row["loop_s"] >= 0.02 for row in rows[1:6])
    assert all(row["data_wait_s"] >= 0.01 for row in rows[:5]), "a stream is read one sample ahead"
    assert min(row["data_wait_s"] for row in rows[:6]) < 0.5, "of one step"
    assert "loop_s" not in rows[6], "nothing tells the two apart"
    assert rows[6]["data_wait_s"] >= 0.02
    made = tmp_path / "made"  # without the ranks' records
    made.mkdir()
    for name in ("plan.json", "events.jsonl"):
        shutil.copyfile(folder / name, made / name)
    between = "all ranks' own code between two steps, or callbacks"
    both = "all ranks wait for data, or the loop's own code between two steps"
    for data_s, loop_s, cause, cure in (
        (0.001, 0.02, between, LOOP_CURE),
        (0.02, 0.001, "all ranks wait for data", loader_cure(is_loop_timed=True)),
        (0.02, None, both, loader_cure(is_loop_timed=False)),
    ):
        row = {**rows[5], "step_s": 0.03, "data_wait_s": data_s, "loop_s": loop_s}
        if loop_s is None:
            del row["loop_s"]
        lines = [json.dumps({**row, "step": step}) for step in range(1, 61)]
        (made / file.name).write_text("\n".join(lines) + "\n")
        verdict = find_verdict(made)
        assert (verdict.cause, verdict.command) == (cause, cure)
        assert verdict.without_s == pytest.approx(0.01, abs=2e-3)
        (advice,) = [one for one in diagnose(made) if one.advice]
        assert advice.command == cure, advice


@pytest.mark.parametrize("part", PARTS_OF_A_RANK)
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_slow_rank_and_the_step_without_it(tmp_path: Path, part: str, ranks: int) -> None:
    drawn_s = random.Random(f"{part} {ranks}").uniform(0.01, 0.05)
    make_run(tmp_path / "slow", lambda _, r, p: drawn_s * ((r, p) == (1, part)), ranks=ranks)
    verdict = find_verdict(tmp_path / "slow")
    assert (verdict.kind, verdict.cause) == ("slow_rank", PARTS_OF_A_RANK[part])
    assert verdict.without_s is not None
    cured_s = mean_s(make_run(tmp_path / "cured", ranks=ranks))
    assert verdict.without_s == pytest.approx(cured_s, rel=0.02)
    assert verdict.share == pytest.approx(drawn_s / (cured_s + drawn_s), abs=0.02)


def test_a_rank_that_is_slow_in_all_its_passes_is_one_cause(tmp_path: Path) -> None:
    make_run(tmp_path / "slow", lambda _, r, p: (r == 1) * 0.5 * OWN_S[p], ranks=4)
    verdict = find_verdict(tmp_path / "slow")
    assert verdict.cause == "rank 1's forward pass and backward pass"
    assert verdict.without_s == pytest.approx(FULL_STEP_S, rel=0.1)


def test_data_that_all_ranks_wait_for(tmp_path: Path) -> None:
    make_run(tmp_path / "slow", lambda _, r, p: 0.02 * (p == "data"))
    verdict = find_verdict(tmp_path / "slow")
    assert (verdict.kind, verdict.command) == ("input", "data.workers=2")
    cured_s = mean_s(make_run(tmp_path / "cured"))
    assert verdict.without_s == pytest.approx(cured_s, rel=0.05)


def test_ranks_alike_have_nothing_to_gain(tmp_path: Path) -> None:
    make_run(tmp_path)
    verdict = find_verdict(tmp_path)
    assert verdict.kind == "nothing"
    assert "nothing to gain" in verdict.line()


def test_a_fault_that_ended_the_run_comes_before_a_cost(tmp_path: Path) -> None:
    died = {"event": "worker_died", "rank": 1, "pid": 7, "step": 90, "how": "killed by SIGKILL"}
    slow: Extra = lambda _, r, p: 0.05 * ((r, p) == (1, "data"))  # noqa: E731
    make_run(tmp_path / "ended", slow, events=[died])
    assert find_verdict(tmp_path / "ended").kind == "fault"
    assert "killed by SIGKILL" in find_verdict(tmp_path / "ended").line()
    make_run(tmp_path / "on", slow, events=[died, {"event": "compute_started", "step": 3}])
    assert find_verdict(tmp_path / "on").kind == "slow_rank", "the run got over it"


GPU_PLAN = {
    "device": "cuda", "compute": "bf16", "accumulate": 1, "micro_batch": 4,
    "predicted": {
        "time": {"matrix": 0.03, "elementwise": 0.015, "constants": 0.002, "gradients": 0.001},
        "memory": {"activations": 2e9},
    },
}  # fmt: skip
GIB = 2**30


def make_gpu_run(
    folder: Path,
    extra: Extra = lambda step, rank, part: 0.0,
    *,
    busy: float = 0.8,
    used: int = 20 * GIB,
    plan: Mapping[str, Any] | None = None,
    **more: Any,
) -> float:
    """Write the folder of a run of four GPUs, timed on the device; return its mean step."""
    row = {"timed_by": "device", "peak_memory_bytes": used}
    found = make_run(folder, extra, ranks=4, plan={**GPU_PLAN, **(plan or {})}, row=row, **more)
    entry = {"name": "NVIDIA H100", "utilisation": busy, "memory_total_bytes": 80 * GIB}
    lines = [{"time_s": 1000.0 + at, "host": "a", "devices": [entry, None, 3]} for at in range(3)]
    text = "".join(json.dumps(one) + "\n" for one in lines)
    (folder / "devices.jsonl").write_text(text + '{"devices": 7}\nnonsense\n')
    return mean_s(found)


PASSES_S = OWN_S["passes"] + OWN_S["backward"]
FULL_STEP_S = sum(OWN_S.values()) + SUM_S


@pytest.mark.parametrize(
    ("kind", "gain_s", "more"),
    [
        ("input", 0.04, {"extra": lambda _, r, p: 0.04 * (p == "data"), "busy": 0.5}),
        ("communication", 0.03, {"sum_s": 0.03 + SUM_S}),
        ("compute", 0.5 * PASSES_S * 2 / 3, {"busy": 0.97, "plan": {"compute": "fp32"}}),
        ("small_kernels", PASSES_S - 0.3 * FULL_STEP_S, {"busy": 0.3}),
        ("memory", OWN_S["passes"], {"plan": {"recompute": "full"}}),
        (
            "micro_batch",
            15 / 16 * (PASSES_S - 0.3 * FULL_STEP_S),
            {"busy": 0.3, "plan": {"accumulate": 16, "micro_batch": 1}},
        ),
        ("slow_rank", 0.02, {"extra": lambda _, r, p: 0.02 * ((r, p) == (2, "backward"))}),
    ],
)
def test_causes_on_devices_are_named_alone(
    tmp_path: Path, kind: str, gain_s: float, more: dict[str, Any]
) -> None:
    """A run that has the cause is told it, with its gain; one without it is told nothing."""
    step_s = make_gpu_run(tmp_path / "has", **more)
    verdict = find_verdict(tmp_path / "has")
    assert verdict.kind == kind, verdict
    assert verdict.without_s == pytest.approx(step_s - gain_s, rel=0.1)
    make_gpu_run(tmp_path / "clean")
    assert find_verdict(tmp_path / "clean").kind == "nothing"


def test_recompute_and_small_micro_batches_stay_where_memory_is_full(tmp_path: Path) -> None:
    for number, plan in enumerate(({"recompute": "full"}, {"accumulate": 16, "micro_batch": 1})):
        busy = (0.8, 0.3)[number]
        make_gpu_run(tmp_path / str(number), plan=plan, used=60 * GIB, busy=busy)
        assert find_verdict(tmp_path / str(number)).kind not in ("memory", "micro_batch")


def test_recompute_of_an_own_loop_is_judged_by_its_peak_and_its_argument_named(
    tmp_path: Path,
) -> None:
    """Own loops have no forecast: what the peak may hold without recompute must fit."""
    own = {"recompute": "full", "predicted": {}}
    make_gpu_run(tmp_path / "room", plan=own, used=3 * GIB)
    (tmp_path / "room" / "run.toml").unlink()
    verdict = find_verdict(tmp_path / "room")
    assert (verdict.kind, verdict.command) == (
        "memory",
        'shoal.parallelize(…, recompute="none")',
    )
    make_gpu_run(tmp_path / "full", plan=own, used=8 * GIB)
    assert find_verdict(tmp_path / "full").kind == "nothing"


def test_a_late_stage_is_told_by_the_plan_or_by_its_host(tmp_path: Path) -> None:
    """Equal layers: the stage's host or code. More layers than the others: another cut."""
    layout = {"layout": {"pp": 2}, "accumulate": 4}
    equal = [{"name": f"b.{at}.weight", "shape": [8, 8], "stages": [at // 2]} for at in range(4)]
    late: Extra = lambda _, r, p: 0.03 * ((r, p) == (1, "passes"))  # noqa: E731
    make_run(tmp_path / "host", late, plan={**layout, "placements": equal})
    host = find_verdict(tmp_path / "host")
    assert (host.kind, host.cause) == ("late_stage", "stage 1's forward pass")
    assert host.without_s == pytest.approx(FULL_STEP_S * 1.03, rel=0.05)
    more = [*equal, *({**equal[3], "name": f"c.{at}.weight"} for at in range(3))]
    make_run(tmp_path / "cut", late, plan={**layout, "placements": more})
    cut = find_verdict(tmp_path / "cut")
    assert (cut.kind, "cut" in cut.command) == ("late_stage", True)
    assert host.without_s < (cut.without_s or 0.0) < (cut.step_s or 0.0)


def test_lateness_by_turns_is_told_as_a_busy_machine(tmp_path: Path) -> None:
    drawn = random.Random(5)
    who = [drawn.randrange(2) for _ in range(200)]
    make_run(tmp_path / "busy", lambda step, r, p: 0.03 * (p == "passes" and r == who[step // 3]))
    verdict = find_verdict(tmp_path / "busy")
    assert "the machine is busy" in verdict.line()
    cured_s = mean_s(make_run(tmp_path / "idle"))
    assert verdict.without_s == pytest.approx(cured_s, rel=0.05)


def test_data_that_is_slow_every_tenth_step_counts(tmp_path: Path) -> None:
    make_run(tmp_path / "slow", lambda step, r, p: 0.1 * (p == "data" and step % 10 == 0))
    verdict = find_verdict(tmp_path / "slow")
    assert verdict.kind == "input"
    assert "Most of it is in 11% of the steps" in " ".join(verdict.evidence)
    assert verdict.without_s == pytest.approx(mean_s(make_run(tmp_path / "cured")), rel=0.05)


def test_a_machine_that_is_busy_now_and_then_makes_no_slow_data(tmp_path: Path) -> None:
    """Every sixth step each part of both ranks is longer, data no more than passes."""
    parts = ("data", "passes", "backward")
    make_run(tmp_path, lambda step, r, p: 0.035 * (step % 6 == 0 and p in parts))
    assert find_verdict(tmp_path).kind == "nothing"


def test_one_long_step_is_no_cost(tmp_path: Path) -> None:
    make_run(tmp_path, lambda step, r, p: 5.0 * ((step, r, p) == (50, 1, "data")))
    assert find_verdict(tmp_path).kind == "nothing"


ODD = [None, [], {}, "\x1b[31m<b>", -1, 0, 1e308, True, 10**400, float("nan"), {"pp": 10**9}]


def test_damaged_and_hostile_folders_give_one_line(tmp_path: Path) -> None:
    """Fields of odd types, torn and random bytes: no error, and no control character."""
    assert find_verdict(tmp_path).line()
    drawn = random.Random(9)
    make_gpu_run(tmp_path, steps=40, plan={"layout": {"pp": 2}, "placements": [{"shape": [2, 2]}]})
    files = {name: (tmp_path / name).read_bytes() for name in (
        "plan.json", "metrics.jsonl", "events.jsonl", "devices.jsonl", "rank_steps/node-0.bin",
    )}  # fmt: skip
    for _ in range(20):
        for name, raw in files.items():
            (tmp_path / name).write_bytes(raw)
        name = drawn.choice(list(files))
        if name == "plan.json" or drawn.random() < 0.3:
            plan = json.loads(files["plan.json"])
            plan["predicted"]["time"][drawn.choice(["matrix", "recompute"])] = drawn.choice(ODD)
            plan[drawn.choice([*plan, "recompute", "offload"])] = drawn.choice(ODD)
            (tmp_path / "plan.json").write_text(json.dumps(plan))
        elif name == "metrics.jsonl":
            rows = [json.loads(line) for line in files[name].splitlines()]
            for row in drawn.sample(rows, 10):
                row[drawn.choice([*row, "skipped"])] = drawn.choice(ODD)
            (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        else:
            raw = bytearray(files[name])
            for at in drawn.sample(range(len(raw)), 20):
                raw[at] = drawn.randrange(256)
            (tmp_path / name).write_bytes(bytes(raw[: drawn.randrange(len(raw))]))
        verdict = find_verdict(tmp_path)
        assert verdict.line().isprintable()
        assert verdict.share is None or 0 <= verdict.share <= 1
        assert verdict.without_s is None or verdict.without_s >= 0
    (tmp_path / "rank_steps" / "node-0.bin").unlink()
    assert find_verdict(tmp_path).line(), "metrics.jsonl alone"


def test_a_defect_of_one_rank_comes_before_a_slightly_larger_cost_of_all(tmp_path: Path) -> None:
    make_run(tmp_path, lambda _, r, p: (p == "data") * (0.013 + 0.012 * (r == 1)))
    assert find_verdict(tmp_path).cause == "rank 1's data"


def rewrite_rows(folder: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    path = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps({**row, **change(row)}) + "\n" for row in rows))


def test_a_loss_that_diverged_is_a_fault(tmp_path: Path) -> None:
    slow: Extra = lambda _, r, p: 0.05 * ((r, p) == (1, "data"))  # noqa: E731
    make_run(tmp_path, slow)
    falls = lambda row: {"loss": 3.0 - 0.02 * row["step"]}  # noqa: E731
    rewrite_rows(tmp_path, falls)
    assert find_verdict(tmp_path).kind == "slow_rank"
    rewrite_rows(tmp_path, lambda row: {"loss": 2.0} if row["step"] > 70 else {})
    assert find_verdict(tmp_path).kind == "slow_rank", "it rose, and is below the first ones"
    rewrite_rows(tmp_path, lambda row: {"loss": 9.0} if row["step"] > 70 else {})
    verdict = find_verdict(tmp_path)
    assert (verdict.kind, "9.0000 in the last 20 steps" in verdict.cause) == ("fault", True)
    rewrite_rows(tmp_path, lambda row: {"loss": None} if row["step"] > 70 else {})
    assert "no longer finite" in find_verdict(tmp_path).cause


def test_skipped_steps_are_a_fault_from_a_twentieth_on(tmp_path: Path) -> None:
    whole_s = make_run(tmp_path)
    rewrite_rows(tmp_path, lambda row: {"skipped": row["step"] % 40 == 0})
    assert find_verdict(tmp_path).kind == "nothing"
    rewrite_rows(tmp_path, lambda row: {"skipped": row["step"] % 10 == 0})
    verdict = find_verdict(tmp_path)
    assert (verdict.kind, verdict.share) == ("fault", 0.1)
    assert verdict.without_s == pytest.approx(mean_s(whole_s))
    assert verdict.step_s == pytest.approx(mean_s(whole_s) / 0.9), "per step that changed weights"


def test_a_damaged_checkpoint_is_a_fault_unless_the_run_went_on(tmp_path: Path) -> None:
    damaged = {"event": "checkpoint_damaged", "step": 90, "folder": "step-90", "file": "rank-0"}
    make_run(tmp_path / "ended", events=[{"event": "compute_started", "step": 0}, damaged])
    assert find_verdict(tmp_path / "ended").kind == "fault"
    make_run(tmp_path / "on", events=[damaged, {"event": "compute_started", "step": 0}])
    assert find_verdict(tmp_path / "on").kind == "nothing"


def test_a_silence_that_the_run_got_over_is_no_fault(tmp_path: Path) -> None:
    """A rank that writes a large file is silent for long, then goes on."""
    silent = {"event": "hang", "rank": 1, "step": 60, "phase": "data", "why": "in C"}
    make_run(tmp_path / "on", events=[silent, {"event": "checkpoint_saved", "step": 80}])
    assert find_verdict(tmp_path / "on").kind == "nothing"
    make_run(tmp_path / "done", events=[silent, {"event": "run_finished", "how": "completed"}])
    assert find_verdict(tmp_path / "done").kind == "nothing"
    make_run(tmp_path / "hangs", events=[{"event": "checkpoint_saved", "step": 50}, silent])
    assert find_verdict(tmp_path / "hangs").kind == "fault"


def test_validation_and_saves_count_with_their_share_of_a_step(tmp_path: Path) -> None:
    """Pauses of 0.3 s after every fifth step: validation if its event says so, else a save."""
    for name, kind in (("validated", "validation"), ("checkpoint_saved", "saves")):
        told = [{"event": name, "step": step, "seconds": 0.3} for step in range(5, 100, 5)]
        late: Extra = lambda step, r, p: 0.3 * (p == "other" and step % 5 == 1)  # noqa: E731
        make_run(tmp_path / kind, late, events=told)
        verdict = find_verdict(tmp_path / kind)
        assert verdict.kind == kind, verdict
        assert verdict.without_s == pytest.approx(FULL_STEP_S * 1.03, rel=0.05)
        assert (verdict.step_s or 0) - (verdict.without_s or 0) == pytest.approx(0.06, rel=0.05)


def test_callbacks_of_a_step_make_the_next_one_late(tmp_path: Path) -> None:
    """Rank 0 in its callbacks, then rank 1 in its data, between the same two sums: no gain."""

    def late(step: int, rank: int, part: str) -> float:
        return 0.05 * ((rank, part, step % 4) in ((0, "hooks", 1), (1, "data", 2)))

    make_run(tmp_path, late)
    assert find_verdict(tmp_path).kind == "nothing"


def test_drawn_costs_are_named_with_their_gain() -> None:
    """Drawn noise and costs: of one rank, of all, by turns, of every n-th step, of a stage."""
    from made_verdicts import list_trials

    assert [one for one in list_trials(count=48, seed=11) if one["wrong"]] == []


@pytest.mark.parametrize(
    ("terms", "part"),
    [
        ({"matrix": 0.01, "optimizer": 0.004, "gradients": 0.001}, "forward and backward"),
        ({"matrix": 0.02, "constants": 0.001, "optimizer": 0.0001}, "forward and backward"),
        ({"matrix": 0.04, "optimizer": 0.004, "gradients": 0.001}, ""),
        ({}, ""),
    ],
)
def test_a_step_of_twice_its_forecast_is_named_with_its_part(
    tmp_path: Path, terms: dict[str, float], part: str
) -> None:
    make_run(tmp_path, plan={"batch": 8, "predicted": {"time": terms}})
    verdict = find_verdict(tmp_path)
    assert verdict.kind == "nothing"
    assert ("times what was foreseen" in verdict.line()) == bool(part)
    if part:
        ratio = verdict.step_s / sum(terms.values())
        assert verdict.line().endswith(f"{ratio:.1f} times what was foreseen, mostly in {part}")
        assert "A step was foreseen to take" in verdict.evidence[-1]


def test_a_cost_with_a_cure_says_nothing_of_the_forecast(tmp_path: Path) -> None:
    """Waiting for a late rank would look like communication beside the forecast."""

    def late(step: int, rank: int, part: str) -> float:
        return 0.08 if (rank, part) == (1, "data") else 0.0

    make_run(tmp_path, late, plan={"batch": 8, "predicted": {"time": {"matrix": 0.02}}})
    verdict = find_verdict(tmp_path)
    assert verdict.kind == "slow_rank"
    assert "foreseen" not in " ".join((verdict.line(), *verdict.evidence))
