"""The vote: all or none, and whoever differs is named."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace

import pytest

from shoal.base.errors import ClusterError
from shoal.islands.commit_vote import (
    Ballot,
    VoteResult,
    count_ballots,
    decide_commit,
    name_islands,
    parse_json_object,
)

ONE = Ballot(round=7, fragment=1, ok=True, digest="a" * 64, tokens=4096, steps_per_s=2.5, used=128)


def test_a_ballot_arrives_as_it_was_sent() -> None:
    full = replace(ONE, ok=False, steps_per_s=None, stop=True, why="NaN in «blocks.0»")
    writing = replace(ONE, saved=None)
    for ballot in (ONE, full, writing, replace(ONE, steps_per_s=0.1 + 0.2)):
        assert Ballot.from_bytes(ballot.to_bytes(), 0) == ballot


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (b"", "cannot be read: Expecting value"),
        (b"\xff\xfe", "cannot be read"),
        (b"\x80\x04K\x01.", "cannot be read"),
        (b"[1]", "cannot be read: no JSON object"),
        (b"[" * 100_000, "cannot be read"),
        (b'{"round": 7}', "has the fields round; round, fragment, ok"),
    ],
)
def test_a_malformed_ballot_names_its_island(message: bytes, said: str) -> None:
    with pytest.raises(ClusterError, match=f"island 2: its ballot {said}"):
        Ballot.from_bytes(message, 2)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("round", -1),
        ("round", True),
        ("fragment", 1.0),
        ("ok", 1),
        ("digest", None),
        ("tokens", "4096"),
        ("tokens", False),
        ("tokens", -0.5),
        ("used", 1.5),
        ("steps_per_s", -1.0),
        ("steps_per_s", True),
        ("steps_per_s", "2"),
        ("used", None),
        ("stop", "no"),
        ("why", 0),
        ("saved", 1),
    ],
)
def test_a_wrong_field_is_named(name: str, value: object) -> None:
    message = json.dumps({**asdict(ONE), name: value}).encode()
    with pytest.raises(ClusterError, match=f"island 3: its ballot says {name} = "):
        Ballot.from_bytes(message, 3)


@pytest.mark.parametrize(("text", "read"), [(b"1e999", "inf"), (b"NaN", "nan")])
def test_a_speed_that_is_not_finite_does_not_come_in(text: bytes, read: str) -> None:
    message = ONE.to_bytes().replace(b"2.5", text)
    with pytest.raises(ClusterError, match=f"island 0: its ballot says steps_per_s = {read}"):
        Ballot.from_bytes(message, 0)


def test_statistics_of_a_broken_change_can_be_read() -> None:
    message = json.dumps({"gram": [[math.nan]]}).encode()
    assert math.isnan(parse_json_object(message, "island 1: its statistics")["gram"][0][0])


def test_a_field_too_many_is_another_version() -> None:
    message = json.dumps({**asdict(ONE), "loss": 1}).encode()
    with pytest.raises(ClusterError, match="all islands need the same version"):
        Ballot.from_bytes(message, 0)


def test_all_alike_commits() -> None:
    faster = replace(ONE, tokens=1, steps_per_s=9.0, used=3)
    assert count_ballots([ONE, faster, ONE]) == VoteResult(True, "", ())
    assert count_ballots([ONE]).committed


def test_one_no_is_enough() -> None:
    no = replace(ONE, ok=False, digest="", why="the candidate is not finite")
    assert count_ballots([ONE, no, ONE]) == VoteResult(
        False, "island 1: the candidate is not finite", ()
    )
    both = count_ballots([replace(no, why=""), no])
    assert both.why == "island 0: voted no; island 1: the candidate is not finite"


def test_the_minority_is_named() -> None:
    other = replace(ONE, digest="b" * 64)
    outcome = count_ballots([ONE, other, ONE])
    assert not outcome.committed
    assert outcome.why == ("island 1: came to another state (bbbbbbbb) than the others (aaaaaaaa)")
    third = replace(ONE, digest="c" * 64)
    assert "islands 1 and 3: came to" in count_ballots([ONE, other, ONE, third, ONE]).why


def test_a_tie_names_all() -> None:
    other = replace(ONE, digest="b" * 64)
    assert count_ballots([ONE, other]).why == (
        "islands 0 and 1: each came to another state (aaaaaaaa, bbbbbbbb), none has a majority"
    )
    assert "islands 0, 1, 2 and 3" in count_ballots([ONE, other, ONE, other]).why


def test_different_places_are_an_error() -> None:
    with pytest.raises(
        ClusterError,
        match=(
            "the islands vote on different steps: island 0: round 7, fragment 1; "
            "island 1: round 6, fragment 1; stop all of them and resume"
        ),
    ):
        count_ballots([ONE, replace(ONE, round=6)])
    with pytest.raises(ClusterError, match="island 1: round 7, fragment 0"):
        count_ballots([ONE, replace(ONE, fragment=0)])


def test_who_wants_to_stop_and_partners_go_by_their_own_numbers() -> None:
    stopping = replace(ONE, stop=True)
    assert count_ballots([ONE, stopping, stopping]).stop == (1, 2)
    assert count_ballots([ONE, stopping], islands=[3, 5]) == VoteResult(True, "", (5,))
    assert "island 5: voted no" in count_ballots([ONE, replace(ONE, ok=False)], islands=[3, 5]).why


def test_who_could_not_save_stops_all() -> None:
    """Not only those who merge with it: a round ahead, they would delete the last one it holds."""
    no = replace(ONE, ok=False, digest="", saved=False, why="round 6 is not on its disk: full")
    outcome = decide_commit([ONE, ONE, no, ONE], (0, 1))
    assert outcome == VoteResult(False, "island 2: round 6 is not on its disk: full", ())
    other = replace(ONE, digest="b" * 64)
    assert decide_commit([ONE, ONE, other, other], (0, 1)).committed
    assert not decide_commit([ONE, ONE, other, ONE], (2, 3)).committed


def test_an_island_that_did_not_save_has_voted_no() -> None:
    """Also where its sums agree with all others."""
    unsaved = replace(ONE, saved=False, why="its disk is full")
    assert count_ballots([ONE, unsaved]) == VoteResult(False, "island 1: its disk is full", ())


def test_names() -> None:
    assert name_islands([4]) == "island 4"
    assert name_islands(range(3)) == "islands 0, 1 and 2"
