"""The loss that a model of transformers computes itself, counted as a run counts losses.

    batch = {"input_ids": …, "labels": …}      one dict, passed by name
    outputs.loss                               a mean over labels, auxiliary losses included
    (outputs.loss × n, n)                      n: the labels that this mean is over

A decoder predicts the label one place further, so that the first label of a sequence counts
nowhere. Labels of −100 never count. Batches of (inputs, targets) have the default loss, on logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from shoal.models.loss import token_loss

IGNORED = -100
SHIFTING = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "DoubleHeadsModel")
"""Parts of the names of classes whose loss is over shifted labels, but for encoder-decoders."""


class ModelLoss:
    """Loss of a run whose model computes one, if batches have labels; else the default loss.

    Args:
        module: a model of transformers.
    """

    is_default = True

    def __init__(self, module: nn.Module) -> None:
        self.name = type(module).__name__
        config: Any = getattr(module, "config", None)
        decodes = any(part in self.name for part in SHIFTING)
        self.shifts = decodes and not getattr(config, "is_encoder_decoder", False)

    def find_loss(self, outputs: Any, targets: Any) -> torch.Tensor | None:
        """Return the model's own loss of a batch with labels; None: it has none."""
        if not isinstance(targets, Mapping) or not isinstance(targets.get("labels"), torch.Tensor):
            return None
        has_keys = isinstance(outputs, Mapping)
        loss = outputs.get("loss") if has_keys else getattr(outputs, "loss", None)
        return loss if isinstance(loss, torch.Tensor) and not loss.ndim else None

    def count_labels(self, labels: torch.Tensor) -> torch.Tensor | int:
        """Return how many labels the model's mean is over.

        Args:
            labels: integers [batch, sequence] or [batch]; or numbers, whose mean is over all.
        """
        if labels.is_floating_point():
            return labels.numel()
        counted = labels[..., 1:] if self.shifts and labels.ndim > 1 else labels
        return (counted != IGNORED).sum()

    def line(self) -> str:
        """Return the notice on the loss that counts."""
        where = " after the shift by one" if self.shifts else ""
        return (
            f"loss: none was given, so {self.name}'s own counts (outputs.loss, with its auxiliary "
            f"losses), over the labels that are not −100{where}; another: loss=… of "
            f"shoal.parallelize"
        )

    def __call__(self, outputs: Any, targets: Any) -> tuple[torch.Tensor, torch.Tensor | int]:
        """Return (sum of the losses, count of targets) of a micro-batch."""
        own = self.find_loss(outputs, targets)
        if own is None:
            return token_loss(outputs, targets)
        count = self.count_labels(targets["labels"])
        if isinstance(count, torch.Tensor):  # a mean over no label is NaN, and adds nothing
            own = torch.where(count > 0, own, torch.zeros_like(own))
        return own * count, count
