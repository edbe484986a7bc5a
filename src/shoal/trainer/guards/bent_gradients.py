"""Try the backward pass of a model's copy with gradients of two sizes: is it linear?

    gradients of W for 2⁻¹³ · g  ×  2²⁶  =  gradients of W for 2¹³ · g

It is not where an autograd.Function or a hook clamps, rounds or normalises gradients of
activations. A run differentiates sums and divides by the step's count afterwards; plain PyTorch
differentiates a mean. Linear backward passes give the same numbers, the others do not.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from shoal.data.loading.sample_seeds import preserved_rng
from shoal.data.loading.step_samples import StepBatch
from shoal.parallel.program import Program
from shoal.trace.isolation.collective_ban import forbid_collectives
from shoal.trainer.batches.batch_split import split_into_micro_batches
from shoal.trainer.guards.model_trial import ROWS, TOLERANCES, ModelTrial, list_leaves
from shoal.trainer.step.micro_batch import prepare_batch

SIZES = (2.0**-13, 2.0**13)
"""Factors of the gradients of a trial: powers of two, which round nothing."""
BENT = 1e-3
"""Relative difference of gradients from which on a backward pass is not linear."""


def find_bent_gradient(trial: ModelTrial, program: Program, batch: Any) -> str:
    """Return the name of a weight whose gradient is no multiple of that of the outputs.

    Args:
        trial: the copy of the model.
        program: the run's, which prepares batches.
        batch: of a step.

    Returns:
        "" if there is none, or if the model has no backward pass.
    """
    if isinstance(batch, StepBatch):
        batch = batch.micro_batches[0].value
    quiet = warnings.catch_warnings()
    try:
        with torch.enable_grad(), preserved_rng(), forbid_collectives(), quiet:
            warnings.simplefilter("ignore")
            trial.module.to(program.world.device)
            parts = split_into_micro_batches(prepare_batch(program, batch), ROWS)
            return find_bent_weight(trial.module, trial.call_module(next(iter(parts))))
    except Exception:  # the run itself reports what is wrong
        return ""


def find_bent_weight(module: nn.Module, outputs: Any) -> str:
    """Return the name of a weight whose gradient is no multiple of that of the outputs, or "".

    Args:
        module: the model.
        outputs: of a forward pass with gradients.
    """
    roots = [leaf for leaf in list_leaves(outputs) if leaf.requires_grad]
    weights = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if not roots or any(one.dtype not in TOLERANCES for one in (*roots, *weights.values())):
        return ""
    drawn = [torch.randn_like(root) for root in roots]
    small, large, again = (
        torch.autograd.grad(
            roots, list(weights.values()), [size * one for one in drawn],
            retain_graph=True, allow_unused=True,
        )
        for size in (*SIZES, SIZES[1])
    )  # fmt: skip
    for name, few, many, same in zip(weights, small, large, again, strict=True):
        if few is None or many is None or same is None or not torch.equal(many, same):
            continue  # not used, or another gradient each time
        apart = (few * (SIZES[1] / SIZES[0]) - many).abs().max()
        if bool(apart > BENT * many.abs().max()):
            return name
    return ""
