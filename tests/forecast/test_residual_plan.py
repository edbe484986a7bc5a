"""A plan with a bf16 residual stream: what FSDP2 holds, and half of what stages send."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest

from shoal.cli.plan_subject import narrow_model_facts, resolve_subject
from shoal.config.load import load_config
from shoal.forecast.fit.peak_memory import predict_memory
from shoal.forecast.memory.activations import boundary_bytes
from shoal.forecast.models.published_models import published_shape
from shoal.forecast.models.transformer_costs import transformer_facts
from shoal.forecast.search.layout_search import LayoutCandidate, search_layouts
from shoal.forecast.search.memory_suggestions import NARROW
from shoal.forecast.search.plan_document import plan_record
from shoal.view.plan_lines import print_plan

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


def proposed(*words: str, on: str = "16x8xA100-80GB") -> list[str]:
    """The settings that `shoal plan` proposes, as it prints them."""
    loaded = load_config(None, [*WORDS.split(), "memory.recompute=full", *words])
    subject = resolve_subject(loaded, on)
    record = plan_record(
        search_layouts(subject.case, subject.space),
        subject.space,
        top=1,
        notes=[],
        narrow=lambda: narrow_model_facts(loaded, subject.case),
    )
    text = io.StringIO()
    print_plan(record, text)
    printed = " ".join(text.getvalue().split())
    assert not record["fixes"] or f" {record['fixes'][0]['set']}: " in printed
    assert (NARROW in printed) == ("as FSDP2's param_dtype has them" in printed)
    return [fix["set"] for fix in record["fixes"]]


def test_bf16_residuals_are_proposed_where_fp32_ones_do_not_fit() -> None:
    assert NARROW in proposed("precision.residual=fp32")


@pytest.mark.parametrize("words", ["precision.residual=bf16", "precision.compute=fp32"])
def test_bf16_residuals_are_proposed_to_runs_alone_that_can_have_them(words: str) -> None:
    assert not [one for one in proposed(words, on="8x8xA100-80GB") if "residual" in one]
