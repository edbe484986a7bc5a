"""bf16 and fp16 over fp32 masters: the same training in every layout, and overflows for all."""

from __future__ import annotations

import functools
import math

import pytest

from cli_run import TOY_ARGUMENTS, CommandLine
from shoal.trainer.step.loss_scale import GROWTH_EVERY, LEAST, LossScale

LAYOUTS = ("ddp", "zero1", "zero2", "fsdp")


@pytest.fixture(scope="module")
def alone(worlds):
    """What one process computes, in its one thread as the processes of a world: asked once."""

    @functools.cache
    def ask(precision: str, case: str = "llama") -> dict:
        given = {"layout": "single", "precision": precision, "case": case}
        return worlds(1).call("precision_case:train", **given)[0]

    return ask


@pytest.fixture(scope="module")
def trained(worlds):
    """What each rank told of a training: asked once."""
    known: dict[str, list[dict]] = {}

    def ask(layout: str, precision: str, **more: str) -> list[dict]:
        key = f"{layout} {precision} {more}"
        if key not in known:
            given = {"layout": layout, "precision": precision, **more}
            known[key] = worlds(2).call("precision_case:train", **given)
        return known[key]

    return ask


ROWS = [(layout, precision) for layout in LAYOUTS for precision in ("bf16", "fp16")]
LONG = [("ddp", "fp16"), ("zero1", "fp16"), ("zero2", "bf16"), ("fsdp", "fp16")]


@pytest.mark.parametrize(
    ("layout", "precision"),
    [pytest.param(*row, marks=[pytest.mark.proof] if row in LONG else []) for row in ROWS],
)
def test_layouts_agree_with_one_process(trained, alone, layout: str, precision: str) -> None:
    told = trained(layout, precision)
    expected = alone(precision)
    for answer in told:
        assert answer["agree"], "ranks ended with different weights"
        assert answer["stepped"] == answer["kept"] == ["torch.float32"]
        for ours, theirs in zip(answer["losses"], expected["losses"], strict=True):
            # rounding of the narrow format, a relative 2^-9 (bf16), reaches the mean loss averaged
            assert math.isclose(ours, theirs, rel_tol=1e-3)
        assert math.isclose(answer["evaluated"], expected["evaluated"], rel_tol=1e-3)
    if precision == "bf16" and layout != "fsdp":
        assert told[0]["module"] == ["torch.bfloat16", "torch.float32"]


@pytest.mark.parametrize(
    "case",
    ["gpt", pytest.param("cnn", marks=pytest.mark.proof)],  # cnn: under fsdp in test_residual.py
)
def test_norms_whose_weights_are_gathered_narrow(worlds, alone, case: str) -> None:
    """Under fsdp a LayerNorm, or a BatchNorm, has float32 inputs and bf16 weights."""
    expected = alone("bf16", case)
    for answer in worlds(2).call(
        "precision_case:train", layout="fsdp", precision="bf16", case=case
    ):
        for ours, theirs in zip(answer["losses"], expected["losses"], strict=True):
            assert math.isclose(ours, theirs, rel_tol=2e-3)


def test_reduce_in_bf16(trained) -> None:
    for layout in ("ddp", "fsdp"):  # ours sums, torch sums
        told = trained(layout, "bf16", reduce="bf16")
        exact = trained(layout, "bf16")
        assert told[0]["agree"]
        assert told[0]["losses"] != exact[0]["losses"], "nothing travelled in bf16"
        assert math.isclose(told[0]["losses"][-1], exact[0]["losses"][-1], rel_tol=1e-2)


@pytest.mark.parametrize("layout", [pytest.param("ddp", marks=pytest.mark.proof), "zero2", "fsdp"])
def test_overflow_on_one_rank_is_everybodys(worlds, tmp_path, layout: str) -> None:
    answers = worlds(2).call("precision_case:overflow", layout=layout, folder=str(tmp_path))
    for answer in answers:
        skipped = [row[0] for row in answer["rows"]]
        assert skipped == [False, False, True, False, False]
        scales = [row[1] for row in answer["rows"]]
        assert scales == [256.0, 256.0, 128.0, 128.0, 128.0]
        assert all(math.isfinite(row[2]) for row in answer["rows"])
        assert answer["restored"] == 128.0
    assert answers[0]["weights"] == answers[1]["weights"]
    assert [(e["step"], e["ranks"], e["scale"]) for e in answers[0]["events"]] == [(3, [1], 128.0)]


def test_the_scale_grows_and_a_fixed_one_stays() -> None:
    scale = LossScale()
    for _ in range(GROWTH_EVERY):
        scale.handle_clean_step()
    assert scale.value == 2.0**17
    assert scale.handle_overflow()
    assert (scale.value, scale.clean) == (2.0**16, 0)
    while scale.value > LEAST:
        scale.handle_overflow()
    assert not scale.handle_overflow(), "what is smaller cures nothing"
    wide = LossScale()
    assert wide.handle_overflow(2.0**18)
    assert wide.value == 2.0**-3, "large sums start below 1"
    summed = LossScale()
    assert summed.handle_overflow(250.0)
    assert summed.value == 2.0**7, "as a mean over 256 targets would have it"
    assert summed.handle_overflow(250.0)
    assert summed.value == 2.0**6
    fixed = LossScale(128.0)
    assert not fixed.handle_overflow()
    assert fixed.value == 128.0


@pytest.mark.proof
def test_fp16_from_the_command_line(tmp_path) -> None:
    arguments = [a for a in TOY_ARGUMENTS if not a.startswith("precision.")]
    run = CommandLine(tmp_path, *arguments, "precision.compute=fp16", "launch.processes=2")
    code, output = run.finish()
    assert code == 0, output
    assert "this CPU has no fast fp16" in output
    assert "products fp16, weights read as float32 and stepped as float32" in output
