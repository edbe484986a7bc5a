"""Counts the floating-point operations of one sample, forward and backward.

A copy of the module runs two samples while torch's own counter listens, before the optimizer has
any state, so the copy fits where that state will be. The real module, its buffers and the random
generators are left as they were. Matrix products, convolutions and attention count; element-wise
work does not, as is usual for MFU.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode


def backward_flops(
    module: nn.Module, batch: Any, loss_sum: Callable[[nn.Module, Any], torch.Tensor]
) -> int | None:
    """FLOP of `loss_sum(module, batch).backward()`; None for a module that cannot be copied or run.

    batch    a few samples, already on the module's device
    Limits   operations that torch's counter does not know count as 0
    """
    kept = torch.get_rng_state()
    try:
        copied = copy.deepcopy(module)
        for part in copied.modules():
            part._forward_pre_hooks.clear()
            part._forward_hooks.clear()
        with FlopCounterMode(display=False) as counter:
            loss_sum(copied, batch).backward()
        return counter.get_total_flops()
    except Exception:  # whatever a user's module cannot do here, MFU is worth less than training
        return None
    finally:
        torch.set_rng_state(kept)
