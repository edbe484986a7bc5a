"""Which rank the launcher calls slow: pages as ranks would write them, with a clock of the test's."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from shoal.launch.watch.page_reader import OwnedPage
from shoal.launch.watch.slow_ranks import STEPS, SlowRankDetector
from shoal.wire import watch_page
from shoal.wire.phases import BACKWARD, DATA, HOOKS, PASSES, SUM, UPDATE, Phase
from shoal.wire.watch_page import PAGE_VARIABLE, WAIT, WatchPage

OWN_S = {DATA: 0.01, PASSES: 0.03, BACKWARD: 0.04, UPDATE: 0.02, HOOKS: 0.0}
NAMES = {
    DATA: "data",
    PASSES: "forward",
    BACKWARD: "backward",
    UPDATE: "optimizer",
    HOOKS: "hooks",
}
Extra = Callable[[int, int, int], float]
"""(step, rank, part) → seconds more."""


class Ranks:
    """Ranks that write pages by a clock of their own, meet in the sum, and are looked at."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
        self.now_s, self.step = [1.0] * size, 0
        self.of = 0
        monkeypatch.setattr(watch_page.time, "monotonic", lambda: self.now_s[self.of])
        self.watched = [OwnedPage(f"rank {rank}") for rank in range(size)]
        opened = [WatchPage.open({PAGE_VARIABLE: one.path}) for one in self.watched]
        self.pages = [one for one in opened if one is not None]
        self.told: list[dict[str, Any]] = []
        self.slow = SlowRankDetector(
            lambda event, **fields: self.told.append({"event": event, **fields})
        )

    def run(self, steps: int, extra: Extra = lambda step, rank, part: 0.0) -> None:
        for _ in range(steps):
            self.step += 1
            for rank, page in enumerate(self.pages):
                self.of = rank
                for part in (DATA, PASSES, BACKWARD):
                    self._spend(page, part, extra)
                page.record_part(SUM)
                page.record_collective_start("all_reduce", 64)
                page.record_wait_start()
            met_s = max(self.now_s)
            for rank, page in enumerate(self.pages):
                self.of, self.now_s[rank] = rank, met_s
                page.record_wait_end(1)
                self._spend(page, UPDATE, extra)
                self._spend(page, HOOKS, extra)
                page.record_step_end(self.step)
            self.slow.poll(self.watched, [one.read().step for one in self.watched])

    def _spend(self, page: WatchPage, part: int, extra: Extra) -> None:
        page.record_part(part)
        self.now_s[self.of] += OWN_S[part] + extra(self.step, self.of, part)

    def named(self) -> list[tuple[int, str]]:
        return [(one["rank"], one["phase"]) for one in self.told]


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Ranks]]:
    made = []

    def make(size: int) -> Ranks:
        made.append(Ranks(monkeypatch, size))
        return made[-1]

    yield make
    for one in made:
        for watched in one.watched:
            watched.close()


def noise(seed: int) -> Extra:
    """Up to half a part more, of all ranks alike, as where more runs than there are cores."""
    drawn = random.Random(seed)
    return lambda step, rank, part: drawn.random() * 0.5 * OWN_S[part]


@pytest.mark.parametrize("part", list(NAMES))
@pytest.mark.parametrize(("size", "slow"), [(2, 0), (2, 1), (3, 1), (4, 3)])
def test_a_rank_that_is_slow_in_a_part_is_told_within_50_steps_and_once(
    ranks: Callable[[int], Ranks], size: int, slow: int, part: int
) -> None:
    run, busy = ranks(size), noise(size)
    run.run(41, busy)
    assert run.told == []
    late = lambda step, rank, at: 0.03 * ((rank, at) == (slow, part)) + busy(step, rank, at)  # noqa: E731
    run.run(49, late)
    assert run.named() == [(slow, NAMES[part])]
    (told,) = run.told
    assert told["event"] == "slow_rank"
    assert told["extra_s"] == pytest.approx(0.03, abs=0.008)
    assert 0.15 < told["share"] < 0.3
    run.run(100, late)
    assert len(run.told) == 1, "once"
    run.run(4 * STEPS, busy)
    run.run(49, late)
    assert run.named() == 2 * [(slow, NAMES[part])], "it had recovered"


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_that_are_disturbed_alike_are_not_told(
    ranks: Callable[[int], Ranks], size: int
) -> None:
    for seed in range(5):
        run = ranks(size)
        run.run(400, noise(seed))
        assert run.told == []


def test_one_long_step_and_a_tenth_of_a_step_are_not_told(ranks: Callable[[int], Ranks]) -> None:
    run = ranks(2)
    run.run(100, lambda step, rank, part: 5.0 * ((step % 20, rank, part) == (9, 1, PASSES)))
    run.run(100, lambda step, rank, part: 0.01 * ((rank, part) == (1, DATA)))
    assert run.told == []


def test_a_rank_with_as_much_to_do_elsewhere_is_waited_for_by_nobody(
    ranks: Callable[[int], Ranks],
) -> None:
    run = ranks(2)
    run.run(100, lambda step, rank, part: 0.03 * ((rank, part) in ((0, PASSES), (1, DATA))))
    assert run.told == []


def test_of_two_slow_ranks_the_one_is_told_for_which_the_other_waits(
    ranks: Callable[[int], Ranks],
) -> None:
    run = ranks(4)
    more = {(1, DATA): 0.08, (2, PASSES): 0.04}
    run.run(100, lambda step, rank, part: more.get((rank, part), 0.0))
    assert run.named() == [(1, "data")]
    run.run(100, lambda step, rank, part: 0.04 * ((rank, part) == (2, PASSES)))
    assert run.named() == [(1, "data"), (2, "forward")]


