"""The trial of a loss on parts of a micro-batch names wrong losses, and leaves right ones alone."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.trainer.guards.first_step_checks import list_foreign_leaves
from shoal.trainer.guards.loss_trial import (
    TrialRows,
    checksum_loss_tensors,
    copy_loss,
    try_loss,
)
from shoal.trainer.guards.reports.first_step_report import foreign_line, trial_line

B, C, T = 7, 5, 4
DRAWN = torch.Generator().manual_seed(3)


def drawn(*size: int) -> Tensor:
    return torch.randn(*size, generator=DRAWN, dtype=torch.float64)


OUT, Y, TOKENS = drawn(B, C), drawn(B, C), drawn(B, T, C)
CLASSES = torch.randint(C, (B,), generator=DRAWN)
IDS = torch.randint(C, (B, T), generator=DRAWN)
SOME = IDS.masked_fill(torch.rand(B, T, generator=DRAWN) < 0.4, -100)
MASK = (torch.rand(B, C, generator=DRAWN) < 0.6).double()
WEIGHTS = torch.tensor([1.0, 2.0, 0.5, 1.5, 3.0]).double()
SIGNS = (Y > 0).double()
PAIRS, ANSWERS = drawn(2 * B + 2, 1), torch.zeros(2 * B + 2)
TEACHER = nn.Linear(C, C).double()
MODEL = nn.Linear(2, 2)


def halves(outputs: Tensor, targets: Tensor) -> Any:
    """DPO as TRL stacks it: first all chosen ones, then all rejected."""
    good, bad = outputs.chunk(2)
    return -F.logsigmoid(good - bad).sum(), len(good)


def rows_interleaved(outputs: Tensor, targets: Tensor) -> Any:
    return F.cross_entropy(outputs, targets.flatten(), reduction="sum"), targets.numel()


def ctc(outputs: Tensor, targets: Tensor) -> Any:
    lengths = torch.full((len(targets),), outputs.shape[0]), torch.full((len(targets),), 2)
    return F.ctc_loss(outputs.log_softmax(-1), targets, *lengths, reduction="sum"), len(targets)


def focal(outputs: Tensor, targets: Tensor) -> Any:
    each = F.cross_entropy(outputs, targets, reduction="none")
    return ((1 - (-each).exp()) ** 2 * each).sum(), len(targets)


def parted(outputs: Tensor, targets: Tensor) -> Any:
    one, other = (outputs - targets).square().sum(), outputs.abs().sum()
    return one + other, len(targets), {"mse": one}


class Smooth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", WEIGHTS.clone())

    def forward(self, outputs: Tensor, targets: Tensor) -> Any:
        losses = F.cross_entropy(
            outputs, targets, self.weight, label_smoothing=0.1, reduction="sum"
        )
        return losses, len(targets)


def auxiliary(outputs: Any, targets: Tensor) -> Any:
    """A router's loss of the whole micro-batch, weighted by its count."""
    given, routed = outputs
    total = F.cross_entropy(given, targets, reduction="sum")
    return total + 0.01 * routed * len(targets), len(targets)


def per_token(outputs: Any, targets: Tensor) -> Any:
    given, router = outputs
    total = F.cross_entropy(given.flatten(0, 1), targets.flatten(), reduction="sum")
    return total + 0.01 * router.logsumexp(-1).square().sum(), targets.numel()


Case = tuple[Callable[..., Any], Any, Any]

