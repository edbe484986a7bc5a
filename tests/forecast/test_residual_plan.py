"""A plan with a bf16 residual stream: what FSDP2 holds, and half of what stages send."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shoal.cli.plan_subject import resolve_subject
from shoal.config.load import load_config
from shoal.forecast.fit.peak_memory import predict_memory
from shoal.forecast.memory.activations import boundary_bytes
from shoal.forecast.models.published_models import published_shape
from shoal.forecast.models.transformer_costs import transformer_facts
from shoal.forecast.search.layout_search import LayoutCandidate, search_layouts

WORDS = (
    "model.name=llama-2-70b precision.compute=bf16 layout.strategy=fsdp train.micro_batch=6 "
    "data.sequence=4096 train.batch=768"
)


def planned(residual: str, recompute: str) -> LayoutCandidate:
    """The plan of a published run: 128 A100 hold 62.8 GiB under FSDP2 with full recompute."""
    words = [*WORDS.split(), f"precision.residual={residual}", f"memory.recompute={recompute}"]
    subject = resolve_subject(load_config(None, words), "16x8xA100-80GB")
    return search_layouts(subject.case, subject.space)[0]


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_activations_are_those_of_fsdp2(recompute: str) -> None:
    ours = planned("bf16", recompute)
    model = transformer_facts(published_shape("llama-2-70b"), 4096, 2)
    theirs = predict_memory(replace(ours.case, framework="automodel", model=model))
    assert ours.memory.parts["activations"] == pytest.approx(theirs.parts["activations"], rel=0.03)


def test_the_published_run_fits_with_bf16_residuals_only() -> None:
    narrow, wide = planned("bf16", "full"), planned("fp32", "full")
    assert (narrow.verdict.after, wide.verdict.after) == ("fits", "no")
    assert narrow.memory.peak_bytes == pytest.approx(62.8 * 2**30, rel=0.05)


def test_stages_send_half() -> None:
    narrow, wide = (planned(residual, "full").case.model for residual in ("bf16", "fp32"))
    assert 2 * boundary_bytes(narrow) == boundary_bytes(wide)
