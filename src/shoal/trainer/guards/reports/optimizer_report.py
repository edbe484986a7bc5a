"""Texts about the optimizer: settings that differ between ranks, groups, schedules, its state.

Imported when there is an error to raise.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from shoal.base.errors import ConfigError
from shoal.base.text.rank_differences import values_text


def refuse_different_settings(
    step: int,
    told: Sequence[Sequence[Any]],
    stepped: Sequence[Collection[int]],
    kept: Collection[str],
) -> None:
    """Raise ConfigError for the first setting of the optimizer that differs; every rank calls it.

    Args:
        step: the compared step.
        told: by rank: the settings of each group now, and at the last update.
        stepped: by group: the ranks that step it.
        kept: keys that every rank has.
    """
    for place, when in enumerate(("", f" at the update of step {step - 1}")):
        for number, ranks in enumerate(stepped):
            values = {
                rank: dict(map(tuple, one[place][number]))
                for rank, one in enumerate(told)
                if number < len(one[place])
            }
            for key in dict.fromkeys(key for one in values.values() for key in one):
                shown = {
                    rank: _format_value(one[key]) if key in one else "not there"
                    for rank, one in values.items()
                    if key in kept or rank in ranks
                }
                if len(set(shown.values())) > 1:
                    several = len(stepped) > 1
                    raise ConfigError(_setting_line(key, number if several else None, shown, when))
    raise ConfigError(
        f"step {step}: the optimizer's settings differ between ranks; try: the same change of "
        f"optimizer.param_groups on every rank"
    )


def _format_value(value: Any) -> str:
    if isinstance(value, list):
        return f"({', '.join(map(_format_value, value))})"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _setting_line(key: str, number: int | None, shown: Mapping[int, str], when: str) -> str:
    """Return the line for one setting that differs; `number` is its group's, None for one group."""
    told = values_text(shown)
    group = "" if number is None else f" of group {number}"
    if key == "lr":
        return (
            f"optimizer: the learning rate{group if number else ''} is {told}{when}: a scheduler "
            f"was stepped on some ranks only, or by what only its own rank has seen; try: "
            f"scheduler.step() on every rank (ReduceLROnPlateau: scheduler.step(result.loss))"
        )
    return (
        f"optimizer: {key}{group} is {told}{when}: each rank would step by numbers of its own; "
        f"try: the same change of optimizer.param_groups on every rank"
    )


def endless_schedule_error(schedule: str, total: int) -> ConfigError:
    """Return the error for a schedule without an end."""
    return ConfigError(
        f"total_steps = {total}: schedule = {schedule} needs the length of the run; give "
        f"shoal.parallelize(…, total_steps=…)"
    )


def changed_rate_error(schedule: str, rate: float) -> ConfigError:
    """Return the error for a learning rate that other code changed."""
    return ConfigError(
        f"optimizer: lr was set to {rate:g} beside the run, which sets it by schedule = "
        f"{schedule}: one of two schedules would be without effect; try: leave out schedule=…, or "
        f"the other scheduler"
    )


def changed_groups_error(held: int, before: int) -> ConfigError:
    """Return the error for parameters that were added or removed.

    Args:
        held: number of parameters that the optimizer holds now.
        before: number that it held when the run began.
    """
    return ConfigError(
        f"optimizer: holds {held} parameters, {before} when shoal.parallelize was called; change "
        f"groups before, or save, and parallelize again"
    )


PARTS_IN_GROUPS = (
    'optimizer: group["params"] was set to another list, and no weight left it: this rank steps '
    "parts of weights, of which none is a weight of run.model, so a choice by weight chooses "
    "nothing; try: weight.requires_grad_(False), or the groups before shoal.parallelize"
)
"""Notice on a list of parameters that a script has put into a group."""


def no_movement_error() -> ConfigError:
    """Return the error for an optimizer whose first step moved nothing."""
    return ConfigError(
        "optimizer: its first step moved no parameter that has a gradient: it steps over other "
        "tensors than the model's; give parallelize a function params -> optimizer"
    )


def own_state_error(layout: str) -> ConfigError:
    """Return the error for `optimizer.state_dict()` where a rank steps parts of the weights."""
    return ConfigError(
        f"optimizer.state_dict(): under {layout} it holds the state of the weights that this rank "
        f"steps, which no optimizer can load, and other ranks have the rest; try: run.save(folder) "
        f"and run.restore(), called on every rank"
    )


def sharded_state_error(layout: str) -> ConfigError:
    """Return the error for loading an optimizer state where a rank steps parts of the weights."""
    return ConfigError(
        f"optimizer.load_state_dict(…): this rank steps a part of the weights only (layout "
        f"{layout}); try: load before shoal.parallelize, or run.restore()"
    )


def other_optimizer_error(layout: str) -> ConfigError:
    """Return the error for an optimizer set as `run.optimizer` where ranks step parts."""
    return ConfigError(
        f"run.optimizer was set to another optimizer, and under {layout} the run's own steps parts "
        f"of the weights, which the new one does not hold; try: change its param_groups, or save, "
        f"and shoal.parallelize again with the new one"
    )


def new_optimizer_line(kind: str) -> str:
    """Return the notice on an optimizer that was made over weights of a run."""
    return (
        f"{kind}: made over weights of a run, which keeps the optimizer that it was given: unless "
        f"it is set as run.optimizer, it steps nothing; try: change run.optimizer.param_groups, or "
        f"save, and shoal.parallelize again with the new one"
    )


def foreign_step_error() -> ConfigError:
    """Return the error for the user's own call of `optimizer.step`."""
    return ConfigError(
        "optimizer.step() was called beside the run: each rank would step on its own samples' "
        "gradients, and ranks drift apart; try: run.step(batch) in the place of backward() and "
        "step(), or run.forward_backward(batch) and run.update()"
    )


def part_of_state_line(function: str, layout: str) -> str:
    """Return the notice on a reduction of the optimizer's state of which this rank has a part."""
    return (
        f"{function} of the optimizer's state: under {layout} this rank has a part of it, and the "
        f"number is that of the part; try: the sum of the parts over ranks (run.total)"
    )
