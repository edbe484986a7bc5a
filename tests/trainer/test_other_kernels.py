"""A model of another library hears what its kernels miss, with its size, and only where it is large."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from trainer_small import run_of

from shoal.base.layouts.layout import Layout
from shoal.base.plans.plan import Plan
from shoal.models.loss import token_loss
from shoal.trainer.guards.reports import kernel_notices
from shoal.trainer.guards.reports.kernel_notices import KERNELS, other_kernels_lines
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


class NewGELUActivation(nn.Module):
    """An activation by single operations."""


def test_activations_and_kept_scores_are_said_too() -> None:
    """GPT-2's activation has an equal of one kernel; attention may be asked to keep its scores."""
    made = nn.Sequential(NewGELUActivation())
    made.config = SimpleNamespace(
        _attn_implementation="eager", num_attention_heads=12, num_hidden_layers=12
    )
    assert other_kernels_lines(made, logits(8, 1024, 7), PLAN, "cuda") == [
        "model: attn_implementation = eager keeps all scores, 4.5 GiB in 12 layers, where flash "
        "attention keeps none; try: model.set_attn_implementation('sdpa')",
        "model: 1 NewGELUActivation run as 8 kernels each, torch's own gelu as 1; try: "
        "gelu_pytorch_tanh in the model's configuration, the same function, or "
        "train.compile=blocks, which fuses them",
    ]


@pytest.mark.proof
@pytest.mark.parametrize("end", sorted(KERNELS))
def test_kernels_are_counted_rightly(end: str) -> None:
    """The table's numbers, from transformers' own classes."""
    kinds = pytest.importorskip("transformers.activations")
    if end.endswith("Activation"):
        part = getattr(kinds, end)()
    elif end == "RMSNorm":
        part = pytest.importorskip("transformers.models.llama.modeling_llama").LlamaRMSNorm(4)
    else:
        part = pytest.importorskip("transformers.models.t5.modeling_t5").T5LayerNorm(4)
    given = torch.ones(2, 4)
    with Written() as written:
        part(given)
    assert len(written.names) == KERNELS[end][0], written.names


class Written(TorchDispatchMode):
    """Operators that make data."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


class Reader(nn.Module):
    """Token ids to logits, as transformers returns them."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.config = nn.Embedding(7, 7), SimpleNamespace()

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
    monkeypatch.setattr(kernel_notices, "LEAST_LOGITS_BYTES", 1)
    monkeypatch.setattr(MetricsRecorder, "notice", lambda recorder, text: told.append(text))
    run = run_of(Reader(), None, token_loss, batch=4, micro_batch=2)
    ids = torch.randint(7, (4, 5))
    for _ in range(2):
        run.step((ids, (ids + 1) % 7))
    run.close()
    assert [line for line in told if "all logits" in line] == [
        LOGITS.replace("[32, 1024, 50304]", "[2, 5, 7]").replace("18.4 GiB", "840 B")
    ]
