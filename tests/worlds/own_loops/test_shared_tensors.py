"""A tensor of all samples that has as many rows as samples is whole in every micro-batch, or named."""

from __future__ import annotations

from typing import Any

import pytest

from batch_steps import check_equal
from proof_rows import chosen

KINDS = (
    *("a table", "a table in a list", "a table by name", "class scores", "class weights"),
    *("a prior in a dict", "an adjacency"),
)
ROWS = [(kind, layout) for kind in KINDS for layout in ("single", "ddp", "tp", "pp")]
SHORT = [
    *(("a table", "tp"), ("a table in a list", "ddp"), ("class scores", "single")),
    *(("class weights", "pp"), ("a prior in a dict", "tp")),
]
SHARED, STAYS = "all samples share this tensor", "has the same numbers in two steps"


def train(worlds: Any, kind: str, layout: str, **more: Any) -> tuple[Any, list[Any], list[str]]:
    """Return the results of plain torch and of the ranks, and the lines about the batch."""
    rows = 4 if layout == "ddp" else 8
    (plain,) = worlds(1).call("shared_tensors_case:plain", kind=kind, rows=rows)
    ranks = 1 if layout == "single" else 2
    found = worlds(ranks).call("shared_tensors_case:trained", kind=kind, layout=layout, **more)
    lines = [line for one in found for line in one["lines"] if "shoal: batch" in line]
    return plain, found, lines


@pytest.mark.parametrize(("kind", "layout"), chosen(ROWS, SHORT))
def test_a_shared_tensor_is_whole_in_every_micro_batch(worlds, kind: str, layout: str) -> None:
    plain, found, lines = train(worlds, kind, layout)
    for one in found:
        check_equal(one, plain)
    assert len(lines) == 1
    assert SHARED in lines[0]


@pytest.mark.parametrize("layout", ["single", "tp"])
def test_it_is_whole_in_a_loop_that_writes_out_the_passes(worlds, layout: str) -> None:
    plain, found, lines = train(worlds, "a table", layout, written=True)
    for one in found:
        check_equal(one, plain)
    assert any(SHARED in line for line in lines)


@pytest.mark.parametrize("layout", ["single", "ddp", "tp"])
def test_fixed_noise_of_each_sample_is_cut_without_a_line(worlds, layout: str) -> None:
    plain, found, lines = train(worlds, "noise by sample", layout)
    for one in found:
        check_equal(one, plain)
    assert lines == []


@pytest.mark.parametrize(("kind", "path"), [("a table", "batch[0][1]"),
                                            ("a prior in a dict", "batch['prior']")])  # fmt: skip
def test_a_tensor_that_stays_is_named_where_no_trial_is_made(worlds, kind: str, path: str) -> None:
    """A large model is not copied: the tensor is cut, and named in the second step."""
    _, found, lines = train(worlds, kind, "single", is_large=True)
    assert not found[0]["error"]
    assert len(lines) == 1
    assert path in lines[0]
    assert STAYS in lines[0]


def test_noise_that_stays_trains_on(worlds) -> None:
    """A row for each sample is right, whatever the line asks."""
    plain, found, lines = train(worlds, "noise by sample", "single", is_large=True)
    check_equal(found[0], plain)
    assert len(lines) == 1
    assert "if it has a row per sample, all is well" in lines[0]
