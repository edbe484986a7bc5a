"""Names of pipeline schedules: the order of passes on the ranks of a pipeline.

A schedule belongs to a pipeline (layout.pp > 1). Under `interleaved` every rank has several
stages (chunks); under `zbv` and `dualpipe` it has two, which for `dualpipe` belong to two
copies of the model. The last three split a backward into two halves, for the gradient of the input
and for those of the weights. The planner generates the order itself.
"""

from __future__ import annotations

from shoal.base.errors import PlanError, format_choice_error

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble", "zbv", "dualpipe")
"""Names of pipeline schedules; `afab` is another name of gpipe."""


ALIASES = {"afab": "gpipe", "zb-h1": "zero-bubble", "zb-v": "zbv"}

SPLIT_BACKWARD = ("zero-bubble", "zbv", "dualpipe")
"""Schedules that run the two halves of a backward separately."""

DEFAULT = "1f1b"


def canonical_schedule(name: str) -> str:
    """Return the canonical name of a schedule or alias; PlanError for an unknown one.

    >>> canonical_schedule("afab"), canonical_schedule("zb-h1")
    ('gpipe', 'zero-bubble')
    """
    known = ALIASES.get(name, name)
    if known not in SCHEDULES:
        raise PlanError(format_choice_error("layout.schedule", name, [*SCHEDULES, "afab"]))
    return known


def stages_per_rank(schedule: str, chunks: int = 1) -> int:
    """Return the stages of a rank, of all copies: 2 for zbv and dualpipe, else `chunks`.

    >>> stages_per_rank("1f1b"), stages_per_rank("interleaved", 4), stages_per_rank("zbv")
    (1, 4, 2)
    """
    return 2 if schedule in ("zbv", "dualpipe") else chunks


def stages_of(schedule: str, pp: int, rank: int, stages: int) -> list[int]:
    """List the stages that rank `rank` of a pipeline of `pp` ranks holds.

    Args:
        stages: all stages of one copy of the model; under dualpipe a rank holds one stage of each
            copy, in that order.

    >>> stages_of("1f1b", 4, 1, 4), stages_of("interleaved", 2, 1, 4), stages_of("zbv", 2, 0, 4)
    ([1], [1, 3], [0, 3])
    >>> stages_of("dualpipe", 4, 1, 4)
    [1, 2]
    """
    if schedule == "interleaved":
        return list(range(rank, stages, pp))
    if schedule == "zbv":
        return [rank, 2 * pp - 1 - rank]
    return [rank, pp - 1 - rank][: model_copies(schedule)]


def check_stages(schedule: str, pp: int, chunks: int, blocks: int, model: str) -> None:
    """Refuse a pipeline of more stages than the model has blocks.

    Args:
        schedule, pp, chunks: fields of the layout.
        blocks: calls of `model`'s blocks in one forward pass.

    Raises:
        PlanError: the model has fewer blocks; names the request and the legal values.

    >>> check_stages("interleaved", 2, 2, 4, "GPT")
    >>> check_stages("zbv", 4, 1, 4, "GPT")
    Traceback (most recent call last):
    shoal.base.errors.PlanError: layout.pp = 4 × 2 stages per rank (layout.schedule = zbv) = 8: ...
    """
    each, held = stages_per_rank(schedule, chunks), model_copies(schedule)
    stages = pp * each // held
    if stages <= blocks:
        return
    asked = f"layout.pp = {pp}"
    if stages != pp:
        asked += f" × {each} stages per rank (layout.schedule = {schedule}) = {stages}"
    legal = []
    if schedule == "interleaved" and 2 <= blocks // pp < chunks:
        legal.append(f"layout.chunks={blocks // pp}")
    fewer = blocks * held // each // held * held  # dualpipe takes an even number
    if fewer > 1 or stages == pp:
        legal.append(f"layout.pp={max(1, fewer)}")
    if stages != pp and pp <= blocks:
        legal.append("layout.schedule=1f1b")
    raise PlanError(
        f"{asked}: more stages than the {blocks} blocks of {model}; try: "
        f"{', or '.join(legal or ['layout.pp=1'])}"
    )


