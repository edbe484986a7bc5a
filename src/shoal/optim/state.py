"""Optimizer state by parameter name: what a checkpoint keeps, and how it comes back.

torch numbers parameters by their place in the groups; names survive another layout, another order
and another group. Tensors become `optimizer.PARAMETER.KEY`, plain numbers and the groups'
hyper-parameters go into the checkpoint's JSON record. Anything else cannot be saved and is refused
right after the first step, not at the first save.

A layout may have given this rank only pieces of parameters. State of a piece's own shape (Adam's
moments) is then that piece of a larger state; all other state (a step count, Adafactor's factors)
is whole, the same on every rank that has it. `sliced_keys` tells the two apart by key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from shoal.base.errors import CheckpointError, ConfigError

Plain = bool | int | float | str | None


def split_state(
    optimizer: torch.optim.Optimizer, names: Mapping[Any, str]
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Split an optimizer's state into (tensors by `PARAMETER.KEY`, JSON record), for a checkpoint.

    names    of the parameters, or pieces of parameters, that the optimizer holds
    Gives    what this rank has, the tensors themselves, no copies; the record has class, numbers,
             groups with their hyper-parameters, and which keys are sliced as parameters are. If
             ranks step different pieces, `merge_records` joins the records
    Errors   ConfigError for state that cannot be saved: no tensor and no number, named by
             parameter, key and type, or kept under something that is no parameter
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
        {
            "names": [names[p] for p in group["params"]],
            **{k: _plain(v) for k, v in group.items() if k != "params" and _is_plain(_plain(v))},
        }
        for group in optimizer.param_groups
    ]
    record = {
        "class": type(optimizer).__name__,
        "scalars": scalars,
        "groups": groups,
        "sliced": sorted(sliced_keys(optimizer)),
    }
    return tensors, record


def parameters_held(optimizer: torch.optim.Optimizer) -> int:
    """Count the parameter tensors, or pieces of them, in all groups of this rank's optimizer."""
    return sum(len(group["params"]) for group in optimizer.param_groups)


def sliced_keys(optimizer: torch.optim.Optimizer) -> set[str]:
    """Keys of state tensors that always have their parameter's shape, like Adam's moments.

    A state tensor of such a key belongs where its parameter's piece does in the global shape;
    tensors of other keys are whole. A 0-dim parameter does not tell its moments from its step
    count: the other parameters decide, and only without any others the name `step`.
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
    """Merge the records that ranks with different pieces made; settings and class are the first's.

    records   by rank, with the same groups in the same order (`localize` keeps empty ones)
    """
    merged: dict[str, Any] = {**records[0]}
    merged["scalars"] = {n: s for record in records for n, s in record["scalars"].items()}
    merged["sliced"] = sorted({key for record in records for key in record["sliced"]})
    merged["groups"] = [
        {**same[0], "names": list(dict.fromkeys(n for group in same for n in group["names"]))}
        for same in zip(*(record["groups"] for record in records), strict=True)
    ]
    return merged


def check_class(optimizer: torch.optim.Optimizer, record: Mapping[str, Any]) -> None:
    """Refuse state that another optimizer class wrote, by its name. Errors: CheckpointError."""
    if record["class"] != type(optimizer).__name__:
        from shoal.optim.build import name_of

        raise CheckpointError(
            f"optimizer: the checkpoint was written by {record['class']}, this run has "
            f"{type(optimizer).__name__}; nearest: optimizer.name={name_of(record['class'])}"
        )


def join_state(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, nn.Parameter],
    tensors: Mapping[str, torch.Tensor],
    record: Mapping[str, Any],
) -> list[str]:
    """Put a saved state back into an optimizer, in the place of what it has.

    parameters  what this rank steps, whole or pieces, by name; state of other names is left out
    tensors     by `PARAMETER.KEY`, on any device; of sliced keys the elements of the piece, in any
                shape; of other keys whole · record  the JSON part, merged over ranks
    Gives       lines for the user on hyper-parameters that differ: they stay as given now. Learning
                rates are not compared (`restore_lr`)
    Errors      CheckpointError if the checkpoint was written by another optimizer class
    """
    check_class(optimizer, record)
    sliced = set(record.get("sliced", ()))
    optimizer.state.clear()
    by_name: dict[str, dict[str, torch.Tensor]] = {}
    for full, value in tensors.items():
        name, _, key = full.rpartition(".")
        by_name.setdefault(name, {})[key] = value
    for name, parameter in parameters.items():
        state: dict[str, Any] = dict(record["scalars"].get(name, {}))
        for key, value in by_name.get(name, {}).items():
            # AdamW keeps `step` on the CPU unless it is fused or capturable.
            if value.ndim == 0 and key not in sliced and not _steps_on_device(optimizer):
                state[key] = value
            else:
                state[key] = _placed(value, parameter, key in sliced)
        if state:
            optimizer.state[parameter] = state
    return _differences(optimizer, record["groups"], parameters)


def restore_lr(
    optimizer: torch.optim.Optimizer, names: Mapping[Any, str], record: Mapping[str, Any]
) -> None:
    """Put saved learning rates back into the groups, for runs whose rate is the user's own state.

    names    of the parameters or pieces that the optimizer holds · record  the JSON part
    Does     groups are found by the name of a member; one that is empty on this rank by its place.
             `initial_lr` comes along: torch's own schedulers want it in order to go on
    """
    groups = record["groups"]
    then = {name: group for group in groups for name in group["names"]}
    same_groups = len(groups) == len(optimizer.param_groups)
    for place, group in enumerate(optimizer.param_groups):
        known = [then[names[p]] for p in group["params"] if names.get(p) in then]
        old: Mapping[str, Any] = known[0] if known else {}
        if not group["params"] and same_groups:
            old = groups[place]
        for key in ("lr", "initial_lr"):
            if key in old and isinstance(group.get(key), torch.Tensor):
                group[key].fill_(old[key])
            elif key in old:
                group[key] = old[key]


def _placed(value: torch.Tensor, parameter: nn.Parameter, sliced: bool) -> torch.Tensor:
    """The value on the parameter's device and in its memory format, which fused kernels rely on."""
    same = value.numel() == parameter.numel() if sliced else value.shape == parameter.shape
    if not same:
        return value.to(parameter.device)
    placed = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False)
    return placed.copy_(value.reshape(parameter.shape))


def _kind(key: object) -> str:
    if isinstance(key, torch.Tensor):
        return f"a tensor of shape {list(key.shape)}"
    return repr(key)


def _differences(
    optimizer: torch.optim.Optimizer, saved: list[Any], parameters: Mapping[str, nn.Parameter]
) -> list[str]:
    then = {name: group for group in saved for name in group["names"]}
    names = {id(p): n for n, p in parameters.items()}
    lines = []
    for number, group in enumerate(optimizer.param_groups):
        known = [names[id(p)] for p in group["params"] if names.get(id(p)) in then]
        if not known:
            continue
        old = then[known[0]]
        for key, value in group.items():
            if key in ("params", "lr", "initial_lr") or key not in old:
                continue
            if _plain(value) != old[key]:
                lines.append(f"optimizer group {number}: {key} was {old[key]}, is {_plain(value)}")
    return lines


def _steps_on_device(optimizer: torch.optim.Optimizer) -> bool:
    return any(g.get("fused") or g.get("capturable") for g in optimizer.param_groups)


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(isinstance(v, Plain) for v in value)
    return isinstance(value, Plain)


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.ndim == 0:
        return value.item()  # a learning rate may be a tensor
    return list(value) if isinstance(value, tuple) else value
