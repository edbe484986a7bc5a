"""Private names of torch that this room uses; tested on 2.13."""

from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["FakeTensorMode", "TorchDispatchMode", "pytree"]
