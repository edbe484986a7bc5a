"""Private names of torch that this package uses; tested on 2.11 and 2.13."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, cast

import torch
from torch.utils import _pytree as pytree
from torch.utils.data.dataloader import _BaseDataLoaderIter as LoaderIterator

__all__ = [
    "LoaderIterator",
    "count_gradient_hooks",
    "get_step_pre_hooks",
    "is_profiled",
    "pytree",
]


is_profiled = torch.autograd._profiler_enabled
"""Returns whether a profiler of torch records what this thread computes."""


def count_gradient_hooks(tensor: torch.Tensor) -> int:
    """Count hooks of user code on a tensor's gradient, also those after its accumulation."""
    return len(tensor._backward_hooks or ()) + count_accumulation_hooks(tensor)


def count_accumulation_hooks(tensor: torch.Tensor) -> int:
    """Count a tensor's `register_post_accumulate_grad_hook` hooks that are not the run's own."""
    after = getattr(tensor, "_post_accumulate_grad_hooks", None) or {}
    names = [str(getattr(hook, "__module__", "shoal")) for hook in after.values()]
    return sum(name.partition(".")[0] not in ("shoal", "torch", "functools") for name in names)


def get_step_pre_hooks(optimizer: torch.optim.Optimizer) -> OrderedDict[int, Any]:
    """Return the optimizer's own dict of step pre-hooks, by id, in calling order."""
    hooks: Any = optimizer._optimizer_step_pre_hooks
    return cast(OrderedDict[int, Any], hooks)
