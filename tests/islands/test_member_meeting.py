"""Who starts a session of members, from which turn; messages as JSON; which methods allow it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from shoal.base.errors import ConfigError
from shoal.base.layouts.changing_members import NO_CHANGING_MEMBERS
from shoal.base.layouts.island_options import METHODS, IslandsPolicy
from shoal.cli.island_witness import witness
from shoal.islands.membership.committed_turn import (
    FIRST_WITNESS,
    CommittedTurn,
    Seat,
    TurnProposal,
    commit_turn,
    start_session,
)
from shoal.islands.membership.message_json import decode_message, encode_message
from shoal.islands.membership.session_meeting import (
    ArrivalReport,
    SessionMeeting,
    number_session,
)
from shoal.islands.membership.turn_messages import Offer, Promise
from shoal.view.members.island_members import collect_members, member_lines

SEATS = tuple(Seat(name, 1) for name in range(3))


def turn_without(absent: int) -> CommittedTurn:
    """The turn after the first, whose members lack one."""
    start = start_session(0, None, SEATS, 4)
    left = [seat for seat in SEATS if seat.name != absent]
    proposals = [TurnProposal(seat, "x", 8, 3, steps=2, steps_per_s=0.1) for seat in left]
    return commit_turn(start, proposals, "w", tuple(left), 4)


def test_messages_survive_json_with_their_digests() -> None:
    fact = turn_without(1)
    proposal = TurnProposal(SEATS[0], "x", 8, 3, (Seat(7, 2),), leaves=True, steps_per_s=0.3)
    for message in (
        Offer(SEATS[0], 0, 2, (1, 0, 1), fact, SEATS, (proposal,)),
        Promise(SEATS[1], 0, 2, (1, 0, 1), ((0, -1, -1), fact), None),
    ):
        assert decode_message(json.loads(json.dumps(encode_message(message)))) == message
    again = decode_message(json.loads(json.dumps(encode_message(fact))))
    assert (
        commit_turn(again, (), "w", SEATS, 4).digest == commit_turn(fact, (), "w", SEATS, 4).digest
    )
    for wrong in ([["Popen", "ls"]], ["Popen", "ls"], {"a": 1}, ["Seat", 1, 2, 3], []):
        with pytest.raises((ValueError, TypeError)):
            decode_message(wrong)


def meet(*meetings: SessionMeeting) -> None:
    """Deliver each one's report to all others, until all have heard all."""
    for _ in range(2):
        for one in meetings:
            for other in meetings:
                other.add(one.own)


def test_a_new_run_waits_for_all_and_one_of_them_starts_it() -> None:
    meetings = [SessionMeeting(ArrivalReport(seat, None, "w"), 3) for seat in SEATS]
    meet(*meetings[:2])
    assert [one.start(4) for one in meetings] == [None] * 3
    assert meetings[1].missing() == (2,)
    meetings[0].add(meetings[2].own)
    assert meetings[0].missing() == ()
    assert meetings[0].start(4) is None, "island 1 may have a seat by now: it has not heard of 2"
    assert meetings[0].find_unheard() == ((1, 2), (2, 0), (2, 1))
    meet(*meetings)
    assert meetings[1].start(4) is None
    fact = meetings[0].start(4)
    assert fact is not None
    assert fact == start_session(fact.session, None, SEATS, 4)


def test_a_resume_waits_for_the_members_of_the_newest_turn_alone() -> None:
    """Island 1 died before; island 2's disk is behind."""
    newest, old = turn_without(1), start_session(0, None, SEATS, 4)
    again = [Seat(name, 2) for name in range(3)]
    meeting = SessionMeeting(ArrivalReport(again[0], newest, "w"), 3)
    assert meeting.missing() == (2,)
    meet(meeting, SessionMeeting(ArrivalReport(again[2], old, "w"), 3))
    fact = meeting.start(4)
    assert fact is not None
    assert (fact.round, fact.weights, fact.names()) == (1, "w", (0, 2))
    assert fact.session > newest.session
    assert fact.dealt[0] == newest.dealt[0], "nobody used them"
    third = (*SEATS[:2], Seat(FIRST_WITNESS, 1))
    held = start_session(0, None, third, 4)
    meeting = SessionMeeting(ArrivalReport(again[0], held, "w"), 3)
    assert meeting.missing() == (1, FIRST_WITNESS), "it may decide turns with others"
    meeting.add(ArrivalReport(Seat(FIRST_WITNESS, 2), None, ""))
    assert meeting.find_unequal_starts() == ()
    fewer = SessionMeeting(ArrivalReport(again[0], newest, "w"), 1)
    assert fewer.expected() == (0,), "a user who starts one island leaves the other out"


