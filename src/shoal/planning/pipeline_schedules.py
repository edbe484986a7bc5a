"""Pipeline schedules: the ordered list of actions of every rank.

p ranks, m micro-batches, v chunks (stages per rank). F forward, B whole backward, I gradient of the
input, W gradient of the weights. F of stage s needs F of stage s − 1; B and I need B of s + 1.

    gpipe        all forwards, then all backwards
    1f1b         p − 1 − i forwards ahead on rank i, then one forward, one backward
    interleaved  1f1b over v·p stages dealt round; m is a multiple of p
    zero-bubble  1f1b with the backward cut: W waits until nothing else is ready (ZB-H1)
    zbv          two stages per rank in a V, so that the first rank also holds the last stage
    dualpipe     two copies of the model fed from both ends; p and m even, m ≥ 2p

Sources: Huang et al. 2019; Narayanan et al. 2021, figure 4; Qi et al. 2023, sections 2.2 and 6;
DeepSeek-V3 technical report 2024, section 3.2.1, whose published order dualpipe follows.
"""

from __future__ import annotations

from dataclasses import replace

from shoal.base.errors import PlanError
from shoal.base.layouts.layout import Layout
from shoal.base.layouts.schedule_names import canonical_schedule, model_copies
from shoal.base.plans.pipeline_actions import Action, PipelineSchedule


def make_schedule(name: str, ranks: int, micro_batches: int, chunks: int = 1) -> PipelineSchedule:
    """Make the action lists of one pipeline step: every rank's actions in order.

    Args:
        ranks: of the pipeline.
        micro_batches: per step and data-parallel rank.
        chunks: stages per rank: at least 2 for interleaved, 1 or 2 for zbv and dualpipe (which
            always have 2), else 1.

    Raises:
        PlanError: with the nearest legal choice.

    >>> [a.text() for a in make_schedule("1f1b", 2, 2).ranks[0]]
    ['F0@0', 'F1@0', 'B0@0', 'B1@0']
    """
    known = check_schedule_name(name, ranks, micro_batches, chunks)
    p, m = ranks, micro_batches
    if known == "interleaved":
        from shoal.planning.zero_bubble_schedules import interleaved_actions

        lists = [interleaved_actions(rank, p, m, chunks) for rank in range(p)]
        return _build_schedule(known, lists, [stage % p for stage in range(p * chunks)], m)
    if known == "zbv":
        from shoal.planning.zero_bubble_schedules import zbv_actions

        lists = [zbv_actions(rank, p, m) for rank in range(p)]
        return _build_schedule(known, lists, [*range(p), *reversed(range(p))], m)
    if known == "dualpipe":
        from shoal.planning.dualpipe_schedule import make_dualpipe_actions

        both = [make_dualpipe_actions(rank, p, m) for rank in range(p)]
        acts = tuple(tuple(done) for done, _ in both)
        at = (*range(p), *reversed(range(p)))
        return PipelineSchedule(
            known, acts, at, m, copies=2, pairs=tuple(pairs for _, pairs in both)
        )
    if known == "zero-bubble":
        from shoal.planning.zero_bubble_schedules import zero_bubble_actions as make
    else:
        make = {"gpipe": _gpipe, "1f1b": _one_f_one_b}[known]
    return _build_schedule(known, [make(rank, p, m) for rank in range(p)], list(range(p)), m)


def _build_schedule(
    name: str, lists: list[list[Action]], stage_rank: list[int], m: int
) -> PipelineSchedule:
    return PipelineSchedule(name, tuple(tuple(acts) for acts in lists), tuple(stage_rank), m)


def shorten_schedule(full: PipelineSchedule, micro_batches: int) -> PipelineSchedule:
    """Return a schedule for fewer micro-batches: the lists without the last ones' actions.

    No action waits for the removed ones, so the shorter schedule cannot deadlock and keeps no more
    activations. With two model copies each loses its last micro-batches, so that both stay equally
    busy; those of the second copy are renumbered. The new schedule has no `pairs`; `full` is
    unchanged.

    Args:
        micro_batches: at most those of `full`; not checked.

    >>> short = shorten_schedule(make_schedule("dualpipe", 2, 4), 3)
    >>> sorted({act.text() for act in short.ranks[0] if act.kind == "F"})
    ['F0@0', 'F1@0', 'F2@3']
    """
    short = replace(full, micro_batches=micro_batches, pairs=())

    def left(act: Action) -> list[Action]:
        place, runs = act.micro_batch - full.runs(act.stage).start, short.runs(act.stage)
        return [replace(act, micro_batch=runs[place])] if place < len(runs) else []

    lists = tuple(tuple(one for act in acts for one in left(act)) for acts in full.ranks)
    return replace(short, ranks=lists)


