"""Settles a plan: which layout the user's words mean on these processes, and how a batch is cut.

`shoal train`, `shoal prove` and `shoal.parallelize` all call `settle`, once per start; what cannot
go together is refused here, before anything is built.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shoal.base.errors import PlanError, ShoalError
from shoal.base.estimates.facts import MachineFacts
from shoal.base.layouts.layout import PIPELINES, STAGES, STRATEGIES, Layout
from shoal.base.layouts.policies import POLICIES, check_compile, with_lists
from shoal.base.layouts.schedule_names import canonical, check_recompute, settle_schedule
from shoal.base.plans.batches import check_batch, share_of
from shoal.base.plans.plan import Plan

Words = str | Mapping[str, Any]
"""A layout as users write it: a strategy, or keys of [layout]."""

NAMED = ("zero", "threads", "schedule", "chunks", "servers", "updates", "staleness", "serves")
"""Keys of [layout] that go with a strategy or with degrees."""


def settle(
    plan: Plan,
    said: Words,
    processes: int,
    parameters: int | None,
    machine: MachineFacts,
    at_most: int = 0,
) -> Plan:
    """Fill in what a plan leaves open: layout, reason (`why`), micro-batch, accumulation.

    Args:
        plan: policies and a batch; its layout is not read, its `why` stays where it has one.
        said: the layout in words, which replaces the plan's (`words_of` gives those of one);
            policies among them win over the plan's. Degrees must multiply out to `processes`: none
            is derived; a strategy's are. Neither: `auto` chooses by the field's guide.
        parameters: elements of the model; None: its size is left out of account.
        machine: whose memory `auto` looks at, on a CPU.
        at_most: as of `settle_batch`.

    Returns:
        a new plan.

    Raises:
        PlanError, ConfigError: with the nearest legal choice.

    >>> laptop = MachineFacts(cores=2, memory_bytes=2**34, gpus=0)
    >>> plan = settle(Plan(Layout(), 16), {"tp": 2, "dp_replicate": 2}, 4, None, laptop)
    >>> plan.layout.text(), plan.micro_batch, plan.accumulate
    ('ddp + tp (dp_replicate = 2, tp = 2)', 8, 1)
    """
    return settle_batch(settle_layout(plan, said, processes, parameters, machine), at_most)


def settle_layout(
    plan: Plan, said: Words, processes: int, parameters: int | None, machine: MachineFacts
) -> Plan:
    """Fill in a plan's layout, `why` and parameters: `settle` without the batch.

    Arguments as of `settle`; `shoal train` then makes a batch that may depend on the layout.

    Raises:
        PlanError, ConfigError: with the nearest legal choice.
    """
    plan, words = split_words(plan, said)
    named = {key: words.pop(key) for key in NAMED if key in words}
    strategy = words.pop("strategy", "dp" if named.get("threads") else "auto")
    layout, why = choose_layout(strategy, words, processes, parameters, machine, **named)
    settled = replace(plan, layout=layout, why=plan.why or why, parameters=parameters or 0)
    check_together(settled)
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
    """Choose the layout to run: (the layout, the line that says why).

    Args:
        strategy: `auto` or a name.
        degrees: axes given by the user, which then must multiply out.
        parameters: elements of the model; None when it is a builder that was not called yet.
        zero: what `dp_shard` splits, if the user says.
        threads: replicas of `dp`.
        schedule, chunks: of the pipeline, served of a parameter server, if the user says.

    Raises:
        PlanError: unknown or unbuilt strategy, wrong world size, rule without a layout here.

    >>> machine = MachineFacts(cores=2, memory_bytes=2**34, gpus=0)
    >>> choose_layout("fsdp", {}, 2, None, machine)[1]
    'strategy given: fsdp (dp_shard = 2)'
    """
    if strategy == "parameter-server" or served:
        from shoal.base.layouts.parameter_servers import check_named

        check_named(strategy, degrees, served)
    if degrees:
        named = zero if zero is not None or strategy == "auto" else STAGES.get(strategy)
        if strategy in PIPELINES and strategy != "pp":
            schedule = schedule or strategy
        from shoal.base.layouts.degrees import check_degrees

        layout = check_degrees(
            degrees, processes, named, threads=threads, schedule=schedule, chunks=chunks
        )
        _check_name(strategy, layout)
        return layout, f"layout given: {layout.text()}"
    if strategy == "auto" and (threads or zero is not None):  # what else would carry them
        strategy = "dp" if threads else {0: "ddp", 1: "zero1", 2: "zero2"}.get(zero or 0, "zero3")
    if strategy != "auto":
        from shoal.base.layouts.strategies import expand

        if strategy == "dp" and machine.gpus > 1:
            threads = threads or machine.gpus
        layout = expand(
            strategy, processes, threads=threads, zero=zero, schedule=schedule, chunks=chunks,
            **served,
        )  # fmt: skip
        alone = strategy not in ("single", "dp") and processes == 1
        given = f"{strategy} on one process = " if alone else ""
        return layout, f"strategy given: {given}{layout.text()}"
    settle_schedule(schedule, chunks, 1)  # what auto takes here has no pipeline
    from shoal.planning.layout_guide import by_size

    return by_size(processes, parameters, machine)


def _check_name(strategy: str, layout: Layout) -> None:
    """Errors: PlanError where the name means something else than the degrees."""
    same = {"zero3": "fsdp"}.get(strategy, strategy)
    if strategy in PIPELINES and strategy != "pp" and canonical(strategy) == layout.schedule:
        same = "pp"
    if strategy != "auto" and same != layout.strategy:
        named = layout.strategy in STRATEGIES
        nearest = f"layout.strategy={layout.strategy}" if named else "leave layout.strategy out"
        raise PlanError(
            f"layout.strategy = {strategy}: the degrees given with it are {layout.text()}; "
            f"try: {nearest}, or leave the degrees out"
        )


def check_together(plan: Plan) -> None:
    """Refuse policies of a plan that its layout, or each other, cannot carry.

    Looks at splits under tp and cp, resharding, recompute, compile and compress.

    Raises:
        PlanError, ConfigError: with the nearest legal choice.
    """
    layout = plan.layout
    if layout.servers:
        from shoal.base.layouts.parameter_servers import check_with_servers

        check_with_servers(plan, layout)
    plan.check_split(layout.tp, layout.cp)
    if plan.reshard != "yes":
        from shoal.base.layouts.resharding import check_reshard

        check_reshard(plan.reshard, layout.zero, layout.pp)
    check_recompute(layout.schedule, plan.recompute)
    check_compile(plan.compile, plan.recompute)
    if plan.compress != "none":
        from shoal.base.layouts.compression import check_compress

        check_compress(plan.compress, layout.data_strategy, plan.compute, plan.sums, layout.ep)


def goes_together(plan: Plan) -> bool:
    """Tell whether `check_together` accepts a plan, without raising."""
    try:
        check_together(plan)
    except ShoalError:
        return False
    return True


def settle_batch(plan: Plan, at_most: int = 0) -> Plan:
    """Fill in micro-batch and accumulation of a plan that has its layout and its batch.

    micro_batch   of the plan: a given one stays; 0: `usual_micro_batch` of the layout
    accumulate    batch / (micro_batch · data-parallel ranks), whatever the plan had

    Args:
        at_most: samples that a micro-batch which is left open may not exceed; 0: no bound.

    Returns:
        a new plan.

    Raises:
        ConfigError: where the batch does not divide so; PlanError where the pipeline's schedule
            cannot run so many micro-batches.
    """
    layout, micro_batch = plan.layout, plan.micro_batch
    if not micro_batch:
        micro_batch = share_of(plan.batch, layout.data_degree)
        if at_most or layout.pp > 1 or layout.threads > 1:
            from shoal.planning.micro_batch_sizes import usual_micro_batch

            micro_batch = usual_micro_batch(layout, plan.batch, at_most) or micro_batch
    accumulate = check_batch(plan.batch, micro_batch, layout.data_degree)
    if layout.pp > 1:
        from shoal.planning.pipeline_schedules import check_micro_batches

        check_micro_batches(layout, plan.batch, micro_batch)
    return replace(plan, micro_batch=micro_batch, accumulate=accumulate)


def split_words(plan: Plan, said: Words) -> tuple[Plan, dict[str, Any]]:
    """Move policies among the words of a layout into the plan: (new plan, the other words).

    Args:
        said: a strategy's name, which becomes {"strategy": name}, or keys of [layout] and of
            policies, which win over the plan's; no value is checked.
    """
    words: dict[str, Any] = {"strategy": said} if isinstance(said, str) else dict(said)
    found = {key: words.pop(key) for key in POLICIES if key in words}
    return replace(plan, **with_lists(found)), words


def words_of(layout: Layout) -> dict[str, Any]:
    """Spell a layout out as keys of [layout], degrees of 1 left out.

    Several threads are strategy dp, one process without them is single.

    >>> words_of(Layout(dp_shard=4, zero=2)), words_of(Layout())
    ({'dp_shard': 4, 'zero': 2}, {'strategy': 'single'})
    """
    if layout.servers:
        from shoal.base.layouts.parameter_servers import words_of_servers

        return words_of_servers(layout)
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


def is_open(asked: Mapping[str, Any]) -> bool:
    """Tell whether the planner chooses the layout: strategy is auto and no key but zero is set.

    A stage (layout.zero) alone leaves open what carries it.

    Args:
        asked: keys of [layout] that the user set (`asked_layout`), "strategy" always among them.

    >>> is_open({"strategy": "auto", "zero": 2}), is_open({"strategy": "auto", "tp": 2})
    (True, False)
    """
    return asked["strategy"] == "auto" and not asked.keys() - {"strategy", "zero"}


def leaves_open(plan: Plan, said: Words) -> bool:
    """Tell the same of a layout's words as a loop of one's own says them (`split_words`).

    >>> leaves_open(Plan(Layout()), {"recompute": "full"}), leaves_open(Plan(Layout()), "fsdp")
    (True, False)
    """
    return is_open({"strategy": "auto", **split_words(plan, said)[1]})
