"""What a layer is called with, and a copy of the layer without its numbers: enough to split it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shoal.trace._torch import pytree
from shoal.trace.isolation.module_copies import copied_module


@dataclass(frozen=True)
class Call:
    """A layer's first call in the sample: its arguments, and what each of its calls came after.

    Attributes:
        args, kwargs: copies of its arguments; floating tensors that carry a gradient require one.
        follows: for each call the layer whose output, untouched, is its first floating argument, or
            "".
        unseen: what the layer computes with beside its tensors and its arguments', in words.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    follows: tuple[str, ...]
    unseen: str = ""

    def without_numbers(self) -> Call:
        """The same with tensors that have shapes only."""
        args, kwargs = pytree.tree_map_only(
            Tensor, lambda t: t.to("meta"), (self.args, self.kwargs)
        )
        return Call(args, kwargs, self.follows, self.unseen)


def bare(block: nn.Module) -> nn.Module:
    """Copy a layer with parameters of the same shapes and formats that take no memory (zeros).

    Buffers stay. Hooks on the layer itself are left out: they run around whatever stands in for it.
    """
    shown: dict[int, Any] = {}
    for p in block.parameters():
        number = torch.zeros((), dtype=p.dtype, device=p.device)
        shown[id(p)] = nn.Parameter(number.expand(p.shape), requires_grad=p.requires_grad)
    twin = copied_module(block, shown)
    for hooks in (twin._forward_pre_hooks, twin._forward_hooks, twin._backward_hooks):
        hooks.clear()
    return twin
