"""Two histories of one run: the island that takes the other one's weights says so, and keeps its own."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from member_drivers import QuietLinks

from shoal.base.errors import ConfigError
from shoal.base.runlog.events import EventLog
from shoal.base.text.event_sentences import event_text
from shoal.islands.changing.round_history import encode_history, read_history
from shoal.islands.membership.committed_turn import CommittedTurn, Seat, start_session
from shoal.trainer.islands.member_state import MemberCheckpoints
from shoal.view.diagnose import diagnose
from shoal.view.members.island_members import collect_members

START = start_session(3, None, (Seat(0, 1), Seat(1, 1)), 4)


def turn_of(session: int, rounds: int, weights: str) -> CommittedTurn:
    """The turn after so many merged rounds."""
    return START._replace(session=session, round=rounds, weights=weights, committers=(1,))


class HistoryLinks(QuietLinks):
    """Connections to island 1, which has a history."""

    def __init__(self, history: dict[int, str]) -> None:
        super().__init__()
        self.addresses, self.history = {0: "a:1", 1: "b:1"}, history

    def fetch(self, name: int, key: str, *more: Any) -> bytes | None:
        assert (name, key) == (1, "state/history")
        return encode_history(self.history)


def island(folder: Path, rounds: str, other: dict[int, str]) -> MemberCheckpoints:
    """Island 0 whose rounds had these digests, beside island 1; checkpoints of the last two."""
    log = EventLog(folder / "events.jsonl", rank=0)
    for number, digest in enumerate(rounds):
        log.emit("round_committed", round=number, digest=digest, members=[[0, 4, 8, 40]])
        step = folder / "checkpoints" / f"step-{number + 1}"
        step.mkdir(parents=True)
        (step / "manifest.json").write_text(digest)
    (folder / "run.toml").write_text("[islands]\n")
    run = SimpleNamespace(recorder=SimpleNamespace(folder=folder, events=log), stop_wanted=False)
    ranks = SimpleNamespace(is_first=True, all_true=lambda flag: flag)
    found = MemberCheckpoints(run, SimpleNamespace(), ranks, 1.0)  # type: ignore[arg-type]
    found.links = HistoryLinks(other)  # type: ignore[assignment]
    return found


def dropped(folder: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    return [event for event in lines if event["event"] == "rounds_dropped"]


def test_an_island_that_was_only_behind_says_nothing(tmp_path: Path) -> None:
    found = island(tmp_path, "abc", dict(enumerate("abcdef")))
    found.check_history(turn_of(9, 6, "f"), turn_of(3, 3, "c"), heals=True)
    assert not dropped(tmp_path)
    found.check_history(turn_of(3, 6, "x"), turn_of(3, 3, "c"), heals=True)
    assert not dropped(tmp_path), "one session has one history"


@pytest.mark.parametrize("other", ["abxyzw", "ab"], ids=["longer", "shorter"])
def test_the_rounds_of_the_other_history_are_told_and_kept(tmp_path: Path, other: str) -> None:
    found = island(tmp_path, "abcd", dict(enumerate(other)))
    fact, own = turn_of(9, len(other), other[-1]), turn_of(5, 4, "d")
    for _ in range(2):  # a second try of the same island
        found.check_history(fact, own, heals=True)
    (event,) = dropped(tmp_path)
    kept = tmp_path / "set-aside-round-3"
    line = event_text(event) or ""
    assert line.startswith("rounds 2 – 3 of this island are not ")
    assert f"at round {len(other)} of another history of this run" in line
    assert f"its own checkpoints are kept in {kept}" in line
    step = tmp_path / "checkpoints" / "step-4"
    found._drop(step)
    assert not step.exists()
    assert (kept / "checkpoints" / "step-4" / "manifest.json").read_text() == "d"
    assert (kept / "run.toml").exists()
    assert read_history(tmp_path) == {0: "a", 1: "b"}
    (finding,) = [one for one in diagnose(tmp_path) if one.kind == "rounds_dropped"]
    assert finding.command == f"shoal checkpoint list {kept}"
    events = map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
    assert [one.round for one in collect_members({0: events})] == [0, 1]


def test_a_history_that_nobody_knows_is_kept_too(tmp_path: Path) -> None:
    found = island(tmp_path, "ab", {7: "x"})
    found.check_history(turn_of(9, 8, "x"), turn_of(5, 2, "b"), heals=True)
    (event,) = dropped(tmp_path)
    assert "rounds 0 – 1 of this island are not known to" in (event_text(event) or "")


def test_a_run_that_begins_anew_replaces_nothing(tmp_path: Path) -> None:
    found = island(tmp_path, "ab", {})
    with pytest.raises(
        ConfigError, match="begin a new run at round 0, and this island has 2 rounds"
    ):
        found.check_history(turn_of(9, 0, ""), turn_of(5, 2, "b"), heals=True)
    found.check_history(turn_of(9, 0, ""), None, heals=True)
    assert not list(tmp_path.glob("set-aside*"))
