"""Private names of torch that this package uses; tested on 2.13."""

from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = ["is_fake", "is_tracing", "pytree"]


def is_fake(tensor: Tensor) -> bool:
    """Return whether a tensor is a FakeTensor: a shape without data."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


def is_tracing() -> bool:
    """Return whether make_fx is tracing the current computation."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    return get_proxy_mode() is not None
