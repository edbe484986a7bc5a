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
    "pytree",
]


def count_gradient_hooks(tensor: torch.Tensor) -> int:
    """Count a tensor's `register_hook` hooks; hooks that run after accumulation are not counted."""
    return len(tensor._backward_hooks or ())


def get_step_pre_hooks(optimizer: torch.optim.Optimizer) -> OrderedDict[int, Any]:
    """Return the optimizer's own dict of step pre-hooks, by id, in calling order."""
    hooks: Any = optimizer._optimizer_step_pre_hooks
    return cast(OrderedDict[int, Any], hooks)
