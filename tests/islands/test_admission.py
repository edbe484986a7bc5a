"""What is refused before anything is added up, and that honest islands never are."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Sequence

import numpy
import pytest

from shoal.base.errors import CheckpointError
from shoal.islands.admission import ROUNDS, AdmissionTest, AdmissionVerdict, RefusalCounter

BOUND, COSINE = 8.0, -0.2
ELEMENTS = 1000


class Fleet:
    """Islands whose changes have a common part and a part of their own."""

    def __init__(self, count: int, cosine: float = 0.5, seed: int = 0) -> None:
        self.count, self.cosine = count, cosine
        self.draw = numpy.random.default_rng(seed)
        self.admission = AdmissionTest(BOUND, COSINE)

    def changes(self, size: float = 1.0, noise: float = 0.1) -> numpy.ndarray:
        common = self.draw.standard_normal(ELEMENTS)
        own = self.draw.standard_normal((self.count, ELEMENTS))
        mixed = math.sqrt(self.cosine) * common + math.sqrt(1 - self.cosine) * own
        sizes = size * self.draw.lognormal(0.0, noise, (self.count, 1))
        return mixed * sizes / math.sqrt(ELEMENTS)

    def judge(self, changes: numpy.ndarray, tokens: Sequence[float] = ()) -> AdmissionVerdict:
        finite = [bool(numpy.isfinite(change).all()) for change in changes]
        with numpy.errstate(invalid="ignore", over="ignore"):
            gram = (changes @ changes.T).tolist()
        return self.admission.judge(finite, gram, tokens or [1000] * self.count)

    def honest_rounds(self, rounds: int, size: float = 1.0) -> None:
        for _ in range(rounds):
            verdict = self.judge(self.changes(size))
            assert verdict.refused == {}
            self.admission.commit(verdict)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("rounds", [0, 5])
def test_what_is_not_finite_is_refused(bad: float, count: int, rounds: int) -> None:
    fleet = Fleet(count)
    fleet.honest_rounds(rounds)
    changes = fleet.changes()
    changes[1, 17] = bad
    verdict = fleet.judge(changes)
    assert verdict.refused == {1: "island 1: its change is not finite"}
    assert verdict.admitted == (0, *range(2, count))
    assert 1 not in verdict.norms


def test_a_square_beyond_float64_is_not_finite() -> None:
    verdict = AdmissionTest(BOUND, COSINE).judge(
        [True, True], [[math.inf, math.inf], [math.inf, 1.0]], [1, 1]
    )
    assert verdict.admitted == (1,)


@pytest.mark.parametrize("count", [3, 4])
@pytest.mark.parametrize("rounds", [0, 1, 2, 30])
def test_times_1000_is_refused(count: int, rounds: int) -> None:
    fleet = Fleet(count)
    fleet.honest_rounds(rounds)
    changes = fleet.changes()
    changes[2] *= 1000
    verdict = fleet.judge(changes)
    assert list(verdict.refused) == [2], "the others are compared without it"
    (line,) = verdict.refused.values()
    found = re.fullmatch(
        r"island 2: its change is (\d+) × the median of (past rounds|this round) "
        r"\(bound (\d\.?\d*) ×\)",
        line,
    )
    assert found, line
    assert 700 < float(found[1]) < 1400
    assert found[2] == ("past rounds" if rounds else "this round")
    assert 5 <= float(found[3]) < 7


def test_what_is_refused_has_no_voice_on_directions() -> None:
    fleet = Fleet(5)
    fleet.honest_rounds(3)
    changes = fleet.changes()
    changes[0, 0] = math.nan
    changes[2] *= -1000
    changes[4] *= -1
    verdict = fleet.judge(changes)
    assert verdict.admitted == (1, 3), "two of three are a majority, two of four are not"
    assert "the median of past rounds" in verdict.refused[2]
    assert "against the mean" in verdict.refused[4]
    assert sorted(verdict.cosines) == [1, 3, 4]


def test_times_1000_of_two_is_refused_once_there_is_a_past() -> None:
    fleet = Fleet(2)
    changes = fleet.changes()
    changes[0] *= 1000
    first = fleet.judge(changes)
    assert first.admitted == (0, 1)
    assert "and no past round says which is right" in first.told[0]
    assert first.told[0].startswith("island 0: its change is ")
    fleet.honest_rounds(1)
    assert list(fleet.judge(changes).refused) == [0]


def test_a_bad_first_round_of_two_does_not_open_the_door() -> None:
    fleet = Fleet(2)
    for refused in ([], [0], [0], [0]):
        changes = fleet.changes()
        changes[0] *= 1000
        verdict = fleet.judge(changes)
        assert list(verdict.refused) == refused
        fleet.admission.commit(verdict)


def test_the_last_finite_one_is_still_held_against_the_past() -> None:
    fleet = Fleet(2)
    fleet.honest_rounds(3)
    changes = fleet.changes()
    changes[0, 0], changes[1] = math.nan, changes[1] * 1000
    verdict = fleet.judge(changes)
    assert verdict.admitted == ()
    assert len(verdict.refused) == 2


@pytest.mark.parametrize("count", [3, 4, 5])
@pytest.mark.parametrize("rounds", [0, 3])
@pytest.mark.parametrize("factor", [-1, -3, -0.1])
def test_a_flipped_sign_is_refused(count: int, rounds: int, factor: float) -> None:
    fleet = Fleet(count, cosine=0.5)
    fleet.honest_rounds(rounds)
    changes = fleet.changes()
    changes[0] *= factor
    verdict = fleet.judge(changes)
    assert list(verdict.refused) == [0]
    assert "points against the mean of the others, cosine -0." in verdict.refused[0]
    assert "(bound -0.2)" in verdict.refused[0]
    assert verdict.admitted == tuple(range(1, count))


def test_a_flipped_sign_with_most_of_the_tokens_is_still_the_one_refused() -> None:
    fleet = Fleet(3, cosine=0.9)
    fleet.honest_rounds(3)
    changes = fleet.changes()
    changes[1] *= -4
    assert list(fleet.judge(changes, tokens=[100, 400, 100]).refused) == [1]


def test_two_of_five_flipped_are_refused() -> None:
    fleet = Fleet(5, cosine=0.5)
    changes = fleet.changes()
    changes[[1, 4]] *= -1
    assert sorted(fleet.judge(changes).refused) == [1, 4]


def test_half_against_half_is_nobodys_step() -> None:
    fleet = Fleet(4, cosine=0.5)
    changes = fleet.changes()
    changes[[1, 3]] *= -1
    verdict = fleet.judge(changes)
    assert verdict.admitted == ()
    assert verdict.refused[2] == "island 2: no majority of the changes points the same way"
    assert sorted(verdict.refused) == [0, 1, 2, 3]


def test_two_that_point_apart_are_told_and_admitted() -> None:
    fleet = Fleet(2, cosine=0.9)
    changes = fleet.changes()
    changes[1] *= -1
    verdict = fleet.judge(changes)
    assert verdict.admitted == (0, 1)
    assert verdict.told == (
        f"islands 0 and 1: their changes point apart, cosine {verdict.cosines[0]:.2f} (bound -0.2)",
    )


@pytest.mark.parametrize("count", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("cosine", [0.05, 0.5, 0.95])
@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_honest_islands_are_never_refused(count: int, cosine: float, noise: float) -> None:
    """200 rounds in which changes become 100 times smaller."""
    fleet = Fleet(count, cosine, seed=count)
    for round_ in range(200):
        size = 100 ** (-round_ / 200)
        verdict = fleet.judge(fleet.changes(size, noise))
        assert verdict.refused == {}, round_
        assert verdict.admitted == tuple(range(count))
        fleet.admission.commit(verdict)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_warm_up_is_honest(count: int) -> None:
    fleet = Fleet(count)
    for round_ in range(60):
        verdict = fleet.judge(fleet.changes((2 * min(round_, 20) + 1) ** 2))
        assert verdict.refused == {}, round_
        fleet.admission.commit(verdict)


def test_times_1000_is_refused_within_a_warm_up() -> None:
    fleet = Fleet(3)
    for round_ in range(20):
        fleet.honest_rounds(1, size=(2 * round_ + 1) ** 2)
        changes = fleet.changes((2 * round_ + 3) ** 2)
        changes[1] *= 1000
        assert list(fleet.judge(changes).refused) == [1], round_


@pytest.mark.parametrize("count", [1, 2, 4])
def test_what_all_do_alike_is_told_and_nobodys_fault(count: int) -> None:
    fleet = Fleet(count)
    fleet.honest_rounds(20)
    verdict = fleet.judge(fleet.changes(30.0))
    assert verdict.refused == {}
    assert verdict.told[0].startswith("most changes grew alike: to ")


def test_equal_norms_in_the_past_leave_room() -> None:
    admission = AdmissionTest(BOUND, COSINE)
    same = [[1.0, 0.5, 0.5], [0.5, 1.0, 0.5], [0.5, 0.5, 1.0]]
    for _ in range(ROUNDS):
        admission.commit(admission.judge([True] * 3, same, [1, 1, 1]))
    larger = [[1.21, 0.5, 0.5], [0.5, 1.0, 0.5], [0.5, 0.5, 1.0]]
    assert admission.judge([True] * 3, larger, [1, 1, 1]).refused == {}


@pytest.mark.parametrize("growth", [0.5, 1.0])
@pytest.mark.parametrize("steps", [(50, 50, 12), (50, 12, 12), (50, 1, 1), (50, 50, 1), (50, 1)])
def test_unequal_speed_is_no_offence(growth: float, steps: tuple[int, ...]) -> None:
    """A change of k steps is between √k and k times as large as that of one."""
    fleet = Fleet(len(steps))
    fleet.honest_rounds(1, size=50**growth)  # speeds are not known yet: all take 50
    sizes = numpy.array(steps, dtype=float)[:, None] ** growth
    for _ in range(60):
        verdict = fleet.judge(fleet.changes() * sizes, [1000 * count for count in steps])
        assert verdict.refused == {}
        fleet.admission.commit(verdict)
    for bad in range(len(steps)):
        changes = fleet.changes() * sizes
        changes[bad] *= 1000
        if 1000 * sizes[bad] > 50 * sizes.max():  # else it is small beside the fast one's
            assert list(fleet.judge(changes, [1000 * n for n in steps]).refused) == [bad]


def test_a_change_of_nothing_is_admitted_and_has_no_voice() -> None:
    fleet = Fleet(4)
    fleet.honest_rounds(2)
    changes = fleet.changes()
    changes[0] = 0
    verdict = fleet.judge(changes, [0, 10, 10, 10])
    assert verdict.admitted == (0, 1, 2, 3)
    assert verdict.norms[0] == 0
    fleet.admission.commit(verdict)
    assert fleet.judge(numpy.zeros((4, ELEMENTS))).admitted == (0, 1, 2, 3)
    assert fleet.judge(fleet.changes()).refused == {}


def test_all_refused_is_nobodys_step() -> None:
    verdict = Fleet(3).judge(numpy.full((3, ELEMENTS), math.nan))
    assert verdict.admitted == ()
    assert sorted(verdict.refused) == [0, 1, 2]


def test_judging_changes_nothing_and_the_past_survives_a_checkpoint() -> None:
    fleet = Fleet(3)
    fleet.honest_rounds(ROUNDS + 5)
    before = fleet.admission.state()
    assert len(before["past"]) == ROUNDS
    changes = fleet.changes()
    changes[1] *= 7
    verdict = fleet.judge(changes)
    assert fleet.admission.state() == before
    other = AdmissionTest(BOUND, COSINE)
    other.load(json.loads(json.dumps(before)))
    gram = (changes @ changes.T).tolist()
    assert other.judge([True] * 3, gram, [1000] * 3) == verdict
    assert other.state() == before
    fleet.admission.commit(verdict)
    assert len(fleet.admission.state()["past"][-1]) == 2, "what was refused is no past"


@pytest.mark.parametrize(
    "state",
    [[], {}, {"past": [[[0, 1]]]}, {"past": [[[math.nan, 1]]]}, {"past": [[[1, -1]]]}, {"past": 3}],
)
def test_a_damaged_past_is_told(state: object) -> None:
    with pytest.raises(CheckpointError, match="the islands' past norms are damaged"):
        AdmissionTest(BOUND, COSINE).load(state)  # type: ignore[arg-type]


def test_partners_go_by_their_own_numbers() -> None:
    changes = Fleet(3).changes()
    changes[1] *= -1
    verdict = AdmissionTest(BOUND, COSINE).judge(
        [True, True, True], (changes @ changes.T).tolist(), [1, 1, 1], islands=[2, 5, 9]
    )
    assert verdict.admitted == (2, 9)
    assert verdict.refused[5].startswith("island 5: ")
    assert sorted(verdict.norms) == [2, 5, 9]


def test_refusals_count_only_in_a_row() -> None:
    refusals = RefusalCounter(3)
    assert refusals.count(range(3), {1}) == ()
    assert refusals.count(range(3), {1, 2}) == ()
    assert refusals.count(range(3), {2}) == ()
    assert refusals.count([0, 1], {1}) == (), "island 2 was not there: nothing is known of it"
    other = RefusalCounter(3)
    other.load(json.loads(json.dumps(refusals.state())))
    assert other.count(range(3), {2}) == (2,)
    assert refusals.count(range(3), {1, 2}) == (2,)
    assert refusals.count(range(3), {1}) == (1,)


def test_the_order_of_islands_does_not_matter() -> None:
    draw = random.Random(3)
    for seed in range(20):
        fleet = Fleet(5, 0.3, seed)
        fleet.honest_rounds(2)
        changes = fleet.changes()
        changes[seed % 5] *= draw.choice([-1, 1000, math.nan])
        order = draw.sample(range(5), 5)
        here = set(fleet.judge(changes).refused)
        there = {order[island] for island in fleet.judge(changes[order]).refused}
        assert here == there == {seed % 5}
