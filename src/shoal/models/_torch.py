"""Private names of torch that this room uses; tested on 2.13."""

from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils import _pytree as pytree

__all__ = ["FakeTensor", "get_proxy_mode", "pytree"]
