"""Search for the fastest layouts that fit: predict memory, then time, of each legal layout.

The loop is over degrees, the data-parallel split, the micro-batch and recomputation. tp stays
inside a node, the model's depth limits pp, cp is tried for long sequences, the rest is
data-parallel, and ep uses data-parallel ranks. The memory prediction comes first, because it is
cheap and rejects most candidates. Illegal layouts are never proposed: heads that do not divide,
more stages than blocks, a block gathered or recomputed again in every half of a split backward.

Source: the legality rules are those of docs/how-it-works/plan.md, each with its measurement.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from shoal.base.errors import PlanError
from shoal.base.estimates.cluster import Cluster
from shoal.base.estimates.estimate import MemoryEstimate, ModelFacts, PlanningCase, TimeEstimate
from shoal.base.layouts.layout import Layout
from shoal.base.layouts.policies import RECOMPUTE
from shoal.base.layouts.schedule_names import (
    DEFAULT,
    SPLIT_BACKWARD,
    check_recompute,
    resolve_schedule,
)
from shoal.base.plans.batches import default_turn, divisors
from shoal.base.plans.plan import Plan
from shoal.forecast.fit.memory_fit import MemoryVerdict, judge_memory
from shoal.forecast.fit.memory_instants import predict_run
from shoal.forecast.search.search_space import SearchSpace
from shoal.forecast.time.step_time import predict_time
from shoal.planning.layout_guide import AUTO_AXES
from shoal.planning.micro_batch_sizes import (
    default_micro_batch,
    micro_batch_sizes,
    with_micro_batch,
)
from shoal.planning.pipeline_schedules import can_run, check_micro_batches

LONG_SEQUENCE = 16384
"""Positions from which cp is tried: below it attention is a small share."""

DEEPEST_PIPELINE = 64
APART = 1.5
"""Smallest factor between two micro-batches that are tried."""

SIZES_APART = 1.15
"""A smaller micro-batch wins over a larger one if the prediction on a GPU is faster by this factor,
the usual error of predictions there (`calibrations.py`)."""

SAME = 0.02
"""Relative difference below which step times are equal: the simpler layout then goes first."""


@dataclass(frozen=True)
class LayoutCandidate:
    """One case (a layout with its policies) of a search, with its predictions."""

    case: PlanningCase
    memory: MemoryEstimate
    time: TimeEstimate
    verdict: MemoryVerdict

    @property
    def fits(self) -> bool:
        """Return whether the case's verdict allows a run."""
        return self.verdict.word != "no"

    @property
    def runs(self) -> bool:
        """Return whether its steps fit, once the run has started."""
        return self.verdict.after != "no"

    @property
    def samples_per_s(self) -> float:
        """Return the samples per second."""
        return self.case.batch / self.time.step_s if self.time.step_s else 0.0

    @property
    def mfu(self) -> float:
        """Return the model FLOPs utilisation: the model's FLOP as a share of the devices' rate."""
        cluster = self.case.cluster
        even = [replace(cluster, groups=()), *cluster.groups]
        peak = sum(
            part.device.matrix_flops_per_s.get(self.case.plan.compute, 0.0) * part.devices
            for part in even
        )
        return self.time.model_flops / (self.time.step_s * peak) if peak else 0.0


def search_layouts(case: PlanningCase, space: SearchSpace) -> list[LayoutCandidate]:
    """Predict every legal layout that `space` leaves open; return the candidates, best first.

    Layouts that fit come first, by step time, then those that are tight: first those whose estimate
    is below the capacity, then the others. Then follow those whose steps fit but whose start does
    not. Last are those that do not fit, by peak memory. Within each group the simplest layout
    within 2 % of the fastest leads.

    Args:
        case: model, cluster, and the plan whose open fields `space` lists.

    Raises:
        PlanError: no layout is legal, with the reason, or the user's schedule is impossible.
    """
    found = list(_predict_candidates(case, space))
    if not found:
        raise PlanError(_no_layout_reason(case, space))
    if space.built and not any(one.fits for one in found):
        found = list(_predict_candidates(case, replace(space, built=False)))
    return rank_candidates(found)