def model_copies(schedule: str) -> int:
    """Return the copies of the model on a pipeline's ranks: 2 for dualpipe, else 1.

    >>> model_copies("dualpipe"), model_copies("zbv"), model_copies("")
    (2, 1, 1)
    """
    return 2 if schedule == "dualpipe" else 1


def runs_single_stage(schedule: str, chunks: int = 1) -> bool:
    """Return whether a rank runs whole passes of a single stage, one after another.

    >>> (
    ...     runs_single_stage("1f1b"),
    ...     runs_single_stage("interleaved", 2),
    ...     runs_single_stage("zero-bubble"),
    ... )
    (True, False, False)
    """
    return stages_per_rank(schedule, chunks) == 1 and schedule not in SPLIT_BACKWARD


def check_recompute(schedule: str, recompute: str) -> None:
    """Refuse recomputation, selective or full, with a schedule that splits the backward.

    Those are zero-bubble, zbv and dualpipe: the weight half of each parameter would recompute its
    whole block, 10 forwards instead of 4 for a transformer block.

    Args:
        schedule: the pipeline schedule, "" without a pipeline.
        recompute: memory.recompute.

    Raises:
        PlanError: the combination is refused; with the nearest legal choice.
    """
    if recompute != "none" and schedule in SPLIT_BACKWARD:
        raise PlanError(
            f"memory.recompute = {recompute}: layout.schedule = {schedule} runs a backward in two "
            f"halves, so a block would be computed again for every weight in it (2.5 times the "
            f"work); try: memory.recompute=none, or layout.schedule=1f1b"
        )


def resolve_schedule(schedule: str, chunks: int, pp: int) -> tuple[str, int]:
    """Return (schedule, chunks) of a pipeline of `pp` ranks, with defaults filled in.

    Args:
        schedule: a name, or "" for 1f1b.
        chunks: stages per rank, or 0 for the schedule's default.

    Returns:
        ("", 1) without a pipeline; chunks is 1 unless interleaved, so for zbv and dualpipe.

    Raises:
        PlanError: a schedule without a pipeline, an unknown schedule, chunks that it cannot have,
            or an odd number of ranks under dualpipe.

    >>> (
    ...     resolve_schedule("", 0, 4),
    ...     resolve_schedule("interleaved", 0, 4),
    ...     resolve_schedule("", 0, 1),
    ... )
    (('1f1b', 1), ('interleaved', 2), ('', 1))
    """
    known = canonical_schedule(schedule) if schedule else ""
    if pp == 1:
        given = f"layout.schedule = {schedule}" if schedule else f"layout.chunks = {chunks}"
        if known or chunks > 1:
            raise PlanError(
                f"{given}: is about the stages of a pipeline, and layout.pp is 1; try: "
                f"layout.pp=2, or leave {given.partition(' ')[0]} out"
            )
        return "", 1
    known = known or DEFAULT
    if model_copies(known) > 1 and pp % 2:
        raise PlanError(
            f"layout.schedule = {known}: is fed from both ends, with two stages on every rank, so "
            f"layout.pp is even, got {pp}; try: layout.pp={pp - 1}, or layout.pp={pp + 1}, or "
            f"layout.schedule=zbv"
        )
    if known == "interleaved":
        if chunks == 1:
            raise PlanError(
                "layout.chunks = 1: interleaved gives every rank at least 2 stages; try: "
                "layout.chunks=2, or layout.schedule=1f1b"
            )
        return known, chunks or 2
    own = stages_per_rank(known)
    if chunks not in (0, 1, own):
        raise PlanError(
            f"layout.chunks = {chunks}: {known} gives every rank "
            f"{'one stage' if own == 1 else f'{own} stages'}; "
            f"try: layout.schedule=interleaved, or leave layout.chunks out"
        )
    return known, 1
