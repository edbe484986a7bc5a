"""Batches of lists, graphs and shared tensors are cut along their samples, in every layout."""

from __future__ import annotations

import pytest

from batch_steps import check_equal
from proof_rows import rows
from sample_lists_case import EMPTY_FIRST, SHARES

KINDS = (
    *("images", "images in a dict", "detection", "two crops", "graphs", "a class", "a table"),
    "a bias",
)
LAYOUTS = ("ddp", "zero2", "fsdp", "tp", "pp")
SHORT = {("images", "ddp"), ("graphs", "fsdp"), ("detection", "zero2"), ("a table", "tp")}
"""Rows of `make test`: a list, an object, two lists, a table, each in another layout."""


@pytest.mark.parametrize(("kind", "layout"), rows((KINDS, LAYOUTS), SHORT))
def test_it_equals_the_whole_batch_in_plain_torch(worlds, kind: str, layout: str) -> None:
    """5 and 3 samples, 8 and none, 4 and 4, 3 and 5, each in micro-batches of 2."""
    (plain,) = worlds(1).call("sample_lists_case:plain", kind=kind, shares=SHARES)
    for found in worlds(2).call(
        "sample_lists_case:trained", kind=kind, layout=layout, shares=SHARES
    ):
        check_equal(found, plain)


@pytest.mark.proof
@pytest.mark.parametrize("kind", ["images", "detection", "a table", "two crops"])
@pytest.mark.parametrize("layout", ["zero2", "fsdp"])
def test_a_rank_without_samples_in_the_first_step(worlds, kind: str, layout: str) -> None:
    (plain,) = worlds(1).call("sample_lists_case:plain", kind=kind, shares=EMPTY_FIRST)
    for found in worlds(2).call(
        "sample_lists_case:trained", kind=kind, layout=layout, shares=EMPTY_FIRST
    ):
        check_equal(found, plain)


@pytest.mark.proof
def test_graphs_are_not_sent_to_a_rank_without_samples(worlds) -> None:
    for found in worlds(2).call(
        "sample_lists_case:trained", kind="graphs", layout="fsdp", shares=EMPTY_FIRST
    ):
        assert "the first step has no sample for some ranks" in found["error"]
