"""Private names of torch that this package uses; tested on 2.11 and 2.13."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.data.dataloader import _BaseDataLoaderIter as LoaderIterator

__all__ = [
    "LoaderIterator",
    "count_backward_hooks",
    "count_gradient_hooks",
    "count_output_hooks",
    "get_step_pre_hooks",
    "is_profiled",
    "list_hooks",
    "pytree",
]


is_profiled = torch.autograd._profiler_enabled
"""Returns whether a profiler of torch records what this thread computes."""


def count_gradient_hooks(tensor: torch.Tensor) -> int:
    """Count hooks of user code on a tensor's gradient, also those after its accumulation."""
    return len(tensor._backward_hooks or ()) + count_accumulation_hooks(tensor)


def count_accumulation_hooks(tensor: torch.Tensor) -> int:
    """Count a tensor's `register_post_accumulate_grad_hook` hooks that are not the run's own."""
    return _count_user_hooks(getattr(tensor, "_post_accumulate_grad_hooks", None))


def count_output_hooks(tensor: torch.Tensor) -> int:
    """Count hooks of user code on an output of a model; torch's FSDP has some of its own."""
    return _count_user_hooks(tensor._backward_hooks)


def _count_user_hooks(hooks: Mapping[int, Any] | None) -> int:
    names = [str(getattr(hook, "__module__", "shoal")) for hook in (hooks or {}).values()]
    return sum(name.partition(".")[0] not in ("shoal", "torch", "functools") for name in names)


def list_hooks(layer: nn.Module) -> list[OrderedDict[int, Any]]:
    """Return the dicts of a layer's hooks, by id."""
    found: Any = (
        *(layer._forward_hooks, layer._forward_pre_hooks),
        *(layer._backward_hooks, layer._backward_pre_hooks),
    )
    return list(found)


def count_backward_hooks(layer: nn.Module) -> int:
    """Count a layer's backward hooks that are of user code."""
    return sum(map(_count_user_hooks, list_hooks(layer)[2:]))


def get_step_pre_hooks(optimizer: torch.optim.Optimizer) -> OrderedDict[int, Any]:
    """Return the optimizer's own dict of step pre-hooks, by id, in calling order."""
    hooks: Any = optimizer._optimizer_step_pre_hooks
    return cast(OrderedDict[int, Any], hooks)
