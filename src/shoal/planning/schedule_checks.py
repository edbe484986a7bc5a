"""Schedule checks: every action once, every input available, no deadlock.

The checks execute the action lists as the trainer would. A rank takes its next action when that
action's inputs exist; messages never block their sender. The checks also count:

    in flight   micro-batches whose activations a rank keeps, in shares of the model of one rank
                (a chunk of v counts 1/v): F opens, B or W closes. I frees only the part that the
                input's gradient needed, so `open_inputs`, closed by B or I, is the lower bound
    bubble      the largest (last end − first start − work) over ranks, at the given costs

tests/planning/critical_path.py computes the lower bound over all orders of these actions.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from shoal.base.errors import PlanError
from shoal.base.plans.pipeline_actions import KINDS, Action, PipelineSchedule

CLOSES = ("B", "W")
Need = tuple[str, int, int]


@dataclass(frozen=True)
class ScheduleCounts:
    """Counts of a valid schedule: activations in flight, actions and bubble.

    Attributes:
        in_flight: per rank: most micro-batches whose activations the rank keeps at once.
        open_inputs: the same if the gradient of the input freed all activations.
        actions: number of actions of each kind, over all ranks.
        makespan_s: first start to last end.
        bubble_s: as defined at the head of the module.
    """

    in_flight: tuple[float, ...]
    open_inputs: tuple[float, ...]
    actions: dict[str, int]
    makespan_s: float
    bubble_s: float


def check_schedule(
    schedule: PipelineSchedule,
    forward_s: float = 1.0,
    input_s: float = 1.0,
    weight_s: float = 1.0,
    *,
    blocks: bool = True,
    pair_s: float | None = None,
) -> ScheduleCounts:
    """Check a schedule by executing its action lists; count activations in flight and idle time.

    Args:
        forward_s, input_s, weight_s: seconds of F, I and W of one rank and micro-batch, all its
            chunks together; a whole backward B takes I + W.
        blocks: run the schedule's pairs (dualpipe) as its paper does, as one block: it starts when
            both inputs exist and gives both outputs at its end. False: each action by itself.
        pair_s: seconds of such a block, per rank and micro-batch; None: nothing overlaps, F + I +
            W.

    Raises:
        PlanError: the first action that is missing, duplicated, on a wrong rank or too early, with
            rank, position and action; or a deadlock, with the cycle of waiting ranks.

    >>> from shoal.planning.pipeline_schedules import make_schedule
    >>> counts = check_schedule(make_schedule("1f1b", 4, 8))
    >>> counts.in_flight, counts.bubble_s, counts.actions
    ((4.0, 3.0, 2.0, 1.0), 9.0, {'F': 32, 'B': 32})
    """
    _check_stage_map(schedule)
    for rank, acts in enumerate(schedule.ranks):
        _check_rank(schedule, rank, acts)
    _check_complete(schedule)
    share = len(schedule.ranks) / schedule.stages_per_copy
    seconds = {
        "F": forward_s * share,
        "B": (input_s + weight_s) * share,
        "I": input_s * share,
        "W": weight_s * share,
    }
    block_s = forward_s + input_s + weight_s if pair_s is None else pair_s
    bubbles, makespan = _execute(schedule, seconds, block_s * share if blocks else None)
    kept, open_inputs = _peak_in_flight(schedule, share)
    actions = Counter(act.kind for acts in schedule.ranks for act in acts)
    return ScheduleCounts(kept, open_inputs, dict(actions), makespan, max(bubbles))


def _check_stage_map(schedule: PipelineSchedule) -> None:
    """Check that every stage is mapped to a rank that exists."""
    ranks = len(schedule.ranks)
    if schedule.copies < 1 or schedule.stages % schedule.copies:
        raise PlanError(
            f"schedule {schedule.name}: {schedule.stages} stages are not {schedule.copies} copies"
        )
    for stage, rank in enumerate(schedule.stage_rank):
        if not 0 <= rank < ranks:
            raise PlanError(
                f"schedule {schedule.name}: stage {stage} lies on rank {rank}, ranks are 0 to "
                f"{ranks - 1}"
            )


def _check_rank(schedule: PipelineSchedule, rank: int, acts: tuple[Action, ...]) -> None:
    """Check one rank's list by itself: rank, range, order and repetition of its actions."""
    seen: set[tuple[str, int, int]] = set()
    for position, act in enumerate(acts):
        wrong = _action_error(schedule, rank, act, seen)
        if wrong:
            raise PlanError(
                f"schedule {schedule.name}: rank {rank}, position {position}, {act.text()}: {wrong}"
            )
        seen.add((act.kind, act.stage, act.micro_batch))


