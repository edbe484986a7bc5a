"""The members' protocol in drawn worlds, and what the vote of today's processes takes from it."""

from __future__ import annotations

import pytest
from member_bugs import draw_world, find_bug, planted
from member_space import explore
from member_world import Violation, World

from shoal.islands.commit_vote import Ballot, VoteResult
from shoal.islands.membership.commit_tally import CommitTally
from shoal.islands.membership.committed_turn import (
    FIRST_WITNESS,
    Seat,
    TurnProposal,
    commit_turn,
    majority,
    promises_needed,
    seat_members,
    start_session,
)
from shoal.islands.membership.island_member import IslandMember
from shoal.islands.membership.turn_messages import (
    ALL_VOTE,
    CastVote,
    Prepare,
    Propose,
    Reject,
    Send,
    Welcome,
)

BALLOT = Ballot(round=7, fragment=1, ok=True, digest="a", tokens=1, steps_per_s=None, used=4)
SAVING = Ballot(
    round=7, fragment=1, ok=True, digest="a", tokens=1, steps_per_s=None, used=4, saved=None
)


def test_a_vote_waits_for_all_and_for_their_disks() -> None:
    tally = CommitTally(range(3))
    tally.add(0, BALLOT)
    tally.add(2, SAVING)
    assert tally.missing() == (1, 2)
    assert tally.result() is None
    tally.add(1, BALLOT)
    assert tally.missing() == (2,)
    assert tally.result() is None
    tally.add(2, BALLOT)
    assert tally.result() == VoteResult(True, "", ())
    assert tally.ballots == [BALLOT] * 3


def test_every_majority_has_a_member_that_promised() -> None:
    for count in range(1, 40):
        assert majority(count) + promises_needed(count) > count >= 2 * majority(count) - 2


def test_who_is_absent_is_left_out_of_divisor_and_samples() -> None:
    seats = [Seat(name, 1) for name in range(3)]
    start = start_session(0, None, seats, samples=4)
    one, two = (TurnProposal(seats[n], "x", 10 * (n + 1), 4) for n in (0, 2))
    after = commit_turn(start, (one, two), "w", tuple(seats), samples=4)
    assert (after.round, after.committers, after.divisor) == (1, (0, 2), 40)
    assert after.dealt[0][0] == start.dealt[1][0], "island 1's samples are dealt again"
    discarded = commit_turn(start, (), start.weights, tuple(seats), samples=4)
    assert (discarded.turn, discarded.round, discarded.dealt) == (1, 0, start.dealt)


@pytest.mark.parametrize(("names", "worlds"), [(2, 4), (3, 6), (5, 28)])
def test_drawn_worlds_keep_the_promises(names: int, worlds: int) -> None:
    """1,000 rounds, with all faults at once; `make proof PART=protocol` has 100,000."""
    rounds = sum(World(seed, names).run(25) for seed in range(worlds))
    assert rounds >= 28 * worlds


def test_drawn_worlds_with_a_witness_keep_the_promises() -> None:
    assert sum(draw_world(seed, witness=True).run(25) for seed in range(6)) >= 28 * 6


def test_a_witness_and_one_of_two_go_on() -> None:
    """The witness votes last, has no samples, and seconds only what all islands voted for."""
    seats = (Seat(0, 1), Seat(1, 1), Seat(FIRST_WITNESS, 1))
    start = start_session(0, None, seats, samples=4)
    assert [len(spans) for spans in start.dealt] == [1, 1, 0]
    witness = IslandMember(seats[2], start, (0, 1), 4)
    proposals = [TurnProposal(seat, f"{seat.name}", 8, 4) for seat in seats[:2]]
    facts = [commit_turn(start, proposals, weights, seats, 4) for weights in "ab"]
    witness.trained("", 0, 0)
    witness.actions.clear()
    for proposal in proposals:
        witness.receive(Propose(proposal.seat, 0, 1, proposal))
    for first, second in (facts, facts[:1] * 2):
        witness._reset()
        witness.receive(CastVote(seats[0], 0, 1, ALL_VOTE, first))
        assert witness.actions == []
        witness.receive(CastVote(seats[1], 0, 1, ALL_VOTE, second))
        cast = witness.actions.pop(0).message
        assert cast.fact == (first if first is second else None)
        witness.actions.clear()
    assert witness.fact == facts[0], "all three voted for it"
    leaving = [one._replace(leaves=True) for one in proposals]
    assert seat_members(seats, (), leaving) == seats, "for the resume"


def test_a_witness_decides_only_for_members_that_restarted() -> None:
    """Island 0 restarted, and nobody else knows its seat: a turn without a merge gives it back."""
    seats = (Seat(0, 1), Seat(FIRST_WITNESS, 1))
    start = start_session(0, None, seats, samples=4)
    witness = IslandMember(seats[1], start, (0,), 4)
    witness.grace_over()
    assert witness.actions == [], "island 0 may be slow"
    again = IslandMember(Seat(0, 2), start, (0, FIRST_WITNESS), 4)
    again.greet()
    for _ in range(2):
        while again.actions or witness.actions:
            for one, other in ((again, witness), (witness, again)):
                sent, one.actions = [a for a in one.actions if isinstance(a, Send)], []
                for action in sent:
                    other.receive(action.message)
        witness.grace_over()
    assert witness.fact is not None
    assert (witness.fact.round, witness.fact.seats) == (0, (Seat(0, 2), seats[1]))


@pytest.mark.parametrize(
    "name", ["a majority is one too few", "a chair ignores earlier votes", "nobody heals"]
)
def test_a_planted_bug_is_found_and_its_seed_replays_it(name: str) -> None:
    found = find_bug(name, most_rounds=2000)
    assert found is not None
    assert found == find_bug(name, most_rounds=2000)


def test_a_restarted_member_promises_no_less_than_before() -> None:
    """Its own promise is lost; those of enough steady members are at least as high."""
    seats = [Seat(name, 1) for name in range(3)]
    start = start_session(0, None, seats, samples=4)
    again = IslandMember(Seat(2, 2), start, (0, 1, 2), 4)
    for name in range(2):
        early = Prepare(seats[0], 0, 1, (1, 0, 1))
        again.receive(early)
        assert again.actions == [], "it takes no part before enough have answered"
        again.receive(Welcome(seats[name], 0, 1, again.seat, start, (3, name, 1)))
    assert again.stands_in
    assert again.promised == (3, 1, 1)
    again.receive(early)
    assert again.actions == [Send((0,), Reject(again.seat, 0, 1, (3, 1, 1)))]


def test_all_interleavings_around_a_late_disk_keep_the_promises() -> None:
    """`make proof PART=protocol` has all faults, and two rounds."""
    space = explore("slow", rounds=1)
    assert space.whole
    assert space.finished
    assert space.states > 1000


def test_a_lone_island_and_a_witness_go_on_after_any_death() -> None:
    """Every state leads to an end, but for a disk that was set back: then the other is awaited."""
    space = explore("lone", rounds=1)
    assert space.whole
    assert space.finished
    assert space.states > 1000
    for bug in ("a witness keeps its seat", "only turns on disks are known"):
        with planted(bug), pytest.raises(Violation, match="nobody goes on"):
            explore("lone", rounds=1)


def test_an_enumeration_finds_a_majority_without_a_chair() -> None:
    with planted("a majority decides without a chair"), pytest.raises(Violation):
        explore("cut", rounds=1, most=1000)
