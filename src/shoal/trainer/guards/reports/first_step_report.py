"""Texts about the loss in a run's first step; imported when there is one to print."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NoReturn, Protocol

import torch
from torch import nn

from shoal.base.errors import ConfigError

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
    """

    module: nn.Module
    dropped: set[str]
    other_kernels: list[str]
    asked: set[str]
    together: int
    micro_batches: int
    compared: bool
    labels: bool


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
            f"same micro-batches, not for the same batch"
        )
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


def refuse_targets(targets: object) -> NoReturn:
    """Raise ConfigError for targets that the default loss cannot compare, such as one dict."""
    got = type(targets).__name__
    if isinstance(targets, Mapping):
        got = f"one dict ({', '.join(map(str, targets))})"
    raise ConfigError(
        f"loss: the default loss takes a tensor of integer targets, got {got}; try: a loss of "
        f"your own; for a model that shifts labels and takes their mean itself: lambda out, batch: "
        f'(out.loss * n, n) with n = (batch["labels"][:, 1:] != -100).sum()'
    )


def refuse_broadcast(rows: int, outputs: torch.Tensor, targets: torch.Tensor) -> NoReturn:
    """Raise ConfigError for outputs [B, 1] and targets [B], which gave B × B losses."""
    raise ConfigError(
        f"loss: gives {rows} × {rows} numbers for {rows} samples: outputs {list(outputs.shape)} "
        f"and targets {list(targets.shape)} were broadcast against each other; try: "
        f"outputs.flatten() and targets.flatten() in it"
    )
