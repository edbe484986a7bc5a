"""The members' protocol in drawn worlds, and what the vote of today's processes takes from it."""

from __future__ import annotations

import pytest
from member_bugs import find_bug, planted
from member_space import explore
from member_world import Violation, World

from shoal.islands.commit_vote import Ballot, VoteResult
from shoal.islands.membership.commit_tally import CommitTally
from shoal.islands.membership.committed_turn import (
    Seat,
    TurnProposal,
    commit_turn,
    majority,
    promises_needed,
    start_session,
)
from shoal.islands.membership.island_member import IslandMember
from shoal.islands.membership.turn_messages import Prepare, Reject, Send, Welcome

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


def test_an_enumeration_finds_a_majority_without_a_chair() -> None:
    with planted("a majority decides without a chair"), pytest.raises(Violation):
        explore("cut", rounds=1, most=1000)
