"""First call of a layer, and a copy of the layer without numbers: the inputs of a split."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shoal.trace._torch import pytree
from shoal.trace.isolation.module_copies import copy_module


@dataclass(frozen=True)
class LayerCall:
    """First call of a layer in the sample: its arguments, and the layers that its calls follow.

    Attributes:
        args, kwargs: copies of its arguments; floating tensors that carry a gradient require one.
        follows: for each call the layer whose output, untouched, is its first floating argument, or
            "".
        unseen: text on other inputs of the layer, beside its own tensors and its arguments'
            tensors.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    follows: tuple[str, ...]
    unseen: str = ""

    def to_meta(self) -> LayerCall:
        """Return the same call with tensors that have shapes only."""
        args, kwargs = pytree.tree_map_only(
            Tensor, lambda t: t.to("meta"), (self.args, self.kwargs)
        )
        return LayerCall(args, kwargs, self.follows, self.unseen)


def copy_without_numbers(block: nn.Module) -> nn.Module:
    """Copy a layer with parameters of the same shapes and dtypes that take no memory (zeros).

    Buffers stay. Hooks on the layer itself are left out: they run around whatever replaces its
    forward.
    """
    shown: dict[int, Any] = {}
    for p in block.parameters():
        number = torch.zeros((), dtype=p.dtype, device=p.device)
        shown[id(p)] = nn.Parameter(number.expand(p.shape), requires_grad=p.requires_grad)
    twin = copy_module(block, shown)
    for hooks in (twin._forward_pre_hooks, twin._forward_hooks, twin._backward_hooks):
        hooks.clear()
    return twin
