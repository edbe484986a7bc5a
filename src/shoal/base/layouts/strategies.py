"""Expansion of a strategy name to degrees, ZeRO stage and schedule for a number of processes.

An impossible name, or a name that contradicts other keys, raises an error with the nearest legal
choice.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shoal.base.errors import PlanError, format_choice_error, nearest_word
from shoal.base.layouts.layout import AXES, PIPELINES, STAGES, STRATEGIES, Layout
from shoal.base.layouts.schedule_names import canonical_schedule, resolve_schedule

OTHER_KEYS = (
    *("strategy", "zero", "threads", "schedule", "chunks"),
    *("servers", "updates", "staleness", "serves"),
)
"""Keys of a layout beside its axes."""
OTHER_NAMES = {
    **dict.fromkeys(("dp", "ddp", "data", "replicate", "data_parallel"), "dp_replicate"),
    **dict.fromkeys(("fsdp", "shard", "sharded", "data_parallel_shard"), "dp_shard"),
    **dict.fromkeys(("tensor", "tensor_parallel", "tensor_model_parallel_size", "mp"), "tp"),
    **dict.fromkeys(("pipeline", "pipeline_parallel", "pipeline_model_parallel_size"), "pp"),
    **dict.fromkeys(("context", "context_parallel", "sp", "sequence"), "cp"),
    **dict.fromkeys(("expert", "expert_parallel"), "ep"),
}
"""Other projects' names of axes."""


def expand_strategy(
    strategy: str,
    processes: int,
    *,
    threads: int = 0,
    zero: int | None = None,
    schedule: str = "",
    chunks: int = 0,
    **served: Any,
) -> Layout:
    """Return the layout of a strategy's name (not "auto") on `processes` processes.

    Args:
        threads: replicas of `dp`; 0: two.
        zero: if given, must be the name's own stage.
        schedule, chunks: of a pipeline, if given; "", 0: by the name.
        served: servers, updates, staleness, serves of parameter-server, for `make_server_layout`.

    Raises:
        PlanError: the name is unknown or not built yet, the size is impossible, or another key
            contradicts the name. On one process other names give all degrees 1.

    >>> (
    ...     expand_strategy("ddp", 4).dp_replicate,
    ...     expand_strategy("zero2", 4).zero,
    ...     expand_strategy("hsdp", 4).dp_shard,
    ... )
    (4, 2, 2)
    >>> (
    ...     expand_strategy("afab", 4).text(),
    ...     expand_strategy("3d", 8).text(),
    ... )  # doctest: +NORMALIZE_WHITESPACE
    ('pp (pp = 4, schedule = gpipe)',
     '3d (pp = 2, dp_replicate = 2, tp = 2, schedule = 1f1b)')
    """
    if strategy not in STRATEGIES:
        from shoal.base.layouts.island_options import METHODS

        if strategy in METHODS:
            raise PlanError(
                f"layout.strategy = {strategy}: is between islands, not inside one; try: "
                f"islands.method={strategy} islands.count=2"
            )
    if strategy not in STRATEGIES:
        raise PlanError(format_choice_error("layout.strategy", strategy, ["auto", *STRATEGIES]))
    _check_extra_keys(strategy, threads, zero)
    if strategy == "parameter-server" and (processes > 1 or any(served.values())):
        from shoal.base.layouts.parameter_servers import make_server_layout

        resolve_schedule(schedule, chunks, 1)  # refuses a schedule
        return make_server_layout(processes, **served)
    if strategy in ("single", "dp"):
        resolve_schedule(schedule, chunks, 1)  # refuses a schedule
        return _one_process(strategy, processes, threads)
    if strategy in PIPELINES and strategy != "pp":
        schedule = _same_schedule(strategy, schedule)
    if processes == 1:
        if strategy not in (*PIPELINES, "3d"):
            resolve_schedule(schedule, chunks, 1)  # as on several
        return Layout()
    layout = _multi_process_layout(strategy, processes)
    schedule, chunks = resolve_schedule(schedule, chunks, layout.pp)
    return replace(layout, schedule=schedule, chunks=chunks)


