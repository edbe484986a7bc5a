"""A model of another library hears what its kernels miss, with its size, and only where it is large."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from trainer_small import run_of

from shoal.base.layouts.layout import Layout
from shoal.base.plans.plan import Plan
from shoal.models.loss import token_loss
from shoal.trainer.guards.reports import model_notices
from shoal.trainer.guards.reports.model_notices import other_kernels_lines
from shoal.trainer.metrics_recorder import MetricsRecorder

PLAN = Plan(Layout())
LOGITS = (
    "model: returns all logits of a micro-batch, [32, 1024, 50304]: their loss takes 18.4 GiB, "
    "where Shoal's own models compute it in chunks of at most 512 MiB; try: a smaller "
    "train.micro_batch if memory is short"
)
NORMS = (
    "model: 2 LlamaRMSNorm run as 6 kernels each, torch's own RMSNorm as 1; "
    "try: train.compile=blocks, which fuses them"
)


class LlamaRMSNorm(nn.Module):
    """A norm by single operations."""


class Reader(nn.Module):
    """Token ids to logits, as transformers returns them."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 7)

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.table(ids)}


def model() -> nn.Module:
    return nn.Sequential(LlamaRMSNorm(), nn.RMSNorm(4), LlamaRMSNorm())


def logits(*shape: int) -> dict[str, torch.Tensor]:
    return {"logits": torch.empty(*shape, device="meta")}


def test_what_a_foreign_model_lacks_is_said_with_its_size() -> None:
    assert other_kernels_lines(model(), logits(32, 1024, 50304), PLAN, "cuda") == [LOGITS, NORMS]


@pytest.mark.parametrize(
    ("outputs", "plan", "device"),
    [
        (logits(2, 8, 7), replace(PLAN, compile="blocks"), "cuda"),
        (logits(2, 8, 7), PLAN, "cpu"),
        (torch.empty(32, 1024, 50304, device="meta"), PLAN, "cpu"),
    ],
)
def test_small_logits_and_fused_norms_get_no_line(outputs: Any, plan: Plan, device: str) -> None:
    assert other_kernels_lines(model(), outputs, plan, device) == []


def test_the_line_is_printed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(model_notices, "LEAST_LOGITS_BYTES", 1)
    monkeypatch.setattr(MetricsRecorder, "notice", lambda recorder, text: told.append(text))
    run = run_of(Reader(), None, token_loss, batch=4, micro_batch=2)
    ids = torch.randint(7, (4, 5))
    for _ in range(2):
        run.step((ids, (ids + 1) % 7))
    run.close()
    assert [line for line in told if "all logits" in line] == [
        LOGITS.replace("[32, 1024, 50304]", "[2, 5, 7]").replace("18.4 GiB", "840 B")
    ]
