"""Lines of the survivors: who left, and why, who joined; the last one that goes on alone.

And an island that resumes beside others: it looks for them.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from member_drivers import QuietLinks, make_driver

from made_keys import make_keys
from shoal.base.errors import ClusterError, ConfigError
from shoal.base.layouts.changing_members import complete_known_islands, complete_lone_island
from shoal.base.layouts.island_options import IslandsPolicy
from shoal.cli import start
from shoal.islands.changing.island_addresses import ADDRESSES, TURN
from shoal.islands.changing.member_waits import ResumeCommand, describe_wait
from shoal.islands.changing.turn_records import AppliedTurn
from shoal.islands.membership.committed_turn import FIRST_WITNESS, Seat, start_session
from shoal.islands.membership.message_json import encode_message
from shoal.trainer.islands.member_job import _name_resume, _open_keys
from shoal.trainer.islands.member_rounds import MemberRounds, RoundWork
from shoal.trainer.islands.member_state import MemberCheckpoints

A, B, C, D = (f"127.0.0.1:{port}" for port in range(29400, 29404))
LINES = [
    "left: island 1: its process ended; islands of round 8: 2",
    "left: island 2: it said goodbye; islands of round 8: 2",
    "joined: island 3, in round 8",
]


ALONE = IslandsPolicy(method="diloco", count=1, least=1, index=0, at=A)


def prepare_first_start(folder: Path, words: list[str], monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the run folder of an island that was started, without a checkpoint."""
    monkeypatch.chdir(folder)
    common = ["islands.method=diloco", "islands.least=1", "launch.processes=1", "run.name=x"]
    first = start.prepare_run([*common, *words, "model.name=mlp", "data.source=digits"], None)
    first.folder.mkdir(parents=True)
    start.write_run_folder(first)
    (first.folder / "checkpoints").mkdir()
    monkeypatch.setattr(start, "_check_resumable", lambda folder: None)  # no checkpoint is needed
    return first.folder


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
    words = ["islands.count=2", f"islands.at={A},{B}", f"islands.index={index}"]
    folder = prepare_first_start(tmp_path, words, monkeypatch)
    policy = start.prepare_run(["islands.count=1"], folder).loaded.config.islands
    assert (policy.at, policy.index, policy.count) == (own, 0, 1)


def test_what_the_user_sets_stays() -> None:
    kept = IslandsPolicy(method="diloco", count=2, least=1, index=1, at=f"{A},{B}")
    for words in (["islands.count=3"], ["islands.count=1", "islands.least=0"]):
        assert complete_lone_island(words, kept) == words
    words = ["islands.count=1", "islands.at=127.0.0.1:1"]
    assert complete_lone_island(words, kept) == [*words, "islands.index=0"]


def leave_to_others(folder: Path, *, addresses: dict[int, str]) -> None:
    """Write what island 0 has after its goodbye: island 1 and a witness decide the next round."""
    turn = start_session(1, None, (Seat(1, 1), Seat(FIRST_WITNESS, 1)), 4)
    (folder / TURN).write_text(json.dumps({"turn": encode_message(turn)}))
    links: Any = SimpleNamespace(name=0, addresses={0: A, FIRST_WITNESS: A, **addresses})
    run: Any = SimpleNamespace(recorder=SimpleNamespace(folder=folder))
    ranks: Any = SimpleNamespace(is_first=True)
    kept = MemberCheckpoints(run, SimpleNamespace(), ranks, 1.0)  # type: ignore[arg-type]
    kept.links = links
    kept.keep_addresses()