RIGHT: dict[str, Case] = {
    "squares": (lambda o, y: ((o - y).square().sum(), len(y)), OUT, Y),
    "squares over numbers": (lambda o, y: ((o - y).square().sum(), y.numel()), OUT, Y),
    "unreduced": (lambda o, y: F.mse_loss(o, y, reduction="none"), OUT, Y),
    "rows of means": (lambda o, y: (o - y).abs().mean(-1), OUT, Y),
    "a mean of samples": (shoal.mean_of_samples(nn.MSELoss()), OUT, Y),
    "a mean of samples, l1": (shoal.mean_of_samples(nn.L1Loss()), OUT, Y),
    "a weighted mean of samples": (shoal.mean_of_samples(lambda o, y: 3 * F.mse_loss(o, y)), OUT, Y),
    "cross-entropy": (lambda o, t: F.cross_entropy(o, t, reduction="none"), OUT, CLASSES),
    "cross-entropy of torch": (shoal.mean_of_samples(nn.CrossEntropyLoss()), OUT, CLASSES),
    "with ignored targets": (
        lambda o, t: (F.cross_entropy(o.flatten(0, 1), t.flatten(), reduction="sum"),
                      (t != -100).sum()), TOKENS, SOME),
    "weighted by class": (shoal.mean_of_samples(nn.CrossEntropyLoss(weight=WEIGHTS)), OUT, CLASSES),
    "label smoothing in a module": (Smooth(), OUT, CLASSES),
    "focal": (focal, OUT, CLASSES),
    "binary": (lambda o, y: F.binary_cross_entropy_with_logits(o, y, reduction="none"), OUT, SIGNS),
    "pos_weight": (
        lambda o, y: (F.binary_cross_entropy_with_logits(o, y, pos_weight=WEIGHTS,
                                                         reduction="sum"), y.numel()), OUT, SIGNS),
    "masked": (lambda o, t: (((o - t[0]).square() * t[1]).sum(), t[1].sum()), OUT, (Y, MASK)),
    "masked in a dict": (
        lambda o, b: (((o - b["y"]).square() * b["mask"]).sum(), b["mask"].sum()), OUT,
        {"y": Y, "mask": MASK}),
    "weights of samples": (lambda o, t: ((o.sum(-1) * t[1]).sum(), t[1].sum()), OUT, (Y, MASK[:, 0])),
    "ctc, time first": (ctc, drawn(6, B, C), torch.randint(1, C, (B, 2), generator=DRAWN)),
    "ctc of as many steps as samples": (
        ctc, drawn(B, B, C), torch.randint(1, C, (B, 2), generator=DRAWN)),
    "pairs in one dict": (
        lambda o, b: (-F.logsigmoid(o[0] - o[1]).sum(), len(o[0])), (OUT[:, 0], OUT[:, 1]), {"y": Y}),
    "pairs, stacked in halves": (halves, PAIRS, ANSWERS),
    "rows of tokens, flat": (rows_interleaved, drawn(B * T, C), IDS),
    "router's loss, weighted": (auxiliary, (OUT, torch.tensor(0.7).double()), CLASSES),
    "router's loss by token": (per_token, (TOKENS, drawn(B, T, 3)), IDS),
    "parts by name": (parted, OUT, Y),
    "kl to soft targets": (
        lambda o, y: (F.kl_div(o.log_softmax(-1), y.softmax(-1), reduction="sum"), len(y)), OUT, Y),
    "huber": (lambda o, y: F.huber_loss(o, y, reduction="none"), OUT, Y),
    "poisson": (lambda o, y: F.poisson_nll_loss(o, y.abs(), reduction="none"), OUT, Y),
    "gaussian": (
        lambda o, y: (F.gaussian_nll_loss(o, y, o.exp(), reduction="sum"), len(y)), OUT, Y),
    "margin": (lambda o, t: F.multi_margin_loss(o, t, reduction="none"), OUT, CLASSES),
    "cosine": (lambda o, y: 1 - F.cosine_similarity(o, y), OUT, Y),
    "triplets by columns": (
        lambda o, y: F.triplet_margin_loss(o, y, y.roll(1, 1), reduction="none"), OUT, Y),
    "a teacher": (lambda o, y: (F.mse_loss(o, TEACHER(y).detach(), reduction="sum"), len(y)), OUT, Y),
    "entropy bonus": (
        lambda o, t: (F.cross_entropy(o, t, reduction="sum")
                      + 0.1 * (o.softmax(-1) * o.log_softmax(-1)).sum(), len(t)), OUT, CLASSES),
    "variational": (
        lambda o, y: ((o - y).square().sum() + 0.5 * (o.exp() - o - 1).sum(), len(y)), OUT, Y),
    "fp32": (lambda o, y: ((o - y).square().sum(), len(y)), OUT.float() * 100, Y.float()),
    "bf16": (lambda o, y: F.cross_entropy(o, y, reduction="none").float(), OUT.bfloat16(), CLASSES),
    "quantiles": (lambda o, y: torch.maximum(0.9 * (y - o), -0.1 * (y - o)), OUT, Y),
    "a policy gradient": (
        lambda o, t: (-(t[1] * o.log_softmax(-1).gather(1, t[0][:, None])[:, 0]).sum(), len(t[1])),
        OUT, (CLASSES, Y[:, 0])),
    "ordinal": (lambda o, t: F.binary_cross_entropy_with_logits(
        o, (torch.arange(C) < t[:, None]).double(), reduction="none").sum(-1), OUT, CLASSES),
    "dice of each sample": (
        lambda o, y: 1 - 2 * (o.sigmoid() * y).sum(-1) / (o.sigmoid() + y).sum(-1), OUT, SIGNS),
}  # fmt: skip


