"""What a proof says of models that cast on their way, talk to other ranks, or have no float64."""

from __future__ import annotations

from typing import Any

import pytest

TP, DDP = {"tp": 2}, {"dp_replicate": 2}


def prove(worlds: Any, model: str, layout: dict[str, int], bug: str = "") -> dict[str, Any]:
    """The answer of rank 0."""
    return worlds(2).call("verdict_case:prove", model=model, layout=layout, bug=bug)[0]


def test_a_models_own_casts_are_lifted_before_anything_is_called_different(worlds) -> None:
    told = prove(worlds, "casting", TP)
    assert told["report"]["verdict"] == "equal", told["report"]["cause"]
    (trajectory,) = told["report"]["trajectories"]
    assert trajectory["largest"]["gradient"] <= 1e-12
    assert 1e-12 < trajectory["as_is"]["gradient"] <= 1e-6
    assert "the model's own casts (verdict_case.py:" in told["line"]
    assert "lifted; as they are: " in told["line"]
    assert told["line"].endswith("apart, 1e-06 is allowed")


def test_casts_that_blow_rounding_up_are_no_difference_and_no_proof(worlds) -> None:
    report = prove(worlds, "flips", TP)["report"]
    assert report["verdict"] == "not proven"
    assert "lifted it computes what one process computes" in report["reason"]
    assert report["reason"].endswith("more than 1e-06: its casts blow rounding up")


def test_a_model_that_blows_rounding_up_itself_is_no_difference_either(worlds) -> None:
    report = prove(worlds, "blown up", TP)["report"]
    assert report["verdict"] == "not proven"
    assert report["reason"].startswith(
        "rounding: a change of its weights in their last bits takes this model as far (sgd: "
    )
    assert report["reason"].endswith(" off, bound 1e-12)")


def test_a_mistake_in_a_model_that_casts_is_different_and_named(worlds) -> None:
    report = prove(worlds, "casting", DDP, "factor lost")["report"]
    assert report["verdict"] == "different"
    assert "is 0.5 × that of one process, 1/2 for 2 data-parallel ranks" in report["cause"]["text"]
    assert report["said"][0].startswith("the model's own casts (verdict_case.py:")
    assert report["said"][0].endswith(" lifted")


@pytest.mark.parametrize(
    ("model", "what"),
    [
        ("talks in forward", "allreduce at verdict_case.py:"),
        pytest.param("talks in loss", "allreduce at verdict_case.py:", marks=pytest.mark.proof),
        ("makes a group", "new_group at verdict_case.py:"),
    ],
)
def test_collectives_of_the_models_own_are_named_at_once(worlds, model: str, what: str) -> None:
    told = prove(worlds, model, DDP)
    assert told["report"]["verdict"] == "not proven"
    assert told["line"].startswith(
        f"proof: not proven: the model takes part in a collective of its own ({what}"
    )


def test_operations_of_a_model_that_talks_are_not_counted_by_one_rank_alone(worlds) -> None:
    assert worlds(2).call("verdict_case:flops_of_talking") == [None, None]


def test_expanded_parameters_are_perturbed(worlds) -> None:
    report = prove(worlds, "expanded", DDP)["report"]
    assert report["verdict"] == "equal", report["reason"]


def test_without_float64_it_is_told_what_float32_shows(worlds) -> None:
    report = prove(worlds, "no float64", DDP)["report"]
    assert report["verdict"] == "not proven"
    assert (
        "\"my_kernel\" not implemented for 'Double'; in float32 instead it is equal within 2e-06"
        in (report["reason"])
    )


def test_grouped_experts_are_proven_one_by_one_and_put_back(worlds) -> None:
    answers = worlds(2).call("verdict_case:prove_grouped_experts")
    report = answers[0]["report"]
    assert report["verdict"] == "equal", report["reason"]
    assert report["said"] == ["experts computed one by one (their grouped product has no float64)"]
    assert report["said"][0] in answers[0]["line"]
    assert [told["kind"] for told in answers] == ["grouped_mm", "grouped_mm"]
