"""Private names of torch that this package uses; tested on 2.13."""

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = ["is_fake", "is_recording", "is_tracing", "pytree", "to_plain_part"]


def is_fake(tensor: Tensor) -> bool:
    """Return whether a tensor is a FakeTensor: a shape without data."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


def is_recording() -> bool:
    """Return whether torch.compile, make_fx or another dispatch mode follows the operations."""
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


def is_tracing() -> bool:
    """Return whether make_fx is tracing the current computation."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    return get_proxy_mode() is not None


def to_plain_part(weight: Tensor) -> Tensor:
    """Return a plain view of a part of a weight, which in user code has the full shape."""
    if not hasattr(type(weight), "part_of_weight") or hasattr(weight, "device_mesh"):
        return weight
    with torch._C.DisableTorchFunctionSubclass():
        return weight.view_as(weight)
