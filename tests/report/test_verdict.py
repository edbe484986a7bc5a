"""The verdict on made run folders: the cause alone, its share, and the step without it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from shoal.base.runlog.rank_records import PARTS, RankStep, encode_header
from shoal.report.verdict import find_verdict

OWN_S = {"data": 0.002, "passes": 0.02, "backward": 0.03, "update": 0.004, "hooks": 0.0}
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
            for part in ("data", "passes", "backward"):
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
