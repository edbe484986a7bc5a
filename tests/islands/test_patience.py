"""Deadlines that follow what exchanges have taken."""

from __future__ import annotations

import pytest

from shoal.islands.peer_deadline import FIRST_S, GRACE_S, MOST_S, WINDOW, PeerDeadline

MB = 1_000_000


def taught(*pairs: tuple[float, int]) -> PeerDeadline:
    patience = PeerDeadline()
    for seconds, size_bytes in pairs:
        patience.record_exchange(seconds, size_bytes)
    return patience


def test_a_link_cut_of_5_s_is_survived_however_short_exchanges_were() -> None:
    """TCP's retries double: 0.2 + 0.4 + … + 6.4 s, so 5 s of cut are up to 13 s of silence."""
    for count in (1, 3, 50):
        patience = taught(*[(0.001, 1000)] * count)
        assert patience.deadline_s(1000) >= 0.001 + 13
        assert patience.deadline_s(1000) < 16


def test_a_cut_within_a_long_exchange_is_survived() -> None:
    patience = taught(*[(60.0, 50 * MB)] * WINDOW)
    assert 60 + 13 < patience.deadline_s(50 * MB) < 300


def test_who_is_known_to_do_something_else_gets_the_time() -> None:
    """Validation on one island is in no past exchange; once waited for, it is."""
    patience = taught(*[(0.1, MB)] * WINDOW)
    usual = patience.deadline_s(MB, round_s=10.0)
    assert usual == pytest.approx(GRACE_S + 10)
    patience.extend_next_deadline()
    assert patience.deadline_s(MB, round_s=10.0) == FIRST_S + 10
    patience.record_exchange(0.1, MB)
    assert patience.deadline_s(MB, round_s=10.0) == usual
    slow = taught(*[(300.0, MB)] * WINDOW)
    usual = slow.deadline_s(MB)
    slow.extend_next_deadline()
    assert slow.deadline_s(MB) == max(usual, FIRST_S)


def test_doubt_goes_with_experience() -> None:
    deadlines = [taught(*[(10.0, MB)] * n).deadline_s(MB) for n in range(1, WINDOW + 1)]
    assert deadlines == sorted(deadlines, reverse=True)
    assert deadlines[0] == pytest.approx(GRACE_S + 150)
    assert deadlines[-1] == pytest.approx(GRACE_S + 36)


def test_a_larger_payload_gets_longer_and_a_much_larger_one_is_unknown() -> None:
    patience = taught((2.0, MB))
    known = taught((2.0, MB)).deadline_s(MB)
    assert patience.deadline_s(3 * MB) == pytest.approx(GRACE_S + 3 * (known - GRACE_S))
    assert patience.deadline_s(10) == known, "what was waiting does not shrink with the payload"
    assert patience.deadline_s(17 * MB) == FIRST_S
    assert taught((0.1, 0)).deadline_s(MB) == FIRST_S


def test_nothing_known_is_patient() -> None:
    assert PeerDeadline().deadline_s(0) == FIRST_S
    assert PeerDeadline().deadline_s(0, round_s=1000) == FIRST_S + 1000


def test_never_shorter_than_the_own_round() -> None:
    patience = taught(*[(0.1, MB)] * WINDOW)
    assert patience.deadline_s(MB, round_s=300) == GRACE_S + 300
    assert patience.deadline_s(MB, round_s=7200) == GRACE_S + 7200


def test_a_dead_island_is_noticed_at_last() -> None:
    assert taught((2000.0, MB)).deadline_s(MB) == MOST_S + 2000


def test_a_stall_is_forgotten() -> None:
    patience = taught((500.0, MB), *[(1.0, MB)] * (WINDOW - 1))
    assert patience.deadline_s(MB) > 1000
    patience.record_exchange(1.0, MB)
    assert patience.deadline_s(MB) < 20
