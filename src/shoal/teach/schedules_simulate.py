"""Time a pipeline's action lists: the lists become operations that the event engine runs.

Actions run in the order of the list; between stages on different ranks the output (forward) or its
gradient (backward) travels as a message that blocks nobody but its receiver. F allocates the
micro-batch's activations, B or W frees them, as the checker counts.
"""

from __future__ import annotations

from shoal.base.plans.pipeline_actions import Action, PipelineSchedule
from shoal.base.plans.timeline import Timeline, TimelineSpan
from shoal.base.text.units import bytes_text, seconds_text
from shoal.planning.schedule_checks import CLOSES, check_schedule, input_of
from shoal.teach.engine import Costs, Op, run_ops

WHAT = {"F": "forward", "B": "backward", "I": "input", "W": "weight"}


def simulate_schedule(
    schedule: PipelineSchedule,
    costs: Costs,
    *,
    activation_bytes: float = 0.0,
    blocks: bool = True,
) -> Timeline:
    """Simulate one step of a pipeline and return its timeline.

    Args:
        activation_bytes: that one rank keeps per micro-batch, all its chunks together; 0: not
            drawn.
        blocks: run the schedule's pairs as one block, see check_schedule.check.

    Returns:
        a timeline; its facts: makespan (first start to last end), bubble (largest last end − first
            start − work over ranks), its share, most in flight.

    Raises:
        PlanError: a list that is no step; the message names the place.

    >>> from shoal.teach.costs import AnalyticalCosts
    >>> from shoal.planning.pipeline_schedules import make_schedule
    >>> line = simulate_schedule(make_schedule("1f1b", 4, 8), AnalyticalCosts.for_pipeline(1, 1, 1))
    >>> line.facts["makespan"], line.facts["bubble"]
    ('33.0 s', '9.0 s')
    """
    counts = check_schedule(schedule)
    share = len(schedule.ranks) / schedule.stages_per_copy
    programs: list[list[Op]] = []
    for rank, acts in enumerate(schedule.ranks):
        program: list[Op] = []
        pairs = set(schedule.pairs[rank]) if blocks and schedule.pairs else set()
        held: list[list[Op]] = []
        for position, act in enumerate(acts):
            parts = _action_ops(schedule, rank, act, share, activation_bytes)
            if position in pairs:
                held = parts
                continue
            for part in range(3):  # both operations of a pair: both receive, both work, both send
                program += (held[part] if held else []) + parts[part]
            held = []
        programs.append(program)
    line = run_ops(programs, costs, f"{schedule.name}, {len(programs)} ranks")
    if activation_bytes:
        line.facts["peak"] = bytes_text(max(held.held_bytes for held in line.memory))
    work = [span for span in line.spans if span.kind in WHAT.values()]
    first, last = min(s.start_s for s in work), max(s.end_s for s in work)
    bubble = timeline_bubble(line)
    line.facts["makespan"] = seconds_text(last - first)
    line.facts["bubble"] = seconds_text(bubble)
    line.facts["bubble share"] = f"{100 * bubble / (last - first):.1f} %" if last > first else "0 %"
    line.facts["in flight"] = f"{max(counts.in_flight):g} micro-batches"
    return line


def _action_ops(
    schedule: PipelineSchedule,
    rank: int,
    act: Action,
    scale: float,
    activation_bytes: float,
) -> list[list[Op]]:
    """Return an action's operations: receive inputs; compute, keep or free activations; send."""
    receive: list[Op] = []
    send: list[Op] = []
    need = input_of(schedule, act)
    if need and schedule.stage_rank[need[1]] != rank:
        peer = schedule.stage_rank[need[1]]
        receive.append(Op("receive", "receive", f"for {act.text()}", need, peer=peer))
    ops = [Op("compute", WHAT[act.kind], act.text(), amount=scale)]
    kept = (act.stage, act.micro_batch)
    if activation_bytes and act.kind == "F":
        size = activation_bytes * scale
        ops.append(Op("allocate", key=kept, amount=size, part="activations"))
    elif activation_bytes and act.kind in CLOSES:
        ops.append(Op("free", key=kept))
    taker = _receiver_rank(schedule, act)
    if taker is not None and taker != rank:
        gave = ("F" if act.kind == "F" else "B", act.stage, act.micro_batch)
        send.append(Op("send", "send", f"of {act.text()}", gave, peer=taker))
    return [receive, ops, send]


def _receiver_rank(schedule: PipelineSchedule, act: Action) -> int | None:
    """Return the rank whose stage needs an action's result; None at chain ends and for W."""
    place = act.stage % schedule.stages_per_copy
    if act.kind == "F" and place < schedule.stages_per_copy - 1:
        return schedule.stage_rank[act.stage + 1]
    if act.kind in "BI" and place > 0:
        return schedule.stage_rank[act.stage - 1]
    return None


def timeline_bubble(line: Timeline) -> float:
    """Return the largest (last end − first start − work) over ranks, of forwards and backwards."""
    by_rank: dict[int, list[TimelineSpan]] = {}
    for span in line.spans:
        if span.kind in WHAT.values():
            by_rank.setdefault(span.rank, []).append(span)
    idle = [
        max(s.end_s for s in spans)
        - min(s.start_s for s in spans)
        - sum(s.end_s - s.start_s for s in spans)
        for spans in by_rank.values()
    ]
    return max(0.0, *idle) if idle else 0.0
