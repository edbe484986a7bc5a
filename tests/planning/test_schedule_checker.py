"""What the checker of action lists must refuse, and that it says where."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from critical_path import critical_path_s

from shoal.base.errors import PlanError
from shoal.base.layouts.schedule_names import SCHEDULES
from shoal.base.plans.pipeline_actions import Action, PipelineSchedule
from shoal.planning.pipeline_schedules import make_schedule
from shoal.planning.schedule_checks import check_schedule

NAMES = {name: (4, 8, 2 if name == "interleaved" else 1) for name in SCHEDULES}


def act(text: str) -> Action:
    """The action that `Action.text` writes.

    >>> act("B3@0")
    Action(kind='B', stage=0, micro_batch=3)
    """
    batch, stage = text[1:].split("@")
    return Action(text[0], int(stage), int(batch))


def lists(*ranks: str, name: str = "own", batches: int = 1, copies: int = 1) -> PipelineSchedule:
    acts = tuple(tuple(act(word) for word in rank.split()) for rank in ranks)
    return PipelineSchedule(name, acts, tuple(range(len(ranks))), batches, copies)


def refusal(schedule: PipelineSchedule) -> str:
    with pytest.raises(PlanError) as error:
        check_schedule(schedule)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("rank", "says"),
    [
        ("F0@0 F0@0 B0@0", "rank 0, position 1, F0@0: done before on this rank, counts twice"),
        ("B0@0 F0@0", "rank 0, position 0, B0@0: backward before its forward"),
        ("F0@0 W0@0 I0@0", "rank 0, position 1, W0@0: gradient of the weights before"),
        ("F0@0 I0@0 B0@0", "rank 0, position 2, B0@0: whole backward after a part"),
        ("F0@0 B0@0 W0@0", "rank 0, position 2, W0@0: part of a backward after the whole"),
        ("F0@0 B0@0 F1@0", "rank 0, position 2, F1@0: stage 0 runs micro-batches 0 to 0"),
        ("F0@0 B0@0 F0@3", "rank 0, position 2, F0@3: stages are 0 to 0"),
        ("F0@0 B0@0 X0@0", "rank 0, position 2, X0@0: kind is not one of F, B, I, W"),
        ("", "rank 0, position 0 (end of its list): F0@0 is missing"),
        ("F0@0", "rank 0, position 1 (end of its list): B0@0 is missing"),
        ("F0@0 I0@0", "rank 0, position 2 (end of its list): W0@0 is missing"),
    ],
)
def test_one_list_by_itself(rank: str, says: str) -> None:
    assert says in refusal(lists(rank))


def test_a_stage_of_another_rank() -> None:
    wrong = lists("F0@0 B0@0 F0@1", "F0@1 B0@1")
    assert "rank 0, position 2, F0@1: stage 1 lies on rank 1" in refusal(wrong)


def test_a_deadlock_names_both_who_wait() -> None:
    says = refusal(lists("F0@0 B0@0 F1@0 B1@0", "F1@1 B1@1 F0@1 B0@1", batches=2))
    assert "deadlock: rank 0, position 1, B0@0 waits for B0@1 of rank 1" in says
    assert "rank 1, position 0, F1@1 waits for F1@0 of rank 0" in says


def test_a_pair_that_cannot_be_one_block_says_which_half_waits() -> None:
    """Stage 0's backward needs what stage 1 makes of the forward in the same block."""
    schedule = replace(lists("F0@0 B0@0", "F0@1 B0@1"), pairs=((0,), ()))
    says = refusal(schedule)
    assert "rank 0, position 1, B0@0 waits for B0@1 of rank 1" in says
    assert "rank 1, position 0, F0@1 waits for F0@0 of rank 0" in says
    assert check_schedule(schedule, blocks=False).in_flight == (1, 1)


def test_maps_that_are_none() -> None:
    right = make_schedule("1f1b", 2, 2)
    assert "stage 1 lies on rank 2, ranks are 0 to 1" in refusal(replace(right, stage_rank=(0, 2)))
    assert "2 stages are not 3 copies" in refusal(replace(right, copies=3))
    odd = replace(make_schedule("dualpipe", 2, 4), micro_batches=5)
    assert "F2@3: stage 3 runs micro-batches 3 to 4" in refusal(odd)


def test_each_copy_runs_its_own_micro_batches() -> None:
    """In dualpipe the second copy may not take a micro-batch of the first."""
    schedule = make_schedule("dualpipe", 2, 4)
    acts = tuple(replace(a, micro_batch=0) if a.stage == 3 else a for a in schedule.ranks[0])
    says = refusal(replace(schedule, ranks=(acts, schedule.ranks[1])))
    assert "stage 3 runs micro-batches 2 to 3" in says


@pytest.mark.parametrize("name", SCHEDULES)
def test_any_lost_or_doubled_action_is_refused(name: str) -> None:
    schedule = make_schedule(name, *NAMES[name])
    draw = random.Random(name)
    for _ in range(12):
        rank = draw.randrange(4)
        acts = list(schedule.ranks[rank])
        at = draw.randrange(len(acts))
        for changed in ([*acts[:at], *acts[at + 1 :]], [*acts, acts[at]]):
            ranks = (*schedule.ranks[:rank], tuple(changed), *schedule.ranks[rank + 1 :])
            assert acts[at].text()[1:] in refusal(replace(schedule, ranks=ranks, pairs=()))


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_shuffled_order_is_never_better_than_the_critical_path_or_is_refused(name: str) -> None:
    schedule = make_schedule(name, *NAMES[name])
    least, _ = critical_path_s(schedule)
    draw = random.Random(name)
    passed = 0
    for _ in range(60):
        rank = draw.randrange(4)
        acts = list(schedule.ranks[rank])
        at = draw.randrange(len(acts) - 1)
        acts[at], acts[at + 1] = acts[at + 1], acts[at]
        ranks = (*schedule.ranks[:rank], tuple(acts), *schedule.ranks[rank + 1 :])
        try:
            count = check_schedule(replace(schedule, ranks=ranks, pairs=()))
        except PlanError:
            continue
        passed += 1
        assert count.makespan_s >= least
    assert passed


def test_what_is_kept_until_the_weights_gradient() -> None:
    """I frees a part only: until W the micro-batch counts, `open_inputs` says what I could free."""
    count = check_schedule(lists("F0@0 F1@0 I0@0 I1@0 F2@0 I2@0 W0@0 W1@0 W2@0", batches=3))
    assert count.in_flight == (3,)
    assert count.open_inputs == (2,)
