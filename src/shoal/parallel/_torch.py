"""Private names of torch that this room uses; tested on 2.13."""

import torch
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.utils import _pytree as pytree

__all__ = ["BatchNorm", "in_backward", "pytree"]


def in_backward() -> bool:
    """Whether autograd runs on this thread now: a module called then is being recomputed."""
    return torch._C._current_graph_task_id() != -1