def _action_error(
    schedule: PipelineSchedule, rank: int, act: Action, seen: set[tuple[str, int, int]]
) -> str | None:
    """Return the reason why an action is illegal after the rank's earlier ones; None if legal."""
    here = act.stage, act.micro_batch
    if act.kind not in KINDS:
        return f"kind is not one of {', '.join(KINDS)}"
    if not 0 <= act.stage < schedule.stages:
        return f"stages are 0 to {schedule.stages - 1}"
    if schedule.stage_rank[act.stage] != rank:
        return f"stage {act.stage} lies on rank {schedule.stage_rank[act.stage]}"
    runs = schedule.runs(act.stage)
    if act.micro_batch not in runs:
        return f"stage {act.stage} runs micro-batches {runs.start} to {runs.stop - 1}"
    if (act.kind, *here) in seen:
        return "done before on this rank, counts twice"
    if act.kind in "BI" and ("F", *here) not in seen:
        return "backward before its forward"
    if act.kind == "B" and (("I", *here) in seen or ("W", *here) in seen):
        return "whole backward after a part of it, counts twice"
    if act.kind in "IW" and ("B", *here) in seen:
        return "part of a backward after the whole, counts twice"
    if act.kind == "W" and ("I", *here) not in seen:
        return "gradient of the weights before that of the input"
    return None


def _check_complete(schedule: PipelineSchedule) -> None:
    """Check that every stage runs forward and backward for each of its micro-batches."""
    done = {(a.kind, a.stage, a.micro_batch) for acts in schedule.ranks for a in acts}
    for stage, rank in enumerate(schedule.stage_rank):
        for j in schedule.runs(stage):
            missing = ""
            if ("F", stage, j) not in done:
                missing = "F"
            elif ("B", stage, j) not in done and ("W", stage, j) not in done:
                missing = "W" if ("I", stage, j) in done else "B"
            if missing:
                raise PlanError(
                    f"schedule {schedule.name}: rank {rank}, position {len(schedule.ranks[rank])} "
                    f"(end of its list): {Action(missing, stage, j).text()} is missing"
                )


def input_of(schedule: PipelineSchedule, act: Action) -> Need | None:
    """Return the result of another stage that an action waits for: (kind, stage, micro-batch).

    ("F", stage − 1, j) for F; ("B", stage + 1, j), the gradient that B or I of that stage computes,
    for B and I. None for actions that wait only for their own rank's order: W, F of the first
    stage, B and I of the last one (of a copy of the model).
    """
    first = act.stage % schedule.stages_per_copy == 0
    last = act.stage % schedule.stages_per_copy == schedule.stages_per_copy - 1
    if act.kind == "F" and not first:
        return "F", act.stage - 1, act.micro_batch
    if act.kind in "BI" and not last:
        return "B", act.stage + 1, act.micro_batch
    return None


class _RankClock:
    """Simulated time and position of one rank."""

    def __init__(self, blocks: list[tuple[Action, ...]]):
        self.blocks = blocks
        self.block = 0
        self.position = 0
        self.now = self.first = self.work = 0.0
        self.waits: tuple[Action, Need] | None = None


