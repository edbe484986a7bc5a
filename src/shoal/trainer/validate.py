"""Validation in the main job: the held-out loss beside what a model without context would reach."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shoal.data.sources import Source
from shoal.models.loss import find_logits
from shoal.trainer.contract import IGNORED_TARGET
from shoal.trainer.run import Run


def validator(
    run: Run, source: Source, workers: int, *, on_labels: bool
) -> Callable[[], dict[str, float] | None]:
    """A function that evaluates the held-out data and emits `validated`; None without such data.

    on_labels   the default loss is used, so images and the like have an accuracy as well
    """
    images = source.kind == "samples" and on_labels
    baseline = "unigram entropy" if source.kind == "tokens" else "class entropy"

    def validate() -> dict[str, float] | None:
        if source.validation is None:
            return None
        metrics = {"accuracy": accuracy} if images else {}
        batches = run.feed.held_out(source.validation, workers, source.collate)
        values = run.evaluate(batches, metrics)
        if run.world.is_first:
            run.recorder.events.emit(
                "validated",
                step=run.step_count,
                loss=values["loss"],
                accuracy=values.get("accuracy"),
                targets=int(values["targets"]),
                unigram_entropy=source.unigram_entropy,
                baseline=baseline,
            )
        return values

    return validate


def accuracy(outputs: Any, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(right answers, answers) of scores [..., classes] against labels [...], −100 left out."""
    right = find_logits(outputs).argmax(-1) == targets
    return right.sum().float(), (targets != IGNORED_TARGET).sum()
