"""Settle a plan: the layout that the user's settings mean on these processes, and the batch.

`shoal train`, `shoal prove` and `shoal.parallelize` all call `settle_plan` once per start. It
refuses incompatible settings before anything is built.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shoal.base.errors import PlanError, ShoalError
from shoal.base.estimates.facts import MachineFacts
from shoal.base.layouts.layout import PIPELINES, STAGES, STRATEGIES, Layout
from shoal.base.layouts.policies import POLICIES, check_compile, lists_as_tuples
from shoal.base.layouts.schedule_names import canonical_schedule, check_recompute, resolve_schedule
from shoal.base.plans.batches import check_batch, samples_per_rank
from shoal.base.plans.plan import Plan

Words = str | Mapping[str, Any]
"""A layout as users write it: a strategy's name, or keys of [layout]."""

NAMED = ("zero", "threads", "schedule", "chunks", "servers", "updates", "staleness", "serves")
"""Keys of [layout] that may stand beside a strategy or beside degrees."""


def settle_plan(
    plan: Plan,
    said: Words,
    processes: int,
    parameters: int | None,
    machine: MachineFacts,
    at_most: int = 0,
) -> Plan:
    """Fill in what a plan leaves open: layout, reason (`why`), micro-batch, accumulation.

    Args:
        plan: policies and a batch; its layout is ignored, and its `why` is kept if it has one.
        said: the layout that replaces the plan's (`layout_keys` spells out a layout); policies in
        it
            override the plan's. Degrees must multiply out to `processes`: none is derived. A
            strategy's degrees are derived. With neither, `auto` chooses by the field's guide.
        parameters: elements of the model; None: unknown, and ignored.
        machine: its memory limits `auto` on a CPU.
        at_most: as in `settle_batch`.

    Returns:
        A new plan.

    Raises:
        PlanError, ConfigError: with the nearest legal choice.

    >>> laptop = MachineFacts(cores=2, memory_bytes=2**34, gpus=0)
    >>> plan = settle_plan(Plan(Layout(), 16), {"tp": 2, "dp_replicate": 2}, 4, None, laptop)
    >>> plan.layout.text(), plan.micro_batch, plan.accumulate
    ('ddp + tp (dp_replicate = 2, tp = 2)', 8, 1)
    """
    return settle_batch(settle_layout(plan, said, processes, parameters, machine), at_most)


def settle_layout(
    plan: Plan, said: Words, processes: int, parameters: int | None, machine: MachineFacts
) -> Plan:
    """Fill in a plan's layout, `why` and parameters, but not the batch.

    Arguments as in `settle_plan`; `shoal train` then makes a batch that may depend on the layout.

    Raises:
        PlanError, ConfigError: with the nearest legal choice.
    """
    plan, words = split_policies(plan, said)
    named = {key: words.pop(key) for key in NAMED if key in words}
    strategy = words.pop("strategy", "dp" if named.get("threads") else "auto")
    layout, why = choose_layout(strategy, words, processes, parameters, machine, **named)
    settled = replace(plan, layout=layout, why=plan.why or why, parameters=parameters or 0)
    check_plan_policies(settled)
    return settled


