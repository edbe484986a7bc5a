"""Copies of a module that has run already: what it remembers of its last pass loses its history.

Many modules keep a tensor of the last forward pass as an attribute (a recurrent state, an attention
map, an auxiliary loss). Such a tensor hangs in the graph of that pass, and torch refuses to copy
it. A copy of the module needs its value only.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode


def copied_module(module: nn.Module, known: dict[int, Any] | None = None) -> nn.Module:
    """Copy a module deeply, with the values of tensors that it keeps from earlier passes.

    known   as in `copy.deepcopy`: what stands for an object, by its id

    >>> layer = nn.Linear(2, 2)
    >>> layer.last = layer(torch.ones(1, 2))
    >>> copied_module(layer).last.requires_grad
    False
    """
    with _WithoutHistory():
        return copy.deepcopy(module, known)


class _WithoutHistory(TorchFunctionMode):
    """Copies tensors in the middle of a graph as values."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.__deepcopy__ and not args[0].is_leaf:
            tensor, known = args
            if id(tensor) not in known:
                known[id(tensor)] = tensor.detach().clone()
            return known[id(tensor)]
        return func(*args, **(kwargs or {}))
