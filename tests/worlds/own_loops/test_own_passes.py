"""A user's own loop over micro-batches computes what one process computes, in any layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shoal.base.text.argument_names import use_argument_names


def long(*row: Any) -> Any:
    """A row that `make proof` runs: others hold most of it."""
    return pytest.param(*row, marks=pytest.mark.proof)


HOW = ["one loss", "two losses", "two passes", "two counts"]
LAYOUTS: list[tuple[int, Any, list[str]]] = [
    (1, "single", HOW),
    (2, "ddp", ["two losses"]),
    (4, "ddp", []),
    (4, "zero1", ["one loss"]),
    (4, "zero2", ["two losses", "two passes", "two counts"]),
    (2, "fsdp", ["two passes"]),
    (4, "fsdp", ["two counts"]),
    (4, {"dp_replicate": 2, "dp_shard": 2}, []),
    (2, {"tp": 2}, ["two passes"]),
    (4, {"tp": 2, "dp_shard": 2}, []),
    (4, {"tp": 2, "dp_replicate": 2}, []),
]
"""Which ways `make test` takes: all where a process is alone or sums its parts as they come, those with
several backward passes where hooks gather and free, else one."""
ROWS = [
    (ranks, layout, how) if how in short else long(ranks, layout, how)
    for ranks, layout, short in LAYOUTS
    for how in HOW
]


@pytest.mark.parametrize(("ranks", "layout", "how"), ROWS, ids=str)
def test_it_equals_plain_torch(worlds, ranks: int, layout: Any, how: str) -> None:
    """In float64, with unequal counts, a tied and a frozen weight, a short last step."""
    (plain,) = worlds(1).call("own_passes_case:plain", how=how)
    for found in worlds(ranks).call("own_passes_case:trained", layout=layout, how=how):
        assert found["losses"] == pytest.approx(plain["losses"], rel=1e-12)
        for name, wanted in plain["weights"].items():
            got = torch.tensor(found["weights"][name], dtype=torch.float64)
            want = torch.tensor(wanted, dtype=torch.float64)
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("layout", ["ddp", long("zero1"), "zero2"])
def test_a_penalty_on_a_gradient(worlds, layout: str) -> None:
    """Differentiated twice, before anything is summed."""
    (plain,) = worlds(1).call("own_passes_case:plain", how="penalty")
    for found in worlds(4).call("own_passes_case:trained", layout=layout, how="penalty"):
        assert found["losses"] == pytest.approx(plain["losses"], rel=1e-12)


@pytest.mark.parametrize(
    "layout", ["ddp", "zero2", "fsdp", long({"tp": 2, "dp_shard": 2})], ids=str
)
def test_dropout_is_that_of_one_process(worlds, layout: Any) -> None:
    """Masks belong to micro-batches, wherever their loop runs."""
    settings = {"how": "one loss", "dropout": 0.3}
    (alone,) = worlds(1).call("own_passes_case:trained", layout="single", **settings)
    for found in worlds(4).call("own_passes_case:trained", layout=layout, **settings):
        assert found["losses"] == pytest.approx(alone["losses"], rel=1e-12)


@pytest.mark.parametrize(
    ("ranks", "name", "layout", "settings"),
    [
        (2, "gpt", {"cp": 2}, {}),
        (2, "llama", {"tp": 2}, {}),
        long(4, "gpt", {"cp": 2, "tp": 2}, {}),
        long(4, "gpt", {"cp": 2, "dp_shard": 2}, {}),
        (2, "moe", {"strategy": "ep"}, {}),
        long(2, "gpt", "ddp", {"recompute": "full"}),
        (2, "gpt", "fsdp", {"recompute": "selective"}),
        (2, "gpt", "zero2", {"defer_sync": True}),
        (2, "gpt", "fsdp", {"defer_sync": True}),
        (2, "gpt", "ddp", {"average": 0.9}),
    ],
    ids=str,
)
def test_other_techniques_are_as_in_a_step(
    worlds, ranks: int, name: str, layout: Any, settings: dict[str, Any]
) -> None:
    """Sequences and experts that ranks share, blocks that run twice, sums that wait."""
    given = {"name": name, "layout": layout, **settings}
    wanted = worlds(ranks).call("own_passes_case:sequences", how="step", **given)
    found = worlds(ranks).call("own_passes_case:sequences", how="passes", **given)
    for got, want in zip(found, wanted, strict=True):
        assert got == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize(
    ("layout", "precision"),
    [
        *(("zero2", "fp16"), ("fsdp", "bf16")),
        *(long("ddp", "bf16"), long("ddp", "fp16"), long("zero2", "bf16"), long("fsdp", "fp16")),
    ],
)
def test_formats_are_those_of_a_step(worlds, layout: str, precision: str) -> None:
    """Autocast around the loop's passes, masters, loss scale: to the last digit."""
    settings = {"layout": layout, "precision": precision}
    wanted = worlds(2).call("own_passes_case:trained", how="step", **settings)
    assert worlds(2).call("own_passes_case:trained", how="one loss", **settings) == wanted


