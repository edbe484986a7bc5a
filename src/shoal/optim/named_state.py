"""Optimizer state by parameter name, as checkpoints keep it; `restore_state.py` loads it.

torch numbers parameters by their position in the groups; names survive another layout, another
order and another group. Tensors become `optimizer.PARAMETER.KEY`. Plain numbers and the groups'
hyper-parameters go into the checkpoint's JSON record. Other values cannot be saved; Shoal refuses
them right after the first step, not at the first save.

Under a sharded layout this rank may hold only pieces of parameters. State of a piece's own shape
(Adam's moments) is then that piece of a larger state. All other state (a step count, Adafactor's
factors) is whole, the same on every rank that has it. `sliced_keys` separates the two by key.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from shoal.base.errors import ConfigError

Plain = bool | int | float | str | None


def split_state(
    optimizer: torch.optim.Optimizer, names: Mapping[Any, str]
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Split an optimizer's state into (tensors by `PARAMETER.KEY`, JSON record), for a checkpoint.

    Args:
        names: of the parameters, or pieces of parameters, that the optimizer holds.

    Returns:
        This rank's state: the tensors themselves, no copies. The record has class, numbers, groups
        with their hyper-parameters, and the keys that are sliced as parameters are. If ranks step
        different pieces, `merge_records` joins the records.

    Raises:
        ConfigError: a value that cannot be saved, with parameter, key and type: neither tensor nor
            number, or stored under a key that is no parameter.
    """
    tensors: dict[str, torch.Tensor] = {}
    scalars: dict[str, dict[str, Plain]] = {}
    for parameter, state in optimizer.state.items():
        if parameter not in names:
            raise ConfigError(
                f"optimizer: {type(optimizer).__name__} keeps state under {_kind(parameter)}, "
                f"which is no parameter of the model; only state of parameters can be saved"
            )
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                tensors[f"{names[parameter]}.{key}"] = value
            elif isinstance(value, Plain):
                scalars.setdefault(names[parameter], {})[key] = value
            else:
                raise ConfigError(
                    f"optimizer: {type(optimizer).__name__} keeps {key} of {names[parameter]} as "
                    f"{type(value).__name__}; tensors and numbers can be saved"
                )
    groups = [
        {"names": [names[p] for p in group["params"]], **settings}
        for group, settings in zip(optimizer.param_groups, group_settings(optimizer), strict=True)
    ]
    record = {
        "class": type(optimizer).__name__,
        "scalars": scalars,
        "groups": groups,
        "sliced": sorted(sliced_keys(optimizer)),
    }
    return tensors, record


def group_settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the hyper-parameters of each group as JSON values, without its parameters."""
    return [
        {
            key: to_json_value(value)
            for key, value in group.items()
            if key != "params" and _is_json_value(to_json_value(value))
        }
        for group in optimizer.param_groups
    ]


def list_changed_settings(
    optimizer: torch.optim.Optimizer, initial: Sequence[Mapping[str, Any]]
) -> list[list[str]]:
    """Return the hyper-parameters of each group that are not what they were at the start.

    Args:
        initial: `group_settings` at the start of the run.
    """
    now = group_settings(optimizer)
    then = [*initial, *([{}] * (len(now) - len(initial)))]
    missing = object()
    return [
        [key for key, value in group.items() if old.get(key, missing) != value]
        for group, old in zip(now, then, strict=False)
    ]


def count_parameters(optimizer: torch.optim.Optimizer) -> int:
    """Count the parameter tensors, or pieces of them, in all groups of this rank's optimizer."""
    return sum(len(group["params"]) for group in optimizer.param_groups)


def inner_optimizers(optimizer: torch.optim.Optimizer) -> Iterator[torch.optim.Optimizer]:
    """Yield the optimizers among an optimizer's attributes, or in a list, tuple or dict of them."""
    for value in vars(optimizer).values():
        inside = value.values() if isinstance(value, dict) else value
        for one in inside if isinstance(value, list | tuple | dict) else (value,):
            if isinstance(one, torch.optim.Optimizer):
                yield one


def sliced_keys(optimizer: torch.optim.Optimizer) -> set[str]:
    """Return keys of state tensors that always have their parameter's shape, like Adam's moments.

    A state tensor of such a key has the position of its parameter's piece in the global shape;
    tensors of other keys are whole. The moments of a 0-dim parameter look like its step count. The
    other parameters decide then; if there are none, only the key `step` counts as whole.
    """
    shaped: set[str] = set()
    other: set[str] = set()
    unclear: set[str] = set()
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                same = value.shape == parameter.shape
                (other if not same else shaped if parameter.ndim else unclear).add(key)
    return (shaped | (unclear - {"step"})) - other


def merge_records(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the records of ranks with different pieces; settings and class are the first's.

    Args:
        records: by rank, with the same groups in the same order (`shard_optimizer` keeps empty
        ones).
    """
    merged: dict[str, Any] = {**records[0]}
    merged["scalars"] = {n: s for record in records for n, s in record["scalars"].items()}
    merged["sliced"] = sorted({key for record in records for key in record["sliced"]})
    merged["groups"] = [
        {**same[0], "names": list(dict.fromkeys(n for group in same for n in group["names"]))}
        for same in zip(*(record["groups"] for record in records), strict=True)
    ]
    return merged


def _kind(key: object) -> str:
    if isinstance(key, torch.Tensor):
        return f"a tensor of shape {list(key.shape)}"
    return repr(key)


def _is_json_value(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(isinstance(v, Plain) for v in value)
    return isinstance(value, Plain)


def to_json_value(value: Any) -> Any:
    """Convert a hyper-parameter to JSON: a 0-dim tensor to its number, a tuple to a list."""
    if isinstance(value, torch.Tensor) and value.ndim == 0:
        return value.item()  # a learning rate may be a tensor
    return list(value) if isinstance(value, tuple) else value