def test_a_process_that_got_a_seat_does_not_count_as_arrived() -> None:
    """Island 2 arrived, and then began a session with others; its report is still here."""
    again = [Seat(name, 2) for name in range(3)]
    meeting = SessionMeeting(ArrivalReport(again[0], turn_without(1), "w"), 3)
    meet(meeting, SessionMeeting(ArrivalReport(again[2], turn_without(1), "w"), 3))
    assert meeting.missing() == ()
    running = start_session(1, turn_without(1), [again[2], Seat(4, 1)], 4)
    meeting.know(running)
    assert meeting.expected() == (2,), "of island 4 nobody was told to wait"
    assert meeting.missing() == (2,)
    assert meeting.start(4) is None


def test_a_late_report_does_not_replace_a_later_one() -> None:
    again = [Seat(name, 2) for name in range(3)]
    meeting = SessionMeeting(ArrivalReport(again[0], None, "w"), 2)
    other = SessionMeeting(ArrivalReport(again[1], None, "w"), 2)
    early = other.own
    other.hold(turn_without(2))
    assert meeting.add(other.own)
    assert not meeting.add(early)
    assert not meeting.add(early._replace(seat=SEATS[1], held=None))
    assert meeting.newest() == turn_without(2)


def test_no_session_has_the_number_of_another_one() -> None:
    """A session that ended before a disk had it is unknown to all."""
    numbers = [number_session(-1, Seat(name, boot)) for name in range(3) for boot in (1, 2)]
    assert len({*numbers}) == 6
    assert all(number_session(10**20, Seat(0, boot)) > 10**20 for boot in (1, 2))
    assert number_session(5, Seat(0, 3)) < number_session(5, Seat(0, 4)), "the clock orders them"


@pytest.mark.parametrize("method", METHODS)
def test_each_method_allows_changing_members_or_is_refused_by_name(method: str) -> None:
    asked = IslandsPolicy(method, count=3, least=2)
    if method not in NO_CHANGING_MEMBERS:
        assert asked.resolved().changes_members
        return
    with pytest.raises(ConfigError, match=f"{method} |islands.data=own"):
        asked.resolved()


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"codec": "sign"}, "islands.codec = sign: what it leaves out is sent later"),
        ({"overlap": 1}, "try: islands.overlap=0, or islands.least=0"),
        ({"regions": 2, "count": 4}, "try: islands.regions=1, or islands.least=0"),
        ({"mixing": 0.5}, "try: islands.mixing=0, or islands.least=0"),
        ({"least": 4}, "islands.least = 4: more than islands.count = 3; try: islands.least=3"),
        ({"at": "10.0.0.1:29400"}, "an address of each of the 3 islands is wanted"),
        ({"data": "own"}, "try: islands.data=shared, or islands.least=0"),
    ],
)
def test_what_needs_a_fixed_list_is_refused(asked: dict, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        IslandsPolicy("diloco", **{"count": 3, "least": 2, **asked}).resolved()
    assert said in str(refused.value)


def test_a_witness_refuses_an_address_without_a_port() -> None:
    with pytest.raises(ConfigError, match=r"--listen = node-9: HOST:PORT is wanted; try: shoal"):
        witness("10.0.0.1:29400,10.0.0.2:29400", "node-9", 0, "", "")


def test_the_table_of_members() -> None:
    told = {
        "event": "round_committed", "round": 1, "members": [[0, 4, 8, 40], [2, 3, 6, 30]],
        "joined": [3, FIRST_WITNESS], "left": {"1": "island 1: its process ended"}, "why": "island 1: its process ended",
    }  # fmt: skip
    fixed = {"event": "round_committed", "round": 0, "steps": 4, "tokens": 40, "admitted": [0, 1],
             "refused": {"2": "island 2: its change is not finite"}}  # fmt: skip
    rounds = collect_members({0: [fixed, told], 1: [{**fixed, "steps": 5}], 2: [fixed]})
    assert member_lines(rounds) == [
        " round    tokens  members (steps)",
        "     0        80  0(4) 1(5); refused: island 2: its change is not finite",
        "     1        70  0(4) 2(3); joined: 3, the witness; left: island 1: its process ended",
    ]
    late = collect_members({2: [{**told, "round": 4}, {**told, "round": 6, "joined": []}]})
    assert [line for line in member_lines(late) if "without" in line] == [
        " 0 – 3            4 rounds without this island; another island's folder tells of them",
        "     5            1 round without this island; another island's folder tells of it",
    ]
    assert rounds[1].to_json()["work"][2] == {"steps": 3, "samples": 6, "tokens": 30}


def test_the_page_has_the_methods() -> None:
    page = Path(__file__).parents[2] / "docs" / "how-it-works" / "members.md"
    rows = dict(re.findall(r"^\| (.*?) \| (.*?) \|$", page.read_text(encoding="utf-8"), re.M))
    for method, why in NO_CHANGING_MEMBERS.items():
        assert rows[f"`{method}`"] == f"no: {why}"
    (allowed,) = [names for names, said in rows.items() if said == "yes"]
    assert {*re.findall(r"`(.*?)`", allowed)} == {*METHODS} - {*NO_CHANGING_MEMBERS}
