"""Texts about the loss in a run's first step; imported when there is one to print."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import torch
from torch import nn

from shoal.base.errors import ConfigError
from shoal.trainer.guards.loss_trial import TrialFinding

EVALUATES = (
    "the model is in evaluation mode while it trains: dropout is off and BatchNorm frozen; try: "
    "model.train() before run.step"
)
SHIFT = "try: (ids[:, :-1], ids[:, 1:]) as (inputs, targets)"


class FirstStepFindings(Protocol):
    """Interface of a `FirstStepLoss` that reports read.

    Attributes:
        module: the model.
        dropped: losses in its outputs that the default loss leaves out.
        other_kernels: lines on kernels that it lacks.
        asked: functions of torch.distributed that the loss called.
        together: how many samples the loss compares with each other, 0 if it adds them up.
        micro_batches: of the step, over all ranks.
        compared: whether the loss compared targets that are the inputs with them, place by place.
        labels: whether such targets are tensors of their own.
        trial: what the trial of the loss on parts of a micro-batch found.
        foreign: parameters of the loss that no run holds.
        own_loss: the `ModelLoss`, if the model's own loss counts.
    """

    module: nn.Module
    dropped: set[str]
    other_kernels: list[str]
    asked: set[str]
    together: int
    micro_batches: int
    compared: bool
    labels: bool
    trial: TrialFinding | None
    foreign: Sequence[torch.Tensor] | None
    own_loss: Any


def print_findings(seen: FirstStepFindings, notice: Callable[[str], None]) -> None:
    """Print a notice for each finding of the first step.

    Args:
        seen: the findings.
        notice: prints a line, by rank 0.

    Raises:
        ConfigError: the model sees the position it predicts.
    """
    if seen.dropped:
        from shoal.trainer.guards.reports.model_notices import print_dropped_losses

        print_dropped_losses(seen.module, seen.dropped, notice)
    if seen.own_loss is not None:
        notice(seen.own_loss.line())
    for line in seen.other_kernels:
        notice(line)
    if seen.asked:
        notice(
            f"loss: calls torch.distributed.{', '.join(sorted(seen.asked))}; the run sums what it "
            f"returns over all ranks and divides once, so a sum over ranks or a division by their "
            f"number would count twice; try: (sum, count) of this rank's own samples"
        )
    if seen.together:
        notice(
            f"loss: what a sample adds depends on the others beside it (like negatives out of the "
            f"batch), and only the {seen.together} of a micro-batch are beside each other, of "
            f"which the step has {seen.micro_batches}; other layouts give the same numbers for the "
            f"same micro-batches, not for the same batch; if it is meant: {COUPLED}"
        )
    if seen.foreign:
        notice(foreign_line(seen.foreign))
    trial = seen.trial
    if trial is not None and not (trial.kind == "coupled" and _is_alone(seen)):
        notice(trial_line(trial))
    if not seen.compared:
        return
    line = (
        "the targets are the inputs themselves, and the loss compares place t with place t: the "
        "model learns to repeat its input (Hugging Face's labels are shifted inside its models, "
        "here they must come shifted)"
    )
    kind = type(seen.module).__name__
    if seen.labels and ("CausalLM" in kind or "LMHead" in kind):
        raise ConfigError(f"batch: {line}; {SHIFT}")
    notice(f"batch: {line}; for next-token training {SHIFT}; if a copy is meant, all is well")


COUPLED = "shoal.parallelize(…, coupled=True)"


def _is_alone(seen: FirstStepFindings) -> bool:
    """Return whether coupled samples need no second line: one micro-batch, or they are named."""
    return seen.micro_batches < 2 or bool(seen.together)


def foreign_line(leaves: Sequence[torch.Tensor]) -> str:
    """Return the notice on parameters of a loss that no run holds.

    Args:
        leaves: the parameters.
    """
    shapes = ", ".join(str(list(one.shape)) for one in leaves)
    return (
        f"loss: it depends on {len(leaves)} tensor{'s' if len(leaves) > 1 else ''} of shape "
        f"{shapes} that require a gradient and are no parameters of the run: their gradient is "
        f"neither summed over ranks nor divided by the step's count; try: make them parameters of "
        f"the model, which returns them among its outputs, or requires_grad_(False)"
    )


def trial_line(found: TrialFinding) -> str:
    """Return the notice on a loss whose parts do not add up, or that was not tried.

    Args:
        found: the finding.
    """
    rows, first = found.rows, found.first
    one, other = found.parts
    parts = f"{one:g} and {other:g} for {first} and {rows - first} of them"
    if found.kind == "mean":
        return (
            f"loss: the first of (sum, count) is a mean over the micro-batch ({found.whole:g} for "
            f"{rows} samples, {parts}), and the run divides it by the count once more; try: the "
            f'mean × count, reduction="sum", or shoal.mean_of_samples around the mean'
        )
    if found.kind == "product":
        return (
            f"loss: a sum over the micro-batch is multiplied by its number of samples "
            f"({found.whole:g} for {rows} samples, {parts}), as if it were a mean; try: (sum, "
            f"count) without shoal.mean_of_samples"
        )
    if found.kind == "fixed":
        return (
            f"loss: its count is {found.whole:g} for {rows} samples and for {first} of them, so "
            f"that the step divides by its number of micro-batches, which layouts change; try: "
            f"(sum, len(targets))"
        )
    if found.kind == "count":
        told = parts if first else f"{one:g} for none"
        return (
            f"loss: its counts do not add up ({told}"
            f"{f', {found.whole:g} for all {rows}' if first else ''}), as with "
            f"clamp(min=1) or max(1, n); try: the count of this micro-batch as it is, 0 too: the "
            f"run divides by that of the whole step"
        )
    if found.kind == "coupled":
        return (
            f"loss: what a sample adds depends on the others of its micro-batch (a mean over a "
            f"mask or over tokens, a weight, a norm or negatives of the batch): {found.whole:g} "
            f"for {rows} samples, {parts}; other layouts cut other micro-batches; try: (sum, "
            f"count) over targets, with statistics of the whole dataset; if it is meant: {COUPLED}"
        )
    why = {
        "random": "it draws random numbers",
        "state": "it keeps a state between calls",
        "shape": "its inputs have no common dimension of samples",
    }[found.kind]
    return (
        f"loss: not tried on parts of a micro-batch, since {why}; the run takes it for a sum over "
        f"samples"
    )


def refuse_targets(targets: object) -> NoReturn:
    """Raise ConfigError for targets that the default loss cannot compare, such as one dict."""
    got = type(targets).__name__
    if isinstance(targets, Mapping):
        got = f"one dict ({', '.join(map(str, targets))})"
    raise ConfigError(
        f"loss: the default loss takes a tensor of integer targets, got {got}; try: a loss of "
        f"your own; for a model of transformers: labels in the dict, and its own loss counts"
    )


def refuse_broadcast(rows: int, outputs: torch.Tensor, targets: torch.Tensor) -> NoReturn:
    """Raise ConfigError for outputs [B, 1] and targets [B], which gave B × B losses."""
    raise ConfigError(
        f"loss: gives {rows} × {rows} numbers for {rows} samples: outputs {list(outputs.shape)} "
        f"and targets {list(targets.shape)} were broadcast against each other; try: "
        f"outputs.flatten() and targets.flatten() in it"
    )
