"""Private names of torch that this room uses; tested on 2.13."""

from torch.utils import _pytree as pytree

__all__ = ["pytree"]
