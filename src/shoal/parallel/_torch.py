"""Private names of torch that this room uses; tested on 2.13."""

from contextlib import AbstractContextManager

import torch
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.conv import _ConvNd as Convolution
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "BatchNorm",
    "Convolution",
    "TorchDispatchMode",
    "UncompiledMode",
    "counting_writes",
    "in_backward",
    "pytree",
]


class UncompiledMode(TorchDispatchMode):
    """A dispatch mode for code that nobody compiles; torch's guard would import its compiler."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def in_backward() -> bool:
    """Whether autograd runs on this thread now: a module called then is being recomputed."""
    return torch._C._current_graph_task_id() != -1


def counting_writes() -> AbstractContextManager[None]:
    """Below autograd: let in the layer that counts in-place writes to a tensor."""
    key = torch._C.DispatchKey.ADInplaceOrView
    guard: AbstractContextManager[None] = torch._C._SetExcludeDispatchKeyGuard(key, False)
    return guard