def masked_mean(outputs: Tensor, targets: Any) -> Tensor:
    y, mask = targets
    return ((outputs - y).square() * mask).sum() / mask.sum()


def negatives(outputs: Tensor, targets: Tensor) -> Any:
    scores = F.normalize(outputs, dim=-1) @ F.normalize(targets, dim=-1).T
    return F.cross_entropy(scores, torch.arange(len(targets)), reduction="sum"), len(targets)


def by_frequency(outputs: Tensor, targets: Tensor) -> Any:
    weight = 1.0 / torch.bincount(targets, minlength=C).clamp(min=1).double()
    return F.cross_entropy(outputs, targets, weight=weight, reduction="sum"), len(targets)


def clamped(outputs: Tensor, targets: Tensor) -> Any:
    total = F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="sum")
    return total, (targets != -100).sum().clamp(min=1)


MEAN, SUM = "is a mean over the micro-batch (", "is multiplied by its number of samples ("
COUNTS, FIXED = "its counts do not add up (", "its count is 1 for 7 samples and for 2 of them"
TOGETHER = "what a sample adds depends on the others of its micro-batch"

WRONG: dict[str, tuple[Case, str]] = {
    "a weighted mean": ((lambda o, y: (3 * F.mse_loss(o, y), len(y)), OUT, Y), MEAN),
    "a mean and another": (
        (lambda o, y: (F.mse_loss(o, y) + 0.01 * o.abs().mean(), len(y)), OUT, Y), MEAN),
    "a sum over numel": (
        (lambda o, y: ((o - y).square().sum() / o.numel(), len(y)), OUT, Y), MEAN),
    "a mean over numbers, counted": (
        (lambda o, y: (2 * F.mse_loss(o, y), y.numel()), OUT, Y), MEAN),
    "a mean of means": (
        (lambda o, y: ((o - y).square().mean(-1).mean() * 1.5, len(y)), OUT, Y), MEAN),
    "batchmean": (
        (lambda o, y: (1.0 * F.kl_div(o.log_softmax(-1), y.softmax(-1), reduction="batchmean") * 2,
                       len(y)), OUT, Y), MEAN),
    "binary with a weight": (
        (lambda o, y: (2 * F.binary_cross_entropy_with_logits(o, y), len(y)), OUT, SIGNS), MEAN),
    "huber, halved": ((lambda o, y: (F.huber_loss(o, y) / 2, len(y)), OUT, Y), MEAN),
    "a sum wrapped": ((shoal.mean_of_samples(nn.MSELoss(reduction="sum")), OUT, Y), SUM),
    "a sum times its count": ((lambda o, y: ((o - y).abs().sum() * len(y), len(y)), OUT, Y), SUM),
    "a masked mean wrapped": ((shoal.mean_of_samples(masked_mean), OUT, (Y, MASK)), TOGETHER),
    "a mean over tokens wrapped": (
        (shoal.mean_of_samples(lambda o, t: F.cross_entropy(o.flatten(0, 1), t.flatten())),
         TOKENS, SOME), TOGETHER),
    "a masked mean, by tokens": (
        (lambda o, t: (masked_mean(o, t) * t[0].numel(), t[0].numel()), OUT, (Y, MASK)), TOGETHER),
    "by class frequency": ((by_frequency, OUT, CLASSES), TOGETHER),
    "standardised targets": (
        (lambda o, y: ((o - (y - y.mean(0)) / (y.std(0) + 1)).square().sum(), len(y)), OUT, Y),
        TOGETHER),
    "normalised advantages": (
        (lambda o, y: (-((y - y.mean()) * o.log_softmax(-1)).sum(), len(y)), OUT, Y), TOGETHER),
    "contrastive": ((negatives, OUT, Y), TOGETHER),
    "variance of the batch": (
        (lambda o, y: ((o - y).square().sum() + F.relu(2 - o.std(0)).sum(), len(y)), OUT, Y),
        TOGETHER),
    "divided by the largest": (
        (lambda o, y: (((o - y) / y.abs().max()).square().sum(), len(y)), OUT, Y), TOGETHER),
    "dice of the batch": (
        (lambda o, y: ((1 - 2 * (o.sigmoid() * y).sum() / (o.sigmoid() + y).sum()) * len(y),
                       len(y)), OUT, SIGNS), TOGETHER),
    "a root of the mean": (
        (lambda o, y: (F.mse_loss(o, y).sqrt() * len(y), len(y)), OUT, Y), TOGETHER),
    "an unweighted router's loss": (
        (lambda o, t: (F.cross_entropy(o[0], t, reduction="sum") + o[1], len(t)),
         (OUT, torch.tensor(0.7).double()), CLASSES), TOGETHER),
    "the worst one": (
        (lambda o, y: ((o - y).square().sum(-1).topk(1).values.sum(), len(y)), OUT, Y),
        TOGETHER),
    "counted once": ((lambda o, y: ((o - y).square().sum(), 1), OUT, Y), FIXED),
    "a clamped count": ((clamped, TOKENS, IDS), COUNTS),
    "one more than there are": (
        (lambda o, y: ((o - y).square().sum(), len(y) + 1), OUT, Y), COUNTS),
    "classes that are there": (
        (lambda o, t: (F.cross_entropy(o, t, reduction="sum"), t.unique().numel()), OUT, CLASSES),
        COUNTS),
}  # fmt: skip


