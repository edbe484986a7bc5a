"""Predict the seconds of the one-process reference, before it begins.

    seconds = FLOP of one sample, forward and backward, in shapes alone · samples
              ÷ (SHARE · float64 rate of a matrix product, timed here and now)

Training reached 0.33 to 0.46 of that rate here, hence SHARE; building the model comes on top. So a
proof that is refused in advance would have been given up halfway, at a few times the cost.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

from shoal.base.errors import ShoalError
from shoal.data.loading.sample_inspection import first_samples
from shoal.fabric.device import is_accelerator
from shoal.proof.proof_case import ProofCase
from shoal.trace.costs.flops import count_training_flops
from shoal.trainer.batches.batch_split import batch_length
from shoal.trainer.step.call_contract import call_model, split_batch, sum_and_count
from shoal.wire.phases import phase

SIDE, DEVICE_SIDE = 384, 2048
"""Side of the square product that is timed, on a CPU and on a device: some ten milliseconds."""

ROUNDS = 3

SHARE = 0.5
"""Share of a product's rate that training reaches; rather more than was measured."""


@phase("estimate")
def expected_seconds(module: nn.Module, case: ProofCase, device: torch.device) -> float:
    """Return the seconds to train `case`'s few samples in one process.

    Args:
        module: as `case.build` returns it; it is not run.

    Returns:
        0 if the module cannot be traced by shapes, or no sample can be read.
    """
    try:
        few = first_samples(case.data, case.collate, case.plan.micro_batch)
    except ShoalError:
        return 0.0

    def loss_sum(twin: nn.Module, batch: Any) -> torch.Tensor:
        inputs, targets = split_batch(batch)
        return sum_and_count(case.loss(call_model(twin, inputs, case.plan.call), targets), targets)[
            0
        ]

    flops = count_training_flops(module, few, loss_sum)
    if not flops:
        return 0.0
    return flops / batch_length(few) * case.samples / (SHARE * _measure_flops_per_s(device))


def _measure_flops_per_s(device: torch.device) -> float:
    """Return the FLOP/s of the best of a few float64 matrix products."""
    side = DEVICE_SIDE if is_accelerator(device) else SIDE
    left, right = (torch.rand(side, side, dtype=torch.float64, device=device) for _ in range(2))
    best_s = float("inf")
    for _ in range(ROUNDS):
        began_s = time.perf_counter()
        float((left @ right)[0, 0])  # waits for the device
        best_s = min(best_s, time.perf_counter() - began_s)
    return float(2 * side**3 / best_s)
