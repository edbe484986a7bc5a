"""Name the first setting of an optimizer that differs between ranks; loaded when one does."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from shoal.base.errors import ConfigError
from shoal.base.unlike_ranks import values_text


def refuse_unlike_settings(
    step: int,
    told: Sequence[Sequence[Any]],
    stepped: Sequence[Collection[int]],
    kept: Collection[str],
) -> None:
    """Raise ConfigError for the first setting of the optimizer that differs; every rank calls it.

    Args:
        step: the one that is compared.
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
                    rank: _shown(one[key]) if key in one else "not there"
                    for rank, one in values.items()
                    if key in kept or rank in ranks
                }
                if len(set(shown.values())) > 1:
                    several = len(stepped) > 1
                    raise ConfigError(_line(key, number if several else None, shown, when))
    raise ConfigError(
        f"step {step}: the optimizer's settings differ between ranks; try: the same change of "
        f"optimizer.param_groups on every rank"
    )


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return f"({', '.join(map(_shown, value))})"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _line(key: str, number: int | None, shown: Mapping[int, str], when: str) -> str:
    """The line for one setting that differs; number  of its group, where there are several."""
    told = values_text(shown)
    group = "" if number is None else f" of group {number}"
    if key == "lr":
        return (
            f"optimizer: the learning rate{group if number else ''} is {told}{when}: a scheduler "
            f"follows what only its own rank has seen; try: scheduler.step(result.loss), which "
            f"all ranks share"
        )
    return (
        f"optimizer: {key}{group} is {told}{when}: each rank would step by numbers of its own; "
        f"try: the same change of optimizer.param_groups on every rank"
    )
