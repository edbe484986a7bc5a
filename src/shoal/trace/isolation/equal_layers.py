"""Compare the construction of layers: classes, shapes of their tensors, other attributes.

Two layers with equal keys could still compute differently, but only through state outside of them,
a global variable for example. Layers that know their own number have unequal keys, though they may
compute the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)


def structure_key(part: nn.Module) -> Any:
    """Return a hashable key of classes, and shapes and dtypes of all tensors in a layer."""
    told: list[Any] = []
    for name, inner in part.named_modules():
        tensors = [
            (key, None if t is None else (tuple(t.shape), t.dtype, t.requires_grad))
            for held in (inner._parameters, inner._buffers)
            for key, t in held.items()
        ]
        told.append((name, type(inner), tuple(tensors)))
    return tuple(told)


def attribute_key(part: nn.Module) -> Any:
    """Return every other attribute in a layer, by value if plain, else by id; hooks too."""
    plain = (bool, int, float, str, type(None), tuple)
    values = [
        (key, value if isinstance(value, plain) and _hashable(value) else id(value))
        for inner in part.modules()
        for key, value in sorted(vars(inner).items())
        if key not in OF_TORCH or key == "training"
    ]
    return (*values, *list_inner_hooks(part))


def list_loose_tensors(part: nn.Module) -> dict[str, Tensor]:
    """Find the tensors that are plain attributes in a layer: neither parameters nor buffers."""
    return {
        f"{path}.{key}" if path else key: value
        for path, inner in part.named_modules()
        for key, value in vars(inner).items()
        if isinstance(value, Tensor)
    }


def tensor_versions(part: nn.Module) -> dict[str, tuple[int, int]]:
    """Return the id and version of each loose tensor in a layer."""
    return {name: (id(t), t._version) for name, t in list_loose_tensors(part).items()}


OF_TORCH = frozenset(vars(nn.Module()))
"""Attributes that every module has."""


def list_inner_hooks(part: nn.Module) -> list[str]:
    """Name the hooks on modules inside of a layer, without torch's and Shoal's own.

    A graph or compiled code that is made once for equal layers has none of these hooks. Hooks on
    the layer itself run around whatever replaces its forward.
    """
    return [
        f"{name}: {getattr(hook, '__qualname__', type(hook).__name__)}"
        for name, inner in part.named_modules()
        for hooks in (inner._forward_pre_hooks, inner._forward_hooks, inner._backward_hooks)
        for hook in hooks.values()
        if name and getattr(hook, "__module__", "").partition(".")[0] not in ("torch", "shoal")
    ]


def _hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True
