"""What a run was asked for, beyond model, optimizer and loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from shoal.base.policies import OptimizerPolicy

BuildOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@dataclass
class RunSettings:
    """What a run was asked for, beyond model, optimizer and loss."""

    clip: float = 0.0
    seed: int = 0
    call: str = "single"
    batch: int = 0
    skip_limit: int = 5
    keep: int = 2
    schedule: OptimizerPolicy | None = None
    total_steps: int = 0
    cut_own_batches: bool = False
    loss_scale: float = 0.0
    average: float = 0.0