def test_an_island_that_left_looks_for_those_that_joined_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its run.toml has itself alone, as it was started before the others joined."""
    words = ["islands.count=1", f"islands.at={A}", "islands.index=0"]
    folder = prepare_first_start(tmp_path, words, monkeypatch)
    resumed = start.prepare_run([], folder).loaded
    assert resumed.config.islands.count == 1, "nobody had joined"
    leave_to_others(folder, addresses={1: B})
    resumed = start.prepare_run([], folder).loaded
    assert (resumed.config.islands.count, resumed.config.islands.at) == (2, f"{A},{B}")
    assert any("without them: the same command with islands.count=1" in x for x in resumed.notices)
    alone = start.prepare_run(["islands.count=1"], folder).loaded.config.islands
    assert (alone.count, alone.at) == (1, A)
    (folder / ADDRESSES).unlink()  # as folders of earlier versions
    near = f"--resume {folder} islands.count=2 islands.at={A},ADDRESS; .* islands.count=1"
    with pytest.raises(ConfigError, match=near):
        start.prepare_run([], folder)


def test_addresses_of_the_command_line_stay_and_are_completed() -> None:
    new, known = "127.0.0.1:2", {0: "127.0.0.1:3", 1: B}

    def complete(*words: str, names: tuple[int, ...] = (0, 1)) -> list[str]:
        return complete_known_islands(list(words), ALONE, names, known, "")

    assert complete(f"islands.at={new}") == ["islands.count=2", f"islands.at={new},{B}"]
    assert complete(f"islands.at={A},{new}") == ["islands.count=2", f"islands.at={A},{new}"]
    for words, names in (
        ((), (0,)),
        ((), ()),
        (("islands.least=0",), (0, 1)),
        (("islands.count=1",), (1,)),
        (("islands.count=3",), (1,)),
    ):
        assert complete(*words, names=names) == list(words)


def test_who_waits_in_vain_for_the_others_names_both_ways_on() -> None:
    line = wait_in_vain(0, 2, 1, restarted=True)
    assert f"waited 60 s (islands.wait_s) for island 1 at {B}; try: start island 1, and" in line
    assert f"--resume runs/x islands.count=2 islands.at={A},{B} with the new one" in line
    assert line.endswith("without island 1: shoal train --resume runs/x islands.count=1")


def wait_in_vain(
    index: int,
    count: int,
    *names: int,
    restarted: bool = False,
    refusing: tuple[int, ...] = (),
    first: tuple[int, ...] = (),
) -> str:
    """Return the error of an island of runs/x that waited for others."""
    links = QuietLinks(refusing=refusing)
    links.addresses = dict(enumerate((A, B, C, D)[:count]))
    driver, _ = make_driver(index, count, links)
    member = driver.member.restarted(7, (1,)) if restarted else driver.member
    found: Any = links
    return str(
        ClusterError(describe_wait(member, names, first or names, 60.0, found, driver.resume))
    )


def test_a_lost_majority_names_the_folder_and_the_command_of_each_that_is_left() -> None:
    """Of islands 0 to 3 two died; island 2 becomes island 1 of two, at its own address."""
    line = wait_in_vain(2, 4, 1, 3)
    assert "RUN" not in line
    assert "try: start islands 1 and 3, and here: shoal train --resume runs/x; if" in line
    alone = "islands.count=2 islands.index=1 islands.at="
    assert line.endswith(f"will not come back: shoal train --resume runs/x {alone}{A},{C}")
    later = wait_in_vain(2, 4, 0, 1, 3, first=(1, 3))
    assert "try: start islands 0, 1 and 3" in later
    assert later.partition("; if ")[2] == line.partition("; if ")[2], "island 0 gave up before it"
    line = wait_in_vain(1, 2, 0)
    assert line.endswith("will not come back: shoal train --resume runs/x islands.count=1")


def test_the_islands_of_one_command_go_on_by_their_number_alone() -> None:
    whole = ResumeCommand("shoal train --resume runs/x", is_whole=True)
    assert whole.without(2, [0, 2], {0: A, 2: C}) == "shoal train --resume runs/x islands.count=2"
    own = _name_resume(Path("runs/my run"))
    assert own == ResumeCommand("shoal train --resume 'runs/my run'")


def test_who_is_refused_reads_that_in_the_last_line_too() -> None:
    line = wait_in_vain(0, 2, 1, restarted=True, refusing=(1,))
    assert line == "islands: waited 60 s (islands.wait_s) for island 1: island 1 refuses this one"


def test_an_island_that_its_own_list_lacks_says_so(tmp_path: Path) -> None:
    make_keys(tmp_path, 2)
    listed = tmp_path / "own.pub"
    listed.write_bytes((tmp_path / "0.key.pub").read_bytes())
    told: list[str] = []
    run: Any = SimpleNamespace(recorder=SimpleNamespace(notice=told.append))
    for index in range(2):
        key = str(tmp_path / f"{index}.key")
        _open_keys(run, IslandsPolicy(at=f"{A},{B}", index=index, key=key, keys=str(listed)))
    own, other = told
    assert own.endswith(f"and 1 may join ({listed})")
    assert other.endswith(f"and 1 may join ({listed}), and this one is none of them")


def test_a_witness_with_a_seat_is_started_again() -> None:
    """`islands.count=1` does not help: the witness is awaited in any case."""
    line = wait_in_vain(0, 1, FIRST_WITNESS, restarted=True)
    assert "for the witness: it had a seat in the last round" in line
    assert "try: start the witness, on any machine: shoal islands witness" in line
    assert "islands.count" not in line