def _no_layout_reason(case: PlanningCase, space: SearchSpace) -> str:
    """Return the reason why no layout was legal."""
    model, cluster = case.model, case.cluster
    given = dict(space.degrees)
    if space.layout is not None:
        given |= {axis: n for axis, n in space.layout.degrees.items() if n > 1}
    tp, pp = given.get("tp", 1), given.get("pp", 1)
    if tp > 1 and (not model.heads or model.heads % tp):
        legal = max((n for n in range(1, tp) if model.heads and model.heads % n == 0), default=1)
        return (
            f"layout.tp = {tp}: does not divide the {model.heads} heads of {model.name}; try:"
            f" layout.tp={legal}"
        )
    if tp > cluster.per_node:
        return (
            f"layout.tp = {tp}: a node has {cluster.per_node} devices, and between nodes tensor "
            f"parallelism never pays; try: layout.tp={cluster.per_node}"
        )
    if pp > model.blocks:
        return (
            f"layout.pp = {pp}: {model.name} has {model.blocks} blocks to cut between; try:"
            f" layout.pp={max(1, model.blocks)}"
        )
    degree = space.layout.data_degree if space.layout else cluster.devices // (tp * pp)
    if pp > 1 and (why := _no_schedule_reason(pp, degree, case.plan, space)):
        return why
    unit = (space.micro_batch or 1) * (space.accumulate or 1) * degree
    if space.micro_batch and space.accumulate:
        legal = unit
    else:
        lower = case.batch // unit * unit
        near = (n for n in (lower, lower + unit) if n)
        legal = min(near, key=lambda n: abs(n - case.batch))
    each = f" in micro-batches of {space.micro_batch}" if space.micro_batch else ""
    each += f", {space.accumulate} of them per rank" if space.accumulate else ""
    serves = space.layout is not None and space.layout.servers
    whom = f"{degree} workers" if serves else f"{cluster.devices} devices"
    return (
        f"train.batch = {case.batch}: nothing divides it over {whom}{each}; "
        f"try: train.batch={legal}"
    )


def _no_schedule_reason(pp: int, degree: int, plan: Plan, space: SearchSpace) -> str:
    """Return why the user's schedule cannot run on `pp` × `degree` ranks; "" if it can."""
    schedule = (space.layout.schedule if space.layout else "") or space.schedule
    if not schedule:
        return ""
    chunks = max(space.layout.chunks if space.layout else 1, space.chunks)
    layout = Layout(pp=pp, dp_replicate=degree, schedule=schedule, chunks=chunks)
    try:
        check_recompute(schedule, "none" if "recompute" not in space.given else plan.recompute)
        if space.micro_batch and plan.batch % (degree * space.micro_batch) == 0:
            check_micro_batches(layout, plan.batch, space.micro_batch)
    except PlanError as cannot:
        return str(cannot)
    return ""


def least_memory_bytes(cluster: Cluster) -> float:
    """Return the memory of the smallest device, also of a mixed cluster."""
    return min(part.device.memory_bytes for part in (cluster, *cluster.groups))


def least_node_bytes(cluster: Cluster) -> float:
    """Return the memory of the smallest node, of those whose memory is known; 0 if of none."""
    nodes = (part.node_memory_bytes for part in (cluster, *cluster.groups))
    return min(filter(None, nodes), default=0.0)


def judge_candidate(case: PlanningCase, memory: MemoryEstimate) -> MemoryVerdict:
    """Return the verdict on a run for the smallest device and node of its cluster."""
    return judge_memory(memory, least_memory_bytes(case.cluster), least_node_bytes(case.cluster))