def test_parts_in_which_ranks_have_other_work_are_not_compared(
    ranks: Callable[[int], Ranks],
) -> None:
    """A pipeline's stages: the passes of one take longer, its data does not."""
    run = ranks(2)

    def unlike(step: int, rank: int, part: int) -> float:
        if part == UPDATE:
            run.pages[rank].record_unequal_parts((PASSES, BACKWARD))
        return 0.05 * ((rank, part) == (1, PASSES))

    run.run(100, unlike)
    assert run.told == []
    both = lambda step, rank, part: unlike(step, rank, part) + 0.05 * ((rank, part) == (1, DATA))  # noqa: E731
    run.run(100, both)
    assert run.named() == [(1, "data")]


def test_the_short_last_step_of_an_epoch_hides_no_slow_rank(
    ranks: Callable[[int], Ranks],
) -> None:
    """Every sixth step leaves a rank fewer micro-batches: it says nothing of it, the others do."""
    run = ranks(3)

    def short(step: int, rank: int, part: int) -> float:
        if part == UPDATE and step % 6 == 0:
            run.pages[rank].record_unequal_parts((DATA, PASSES, BACKWARD))
        return 0.05 * ((rank, part) == (1, DATA))

    run.run(49, short)
    assert run.named() == [(1, "data")]


STAGES_S = ((2, PASSES), (2, BACKWARD))
"""Where the stage that has most to do has it; others wait for it from the first step on."""


def staged(run: Ranks, more: Extra) -> Extra:
    """Work of a pipeline's ranks, of which the last has most."""

    def extra(step: int, rank: int, part: int) -> float:
        run.pages[rank].record_unequal_parts((PASSES, BACKWARD, UPDATE), always=True)
        return 0.03 * ((rank, part) in STAGES_S) + more(step, rank, part)

    return extra


@pytest.mark.parametrize("part", list(NAMES))
@pytest.mark.parametrize(("slow", "slack_s"), [(0, 0.06), (1, 0.06), (2, 0.0)])
def test_a_slow_stage_is_told_by_what_it_took_before_and_by_who_waits(
    ranks: Callable[[int], Ranks], slow: int, slack_s: float, part: int
) -> None:
    run = ranks(3)
    busy = staged(run, noise(slow))
    run.run(100, busy)
    assert run.told == [], "stages differ from the first step on"
    more_s = 0.05 + slack_s  # it has so much to spare
    late = lambda step, rank, at: more_s * ((rank, at) == (slow, part)) + busy(step, rank, at)  # noqa: E731
    run.run(49, late)
    assert run.named() == [(slow, NAMES[part])]
    run.run(100, late)
    assert len(run.told) == 1


def test_a_stage_that_eats_its_own_spare_time_and_a_machine_that_slows_down_are_not_told(
    ranks: Callable[[int], Ranks],
) -> None:
    run = ranks(3)
    run.run(100, staged(run, lambda step, rank, part: 0.0))
    run.run(100, staged(run, lambda step, rank, part: 0.05 * ((rank, part) == (0, PASSES))))
    assert run.told == [], "nobody waits for it"
    twice = lambda step, rank, part: OWN_S[part] + 0.03 * ((rank, part) in STAGES_S)  # noqa: E731
    run.run(100, staged(run, twice))
    assert run.told == [], "all became slower"


def test_a_page_keeps_what_each_step_spent_without_waits_and_phases(
    ranks: Callable[[int], Ranks],
) -> None:
    run = ranks(1)
    run.run(3)
    (page,) = run.pages
    page.record_phases([Phase("save")])
    run.now_s[0] += 7.0
    page.record_phases([])
    page.record_part(PASSES)
    page.record_wait_start()
    run.now_s[0] += 5.0
    page.record_wait_end(1)
    run.run(1)
    kept = run.watched[0].steps()
    assert set(kept) == {1, 2, 3, 4}
    assert [round(kept[4][part], 9) for part in OWN_S] == list(OWN_S.values())
    assert kept[4][0] == pytest.approx(7.0)
    assert kept[4][WAIT] == pytest.approx(5.0), "in its passes, as where parameters are gathered"
    run.run(100)
    assert set(run.watched[0].steps()) == set(range(41, 105))


def test_a_run_that_starts_again_begins_anew(ranks: Callable[[int], Ranks]) -> None:
    run = ranks(2)
    late = lambda step, rank, part: 0.05 * ((rank, part) == (1, DATA))  # noqa: E731
    run.run(60, late)
    run.slow.reset()
    run.run(60, late)
    assert run.named() == 2 * [(1, "data")]


def test_lateness_that_flips_between_ranks_is_told_once_as_a_busy_machine(
    ranks: Callable[[int], Ranks],
) -> None:
    """Bursts of 40 to 60 steps, each of a rank and a part drawn anew, with pauses between."""
    run, drawn = ranks(2), random.Random(1)
    parts = (DATA, PASSES, BACKWARD, UPDATE)
    for number in range(16):
        late = number % 2, drawn.choice(parts)
        rise_s = drawn.uniform(0.03, 0.05)
        run.run(drawn.randint(40, 60), lambda _, r, p, late=late, s=rise_s: s * ((r, p) == late))
        run.run(drawn.randint(32, 80))
    notices = [one["text"] for one in run.told if one["event"] == "notice"]
    assert len(notices) == 1, "once"
    assert "the machine is busy" in notices[0]
    assert len(run.told) <= 2, "besides it the first rank at most, before another one was late"
    run.run(200, lambda _, r, p: 0.05 * ((r, p) == (1, DATA)))
    assert run.told[-1]["event"] == "slow_rank", "this one stays late"
    assert (run.told[-1]["rank"], run.told[-1]["phase"]) == (1, "data")
