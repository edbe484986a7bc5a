"""A turn that only a witness knows: its island died before a disk had it, and both go on without it."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.base.errors import CheckpointError
from shoal.islands.changing.member_driver import ARRIVAL
from shoal.islands.changing.turn_records import AppliedTurn
from shoal.islands.changing.witness import WINDOW_S, Witness
from shoal.islands.membership.committed_turn import (
    FIRST_WITNESS,
    CommittedTurn,
    Seat,
    TurnProposal,
    commit_turn,
    start_session,
)
from shoal.islands.membership.message_json import decode_message, encode_message
from shoal.islands.membership.session_meeting import ArrivalReport, SessionMeeting
from shoal.islands.membership.turn_messages import Hello, Prepare, Welcome
from shoal.trainer.islands.member_rounds import MemberRounds
from shoal.trainer.islands.member_state import MemberCheckpoints

FIRST, SECOND, THIRD = Seat(0, 1), Seat(1, 1), Seat(FIRST_WITNESS, 1)
AGAIN = Seat(0, 2)
START = start_session(0, None, (FIRST, SECOND, THIRD), 4)


def commit(before: CommittedTurn, weights: str, *mergers: Seat) -> CommittedTurn:
    """The turn after another one, which islands merged; they and the witness are its seats."""
    proposals = [TurnProposal(seat, "x", 8, 4) for seat in mergers]
    return commit_turn(before, proposals, weights, (*mergers, THIRD), 4)


HELD = commit(START, "on disk", FIRST, SECOND)
"""The round before island 1 died."""
LOST = commit(HELD, "lost", FIRST)


class Links:
    """Connections of a witness; what it sent."""

    def __init__(self) -> None:
        self.boot = 1
        self.addresses = {0: "a:1", 1: "b:1", FIRST_WITNESS: "c:1"}
        self.sent: list[Any] = []

    def learn(self, name: int, address: str) -> None:
        """Nothing to do."""

    def send(self, names: tuple[int, ...], message: Any) -> None:
        self.sent.append(message)

    def restart(self) -> int:
        self.boot += 1
        return self.boot

    def restarted(self, seats: Any) -> set[int]:
        return {0}


def witness_of(*facts: CommittedTurn) -> Witness:
    """A witness that has a seat in turns, and has waited for its window."""
    found = Witness(THIRD, (0, 1), lambda line: None)
    found.links = Links()  # type: ignore[assignment]
    for fact in facts:
        found.member.receive(Welcome(FIRST, fact.session, fact.turn + 1, THIRD, fact, (0, -1, -1)))
        found._perform()
    assert found.member.seated
    found._moved_s -= WINDOW_S + 1
    return found


def greet(witness: Witness, held: CommittedTurn | None, start: Seat = AGAIN) -> None:
    """Island 0 is back with a turn on its disk, and asks for its seat."""
    report = ArrivalReport(start, held, "w")
    witness._receive(0, "a:1", [ARRIVAL, encode_message(report), {}])
    witness._receive(0, "a:1", encode_message(Hello(AGAIN, 0, 1)))
    witness._perform()


def is_chair(witness: Witness) -> bool:
    """Whether it decides a turn by itself."""
    witness._watch()
    return any(message[0] == Prepare.__name__ for message in sent(witness))


def sent(witness: Witness) -> list[Any]:
    witness._perform()
    links: Any = witness.links
    return list(links.sent)


@pytest.mark.parametrize("held", [HELD, None], ids=["an old disk", "an empty disk"])
def test_a_witness_gives_up_its_seat_for_a_turn_that_no_disk_has(
    held: CommittedTurn | None,
) -> None:
    witness = witness_of(START, HELD, LOST)
    greet(witness, held)
    assert not is_chair(witness)
    assert not witness.member.seated
    assert witness.member.seat == Seat(FIRST_WITNESS, 2)
    witness._greeted_s = 0.0
    witness._watch()
    (report,) = [message[1] for message in sent(witness) if message[0] == ARRIVAL]
    found = decode_message(report)
    assert found[:4] == (Seat(FIRST_WITNESS, 2), None, "", LOST)
    assert AGAIN in found.heard


def test_a_witness_decides_for_an_island_whose_disk_has_the_turn() -> None:
    witness = witness_of(START, HELD, LOST)
    assert not is_chair(witness), "nobody asked"
    greet(witness, LOST)
    assert is_chair(witness)
    assert witness.member.seat == THIRD


def test_a_report_of_an_earlier_start_does_not_count() -> None:
    """Its disk may have been replaced since."""
    witness = witness_of(START, HELD, LOST)
    greet(witness, LOST, FIRST)
    assert not is_chair(witness)
    assert witness.member.seat == THIRD


def test_a_witness_waits_for_an_island_that_left_with_the_turn() -> None:
    """Island 1 merged the turn too, and said goodbye: its disk has it."""
    both = commit(HELD, "of both", FIRST, SECOND)._replace(seats=(FIRST, THIRD))
    witness = witness_of(START, HELD, both._replace(dealt=both.dealt[::2]))
    greet(witness, HELD)
    assert not is_chair(witness), "it would give island 0 a seat without weights"
    assert witness.member.seat == THIRD


def test_a_turn_without_a_merge_has_the_weights_of_the_one_before() -> None:
    none = commit_turn(LOST, (), "lost", LOST.seats, 4)
    witness = witness_of(START, HELD, LOST, none)
    greet(witness, HELD)
    assert not is_chair(witness)
    assert witness.member.seat == Seat(FIRST_WITNESS, 2)


def meeting_with_witness(held: CommittedTurn | None, known: CommittedTurn) -> SessionMeeting:
    """What island 0 knows once it and a witness have heard each other."""
    meeting = SessionMeeting(ArrivalReport(AGAIN, held, "w"), 2)
    witness = Seat(FIRST_WITNESS, 2)
    meeting.add(ArrivalReport(witness, None, "", known, (AGAIN, witness)))
    return meeting


def test_islands_start_from_the_newest_disk_with_the_seats_of_the_lost_turn() -> None:
    """Island 1, which had a seat in the turn on the disk, is not awaited."""
    alone = SessionMeeting(ArrivalReport(AGAIN, HELD, "w"), 2)
    assert alone.missing() == (1, FIRST_WITNESS)
    meeting = meeting_with_witness(HELD, LOST)
    assert meeting.find_lost() == LOST
    assert meeting.missing() == ()
    fact = meeting.start(4)
    assert fact is not None
    assert (fact.round, fact.weights) == (HELD.round, "on disk")
    assert fact.seats == (AGAIN, Seat(FIRST_WITNESS, 2))


def test_an_emptied_disk_is_no_lost_turn() -> None:
    """Each vote waits for the disk; so the disk was set back, and island 1 has more on its own."""
    meeting = meeting_with_witness(None, LOST)
    assert meeting.missing() == (1,)
    assert meeting.start(4) is None
    meeting.add(ArrivalReport(Seat(1, 2), HELD, "w"))
    assert meeting.missing() == ()


@pytest.mark.parametrize(
    ("held", "known"), [(LOST, HELD), (LOST, LOST), (HELD._replace(session=4), LOST)]
)
def test_no_turn_is_lost_that_a_disk_has(held: CommittedTurn, known: CommittedTurn) -> None:
    assert meeting_with_witness(held, known).find_lost() is None


def test_a_turn_without_a_merge_is_not_lost() -> None:
    """Its weights are on the disk; its seats are the ones that must meet."""
    none = commit_turn(HELD, (), HELD.weights, (FIRST, THIRD), 4)
    meeting = meeting_with_witness(HELD, none)
    assert meeting.find_lost() is None
    assert meeting.missing() == ()


def checkpoints_in(folder: Path, *, is_first: bool = True) -> MemberCheckpoints:
    recorder = SimpleNamespace(folder=folder, cut=lambda rows: None)
    run: Any = SimpleNamespace(recorder=recorder, stop_wanted=False)
    joined: Any = SimpleNamespace(policy=SimpleNamespace(period=2))
    ranks: Any = SimpleNamespace(is_first=is_first, broadcast_json=lambda found: found)
    return MemberCheckpoints(run, joined, ranks, 60.0)


def test_a_turn_without_a_merge_is_on_the_disk_before_a_vote(tmp_path: Path) -> None:
    """Else island 0, dead and back, would decide alone, as the turn of its checkpoint says.

    Islands 1 and 2 joined it in turns without a merge, and are two of three now.
    """
    alone = commit(START, "on disk", FIRST)._replace(seats=(FIRST,))
    joined = commit_turn(alone._replace(dealt=alone.dealt[:1]), (), "on disk", (FIRST, SECOND), 4)
    checkpoints = checkpoints_in(tmp_path)
    assert checkpoints.find_later(alone) == alone
    checkpoints.keep_turn(joined)
    again = checkpoints_in(tmp_path)
    assert again.find_later(alone) == joined
    assert SessionMeeting(ArrivalReport(AGAIN, joined, "w"), 1).expected() == (0,)
    assert SessionMeeting(ArrivalReport(AGAIN, joined, "w"), 2).missing() == (1,)
    assert again.find_later(None) is None, "without the checkpoint its weights are lost"
    merged = commit(joined._replace(seats=(FIRST, THIRD), dealt=joined.dealt[:2]), "later", FIRST)
    assert again.find_later(merged) == merged, "a later checkpoint counts"
    later = joined._replace(turn=joined.turn + 1)
    assert again.find_later(later) == later, "a copied checkpoint may have the later turn"
    (tmp_path / "turn.json").write_text("{}")
    assert again.find_later(alone) == alone
    checkpoints_in(tmp_path, is_first=False).keep_turn(joined)
    assert again.find_later(alone) == alone, "the first rank writes it for all"


def test_a_turn_before_the_first_merge_is_found_without_a_checkpoint(tmp_path: Path) -> None:
    checkpoints = checkpoints_in(tmp_path)
    assert checkpoints.restore_newest(lambda *event, **given: None) is None
    checkpoints.keep_turn(START)
    assert checkpoints_in(tmp_path).restore_newest(lambda *event, **given: None) == START


def test_a_disk_that_takes_no_turn_ends_the_island(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="so this island may not vote; try: mend that"):
        checkpoints_in(tmp_path / "missing").keep_turn(START)


def test_a_vain_wait_for_weights_ends_when_the_members_go_on(tmp_path: Path) -> None:
    """And the island installs the turn with which they went on."""
    run: Any = SimpleNamespace(recorder=SimpleNamespace(folder=tmp_path), stop_wanted=False)
    joined: Any = SimpleNamespace(policy=SimpleNamespace(period=2))
    ranks: Any = SimpleNamespace(is_first=True, broadcast_json=lambda found: found)
    checkpoints = MemberCheckpoints(run, joined, ranks, 60.0)
    checkpoints.has_newer = lambda fact: fact is LOST
    began_s = time.monotonic()
    assert not checkpoints.heal(LOST)
    assert time.monotonic() - began_s < 20.0
    turns = [AppliedTurn(fact, None, True, True, {}, {}) for fact in (LOST, HELD)]
    rounds: Any = MemberRounds.__new__(MemberRounds)
    rounds.fact, rounds._may_stop = None, lambda: False
    rounds.ranks = SimpleNamespace(
        wait_for_turn=lambda interrupted: turns.pop(0), has_newer=checkpoints.has_newer
    )
    rounds._install = lambda turn, known: turn.fact is not LOST
    assert rounds.next_turn().fact is HELD
    assert rounds.fact is HELD


def test_a_witness_that_was_cut_off_asks_for_the_newest_turn() -> None:
    """The islands went on without it, and no message reached it: it has a seat that nobody knows."""
    witness = witness_of(START)
    links: Any = witness.links
    links.restarted = lambda seats: set()
    witness._watch()
    witness._perform()
    assert not any(message[0] == Hello.__name__ for message in links.sent[1:]), "too early"
    witness._greeted_s -= WINDOW_S + 1
    links.sent.clear()
    witness._watch()
    assert [message[0] for message in sent(witness)] == [Hello.__name__]
    witness.member.receive(Welcome(FIRST, 0, 2, THIRD, HELD._replace(seats=(FIRST,)), (0, -1, -1)))
    witness._perform()
    witness._greeted_s = 0.0
    witness._watch()
    assert {message[0] for message in sent(witness)} >= {Hello.__name__, ARRIVAL}
