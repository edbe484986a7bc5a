"""Optimizer state by parameter name: what a checkpoint keeps, and how it comes back.

torch numbers parameters by their place in the groups; names survive another layout, another order
and another group. Tensors become `optimizer.PARAMETER.KEY`, plain numbers and the groups'
hyper-parameters go into the checkpoint's JSON record. Anything else cannot be saved and is refused
right after the first step, not at the first save.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from shoal.base.errors import CheckpointError, ConfigError

Plain = bool | int | float | str | None


def split_state(
    optimizer: torch.optim.Optimizer, names: Mapping[Any, str]
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """(tensors by `PARAMETER.KEY`, JSON record) of an optimizer.

    Errors: ConfigError naming the parameter, the key and the type of a state that cannot be saved.
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
    return tensors, {"class": type(optimizer).__name__, "scalars": scalars, "groups": groups}


def check_class(optimizer: torch.optim.Optimizer, record: Mapping[str, Any]) -> None:
    """Errors: CheckpointError if the state was written by another optimizer class."""
    if record["class"] != type(optimizer).__name__:
        raise CheckpointError(
            f"optimizer: the checkpoint was written by {record['class']}, this run has "
            f"{type(optimizer).__name__}; nearest: optimizer.name={record['class'].lower()}"
        )


def join_state(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, nn.Parameter],
    tensors: Mapping[str, torch.Tensor],
    record: Mapping[str, Any],
) -> list[str]:
    """Put a saved state back; gives lines on hyper-parameters that differ, which stay as given now.

    tensors    by `PARAMETER.KEY`, on any device · record  the JSON part
    Errors     CheckpointError if the checkpoint was written by another optimizer class
    """
    check_class(optimizer, record)
    optimizer.state.clear()
    by_name: dict[str, dict[str, torch.Tensor]] = {}
    for full, value in tensors.items():
        name, _, key = full.rpartition(".")
        by_name.setdefault(name, {})[key] = value
    for name, parameter in parameters.items():
        state: dict[str, Any] = dict(record["scalars"].get(name, {}))
        for key, value in by_name.get(name, {}).items():
            # AdamW keeps `step` on the CPU unless it is fused or capturable.
            at_home = value.ndim == 0 and not _steps_on_device(optimizer)
            state[key] = value if at_home else _placed(value, parameter)
        if state:
            optimizer.state[parameter] = state
    return _differences(optimizer, record["groups"], parameters)


def _placed(value: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    """The value on the parameter's device and in its memory format, which fused kernels rely on."""
    if value.shape != parameter.shape:
        return value.to(parameter.device)
    return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)


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
