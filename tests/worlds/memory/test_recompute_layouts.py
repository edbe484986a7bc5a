"""Recomputed blocks give the bits of blocks that keep everything, in every data-parallel layout."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize(
    ("case", "layout"),
    [
        *(("llama", "ddp"), ("cnn", "fsdp")),
        *(
            pytest.param(*row, marks=pytest.mark.proof)
            for row in (("cnn", "ddp"), ("llama", "zero2"))
        ),
    ],
)
def test_recompute_gives_the_same_bits(worlds, case: str, layout: str) -> None:
    def trained(policy: str) -> list:
        call = "recompute_cases:trained"
        return worlds(2).call(call, case=case, layout=layout, policy=policy)

    expected = trained("none")
    assert all(answer["same_names"] for answer in expected)
    for policy in ("selective", "full"):
        assert trained(policy) == expected, policy


def test_fsdp_gives_the_same_bits_and_gathers_no_more(worlds) -> None:
    """Its hooks stay outside of what runs twice: weights are gathered before a block's second run."""
    answers = worlds(2).call("recompute_cases:fsdp")
    for policies in answers:
        assert policies["none"]["gathers"] > 0
        for policy in ("selective", "full"):
            assert policies[policy] == policies["none"], policy
    assert answers[0]["none"]["gradients"] == answers[1]["none"]["gradients"]


def test_fsdp_keeps_nothing_of_it_after_close(worlds) -> None:
    assert worlds(2).call("recompute_cases:fsdp_undo") == [True, True]
