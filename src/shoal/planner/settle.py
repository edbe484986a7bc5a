"""Settles a plan: which layout the user's words mean on these processes, and how a batch is cut.

`shoal train`, `shoal prove` and `shoal.parallelize` all call `settle`, once per start; what cannot
go together is refused here, before anything is built.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from shoal.base.batches import check_batch, default_micro_batch
from shoal.base.errors import ShoalError
from shoal.base.facts import MachineFacts
from shoal.base.layout import Layout
from shoal.base.lines import read_object
from shoal.base.plan import Plan
from shoal.base.policies import POLICIES, check_compile, check_compress, with_lists
from shoal.base.schedules import check_recompute
from shoal.planner.guide import check_micro_batches, choose_layout

Words = str | Mapping[str, Any]
"""A layout as users write it: a strategy, or keys of [layout]."""

NAMED = ("zero", "threads", "schedule", "chunks")
"""Keys of [layout] that go with a strategy or with degrees."""


def settle(
    plan: Plan, said: Words, processes: int, parameters: int | None, machine: MachineFacts
) -> Plan:
    """Fill in what a plan leaves open: layout, reason, micro-batch, accumulation.

    plan         policies and a batch; its layout is not read, its `why` stays where it has one
    said         the layout in words, which replaces the plan's (`words_of` gives those of one);
                 policies among them win over the plan's. Degrees must multiply out to `processes`:
                 none is derived; a strategy's are
    parameters   elements of the model; None: its size is left out of account
    Errors       PlanError, ConfigError with the nearest legal choice

    >>> laptop = MachineFacts(cores=2, memory_bytes=2**34, gpus=0)
    >>> plan = settle(Plan(Layout(), 16), {"tp": 2, "dp_replicate": 2}, 4, None, laptop)
    >>> plan.layout.text(), plan.micro_batch, plan.accumulate
    ('ddp + tp (dp_replicate = 2, tp = 2)', 2, 4)
    """
    return settle_batch(settle_layout(plan, said, processes, parameters, machine))


def settle_layout(
    plan: Plan, said: Words, processes: int, parameters: int | None, machine: MachineFacts
) -> Plan:
    """The first half of `settle`, for `shoal train`, whose batch may depend on the layout."""
    plan, words = split_words(plan, said)
    named = {key: words.pop(key) for key in NAMED if key in words}
    strategy = words.pop("strategy", "dp" if named.get("threads") else "auto")
    layout, why = choose_layout(strategy, words, processes, parameters, machine, **named)
    settled = replace(plan, layout=layout, why=plan.why or why, parameters=parameters or 0)
    check_together(settled)
    return settled


def check_together(plan: Plan) -> None:
    """Errors: PlanError, ConfigError for policies that a layout, or each other, cannot carry."""
    layout = plan.layout
    plan.check_split(layout.tp, layout.cp)
    check_recompute(layout.schedule, plan.recompute)
    check_compile(plan.compile, plan.recompute)
    check_compress(plan.compress, layout.data_strategy, plan.compute, plan.sums, layout.ep)


def goes_together(plan: Plan) -> bool:
    """Whether `check_together` has nothing to refuse."""
    try:
        check_together(plan)
    except ShoalError:
        return False
    return True


def settle_batch(plan: Plan) -> Plan:
    """Fill in micro-batch and accumulation of a plan that has its layout and its batch.

    micro_batch   of the plan: a given one stays; 0: batch / gcd(batch, 8), whatever the layout
    Errors        ConfigError where the batch does not divide; PlanError where the schedule cannot
    """
    micro_batch = plan.micro_batch or default_micro_batch(plan.batch)
    accumulate = check_batch(
        plan.batch, micro_batch, plan.layout.data_degree, derived=not plan.micro_batch
    )
    check_micro_batches(plan.layout, plan.batch, micro_batch)
    return replace(plan, micro_batch=micro_batch, accumulate=accumulate)


def split_words(plan: Plan, said: Words) -> tuple[Plan, dict[str, Any]]:
    """Take the policies out of the words of a layout: (plan that has them, what is left)."""
    words: dict[str, Any] = {"strategy": said} if isinstance(said, str) else dict(said)
    found = {key: words.pop(key) for key in POLICIES if key in words}
    return replace(plan, **with_lists(found)), words


def words_of(layout: Layout) -> dict[str, Any]:
    """Spell a layout out as keys of [layout].

    >>> words_of(Layout(dp_shard=4, zero=2)), words_of(Layout())
    ({'dp_shard': 4, 'zero': 2}, {'strategy': 'single'})
    """
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
    """Whether the planner chooses: neither a strategy nor a degree is given.

    A stage (layout.zero) alone leaves open what carries it.

    >>> is_open({"strategy": "auto", "zero": 2}), is_open({"strategy": "auto", "tp": 2})
    (True, False)
    """
    return asked["strategy"] == "auto" and not asked.keys() - {"strategy", "zero"}


def kept_plan(folder: Path, processes: int) -> Plan | None:
    """Read what was chosen for an earlier start of a run, on as many processes; None without.

    Format   <run>/plan.json: a plan (`Plan.to_json`), and beside it `chosen`: the layout was left
             open, and this is the one that was taken
    """
    told = read_object(folder / "plan.json")
    try:
        plan = Plan.from_json(json.dumps(told))
        return plan if told["chosen"] and plan.layout.processes == processes else None
    except (ShoalError, ValueError, KeyError, TypeError):
        return None


def keep_choice(plan: Plan, asked: Mapping[str, Any], folder: Path) -> tuple[Plan, bool]:
    """Take the layout that an earlier start of a run chose, where it is left open again.

    asked   keys of [layout] that the user set, "strategy" among them · folder  of the run; read
    Gives   the plan, and whether its layout is such a choice: a restart goes on bit for bit
    """
    kept = kept_plan(folder, plan.layout.processes) if is_open(asked) else None
    if kept is None or kept.layout.zero != asked.get("zero", kept.layout.zero):
        return plan, False
    again = replace(plan, layout=kept.layout, why=kept.why)
    return (settle_batch(again), True) if goes_together(again) else (plan, False)
