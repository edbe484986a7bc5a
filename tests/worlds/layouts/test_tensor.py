"""Tensor parallelism on real processes: the numbers of one process, and the planned collectives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

EXACT = 1e-12


def long(*row: Any) -> Any:
    """A row that `make proof` runs: others hold most of it."""
    return pytest.param(*row, marks=pytest.mark.proof)


CASES: list[Any] = [
    (2, "llama", {}, {}),
    (2, "llama", {"tied": False}, {"sequence": True}),
    (2, "llama", {"dropout": 0.3}, {"sequence": True, "seeds": (1, 2)}),
    (2, "llama", {}, {"loss": "own"}),
    long(2, "plain", {}, {}),
    (2, "plain", {"tied_by_hand": True}, {"sequence": True}),
    (2, "fused", {}, {"sequence": True}),
    (2, "flat", {}, {"sequence": True}),
    (2, "llama", {}, {"sequence": True, "odd": True}),
    (2, "llama", {"dropout": 0.2}, {"sequence": True, "again": "full"}),
    long(2, "llama", {}, {"sequence": True, "again": "selective"}),
    (2, "mlp", {}, {}),
    (2, "sequential", {}, {}),
    long(2, "gated", {}, {}),
    (2, "gated", {"inside": 0.2}, {"seeds": (1, 2)}),
    (4, "llama", {"kv_heads": 2}, {"sequence": True}),
    long(4, "llama", {"kv_heads": 1, "tied": False, "dropout": 0.2}, {}),
    long(4, "fused", {}, {}),
    long(4, "plain", {}, {"loss": "own"}),
    long(4, "mlp", {}, {}),
]


@pytest.fixture(scope="module")
def equality(worlds):
    """What every rank tells of a model that is split, trained once for all who ask."""
    known: dict[str, list[dict[str, Any]]] = {}

    def ask(size: int, name: str, **words: Any) -> list[dict[str, Any]]:
        asked = {"name": name, "settings": {}, **words}
        key = f"{size} {asked}"
        if key not in known:
            known[key] = worlds(size).call("tensor_case:equality", **asked)
        return known[key]

    return ask


@pytest.mark.parametrize(("size", "name", "settings", "options"), CASES, ids=str)
def test_equals_one_process(equality, size: int, name: str, settings: Any, options: Any) -> None:
    answers = equality(size, name, settings=settings, **options)
    for told in answers:
        assert told["loss"] <= EXACT
        assert told["gradient"] <= EXACT, told["worst"]
        assert told["evaluated"] <= EXACT
        # As the sample, and nothing between the layers that gathers what they hand on.
        if name != "flat" and not {"loss", "seeds", "odd", "again"} & set(options):
            assert told["sent"] == told["planned"]


def test_a_llama_block_costs_four_all_reduces(equality) -> None:
    plain, parts = (
        equality(2, "llama", settings=settings, **sequence)[0]["exchanges"]
        for settings, sequence in (({}, {}), ({"tied": False}, {"sequence": True}))
    )
    forward, backward = ["all_reduce", "forward"], ["all_reduce", "backward"]
    assert sorted(plain["blocks.1"]) == [backward, backward, forward, forward]
    kinds = [kind for kind, when in parts["blocks.0"] if when == "forward"]
    assert sorted(kinds) == ["all_gather", "all_gather", "reduce_scatter", "reduce_scatter"]
    assert not [kind for kind, _ in parts["blocks.0"] if kind == "all_reduce"]


def test_every_rank_holds_its_part_only(equality) -> None:
    told = equality(2, "llama")[0]
    norms = 5 * 32  # stay whole
    uneven = 32  # 67 rows of the vocabulary: one more on rank 0
    assert told["elements"] == (told["of"] - norms + uneven) // 2 + norms


def test_shared_heads_are_named(equality) -> None:
    told = equality(4, "llama", settings={"kv_heads": 2}, sequence=True)[0]
    assert any(
        "blocks.0.attention.k.weight (and in 1 like it) stays whole" in n for n in told["notices"]
    )


def test_a_layer_that_is_no_graph_may_not_drop_out(worlds) -> None:
    line = (
        "layout.tp = 2: layers.0 draws random numbers (dropout in layers.0.drop) and cannot be "
        "traced (DataDependentOutputException: aten._local_scalar_dense.default), so they may "
        'depend on the layout; try: no dropout there, or layout={"tp": 1}'
    )
    for told in worlds(2).call("tensor_case:starts", dropouts=[0.0, 0.1]):
        assert told == ["runs", line]


BUGS = {
    "missing backward sum": (2, "a sum over ranks is missing, or done twice, in the backward pass"),
    "no backward sums": (2, "a sum over ranks is missing, or done twice, in the backward pass"),
    "row bias": (2, "every rank adds out.bias and down.bias, which so counts 2 times"),
    "qkv cut": (2, "qkv.weight and qkv.bias hold 3 segments and were cut as one"),
    "missing forward sum": (2, "an exchange in the forward pass is missing"),
    "kv gradient": (2, "attention.k.weight, each has a part of the gradient, and nobody sums it"),
    "kv part": (4, "wrong part of attention.k.weight and attention.v.weight"),
}


@pytest.mark.parametrize(
    "bug",
    [long(bug) if bug == "no backward sums" else bug for bug in BUGS],  # the first again
)
def test_the_check_names_planted_bugs(worlds, bug: str) -> None:
    size, cause = BUGS[bug]
    for text in worlds(size).call("tensor_case:finding", bug=bug):
        assert cause in text


def test_the_check_finds_nothing_in_what_is_right(worlds) -> None:
    assert worlds(2).call("tensor_case:finding", bug="none") == ["", ""]


def test_a_block_that_fails_the_check_stays_whole_by_name(worlds) -> None:
    for told in worlds(2).call("tensor_case:after_the_check"):
        assert told["gradient"] <= EXACT
        assert "layout.tp = 2: blocks.0 (and 1 like it) stays whole: split, it" in told["notice"]
        assert told["split"] == ["tokens.weight", "head.weight"]
        assert told["strict"].startswith("layout.tp = 2: blocks.0: split, it computes something")


@pytest.mark.parametrize("strict", [long(False), True])
def test_a_warm_start_is_checked_as_a_cold_one(worlds, tmp_path: Path, strict: bool) -> None:
    """Wrong labels in a first start, and in one after a right one with the same cache."""
    (cold, right, warm), others = worlds(2).call(
        "split_start_case:starts",
        folders=[str(tmp_path / name) for name in ("cold", "warm", "warm")],
        planted=[True, False, True],
        strict=strict,
    )
    assert others == ([cold, "", warm] if strict else ["", "", ""]), "rank 0 tells, all refuse"
    assert right == ""
    assert "were cut as one" in cold
    assert warm == cold


@pytest.mark.parametrize(
    ("size", "name"), [long(2, "tuples"), (2, "unet"), (2, "encoder"), long(4, "encoder")]
)
def test_a_users_module_equals_one_process(worlds, size: int, name: str) -> None:
    for told in worlds(size).call("tensor_case:example", name=name):
        assert told["loss"] <= EXACT
        assert told["gradient"] <= EXACT, told["worst"]
        assert told["failed"] == 0, told["notices"]