def test_there_are_forty_right_ones_and_25_wrong_ones() -> None:
    assert len(RIGHT) >= 40
    assert len(WRONG) >= 25


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_loss_is_left_alone(name: str) -> None:
    loss, outputs, targets = RIGHT[name]
    found = try_loss(loss, outputs, targets, MODEL)
    assert found is None, trial_line(found)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_loss_is_named(name: str) -> None:
    (loss, outputs, targets), text = WRONG[name]
    found = try_loss(loss, outputs, targets, MODEL)
    assert found is not None
    line = trial_line(found)
    assert line.startswith("loss: ")
    assert text in line
    assert "; try: " in line


def test_a_loss_that_draws_is_not_tried_and_no_generator_moves() -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Any:
        noise = torch.randn(()) + random.random() + float(np.random.rand())
        return (outputs - targets).square().sum() * (1 + float(noise)), len(targets)

    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    found = try_loss(loss, OUT, Y, MODEL)
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert found is not None
    assert "not tried on parts of a micro-batch, since it draws random" in trial_line(found)
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]


def test_a_loss_with_a_queue_is_not_tried_and_its_queue_stays() -> None:
    queue, calls = deque([drawn(C)], maxlen=3), [0]

    def loss(outputs: Tensor, targets: Tensor) -> Any:
        calls[0] += 1
        far = torch.stack(list(queue)).mean(0)
        queue.append(outputs.detach().mean(0))
        return (outputs - far).square().sum(), len(targets)

    held = queue[0].clone()
    found = try_loss(loss, OUT, Y, MODEL)
    assert found is not None
    assert "since it keeps a state between calls" in trial_line(found)
    assert calls == [0]
    assert len(queue) == 1
    assert torch.equal(queue[0], held)


def test_the_state_of_an_object_is_copied_and_the_model_is_not() -> None:
    class Kept:
        def __init__(self) -> None:
            self.model, self.sums = MODEL, torch.zeros(C, dtype=torch.float64)

        def __call__(self, outputs: Tensor, targets: Tensor) -> Any:
            self.sums += outputs.sum(0)
            return (outputs - targets).square().sum(), len(targets)

    kept = Kept()
    assert try_loss(kept, OUT, Y, MODEL) is None
    assert kept.sums.tolist() == [0.0] * C
    copied = cast(Kept, copy_loss(kept, MODEL))
    assert copied is not kept
    assert copied.model is MODEL


