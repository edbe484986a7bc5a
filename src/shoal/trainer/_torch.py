"""Private names of torch that this room uses; tested on 2.13."""

from __future__ import annotations

from torch.utils import _pytree as pytree
from torch.utils.data.dataloader import _BaseDataLoaderIter as LoaderIterator

__all__ = ["LoaderIterator", "pytree"]