def choose_layout(
    strategy: str,
    degrees: dict[str, int],
    processes: int,
    parameters: int | None,
    machine: MachineFacts,
    *,
    zero: int | None = None,
    threads: int = 0,
    schedule: str = "",
    chunks: int = 0,
    **served: Any,
) -> tuple[Layout, str]:
    """Choose the layout to run; return the layout and the line with the reason.

    Args:
        strategy: `auto` or a name.
        degrees: axes that the user set; they must multiply out to `processes`.
        parameters: elements of the model; None for a builder that has not run yet.
        zero: ZeRO stage of `dp_shard`, if the user sets it.
        threads: replicas of `dp`.
        schedule, chunks: of the pipeline, if the user sets them.
        served: keys of a parameter server, if the user sets them.

    Raises:
        PlanError: unknown strategy, wrong world size, or a guide's rule without a layout here.

    >>> machine = MachineFacts(cores=2, memory_bytes=2**34, gpus=0)
    >>> choose_layout("fsdp", {}, 2, None, machine)[1]
    'strategy given: fsdp (dp_shard = 2)'
    """
    if strategy == "parameter-server" or served:
        from shoal.base.layouts.parameter_servers import check_server_keys

        check_server_keys(strategy, degrees, served)
    if degrees:
        named = zero if zero is not None or strategy == "auto" else STAGES.get(strategy)
        if strategy in PIPELINES and strategy != "pp":
            schedule = schedule or strategy
        from shoal.base.layouts.degrees import check_degrees

        layout = check_degrees(
            degrees, processes, named, threads=threads, schedule=schedule, chunks=chunks
        )
        _check_strategy_name(strategy, layout)
        return layout, f"layout given: {layout.text()}"
    if strategy == "auto" and (threads or zero is not None):  # only dp or data parallelism fit
        strategy = "dp" if threads else {0: "ddp", 1: "zero1", 2: "zero2"}.get(zero or 0, "zero3")
    if strategy != "auto":
        from shoal.base.layouts.strategies import expand_strategy

        if strategy == "dp" and machine.gpus > 1:
            threads = threads or machine.gpus
        layout = expand_strategy(
            strategy, processes, threads=threads, zero=zero, schedule=schedule, chunks=chunks,
            **served,
        )  # fmt: skip
        alone = strategy not in ("single", "dp") and processes == 1
        given = f"{strategy} on one process = " if alone else ""
        return layout, f"strategy given: {given}{layout.text()}"
    resolve_schedule(schedule, chunks, 1)  # `choose_by_size` chooses no pipeline
    from shoal.planning.layout_guide import choose_by_size

    return choose_by_size(processes, parameters, machine)


def _check_strategy_name(strategy: str, layout: Layout) -> None:
    """Raise PlanError if the strategy's name contradicts the degrees."""
    same = {"zero3": "fsdp"}.get(strategy, strategy)
    if (
        strategy in PIPELINES
        and strategy != "pp"
        and canonical_schedule(strategy) == layout.schedule
    ):
        same = "pp"
    if strategy != "auto" and same != layout.strategy:
        named = layout.strategy in STRATEGIES
        nearest = f"layout.strategy={layout.strategy}" if named else "leave layout.strategy out"
        raise PlanError(
            f"layout.strategy = {strategy}: the degrees given with it are {layout.text()}; "
            f"try: {nearest}, or leave the degrees out"
        )


def check_plan_policies(plan: Plan) -> None:
    """Refuse policies of a plan that contradict its layout or each other.

    Checks splits under tp and cp, resharding, recompute, compile and compress.

    Raises:
        PlanError, ConfigError: with the nearest legal choice.
    """
    layout = plan.layout
    if layout.servers:
        from shoal.base.layouts.parameter_servers import check_server_policies

        check_server_policies(plan, layout)
    plan.check_split(layout.tp, layout.cp)
    if plan.reshard != "yes":
        from shoal.base.layouts.resharding import check_reshard

        check_reshard(plan.reshard, layout.zero, layout.pp)
    check_recompute(layout.schedule, plan.recompute)
    check_compile(plan.compile, plan.recompute)
    if plan.compress != "none":
        from shoal.base.layouts.compression import check_compression

        check_compression(plan.compress, layout.data_strategy, plan.compute, plan.sums, layout.ep)


def policies_compatible(plan: Plan) -> bool:
    """Return whether `check_plan_policies` accepts a plan."""
    try:
        check_plan_policies(plan)
    except ShoalError:
        return False
    return True