def unknown_key_text(key: str, value: object) -> str:
    """Format the error for an unknown key of a layout, with the nearest axis or key.

    >>> unknown_key_text("fdsp", 2)
    'layout.fdsp = 2: no key of a layout; try: layout.dp_shard=2, or layout.strategy=fsdp'
    """
    keys = (*AXES[1:], "ep", *OTHER_KEYS)
    near = nearest_word(key.lower(), (*keys, *OTHER_NAMES)) or ""
    line = f"layout.{key} = {value}: no key of a layout"
    if not near:
        return f"{line}; there are {', '.join(keys)}"
    degree = value if isinstance(value, str) or type(value) is int else 2
    named = f", or layout.strategy={near}" if near in ("ddp", "fsdp") else ""
    return f"{line}; try: layout.{OTHER_NAMES.get(near, near)}={degree}{named}"


def _check_extra_keys(strategy: str, threads: int, zero: int | None) -> None:
    """Raise PlanError for a stage or threads that the name does not have."""
    stage = STAGES.get(strategy, 0)
    if zero and strategy in ("tp", "cp", "3d", *PIPELINES):
        axis = {"tp": "tp", "cp": "cp", "3d": "tp=2 layout.pp"}.get(strategy, "pp")
        raise PlanError(
            f"layout.zero = {zero}: splits over layout.dp_shard, of which layout.strategy = "
            f"{strategy} has none; try: degrees, layout.{axis}=2 layout.dp_shard=2 "
            f"layout.zero={zero}"
        )
    if zero is not None and zero != stage:
        names = {0: "ddp", 1: "zero1", 2: "zero2", 3: "fsdp"}
        raise PlanError(
            f"layout.zero = {zero}: layout.strategy = {strategy} is stage {stage}; try: "
            f"layout.strategy={names.get(zero, 'zero1')}, or leave layout.zero out"
        )
    if threads and strategy != "dp":
        raise PlanError(
            f"layout.threads = {threads}: only layout.strategy=dp runs replicas in threads, "
            f"{strategy} has processes; try: launch.processes={threads}"
        )


def _same_schedule(strategy: str, schedule: str) -> str:
    """Return the schedule after which a strategy is named."""
    own = canonical_schedule(strategy)
    if schedule and canonical_schedule(schedule) != own:
        raise PlanError(
            f"layout.schedule = {schedule}: layout.strategy = {strategy} names another; try: "
            f"layout.strategy={schedule}, or leave layout.schedule out"
        )
    return own


def _multi_process_layout(strategy: str, processes: int) -> Layout:
    """Return the layout of a strategy on at least two processes."""
    if strategy == "ddp":
        return Layout(dp_replicate=processes)
    if strategy == "ep":
        return Layout(dp_replicate=processes, ep=processes)
    if strategy in ("tp", "cp"):
        return Layout.of({strategy: processes})
    if strategy in PIPELINES:
        return Layout(pp=processes)
    if strategy == "3d":
        if processes % 4:
            raise PlanError(
                f"layout.strategy = 3d: is tp 2 × pp 2 × data-parallel ranks, got "
                f"launch.processes = {processes}; try: "
                f"launch.processes={max(4, processes // 4 * 4)}, or degrees: layout.tp, layout.pp, "
                f"layout.dp_replicate"
            )
        return Layout(tp=2, pp=2, dp_replicate=processes // 4)
    if strategy != "hsdp":
        return Layout(dp_shard=processes, zero=STAGES[strategy])
    if processes % 2 or processes < 4:
        raise PlanError(
            f"layout.strategy = hsdp: is at least 2 × 2 processes, got launch.processes = "
            f"{processes}; try: launch.processes={max(4, processes // 4 * 4)}, or "
            f"layout.strategy=fsdp"
        )
    return Layout(dp_replicate=2, dp_shard=processes // 2, zero=3)


def _one_process(strategy: str, processes: int, threads: int) -> Layout:
    if processes != 1:
        raise PlanError(
            f"layout.strategy = {strategy}: is one process, got launch.processes = {processes}; "
            f"try: launch.processes=1, or layout.strategy=ddp"
        )
    return Layout(threads=threads or 2) if strategy == "dp" else Layout()
