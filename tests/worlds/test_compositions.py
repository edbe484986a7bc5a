"""Policies on top of each other: a second start is the first one, and both are one process.

Each row once broke, or was falsely refused; `make proof` draws hundreds more
(tests/proof/compositions.py), with real kills.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

FP16 = {"precision": "fp16", "loss_scale": 64.0}
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "tp, full": ("llama", {"layout": {"tp": 2}, "recompute": "full"}),
    "tp, selective": ("gpt", {"layout": {"tp": 2}, "recompute": "selective", "dropout": 0.1}),
    "tp in fp16, selective": (
        "llama",
        {"layout": {"tp": 2, "sequence_parallel": "off"}, "recompute": "selective",
         "dropout": 0.1, **FP16},
    ),
    "tp in bf16, full": (
        "moe",
        {"layout": {"tp": 2, "sequence_parallel": "off"}, "recompute": "full", "precision": "bf16"},
    ),
    "cp in bf16, full": (
        "gpt", {"layout": {"cp": 2, "context": "ring"}, "recompute": "full", "precision": "bf16"},
    ),
    "cp by gathering in bf16, full": (
        "moe",
        {"layout": {"cp": 2, "context": "gather"}, "recompute": "full", "precision": "bf16"},
    ),
    "pp in fp16, full": ("moe", {"layout": {"pp": 2}, "recompute": "full", **FP16}),
    "own module, tp, full": ("own", {"layout": {"tp": 2}, "recompute": "full", "dropout": 0.1}),
    "compiled tp": ("gpt", {"layout": {"tp": 2}, "compile": "blocks", "dropout": 0.1}),
    "compiled cp": ("llama", {"layout": {"cp": 2}, "compile": "blocks", "dropout": 0.1}),
    "compiled tp, full": (
        "own", {"layout": {"tp": 2}, "compile": "blocks", "recompute": "full"},
    ),
    "compiled tp in fp16": ("gpt", {"layout": {"tp": 2}, "compile": "blocks", **FP16}),
}  # fmt: skip

NARROW = {"fp32": 2.0**-15, "bf16": 2.0**-5, "fp16": 2.0**-8}
"""8 × the epsilon of a format: parts of products are rounded before they are added."""


FAST = ("tp, full", "tp in bf16, full", "cp in bf16, full", "pp in fp16, full", "compiled tp")


@pytest.mark.parametrize(
    "row", [pytest.param(r, marks=[] if r in FAST else [pytest.mark.proof]) for r in ROWS]
)
def test_a_second_start_is_the_first_and_both_are_one_process(
    worlds: Any, tmp_path: Path, row: str
) -> None:
    model, words = ROWS[row]
    words = {"precision": "fp64", "clip": 1.0, **words}
    told = worlds(2).call("mix_case:fate", folder=str(tmp_path), model=model, words=words)
    most = NARROW.get(words["precision"], 1e-12)
    for rank in told:
        assert "refused" not in rank, rank
        assert rank["warm"] == rank["cold"][1:]
        for got, right in zip(rank["cold"], told[0]["alone"], strict=True):
            assert got == pytest.approx(right, rel=most)


def test_too_many_stages_are_told_in_the_users_words(worlds: Any, tmp_path: Path) -> None:
    words = {"layout": {"pp": 2, "schedule": "interleaved", "chunks": 2}, "precision": "fp64"}
    told = worlds(2).call("mix_case:fate", folder=str(tmp_path), model="gpt", words=words)
    assert told == 2 * [
        {"refused": "layout.pp = 2 × 2 stages per rank (layout.schedule = interleaved) = 4: more "
         "stages than the 2 blocks of GPT; nearest legal: layout.schedule=1f1b"}
    ]  # fmt: skip
