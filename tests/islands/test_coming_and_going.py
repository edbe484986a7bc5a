"""Lines of the survivors: who left, and why, who joined; and the last one that goes on alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from shoal.base.layouts.changing_members import complete_lone_island
from shoal.base.layouts.island_options import IslandsPolicy
from shoal.cli import start
from shoal.islands.changing.turn_records import AppliedTurn
from shoal.trainer.islands.member_rounds import MemberRounds, RoundWork

A, B = "127.0.0.1:29400", "127.0.0.1:29401"
LINES = [
    "left: island 1: its process ended; islands of round 8: 2",
    "left: island 2: it said goodbye; islands of round 8: 2",
    "joined: island 3, in round 8",
]


def fact_of(*names: int) -> Any:
    """Stands for a committed turn that islands 0 and others merged."""
    return SimpleNamespace(
        session=1,
        round=8,
        committers=(0,),
        work=(),
        divisor=1,
        weights="",
        names=lambda: names,
        trainers=lambda: names,
    )


def test_who_left_and_who_joined_is_a_line_on_the_survivors() -> None:
    found: list[str] = []

    def emit(event: str, **values: Any) -> None:
        if event == "notice":
            found.append(values["text"])

    rounds: Any = SimpleNamespace(
        work=RoundWork(),
        index=0,
        policy=SimpleNamespace(key="", at=""),
        ranks=SimpleNamespace(count_sent_bytes=lambda: 0),
        plain=SimpleNamespace(describe_untrimmed_round=lambda *_: []),
        run=SimpleNamespace(
            step_count=1,
            world=SimpleNamespace(is_first=True),
            recorder=SimpleNamespace(events=SimpleNamespace(emit=emit)),
        ),
    )
    why = {1: "island 1: its process ended"}
    turn = AppliedTurn(fact_of(0, 3), None, False, None, why, {}, "")
    MemberRounds._emit(rounds, turn, fact_of(0, 1, 2))
    assert found == LINES


@pytest.mark.parametrize(("index", "own"), [(0, A), (1, B)])
def test_the_survivor_of_two_needs_its_count_alone(
    index: int, own: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["islands.method=diloco", "islands.least=1", "islands.count=2", f"islands.at={A},{B}"]
    words += [f"islands.index={index}", "model.name=mlp", "data.source=digits", "run.name=x"]
    first = start.prepare_run([*words, "launch.processes=1"], None)
    first.folder.mkdir(parents=True)
    start.write_run_folder(first)
    (first.folder / "checkpoints").mkdir()
    monkeypatch.setattr(start, "_check_resumable", lambda folder: None)  # no checkpoint is needed
    policy = start.prepare_run(["islands.count=1"], first.folder).loaded.config.islands
    assert (policy.at, policy.index, policy.count) == (own, 0, 1)


def test_what_the_user_sets_stays() -> None:
    kept = IslandsPolicy(method="diloco", count=2, least=1, index=1, at=f"{A},{B}")
    for words in (["islands.count=3"], ["islands.count=1", "islands.least=0"]):
        assert complete_lone_island(words, kept) == words
    words = ["islands.count=1", "islands.at=127.0.0.1:1"]
    assert complete_lone_island(words, kept) == [*words, "islands.index=0"]