def test_outputs_without_samples_are_not_tried() -> None:
    found = try_loss(lambda o, y: (o.sum(), len(y)), drawn(3, 5), Y, MODEL)
    assert found is not None
    assert "its inputs have no common dimension of samples" in trial_line(found)


def test_one_sample_and_a_loss_that_fails_on_parts_are_left_alone() -> None:
    def whole_only(outputs: Tensor, targets: Tensor) -> Any:
        if len(targets) != B:
            raise ValueError("by chance")
        return (outputs - targets).mean(), len(targets)

    assert try_loss(lambda o, y: (3 * F.mse_loss(o, y), len(y)), OUT[:1], Y[:1], MODEL) is None
    assert try_loss(whole_only, OUT, Y, MODEL) is None


def test_a_temperature_beside_the_model_is_named() -> None:
    temperature = nn.Parameter(torch.ones(()))
    program = cast(Any, SimpleNamespace(module=MODEL))
    outputs = MODEL(torch.ones(3, 2))
    (leaf,) = list_foreign_leaves(((outputs * temperature).sum(), 3), outputs, program)
    assert leaf is temperature
    assert "it depends on 1 tensor of shape []" in foreign_line([leaf])
    penalty = outputs.sum() + MODEL.weight.square().sum()
    assert list_foreign_leaves((penalty, 3), outputs, program) == []


def test_micro_batches_of_one_sample_are_joined() -> None:
    rows = TrialRows()
    for place in range(B):
        rows.add(OUT[place : place + 1], (Y[place : place + 1], MASK[place : place + 1]))
    joined = rows.join()
    assert joined is not None
    assert torch.equal(joined[0], OUT)
    found = try_loss(shoal.mean_of_samples(masked_mean), *joined, MODEL)
    assert found is not None
    assert TOGETHER in trial_line(found)


def test_micro_batches_of_other_shapes_are_not_joined() -> None:
    rows = TrialRows()
    rows.add(OUT[:2], Y[:2])
    rows.add(OUT[:2, :3], Y[:2, :3])
    joined = rows.join()
    assert joined is not None
    assert torch.equal(joined[0], OUT[:2])
    loss, outputs, targets = RIGHT["ctc, time first"]
    rows = TrialRows()
    rows.add(outputs, targets)
    rows.add(outputs, targets)
    alone = rows.join()
    assert alone is not None
    assert try_loss(loss, *alone, MODEL) is None


def test_tensors_of_a_loss_are_listed_and_those_of_the_model_are_not() -> None:
    weight, scale = WEIGHTS.clone(), 0.5

    def loss(outputs: Tensor, targets: Tensor) -> Any:
        penalty = MODEL.weight.square().sum()
        return F.cross_entropy(outputs, targets, weight) * scale + penalty, len(targets)

    first = checksum_loss_tensors(loss, MODEL)
    assert list(first) == ["weight [5]"]
    weight[0] += 1
    assert checksum_loss_tensors(loss, MODEL) != first
    assert list(checksum_loss_tensors(Smooth(), MODEL)) == ["weight [5]"]
    assert checksum_loss_tensors(nn.MSELoss(), MODEL) == {}


def test_as_many_samples_as_outputs_are_no_batch_along_the_second_dim() -> None:
    """[3 samples, 3 outputs] could be [time, batch] too, where this loss does not fail."""

    def centred(o: Tensor, y: Tensor) -> tuple[Tensor, int]:
        gain = y[:, 0] - y[:, 0].mean()
        return -(gain.unsqueeze(1) * o.log_softmax(-1)).sum(), len(y)

    drawn = torch.Generator().manual_seed(0)
    outputs, targets = torch.randn(2, 3, 3, generator=drawn, dtype=torch.float64)
    found = try_loss(centred, outputs, targets, MODEL)
    assert found is not None
    assert found.kind == "coupled"
