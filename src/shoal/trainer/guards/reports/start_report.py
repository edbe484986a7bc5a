"""Texts of errors about models and arguments with which no run can start."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from torch import nn
from torch.nn.parameter import is_lazy

from shoal.base.errors import ConfigError, PlanError
from shoal.base.plans.plan import Plan
from shoal.trainer.argument_checks import check_policies

OFF = (
    "train.guards = off: mistakes that change numbers are not looked for (weights written on one "
    "rank, equal samples on all ranks, …); try: train.guards=on for what is no measurement"
)
"""Notice of a run without guards."""


def refuse_parameter(name: str, parameter: nn.Parameter) -> NoReturn:
    """Raise ConfigError for a parameter that is lazy, sharded already, or on the meta device."""
    if is_lazy(parameter):
        raise ConfigError(
            f"model: {name} has no shape yet, its layer is a lazy one; try: one forward pass, "
            f"model(inputs), before shoal.parallelize"
        )
    if hasattr(parameter, "device_mesh"):
        raise ConfigError(
            f"model: {name} is sharded already, by fully_shard or by a run that is closed; try: "
            f"the module as it was built"
        )
    raise ConfigError(
        f"model: {name} is on the meta device and has no values; try: a function that builds the "
        f'model, or model.to_empty(device="cpu") and its weights loaded'
    )


def refuse_layers(
    unlike: tuple[int, Sequence[str], Sequence[str]], ranks: Sequence[int], step: int
) -> NoReturn:
    """Raise PlanError for the first layer that differs.

    Args:
        unlike: a rank, the layers of the first rank and of that one.
        ranks: numbers of the ranks among all processes.
        step: before which they were equal; 0: they never were.
    """
    rank, first, other = unlike
    where, nearest = (
        (f"step {step}: the model changed", "try: the same change on every rank")
        if step
        else (
            "model",
            "every rank must build the same model: look for a builder that reads the rank or the "
            "environment",
        )
    )
    place = next(
        (n for n, (a, b) in enumerate(zip(first, other, strict=False)) if a != b),
        min(len(first), len(other)),  # one model has more layers
    )
    here, there = ([*one, "not there"][place] for one in (first, other))
    at, away = ranks[0], ranks[rank]
    raise PlanError(f"{where}: layer {here} on rank {at}, and {there} on rank {away}; {nearest}")


def refuse_hook(name: str, layout: str) -> NoReturn:
    """Raise PlanError for a hook on a gradient that would never run under a layout."""
    raise PlanError(
        f"model: {name} has a gradient hook (register_hook), and under {layout} the gradient goes "
        f"to a part or a copy of it, so the hook would be left out; try: clip=… of "
        f"shoal.parallelize in the place of a clamp, or layout=zero2"
    )


def hooks_line(names: Sequence[str]) -> str:
    """Return the line for weights with a hook on their gradient."""
    count = f"{len(names)} weight{'s' if len(names) > 1 else ''}"
    return (
        f"model: {count} with a gradient hook, first {names[0]}: it sees sums over the targets of "
        f"one micro-batch, and no mean; a factor or a mask is right, a clamp is not: try: clip=… "
        f"of shoal.parallelize"
    )


def refuse_plan_conflicts(
    plan: Plan, given: Mapping[str, Any], plain: Mapping[str, inspect.Parameter]
) -> None:
    """Raise ConfigError for an invalid plan, or for arguments that a plan sets itself.

    Args:
        plan: the argument `plan` of `parallelize`.
        given: all arguments of `parallelize`, by name.
        plain: its parameters, with their defaults.

    Raises:
        ConfigError: as above.
    """
    if not isinstance(plan, Plan):
        raise ConfigError(
            f"plan = {type(plan).__name__}: a shoal.Plan is wanted; try: "
            f'shoal.Plan(shoal.Layout(tp=2), recompute="full"), or layout={{"tp": 2}}'
        )
    check_policies(plan, {})
    for name in ("layout", "batch", "micro_batch", "precision", *given["policies"]):
        value = given["policies"].get(name, given.get(name))
        if name in given["policies"] or value != plain[name].default:
            key = {"precision": "compute"}.get(name, name)
            raise ConfigError(
                f"{name} = {value}: stands beside a plan, which says it itself; try: "
                f"plan=dataclasses.replace(plan, {key}=…)"
            )
