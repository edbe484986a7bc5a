"""Copies of a module: with its numbers, or with shapes alone, on the meta device.

A module may have run already: tensors that it keeps from its last pass lose their history in the
copy. Many modules keep a tensor of the last forward pass as an attribute (a recurrent state, an
attention map, an auxiliary loss). Such a tensor is part of that pass's graph, and torch refuses to
copy it. A copy of the module needs its value only.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from shoal.base.errors import PlanError


def copy_module(module: nn.Module, known: dict[int, Any] | None = None) -> nn.Module:
    """Copy a module deeply, with the values of tensors that it keeps from earlier passes.

    Args:
        known: as in `copy.deepcopy`: the copy of an object, by the object's id.

    >>> layer = nn.Linear(2, 2)
    >>> layer.last = layer(torch.ones(1, 2))
    >>> copy_module(layer).last.requires_grad
    False
    """
    with _DetachedCopyMode():
        return copy.deepcopy(module, known)


def copy_to_meta(module: nn.Module, device: str = "meta") -> nn.Module:
    """Copy a module with tensors without data; forward hooks and replaced forwards are left out.

    Tensors that are plain attributes are copied so too, those inside of lists and dicts are not.

    Args:
        device: "meta"; "cpu" while a FakeTensorMode is on, whose tensors have no data either.

    Raises:
        PlanError: a part copies itself as itself, e.g. a shared teacher: its weights and hooks
            would be the model's own.
    """
    twins: dict[int, Any] = {}
    loose = [v for part in module.modules() for v in vars(part).values()]
    plain = [v for v in loose if isinstance(v, torch.Tensor)]  # attributes that are not registered
    for tensor in [*module.parameters(), *module.buffers(), *plain]:
        twin = torch.empty_strided(  # empty_like runs in Python for meta tensors: ten times slower
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device
        )
        if isinstance(tensor, nn.Parameter):
            twin = nn.Parameter(twin, requires_grad=tensor.requires_grad)
        twins[id(tensor)] = twin
    copied = copy_module(module, twins)
    refuse_shared_parts(module, copied)
    for part in copied.modules():
        part._forward_pre_hooks.clear()
        part._forward_hooks.clear()
        part.__dict__.pop("forward", None)  # recomputation is no work of the model
        part.__dict__.pop("_output_capturing_hooks_installed", None)  # transformers': not here
    return copied


def refuse_shared_parts(module: nn.Module, copied: nn.Module) -> None:
    """Refuse a copy of a module that has layers or tensors of the module itself.

    Raises:
        PlanError: a part copies itself as itself.
    """
    own = {id(one) for one in (*module.modules(), *module.parameters(), *module.buffers())}
    for one in (*copied.named_modules(), *copied.named_parameters(), *copied.named_buffers()):
        if id(one[1]) in own:
            name = one[0] or type(module).__name__
            raise PlanError(f"model: {name} copies itself as itself, so no twin of it can be made")


class _DetachedCopyMode(TorchFunctionMode):
    """Torch function mode in which deep copies of non-leaf tensors copy values only."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.__deepcopy__ and not args[0].is_leaf:
            tensor, known = args
            if id(tensor) not in known:
                known[id(tensor)] = tensor.detach().clone()
            return known[id(tensor)]
        return func(*args, **(kwargs or {}))
