"""Count the bytes that autograd saves in a forward pass for the backward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shoal.trainer._torch import pytree
from shoal.trainer.step.call_contract import call_model


def count_saved_bytes(module: nn.Module, inputs: Any, call: str) -> int:
    """Return the bytes that autograd saves for backward, with an estimate of the loss's tensors.

    Args:
        module: on the host, or on the meta device, where only shapes and types matter.
        inputs: of a few samples.
        call: as `call_model`.

    Raises:
        Exception: any exception of the module.
    """
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[id(storage)] = storage
        return tensor

    first = next(module.parameters(), None)
    device = "meta" if first is None else first.device

    def moved(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if first is None or not leaf.is_floating_point():
            return leaf.to(device)
        return leaf.to(device, first.dtype)

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda one: one):
        outputs = call_model(module, pytree.tree_map(moved, inputs), call)
    for weight in (*module.parameters(), *module.buffers()):
        kept.pop(id(weight.untyped_storage()), None)
    ends = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
    return sum(one.nbytes() for one in kept.values()) + 3 * sum(leaf.nbytes for leaf in ends)