def check_schedule_name(name: str, ranks: int, micro_batches: int, chunks: int = 1) -> str:
    """Return the canonical name of a schedule; raise PlanError if it cannot run on these ranks.

    The error names the nearest legal choice.

    >>> check_schedule_name("afab", 4, 3)
    'gpipe'
    """
    name, p, m = canonical_schedule(name), ranks, micro_batches
    where = f"layout.schedule = {name}"
    if p < 1 or m < 1 or chunks < 1:
        raise PlanError(
            f"{where}: needs at least 1 rank, 1 micro-batch and 1 chunk, got {p}, {m}, {chunks}"
        )
    if name == "interleaved":
        if chunks < 2:
            raise PlanError(f"{where}: needs at least 2 chunks per rank, got {chunks}; try: 2")
        if m % p:
            raise PlanError(
                f"{where}: needs micro-batches per step in a multiple of layout.pp = {p}, got {m}; "
                f"try: {_multiple(m, p)}, or layout.schedule=1f1b"
            )
    elif chunks != 1 and not (name in ("zbv", "dualpipe") and chunks == 2):
        fixed = "2 stages" if name in ("zbv", "dualpipe") else "1 stage"
        raise PlanError(
            f"{where}: holds {fixed} per rank, got {chunks} chunks; try: "
            f"chunks=1, or layout.schedule=interleaved"
        )
    if name == "dualpipe" and (p % 2 or m % 2 or m < 2 * p):
        right_p = p + p % 2
        right_m = max(m + m % 2, 2 * right_p)
        raise PlanError(
            f"{where}: needs an even number of ranks and an even number of micro-batches, at least "
            f"two per rank, got layout.pp = {p} and {m}; try: layout.pp={right_p} and {right_m}"
        )
    return name


def can_run(layout: Layout, micro_batches: int) -> bool:
    """Return whether a layout's schedule can run a number of micro-batches."""
    try:
        check_schedule_name(layout.schedule, layout.pp, micro_batches, layout.chunks)
    except PlanError:
        return False
    return True


def check_micro_batches(layout: Layout, batch: int, micro_batch: int) -> None:
    """Check that a pipeline's schedule can run the micro-batches of a step.

    Args:
        batch, micro_batch: samples per step over all ranks, samples per forward pass; the batch
            must be a multiple, which is not checked here.

    Raises:
        PlanError: with the nearest batch and micro-batch that the schedule can run.
    """
    if layout.pp == 1:
        return
    samples = batch // layout.data_degree
    count = samples // micro_batch
    name, ranks = layout.schedule, layout.pp
    if not can_run(layout, count):
        fitting = [n for n in range(1, samples + 1) if samples % n == 0 and can_run(layout, n)]
        cut = min(fitting, key=lambda n: abs(n - count), default=0)
        whole = next(n for n in range(count, count + 2 * ranks + 1) if can_run(layout, n))
        nearest = [f"train.micro_batch={samples // cut}"] if cut else []
        nearest += [f"train.batch={whole * micro_batch * layout.data_degree}"]
        which = (
            f"an even number of micro-batches per step, at least {2 * ranks} (twice layout.pp)"
            if model_copies(name) > 1
            else f"micro-batches per step in a multiple of layout.pp = {ranks}"
        )
        raise PlanError(
            f"layout.schedule = {name}: needs {which}, got {count} per data-parallel rank "
            f"(train.batch {batch}, train.micro_batch {micro_batch}); try: "
            f"{', or '.join([*nearest, 'layout.schedule=1f1b'])}"
        )


def _multiple(m: int, p: int) -> int:
    """Return the multiple of p nearest to m, at least p.

    >>> _multiple(5, 4), _multiple(7, 4), _multiple(1, 4)
    (4, 8, 4)
    """
    return max(p, (m + p // 2) // p * p)


def _gpipe(rank: int, p: int, m: int) -> list[Action]:
    forward = [Action("F", rank, j) for j in range(m)]
    return forward + [Action("B", rank, j) for j in range(m)]


def _one_f_one_b(rank: int, p: int, m: int) -> list[Action]:
    ahead = min(p - 1 - rank, m)
    acts = [Action("F", rank, j) for j in range(ahead)]
    for j in range(m - ahead):
        acts += [Action("F", rank, ahead + j), Action("B", rank, j)]
    return acts + [Action("B", rank, j) for j in range(m - ahead, m)]
