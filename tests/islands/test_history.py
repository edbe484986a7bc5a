"""From which round islands go on after they were stopped anywhere, a vote included."""

from __future__ import annotations

import pytest

from shoal.base.errors import CheckpointError, ClusterError
from shoal.islands.common_round import (
    ResumePoint,
    decode_rounds,
    encode_rounds,
    find_newest_common_round,
    find_resume_point,
)


def test_the_newest_that_all_hold() -> None:
    assert find_newest_common_round([{6: "f", 7: "a"}, {6: "f", 7: "a"}]) == 7
    assert find_newest_common_round([{7: "a", 8: "b"}, {6: "f", 7: "a"}]) == 7, (
        "one died in the vote"
    )
    assert find_newest_common_round([{7: "a", 8: "b"}, {7: "a", 8: "c"}]) == 7, "equal digests only"
    assert find_newest_common_round([{10: "x", 9: "a"}, {9: "a", 10: "y"}]) == 9
    assert find_newest_common_round([{7: "a"}, {8: "b"}]) is None
    assert find_newest_common_round([{7: "a"}, {}]) is None
    assert find_newest_common_round([]) is None


def test_newcomers_take_it_from_the_lowest_that_holds_it() -> None:
    assert find_resume_point([{}, {7: "a"}, {6: "x", 7: "a"}, {}]) == ResumePoint(7, (1, 1, 2, 1))
    assert find_resume_point([{7: "a"}]) == ResumePoint(7, (0,))


def test_nobody_holds_anything_is_a_new_run() -> None:
    assert find_resume_point([{}, {}]) is None


def test_no_common_round_says_who_holds_what_and_what_to_do() -> None:
    held = [{8: "b" * 64, 9: "c" * 64}, {4: "d" * 64}, {9: "c" * 64}, {}]
    with pytest.raises(CheckpointError) as error:
        find_resume_point(held)
    assert str(error.value) == (
        "no round is held by all islands with the same digest: island 0 holds round 8 (bbbbbbbb), "
        "round 9 (cccccccc); island 1 holds round 4 (dddddddd); island 2 holds round 9 (cccccccc); "
        "try: resume islands 0 and 2 alone from round 9, or move the run folder of island 1 "
        "away and take the round from island 0"
    )


def test_the_same_round_with_other_digests_is_told() -> None:
    with pytest.raises(
        CheckpointError, match=r"island 0 holds round 7 \(a\); island 1 holds round 7 \(b\)"
    ):
        find_resume_point([{7: "a"}, {7: "b"}])


def test_what_is_held_travels() -> None:
    held = {7: "a" * 64, 12: "b"}
    assert decode_rounds(encode_rounds(held), 0) == held
    assert decode_rounds(encode_rounds({}), 0) == {}


@pytest.mark.parametrize(
    "message", [b'{"x": "a"}', b'{"7": 7}', b'{"-1": "a"}', '{"٣": "a"}'.encode()]
)
def test_a_malformed_list_names_its_island(message: bytes) -> None:
    with pytest.raises(ClusterError, match="island 2: its list of saved rounds says"):
        decode_rounds(message, 2)


def test_what_is_no_list_at_all_names_its_island() -> None:
    with pytest.raises(ClusterError, match="island 2: its list of saved rounds cannot be read"):
        decode_rounds(b"[]", 2)
