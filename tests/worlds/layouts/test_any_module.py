"""Any module under tp, pp and their compositions computes what one process computes.

A sample of the table of `tests/proof/any_module.py`: every layout comes up, and every kind of model.
"""

from __future__ import annotations

import pytest

import any_case

SAMPLE = [
    pytest.param("our gpt", "tp2", marks=pytest.mark.proof),
    ("our gpt, one block", "tp2"),  # nothing repeats; its tables are split by themselves
    pytest.param("our vit", "tp2", marks=pytest.mark.proof),
    pytest.param("our moe", "tp2", marks=pytest.mark.proof),
    pytest.param("nested", "tp2", marks=pytest.mark.proof),
    pytest.param("mlp", "tp2", marks=pytest.mark.proof),
    pytest.param("hf bert", "tp2", marks=pytest.mark.proof),
    pytest.param("our resnet", "pp2", marks=pytest.mark.proof),  # `unet` stays
    ("unet", "pp2"),
    pytest.param("hf t5", "pp2", marks=pytest.mark.proof),
    pytest.param("mlp", "tp4", marks=pytest.mark.proof),  # a Llama on 4 in test_tensor.py
    pytest.param("our llama", "tp4", marks=pytest.mark.proof),
    pytest.param("tuples", "pp4", marks=pytest.mark.proof),
    pytest.param("encoder", "tp2 pp2", marks=pytest.mark.proof),
    ("gpt", "tp2 pp2"),
    pytest.param("hf llama", "tp2 pp2", marks=pytest.mark.proof),
    ("gpt", "tp2 fsdp2"),
    pytest.param("attributes", "tp2 fsdp2", marks=pytest.mark.proof),
    # q, k and v in unequal segments, cut once more in rows: their split is in tests/parallel/spmd.
    pytest.param("hf phi3", "tp2 fsdp2", marks=pytest.mark.proof),
    ("stages", "pp2 fsdp2"),
    pytest.param("hf gpt2", "pp2 fsdp2", marks=pytest.mark.proof),
    ("lstm", "pp2 fsdp2"),  # a view crosses the cut
    pytest.param("our llama", "tp2 pp2 dp2", marks=pytest.mark.proof),  # 8 processes
]


@pytest.mark.parametrize(("model", "layout"), SAMPLE)
def test_a_layout_equals_one_process(worlds, model: str, layout: str) -> None:
    if model.startswith("hf "):
        pytest.importorskip("transformers")
    asked = {"model": model, "layout": layout, "steps": 3}
    report = worlds(any_case.processes(layout)).call("any_case:prove", **asked)[0]
    assert report["verdict"] == "equal", report["reason"] or report["cause"]
    assert report["trajectories"][0]["largest"]["gradient"] <= 1e-12
    # A block that failed the check at the start stays whole: equal, and not what is meant here.
    assert not [line for line in report["notices"] if "computes something else" in line]


@pytest.mark.parametrize(
    "model",
    [
        *(pytest.param(name, marks=pytest.mark.proof) for name in ("attributes", "stages")),
        *("nested", "recurrent"),
    ],
)
def test_blocks_wherever_they_stand_are_gathered_one_by_one(worlds, model: str) -> None:
    """As attributes, inside of unequal stages, in a ModuleDict, one that is called several times."""
    layout = {"dp_shard": 2, "zero": 3}
    report = worlds(2).call("any_case:prove", steps=3, model=model, layout=layout)[0]
    assert report["verdict"] == "equal", report["reason"] or report["cause"]
    assert report["trajectories"][0]["largest"]["gradient"] <= 1e-12
    at_once = [line for line in report["notices"] if "are gathered at once" in line]
    assert not at_once


GATES = "5 scalar parameters have no rows to cut, first: scale; they stay whole on every rank"


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (2, {"dp_shard": 2, "zero": 3}),
        pytest.param(4, {"tp": 2, "dp_shard": 2, "zero": 3}, marks=pytest.mark.proof),
        pytest.param(4, {"pp": 2, "dp_shard": 2, "zero": 3}, marks=pytest.mark.proof),
    ],
    ids=str,
)
def test_scalars_stay_whole_under_fsdp(worlds, ranks: int, layout: dict[str, int]) -> None:
    """The table's mlp has one too: fsdp and hsdp on four ranks (test_equality.py)."""
    report = worlds(ranks).call("any_case:prove", steps=3, model="rezero", layout=layout)[0]
    assert report["verdict"] == "equal", report["reason"] or report["cause"]
    assert report["trajectories"][0]["largest"]["gradient"] <= 1e-12
    assert [line for line in report["notices"] if GATES in line]


@pytest.mark.parametrize(
    ("layout", "blocks"),
    [("fsdp", 40), pytest.param("fsdp", 8, marks=pytest.mark.proof), ("zero2", 40)],
)
def test_many_small_blocks_need_no_line(worlds, layout: str, blocks: int) -> None:
    """They are gathered together: a chain of 300 took 14 times ddp's step one by one."""
    lines = worlds(2).call("chain_case:said", layout=layout, blocks=blocks)[0]
    assert not [line for line in lines if "collectives a micro-batch" in line], lines


def test_every_layout_is_in_the_sample() -> None:
    named = {name for name in any_case.LAYOUTS if "cp" not in name and "ep" not in name}
    assert {getattr(row, "values", row)[1] for row in SAMPLE} == named


def test_what_cannot_be_split_is_named(worlds) -> None:
    report = worlds(2).call("any_case:prove", steps=3, model="tuples", layout="tp2")[0]
    assert report["verdict"] == "equal", report["reason"] or report["cause"]
    assert any("chain.0.gate.weight (and in 3 like it) stays whole" in n for n in report["notices"])


def test_strict_refuses_what_would_stay_whole(worlds) -> None:
    layout = {"tp": 2, "strict": True}
    report = worlds(2).call("any_case:prove", steps=3, model="tuples", layout=layout)[0]
    assert report["verdict"] == "refused"
    assert report["reason"].startswith("layout.tp = 2 with layout.strict: chain.0.gate.weight")


def test_a_pattern_that_matches_nothing_is_an_error(worlds) -> None:
    layout = {"tp": 2, "split": ["blocks.*.nothing=whole"]}
    report = worlds(2).call("any_case:prove", steps=3, model="our gpt", layout=layout)[0]
    assert report["verdict"] == "refused"
    assert "matches no parameter of GPT; try: " in report["reason"]


def test_more_stages_than_blocks_is_refused(worlds) -> None:
    layout = {"pp": 4, "schedule": "interleaved", "chunks": 2}
    report = worlds(4).call("any_case:prove", steps=3, model="our gpt", layout=layout)[0]
    assert report["verdict"] == "refused"