TWICE = [
    (2, "fsdp", "layout.strategy = fsdp", {}),
    (2, {"tp": 2}, "layout.tp = 2", {}),
    (4, {"tp": 2, "dp_replicate": 2}, "layout.tp = 2", {}),
    (1, "single", "train.compile = blocks", {"compile": "blocks"}),
]


@pytest.mark.parametrize(
    ("ranks", "layout", "what", "settings", "how"),
    [
        (*row, how) if (row[0] == 2 and how == "penalty") or row is TWICE[0] else long(*row, how)
        for row in TWICE
        for how in ("penalty", "penalty in the loss")
    ],
    ids=str,
)
def test_a_gradient_of_a_gradient_is_refused(
    worlds, ranks: int, layout: Any, what: str, settings: dict[str, Any], how: str
) -> None:
    """Under tp torch would take another gradient than one process does, with a warning."""
    wanted = (
        f"a gradient of a gradient (create_graph=True) passes through the model, and {what} can be "
        f'differentiated once only; try: layout="ddp", zero1 or zero2'
    )
    wanted = use_argument_names(wanted)  # as the screen shows what the user's own pass raises
    for told in worlds(ranks).call("own_passes_case:told", layout=layout, mistake=how, **settings):
        assert wanted in use_argument_names(told)


@pytest.mark.parametrize("layout", ["fsdp", {"tp": 2}], ids=str)
def test_a_gradient_by_the_outputs_is_none_through_the_model(worlds, layout: Any) -> None:
    (alone,) = worlds(1).call("own_passes_case:told", layout="single", mistake="by outputs")
    assert alone.startswith("loss ")
    for told in worlds(2).call("own_passes_case:told", layout=layout, mistake="by outputs"):
        assert told == alone


ONCE = "call it equally often in every micro-batch, on every rank"
MISTAKES = {
    "outside": "run.backward is for loops over run.micro_batches(batch); try: run.step(batch)",
    "never": "run.update: run.backward was not called in step 1; try: run.backward(loss_sum, "
    "count) in the loop over run.micro_batches(batch)",
    "left out": "run.backward: called 0 times in a micro-batch of rank 1 and 1 times in one of "
    f"rank 0, in step 1; {ONCE}",
    "doubled": "run.backward: called 1 times in a micro-batch of rank 0 and 2 times in one of rank "
    f"1, in step 1; {ONCE}",
    "dims": "run.backward: a sum with a gradient is wanted, got a tensor of shape [1]; try: "
    "loss.sum()",
    "detached": "run.backward: a sum with a gradient is wanted, got one without: it is cut off from "
    "the model (by .detach(), .item(), torch.no_grad())",
    "mean": "where (sum, count) is wanted: a mean is divided by the count again, or weighs ranks with "
    'unequal counts wrongly; try: reduction="sum"',
    "two counts": "whose losses share one; try: divide each sum by its run.total(n) of the "
    "whole step, and give no count",
    "mixed": "run.backward: some losses of step 1 came with a count and some without; try: one "
    "of both everywhere",
    "break": "run.update: 1 of 2 micro-batches were taken from run.micro_batches; take all of them, "
    "whatever becomes of their losses",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line(worlds, mistake: str) -> None:
    for told in worlds(2).call("own_passes_case:told", layout="ddp", mistake=mistake):
        assert MISTAKES[mistake] in told


def test_doubled_alike_is_taken_at_its_word(worlds) -> None:
    """Two losses are two calls."""
    for told in worlds(2).call("own_passes_case:told", layout="ddp", mistake="doubled everywhere"):
        assert told.startswith("loss ")


def test_a_pipeline_runs_its_passes_itself(worlds) -> None:
    told = worlds(2).call("own_passes_case:told", layout={"pp": 2}, mistake="")
    wanted = "run.micro_batches: layout = pp runs the passes of a step in an order of its own"
    told = [use_argument_names(line) for line in told]  # as the screen shows what a loop raises
    assert all(wanted in line and "try: run.step(batch)" in line for line in told)
