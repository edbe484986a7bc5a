"""Tells whether two layers are made alike: classes, shapes of their tensors, other attributes.

What computes differently may still be made alike only if it says so nowhere: by a global variable,
say. Layers that know their own number are not made alike, though they may compute the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)


def shapes_of(part: nn.Module) -> Any:
    """Classes, and shapes and formats of all tensors in a layer: equal or not, and hashable."""
    told: list[Any] = []
    for name, inner in part.named_modules():
        tensors = [
            (key, None if t is None else (tuple(t.shape), t.dtype, t.requires_grad))
            for held in (inner._parameters, inner._buffers)
            for key, t in held.items()
        ]
        told.append((name, type(inner), tuple(tensors)))
    return tuple(told)


def attributes_of(part: nn.Module) -> Any:
    """Every other attribute in a layer: plain values, anything else by what object it is; hooks."""
    plain = (bool, int, float, str, type(None), tuple)
    values = [
        (key, value if isinstance(value, plain) and _hashable(value) else id(value))
        for inner in part.modules()
        for key, value in sorted(vars(inner).items())
        if key not in OF_TORCH or key == "training"
    ]
    return (*values, *hooked_inside(part))


def loose_tensors(part: nn.Module) -> dict[str, Tensor]:
    """Find the tensors that are plain attributes in a layer: neither parameters nor buffers."""
    return {
        f"{path}.{key}" if path else key: value
        for path, inner in part.named_modules()
        for key, value in vars(inner).items()
        if isinstance(value, Tensor)
    }


def versions_of(part: nn.Module) -> dict[str, tuple[int, int]]:
    """Say which tensors those are, and which versions of them."""
    return {name: (id(t), t._version) for name, t in loose_tensors(part).items()}


OF_TORCH = frozenset(vars(nn.Module()))
"""Attributes that every module has."""


def hooked_inside(part: nn.Module) -> list[str]:
    """Name the hooks on modules inside of a layer, torch's and Shoal's own left out.

    What is made of a layer once for all (a graph, compiled code for layers of its class) has none
    of them. Those on the layer itself run around whatever stands in for it.
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
