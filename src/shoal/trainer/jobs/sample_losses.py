"""Loss and gradient norm of each sample of a step, by a checkpoint near it, on one process.

    checkpoint before step N ──> the model as it met the step, but for the steps between
    sample by sample: forward in eval mode, the run's loss, sum / count of its targets
    on request: backward of the sum, and the norm of all gradients / count of the step's targets

So a norm is that of the sample's part of the step's mean gradient: a text of 100 targets counts ten
times as much as one of ten. Weighted by their counts, the losses of a step are the loss that the
run wrote for it, if the checkpoint is of the step before and the model draws nothing at random.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from shoal.base.errors import ShoalError
from shoal.base.plans.plan import Plan
from shoal.base.pretrained_folders import HF
from shoal.checkpoint.format.hub_folder import CONFIG, HUB
from shoal.checkpoint.format.listing import list_checkpoints
from shoal.config.sections import Config
from shoal.data.inspection.sample_fields import split_joined
from shoal.data.loading.sample_seeds import preserved_rng
from shoal.data.loading.step_samples import StepBatch
from shoal.data.sources import Source
from shoal.fabric.device import accelerator_type
from shoal.forecast.models.hf_presence import is_hf_name
from shoal.trainer._torch import pytree
from shoal.trainer.jobs.configured_run import build_model, import_loss
from shoal.trainer.jobs.text_generation import load_weights
from shoal.trainer.step.call_contract import call_model, split_batch, sum_and_count
from shoal.wire.phases import iter_with_progress


@dataclass(frozen=True)
class SampleLoss:
    """Mean loss of one sample, the count of its targets, and its part of the step's gradient.

    Attributes:
        grad_norm: norm of the gradient of its summed loss, divided by all targets of the step.
    """

    loss: float
    count: float
    grad_norm: float | None = None

    def record(self) -> dict[str, float]:
        """Return the keys of the sample's row; no norm if none was computed."""
        norm = {"grad_norm": self.grad_norm} if self.grad_norm is not None else {}
        return {"loss": self.loss, "targets": self.count, **norm}


@dataclass(frozen=True)
class NearCheckpoint:
    """The checkpoint under which the samples of a step are weighed.

    Attributes:
        step: of the checkpoint.
        path: its folder.
    """

    step: int
    path: Path


def find_checkpoint(folder: Path, step: int) -> NearCheckpoint | None:
    """Return the newest checkpoint before a step, else the oldest after it; None without one."""
    found = [*list_checkpoints(folder / "checkpoints")]
    found += [one for tag in folder.glob("tags/*/checkpoints") for one in list_checkpoints(tag)]
    before = [one for one in found if one.step < step]
    chosen = max(before, key=lambda one: one.step) if before else None
    if chosen is None and found:
        chosen = min(found, key=lambda one: one.step)
    return NearCheckpoint(chosen.step, chosen.path) if chosen else None


def compute_losses(
    config: Config,
    source: Source,
    plan: Plan,
    folder: Path,
    checkpoint: Path,
    batch: StepBatch,
    *,
    with_norms: bool = False,
) -> list[list[SampleLoss | None]]:
    """Return the loss of each sample of a step, by micro-batch in order.

    Args:
        folder: of the run, with its hub/.
        checkpoint: a step's folder.
        batch: all micro-batches of the step. One that cannot be cut into samples has one loss.
        with_norms: run a backward pass for each sample too.

    Returns:
        None for a sample without a target, or with a loss that is not finite.

    Raises:
        ShoalError: a model that cannot be built, or a checkpoint of another model.
    """
    model = _build_saved_model(config, source, folder)
    load_weights(model, checkpoint, False)
    device = torch.device(accelerator_type() or "cpu")
    model.to(device).eval()
    loss = import_loss(config.model)
    parts = [
        _cut(micro_batch.value, len(micro_batch.positions)) for micro_batch in batch.micro_batches
    ]
    each = iter_with_progress("losses", len(parts), parts)
    with torch.set_grad_enabled(with_norms), preserved_rng():
        found = [
            [_one_loss(model, loss, plan.call, value, device) for value in one] for one in each
        ]
    targets = sum(one.count for row in found for one in row if one is not None)
    return [[_share_norm(one, targets) for one in row] for row in found]


def _share_norm(one: SampleLoss | None, targets: float) -> SampleLoss | None:
    """Return the sample with the gradient norm of its sum divided by the step's targets."""
    if one is None or one.grad_norm is None:
        return one
    return replace(one, grad_norm=one.grad_norm / targets)


def _build_saved_model(config: Config, source: Source, folder: Path) -> nn.Module:
    """Build the run's model; one of transformers from the configuration in the run folder."""
    section = config.model
    if not section.build and is_hf_name(section.name) and (folder / HUB / CONFIG).is_file():
        section = replace(section, name=f"{HF}{folder / HUB / CONFIG}")
    return build_model(replace(config, model=section), source)


def _cut(value: Any, count: int) -> list[Any]:
    """Return micro-batches of one sample each; the whole one if it is not stacked by sample."""
    if split_joined(value, count) is None:
        return [value]
    return [_slice(value, n) for n in range(count)]


def _slice(value: Any, n: int) -> Any:
    if isinstance(value, Mapping):
        return {key: _slice(part, n) for key, part in value.items()}
    if isinstance(value, torch.Tensor | np.ndarray):
        return value[n : n + 1]
    if value and all(isinstance(one, str | bytes) for one in value):
        return [value[n]]
    return [_slice(part, n) for part in value]


def _one_loss(
    model: nn.Module, loss: Any, call: str, value: Any, device: torch.device
) -> SampleLoss | None:
    """Return the mean loss of one sample, and the gradient norm of its summed loss."""
    moved = pytree.tree_map(lambda x: x.to(device) if isinstance(x, torch.Tensor) else x, value)
    inputs, targets = split_batch(moved)
    result = loss(call_model(model, inputs, call), targets)
    total, count = sum_and_count(result, targets)
    number = float(total.detach().double()) / float(count) if float(count) else float("nan")
    if not np.isfinite(number):
        return None
    norm = _gradient_norm(model, total) if torch.is_grad_enabled() else None
    return SampleLoss(number, float(count), norm)


def _gradient_norm(model: nn.Module, loss: torch.Tensor) -> float | None:
    """Return the norm of the gradients of a loss; None if it is not finite or has none."""
    model.zero_grad(set_to_none=True)
    if loss.requires_grad:
        loss.backward()
    gradients = [one.grad for one in model.parameters() if one.grad is not None]
    if not gradients:
        return None
    squares = sum(float(torch.linalg.vector_norm(one.double())) ** 2 for one in gradients)
    model.zero_grad(set_to_none=True)
    return float(squares**0.5) if np.isfinite(squares) else None


def describe_failure(error: Exception) -> str:
    """Return why no losses could be computed, in one line."""
    text = str(error).strip().splitlines() or [type(error).__name__]
    return text[0] if isinstance(error, ShoalError) else f"{type(error).__name__}: {text[0]}"
