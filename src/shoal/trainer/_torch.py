"""Private names of torch that this room uses; tested on 2.13."""

from __future__ import annotations

import torch
from torch.utils import _pytree as pytree
from torch.utils.data.dataloader import _BaseDataLoaderIter as LoaderIterator

__all__ = ["LoaderIterator", "gradient_hooks", "pytree"]


def gradient_hooks(tensor: torch.Tensor) -> int:
    """Count the hooks of `register_hook`; those that run after accumulation are not among them."""
    return len(tensor._backward_hooks or ())
