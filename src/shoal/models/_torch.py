"""Private names of torch that this room uses; tested on 2.13."""

from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = ["is_fake", "is_recorded", "pytree"]


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor has a shape and no numbers (FakeTensor)."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


def is_recorded() -> bool:
    """Whether make_fx is writing down what is computed now."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    return get_proxy_mode() is not None