def _blocks(schedule: PipelineSchedule, rank: int, paired: bool) -> list[tuple[Action, ...]]:
    """Return the rank's actions one by one, or with its pairs as blocks of two."""
    acts = schedule.ranks[rank]
    starts = set(schedule.pairs[rank]) if paired and schedule.pairs else set()
    ends = {position + 1 for position in starts}
    return [
        acts[position : position + 2] if position in starts else (act,)
        for position, act in enumerate(acts)
        if position not in ends
    ]


def _execute(
    schedule: PipelineSchedule, seconds: dict[str, float], pair_s: float | None
) -> tuple[tuple[float, ...], float]:
    """Execute all lists; return the bubble per rank and the makespan, or raise PlanError."""
    made: dict[Need, float] = {}
    waiting: dict[Need, int] = {}
    ranks = range(len(schedule.ranks))
    clocks = [_RankClock(_blocks(schedule, rank, pair_s is not None)) for rank in ranks]
    ready = list(ranks)
    while ready:
        rank = ready.pop()
        clock = clocks[rank]
        while clock.block < len(clock.blocks):
            block = clock.blocks[clock.block]
            start = clock.now
            for act in block:
                need = input_of(schedule, act)
                if need is None:
                    continue
                if need not in made:
                    waiting[need], clock.waits = rank, (act, need)
                    break
                start = max(start, made[need])
            else:
                took = pair_s if len(block) == 2 and pair_s is not None else seconds[block[0].kind]
                if clock.block == 0:
                    clock.first = start
                clock.now, clock.work = start + took, clock.work + took
                clock.block, clock.position = clock.block + 1, clock.position + len(block)
                ready += _record_results(block, clock.now, made, waiting)
                continue
            break
    _check_deadlock(schedule, clocks)
    bubbles = tuple(max(0.0, clock.now - clock.first - clock.work) for clock in clocks)
    return bubbles, max(c.now for c in clocks) - min(c.first for c in clocks)


def _record_results(
    block: tuple[Action, ...], now: float, made: dict[Need, float], waiting: dict[Need, int]
) -> list[int]:
    """Record the results of a finished block; return the ranks that waited for them."""
    woken = []
    for act in block:
        if act.kind != "W":
            gave = ("F" if act.kind == "F" else "B", act.stage, act.micro_batch)
            made[gave] = now
            if gave in waiting:
                woken.append(waiting.pop(gave))
    return woken


def _check_deadlock(schedule: PipelineSchedule, clocks: list[_RankClock]) -> None:
    """Raise PlanError with the cycle of waiting ranks, if any rank has actions left."""
    stuck = [r for r, clock in enumerate(clocks) if clock.block < len(clock.blocks)]
    if not stuck:
        return
    parts, rank, seen = [], stuck[0], set()
    while rank not in seen:
        seen.add(rank)
        clock = clocks[rank]
        if clock.waits is None or clock.block == len(clock.blocks):
            break
        act, need = clock.waits
        position = clock.position + clock.blocks[clock.block].index(act)
        owner = schedule.stage_rank[need[1]]
        wanted = Action(*need).text()
        parts.append(
            f"rank {rank}, position {position}, {act.text()} waits for {wanted} of rank {owner}"
        )
        rank = owner
    raise PlanError(f"schedule {schedule.name}: deadlock: " + "; ".join(parts))


def _peak_in_flight(
    schedule: PipelineSchedule, share: float
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the most activations of each rank open at once: until B or W, and until B or I."""
    most, most_inputs = [], []
    for acts in schedule.ranks:
        opened = inputs = peak = peak_inputs = 0
        for act in acts:
            opened += (act.kind == "F") - (act.kind in CLOSES)
            inputs += (act.kind == "F") - (act.kind in "BI")
            peak, peak_inputs = max(peak, opened), max(peak_inputs, inputs)
        most.append(peak * share)
        most_inputs.append(peak_inputs * share)
    return tuple(most), tuple(most_inputs)