def settle_batch(plan: Plan, at_most: int = 0) -> Plan:
    """Fill in micro-batch and accumulation of a plan that has its layout and its batch.

    micro_batch   of the plan: a given one stays; 0: `default_micro_batch` of the layout
    accumulate    batch / (micro_batch · data-parallel ranks), whatever the plan had

    Args:
        at_most: largest micro-batch in samples if the plan leaves it open; 0: no bound.

    Returns:
        A new plan.

    Raises:
        ConfigError: the batch is not divisible in this way.
        PlanError: the pipeline's schedule cannot run so many micro-batches.
    """
    layout, micro_batch = plan.layout, plan.micro_batch
    if not micro_batch:
        micro_batch = samples_per_rank(plan.batch, layout.data_degree)
        if at_most or layout.pp > 1 or layout.threads > 1:
            from shoal.planning.micro_batch_sizes import default_micro_batch

            micro_batch = default_micro_batch(layout, plan.batch, at_most) or micro_batch
    accumulate = check_batch(plan.batch, micro_batch, layout.data_degree)
    if layout.pp > 1:
        from shoal.planning.pipeline_schedules import check_micro_batches

        check_micro_batches(layout, plan.batch, micro_batch)
    return replace(plan, micro_batch=micro_batch, accumulate=accumulate)


def split_policies(plan: Plan, said: Words) -> tuple[Plan, dict[str, Any]]:
    """Move policies from the layout's keys into the plan; return the plan and the other keys.

    Args:
        said: a strategy's name, which becomes {"strategy": name}, or keys of [layout] and of
            policies, which override the plan's. The values are not checked.
    """
    words: dict[str, Any] = {"strategy": said} if isinstance(said, str) else dict(said)
    found = {key: words.pop(key) for key in POLICIES if key in words}
    return replace(plan, **lists_as_tuples(found)), words


def layout_keys(layout: Layout) -> dict[str, Any]:
    """Return a layout as keys of [layout], without degrees of 1.

    Several threads give strategy dp; one process without threads gives single.

    >>> layout_keys(Layout(dp_shard=4, zero=2)), layout_keys(Layout())
    ({'dp_shard': 4, 'zero': 2}, {'strategy': 'single'})
    """
    if layout.servers:
        from shoal.base.layouts.parameter_servers import server_layout_keys

        return server_layout_keys(layout)
    found: dict[str, Any] = {key: n for key, n in layout.degrees.items() if n > 1}
    if layout.ep > 1:
        found["ep"] = layout.ep
    if layout.dp_shard > 1:
        found["zero"] = layout.zero
    if layout.schedule:
        found["schedule"] = layout.schedule
    if layout.chunks > 1:
        found["chunks"] = layout.chunks
    if layout.threads > 1:
        return {"strategy": "dp", "threads": layout.threads}
    return found or {"strategy": "single"}


def is_layout_open(asked: Mapping[str, Any]) -> bool:
    """Return whether the planner chooses the layout: strategy is auto, and at most zero is set.

    A ZeRO stage (layout.zero) alone leaves the degrees open.

    Args:
        asked: keys of [layout] that the user set (`collect_layout_keys`), "strategy" always among
        them.

    >>> (
    ...     is_layout_open({"strategy": "auto", "zero": 2}),
    ...     is_layout_open({"strategy": "auto", "tp": 2}),
    ... )
    (True, False)
    """
    return asked["strategy"] == "auto" and not asked.keys() - {"strategy", "zero"}


def leaves_layout_open(plan: Plan, said: Words) -> bool:
    """Return whether the layout argument of `shoal.parallelize` leaves the layout open.

    >>> (
    ...     leaves_layout_open(Plan(Layout()), {"recompute": "full"}),
    ...     leaves_layout_open(Plan(Layout()), "fsdp"),
    ... )
    (True, False)
    """
    return is_layout_open({"strategy": "auto", **split_policies(plan, said)[1]})


def shards_model(plan: Plan, said: Words | None) -> bool:
    """Return whether ranks will hold only parts of the model, so that none must hold it all."""
    if said is None:
        return plan.layout.tp * plan.layout.pp * plan.layout.ep > 1 or plan.layout.zero == 3
    words: Mapping[str, Any] = {"strategy": said} if isinstance(said, str) else said
    if words.get("strategy", "auto") != "auto":
        named = words["strategy"]
        return named in ("tp", "3d", *PIPELINES) or STAGES.get(named) == 3
    cut = any(words.get(axis, 1) != 1 for axis in ("tp", "pp", "ep"))
    return cut or (words.get("dp_shard", 1) != 1 and words.get("zero") in (None, 3))