def rank_candidates(found: list[LayoutCandidate]) -> list[LayoutCandidate]:
    """Sort candidates: fitting by step time, near ties by simplicity; then tight; then the rest.

    Candidates that another instant ends come after all that run, ordered by their steps' memory.
    """
    others = sorted((c for c in found if not c.runs), key=lambda c: c.memory.peak_bytes)
    ordered: list[LayoutCandidate] = []
    for group in itertools.product((True, False), RANKING_WORDS):
        like = (c for c in found if c.runs and (c.verdict.starts, _ranking_word(c)) == group)
        same = sorted(like, key=lambda c: c.time.step_s)
        if same:
            bound_s = same[0].time.step_s * (1 + SAME)
            best = min((c for c in same if c.time.step_s <= bound_s), key=_complexity)
            ordered += [best, *(c for c in same if c is not best)]
    return ordered + others


RANKING_WORDS = ("fits", "tight", "over")
"""Groups of candidates, best first: "over" is tight, with an estimate above the capacity."""


def _ranking_word(candidate: LayoutCandidate) -> str:
    """Return the worst verdict of a run that reaches its steps; else that of the steps."""
    verdict = candidate.verdict
    word = verdict.word if verdict.starts else verdict.after
    return "over" if word == "tight" and verdict.margin_bytes < 0 else word


def _complexity(candidate: LayoutCandidate) -> tuple[int, int, int, int, float]:
    """Return a sort key of a layout's complexity: axes, policies, depth, passes, then time."""
    case = candidate.case
    layout = case.layout
    axes = sum(degree > 1 for degree in (*layout.degrees.values(), layout.ep))
    extras = (
        (case.plan.recompute != "none") + (case.plan.offload != "none") + (case.schedule != DEFAULT)
    )
    deep = layout.tp * layout.pp * layout.cp
    return axes + extras, deep, layout.zero, -case.micro_batch, candidate.time.step_s


def _predict_candidates(case: PlanningCase, space: SearchSpace) -> Iterator[LayoutCandidate]:
    for layout in _candidate_layouts(case, space):
        if not is_legal(case.model, layout):
            continue
        for micro_batch in _candidate_micro_batches(case, layout, space):
            room = False
            for schedule, chunks in _candidate_schedules(case, layout, space, micro_batch):
                ordered = replace(layout, schedule=schedule if layout.pp > 1 else "", chunks=chunks)
                tried = case.but(layout=ordered, micro_batch=micro_batch)
                try:
                    found = list(_lightest_recompute(tried, space))
                except PlanError:
                    if layout.schedule or space.schedule:
                        raise
                    continue  # more stages than the model has blocks
                room |= any(candidate.runs for candidate in found)
                yield from found
            if not room:  # larger micro-batches need even more memory
                break


def is_legal(model: ModelFacts, layout: Layout) -> bool:
    """Return whether a layout divides a model: heads over tp, blocks over pp, tokens over cp."""
    if model.sequence % layout.cp:
        return False
    if layout.tp > 1 and (not model.heads or model.heads % layout.tp):
        return False
    return layout.pp <= max(1, model.blocks)


def _lightest_recompute(case: PlanningCase, space: SearchSpace) -> Iterator[LayoutCandidate]:
    """Yield the case with the least recomputation that fits; if none does, with full recompute."""
    # Compiled blocks have no single operations that selective recompute could keep.
    free = [one for one in RECOMPUTE if one != "selective" or case.plan.compile == "none"]
    policies = free if "recompute" not in space.given else [case.plan.recompute]
    if case.layout.pp > 1 and case.schedule in SPLIT_BACKWARD:
        policies = [policy for policy in policies if policy == "none"]
    for policy in policies:
        tried = case.but(recompute=policy)
        memory = predict_run(tried)
        word = judge_candidate(tried, memory)
        if word.after != "no" or policy == policies[-1]:
            yield LayoutCandidate(tried, memory, predict_time(tried), word)
        if word.after == "fits":
            return


