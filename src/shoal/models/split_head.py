"""Vocabulary-parallel cross-entropy: every rank holds some rows of the head, none all logits.

Formula   a rank knows of its own classes m_r = max_v x_v, s_r = Σ_v exp(x_v − m_r) and the target
          x_y, or 0 if another rank holds class y. With m = max_r m_r:
          loss = m + log Σ_r s_r·exp(m_r − m) − Σ_r x_y
          gradient of own logits = exp(x − m) / Σ_r s_r·exp(m_r − m) − onehot(y)
Protocol  one gather of three numbers per token, in place of an all-gather of the logits; every rank
          adds up in the order of the ranks, so all get the same bits.
Source    Shoeybi et al. 2019 (1909.08053), section 3
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class Vocabulary(Protocol):
    """Ranks that each hold some rows of one head."""

    @property
    def start(self) -> int:
        """First class of this rank's rows."""

    @property
    def size(self) -> int:
        """Number of classes of all ranks together."""

    @property
    def most(self) -> int:
        """Rows of the rank that holds most: chunks must be equal everywhere."""

    def all_gather(self, tensor: Tensor) -> Tensor:
        """All-gather [...] to [ranks, ...]."""

    def all_reduce(self, tensor: Tensor) -> None:
        """All-reduce a tensor by sum, in place."""

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Compute [..., size] from replicated hidden states and this rank's rows of the head."""


def to_split_gradient(
    block: Tensor, picked: Tensor, skip: Tensor | None, vocabulary: Vocabulary
) -> Tensor:
    """Turn this rank's logits into their part of softmax − onehot, in place; return the losses.

    Args:
        block: [rows, own classes], fp32 or fp64.
        picked: int64 [rows, 1], of all classes.
        skip: bool [rows, 1]: rows without gradient.

    Returns:
        [rows, 1], the same on every rank.
    """
    here = picked - vocabulary.start
    elsewhere = (here < 0) | (here >= block.shape[1])
    here = here.masked_fill_(elsewhere, 0)
    at_target = block.gather(1, here).masked_fill_(elsewhere, 0)
    largest = block.amax(1, keepdim=True)
    block.sub_(largest).exp_()
    told = vocabulary.all_gather(torch.cat((largest, block.sum(1, keepdim=True), at_target), 1))
    maxima, sums, at_targets = told.unbind(2)  # each [ranks, rows]
    top = maxima.amax(0)
    total = (sums * (maxima - top).exp_()).sum(0)
    losses = top + total.log() - at_targets.sum(0)
    block.mul_((largest.squeeze(1) - top).exp_().div_(total).unsqueeze(1))
    block.scatter_add_(1, here, elsewhere.to(block.dtype) - 1)
    if skip is not None:
        block.masked_fill_(skip, 0)
    return losses.unsqueeze(1)


def split_logits_loss(logits: Any, flat: Tensor, ignored: Tensor, vocabulary: Vocabulary) -> Tensor:
    """Sum the cross-entropy of logits of which this rank holds its own classes (collective).

    Args:
        logits: has them in `.local`, [..., own classes].
        flat: int64 [rows], of all classes.
        ignored: bool [rows].

    Returns:
        The sum, fp32 (fp64 for fp64 logits).
    """
    local: Tensor = logits.local
    rows = local.reshape(-1, local.shape[-1])
    return _SplitCrossEntropy.apply(rows, flat, ignored, vocabulary)


class _SplitCrossEntropy(torch.autograd.Function):
    """Autograd function: forward computes the gradient of the logits, backward scales it."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, flat: Tensor, ignored: Tensor, vocabulary: Vocabulary
    ) -> Tensor:
        wide = torch.float64 if rows.dtype == torch.float64 else torch.float32
        block = rows.to(wide, copy=True)
        skip = ignored.unsqueeze(1)
        losses = to_split_gradient(block, flat.unsqueeze(1).masked_fill(skip, 0), skip, vocabulary)
        ctx.save_for_backward(block)
        ctx.dtype = rows.dtype
        return losses.masked_fill_(skip, 0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        (block,) = ctx.saved_tensors
        return (block * upstream).to(ctx.dtype), None, None, None
