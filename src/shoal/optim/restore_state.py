"""Restore a saved optimizer state by parameter name, under any layout, order and groups.

`named_state.py` says what is saved, and which keys are sliced as their parameters are.
A run keeps its current hyper-parameters; a line reports each that differs from the saved value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from shoal.base.errors import CheckpointError
from shoal.optim.build import optimizer_name
from shoal.optim.named_state import to_json_value


def check_optimizer_class(optimizer: torch.optim.Optimizer, record: Mapping[str, Any]) -> None:
    """Refuse state of another optimizer class with a CheckpointError."""
    if record["class"] != type(optimizer).__name__:
        raise CheckpointError(
            f"optimizer: the checkpoint was written by {record['class']}, this run has "
            f"{type(optimizer).__name__}; try: optimizer.name={optimizer_name(record['class'])}"
        )


def restore_optimizer_state(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, nn.Parameter],
    tensors: Mapping[str, torch.Tensor],
    record: Mapping[str, Any],
) -> list[str]:
    """Replace an optimizer's state by a saved one.

    Args:
        parameters: parameters or pieces that this rank steps, by name; state of other names is
            ignored.
        tensors: by `PARAMETER.KEY`, on any device; of sliced keys the elements of the piece, in any
            shape; of other keys whole.
        record: the JSON part, merged over ranks.

    Returns:
        Lines for the user on hyper-parameters that differ: the current ones stay. Learning rates
        are not compared (`restore_group_settings`).

    Raises:
        CheckpointError: another optimizer class wrote the checkpoint.
    """
    check_optimizer_class(optimizer, record)
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
                state[key] = _to_parameter_layout(value, parameter, key in sliced)
        if state:
            optimizer.state[parameter] = state
    return _changed_settings(optimizer, record["groups"], parameters)


RATES = ("lr", "initial_lr")
"""Settings of a group that are a run's own state; torch's schedulers read the second one."""
CYCLED = ("momentum", "betas")
"""Settings that OneCycleLR and CyclicLR change; checkpoints before 0.2 do not say what changed."""


def restore_group_settings(
    optimizer: torch.optim.Optimizer, names: Mapping[Any, str], record: Mapping[str, Any]
) -> None:
    """Restore the groups' learning rates, and what else the saved run had changed since its start.

    A setting that the run never changed is the script's: a resume may begin with another one.

    Args:
        names: of the parameters or pieces that the optimizer holds.
        record: the JSON part.

    Note:
        A group is found by the name of a member; one that is empty on this rank by its position.
    """
    groups = record["groups"]
    place_of = {name: place for place, group in enumerate(groups) for name in group["names"]}
    same_groups = len(groups) == len(optimizer.param_groups)
    for place, group in enumerate(optimizer.param_groups):
        known = [place_of[names[p]] for p in group["params"] if names.get(p) in place_of]
        if not known and (group["params"] or not same_groups):
            continue
        then = known[0] if known else place
        for key in (*RATES, *_changed_keys(record, then)):
            if key not in groups[then]:
                continue
            value, now = groups[then][key], group.get(key)
            if isinstance(now, torch.Tensor):
                now.fill_(value)
            else:
                is_tuple = isinstance(value, list) and not isinstance(now, list)
                group[key] = tuple(value) if is_tuple else value  # JSON knows lists only


def _changed_keys(record: Mapping[str, Any], place: int) -> Sequence[str]:
    """Return the settings of a saved group that its run changed."""
    if "changed" in record:
        return record["changed"][place]
    return CYCLED if "max_momentum" in record["groups"][place] else ()


def _to_parameter_layout(
    value: torch.Tensor, parameter: nn.Parameter, sliced: bool
) -> torch.Tensor:
    """Return the value on the parameter's device and in its memory format, for fused kernels."""
    same = value.numel() == parameter.numel() if sliced else value.shape == parameter.shape
    if not same:
        return value.to(parameter.device)
    placed = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False)
    return placed.copy_(value.reshape(parameter.shape))


def _changed_settings(
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
            if key in ("params", *RATES) or key not in old:
                continue
            if to_json_value(value) != old[key]:
                lines.append(
                    f"optimizer group {number}: {key}: {old[key]} → {to_json_value(value)}"
                )
    return lines


def _steps_on_device(optimizer: torch.optim.Optimizer) -> bool:
    return any(g.get("fused") or g.get("capturable") for g in optimizer.param_groups)