def _candidate_layouts(case: PlanningCase, space: SearchSpace) -> Iterator[Layout]:
    if space.layout is not None:
        yield space.layout
        return
    degrees = dict(space.degrees)
    given = degrees.pop("ep", 0)
    for layout in _every_layout(case, space):
        exact = all(layout.degrees[axis] == degree for axis, degree in degrees.items())
        if exact and (space.zero is None or layout.zero == space.zero):
            for ep in [given] if given else _expert_degrees(case, layout, space):
                if layout.can_share_experts(ep):
                    yield replace(layout, ep=ep)


def _every_layout(case: PlanningCase, space: SearchSpace) -> Iterator[Layout]:
    model, cluster = case.model, case.cluster
    devices = cluster.devices
    for tp in _tensor_degrees(model, cluster, space):
        for cp in _context_degrees(model, devices // tp, space):
            for pp in _pipeline_degrees(model, devices // (tp * cp), space):
                data = devices // (tp * cp * pp)
                if case.batch % data:
                    continue
                inside = cluster.per_node // min(cluster.per_node, tp)
                for split in _data_splits(data, inside, pp, dict(space.degrees)):
                    yield replace(split, tp=tp, cp=cp, pp=pp)


def _tensor_degrees(model: ModelFacts, cluster: Cluster, space: SearchSpace) -> Iterator[int]:
    """Yield tp degrees: 1 and divisors of heads, node and devices; across nodes tp never pays."""
    yield 1
    if (space.built and "tp" not in AUTO_AXES) or not model.heads:
        return
    for tp in range(2, cluster.per_node + 1):
        if not (model.heads % tp or cluster.per_node % tp or cluster.devices % tp):
            yield tp


def _context_degrees(model: ModelFacts, devices: int, space: SearchSpace) -> Iterator[int]:
    """Yield cp degrees: 1, the user's, and those that keep enough tokens per rank."""
    wanted = dict(space.degrees).get("cp", 0)
    if wanted:
        yield from [wanted] if devices % wanted == 0 else []
        return
    yield 1
    cp = 2
    while (
        not (space.built and "cp" not in AUTO_AXES)
        and model.sequence // cp >= LONG_SEQUENCE // 2
        and cp <= 16
    ):
        if devices % cp == 0:
            yield cp
        cp *= 2


def _expert_degrees(case: PlanningCase, layout: Layout, space: SearchSpace) -> Iterator[int]:
    """Yield ep degrees: 1, and without tp for the experts the most ranks of a node, and of all.

    More ranks hold fewer experts each and send as many tokens, but over slower links between nodes.
    """
    yield 1
    experts = case.model.experts
    if layout.tp > 1 or (space.built and "ep" not in AUTO_AXES):
        return
    even = [n for n in range(2, experts + 1) if experts % n == 0 and layout.can_share_experts(n)]
    inside = [n for n in even if n * layout.cp <= case.cluster.per_node]
    yield from sorted({*inside[-1:], *even[-1:]})


def _pipeline_degrees(model: ModelFacts, devices: int, space: SearchSpace) -> Iterator[int]:
    """Yield pipeline depths that leave every stage at least one block."""
    yield 1
    if space.built and "pp" not in AUTO_AXES:
        return
    for pp in range(2, min(DEEPEST_PIPELINE, model.blocks, devices) + 1):
        if devices % pp == 0:
            yield pp


def _data_splits(data: int, inside: int, pp: int, given: dict[str, int]) -> Iterator[Layout]:
    """Yield the data-parallel splits; with a pipeline, parameters stay whole.

    Zero 3 in a pipeline would gather the blocks again for every micro-batch, so it is omitted
    there.

    Args:
        inside: data-parallel ranks of a node.
        given: degrees that the user fixed.
    """
    yield Layout(dp_replicate=data)
    if data == 1:
        return
    yield Layout(dp_shard=data, zero=1)
    if pp > 1:
        return
    yield Layout(dp_shard=data, zero=2)
    yield Layout(dp_shard=data, zero=3)
    asked = {given.get("dp_shard", 1), data // given.get("dp_replicate", data)}
    for shard in sorted({inside, 4 * inside, 16 * inside} | asked):
        if 1 < shard < data and data % shard == 0:
            yield Layout(dp_replicate=data // shard, dp_shard=shard, zero=3)


def _candidate_micro_batches(
    case: PlanningCase, layout: Layout, space: SearchSpace
) -> Iterator[int]:
    """Yield micro-batches that divide a rank's share, each well below the one before.

    On a CPU only a run's default: predictions by micro-batch err too much there to rank them.
    """
    share, rest = divmod(case.batch, layout.data_degree)
    if rest:
        return
    if space.micro_batch or space.accumulate:
        size = space.micro_batch or share // space.accumulate
        if size and share % size == 0 and space.accumulate in (0, share // size):
            yield size
        return
    if case.cluster.device.kind == "cpu":
        ordered = layout.schedule or (DEFAULT if layout.pp > 1 else "")
        whole = case.but(layout=replace(layout, schedule=ordered), micro_batch=share)
        yield fastest_micro_batch(whole, measured=True)
        return
    before = 0.0
    for size in divisors(share):
        if size >= APART * before:
            before = size
            yield size


def fastest_micro_batch(case: PlanningCase, *, measured: bool) -> int:
    """Return the micro-batch that fits in memory and has the fastest predicted step.

    Args:
        case: model, machine and a settled plan.
        measured: the machine's rates were measured. False: default rates cannot rank sizes.

    Returns:
        The largest that fits, or a pipeline's default, unless the prediction on a GPU is faster for
        another one by more than predictions err. On a CPU predictions by size are ignored: a model
        with 32,000 tokens took 1.8 s with 1 sample a pass, 1.2 s with 16, where predictions were
        2.5 and 5.0 s. If no size fits, an eighth of the batch or less: memory predictions err too,
        and no smaller default was ever needed.
    """
    layout, batch = case.layout, case.batch
    measured = measured and case.cluster.device.kind != "cpu"
    most = 0 if measured else default_micro_batch(layout, batch)
    fitting = list(_fitting_cases(case, micro_batch_sizes(layout, batch, most)))
    if not fitting:
        few = micro_batch_sizes(layout, batch, default_turn(batch))
        return next(iter(few), case.micro_batch)
    if not measured:
        return fitting[0].micro_batch
    times_s = {one.micro_batch: predict_time(one).step_s for one in fitting}
    best = min(times_s, key=lambda size: times_s[size])
    most = default_micro_batch(layout, batch, at_most=fitting[0].micro_batch)
    usual = max((size for size in times_s if size <= most), default=best)
    return best if times_s[best] * SIZES_APART < times_s[usual] else usual


def _fitting_cases(case: PlanningCase, sizes: list[int]) -> Iterator[PlanningCase]:
    """Yield the cases with those sizes whose prediction fits with its margin, the largest first."""
    for size in sizes:
        tried = replace(case, plan=with_micro_batch(case.plan, size))
        try:
            if judge_candidate(tried, predict_run(tried)).after == "fits":
                yield tried
        except PlanError:
            continue


def _candidate_schedules(
    case: PlanningCase, layout: Layout, space: SearchSpace, micro_batch: int
) -> Iterator[tuple[str, int]]:
    rounds = case.batch // (micro_batch * layout.data_degree)
    given, chunks = layout.schedule or space.schedule, max(layout.chunks, space.chunks)
    if layout.pp > 1 and given:
        name, each = resolve_schedule(given, chunks if chunks > 1 else 0, layout.pp)
        if can_run(replace(layout, schedule=name, chunks=each), rounds):
            yield name, each
        return
    yield DEFAULT, 1
    if layout.pp == 1:
        return
    if layout.zero < 3 and rounds >= layout.pp:
        yield "zero-bubble", 1
    for chunks in (2, 4):
        if rounds % layout.pp == 0 and case.model.blocks // (layout.pp * chunks) >= 1:
            yield "interleaved", chunks
