"""Policies on top of each other: a second start is the first one, and both are one process.

Each row once broke, or was falsely refused; `make proof` draws hundreds more
(tests/proof/compositions.py), with real kills.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest

from shoal.base.errors import UserError
from shoal.cli import start

sys.path.insert(0, str(Path(__file__).parents[2] / "proof"))
from compositions_drawn import draw, furnish
from compositions_reasons import reason_of

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
    "compiled tp": (
        "gpt", {"layout": {"tp": 2}, "compile": "blocks", "dropout": 0.1, "layers": 1},
    ),
    "compiled cp": ("llama", {"layout": {"cp": 2}, "compile": "blocks", "dropout": 0.1}),
    "compiled tp, full": (
        "own", {"layout": {"tp": 2}, "compile": "blocks", "recompute": "full"},
    ),
    "compiled, backward in two halves": (
        "gpt", {"layout": {"pp": 2, "schedule": "zero-bubble"}, "compile": "blocks", "dropout": 0.1},
    ),
    "compiled tp in fp16": ("gpt", {"layout": {"tp": 2}, "compile": "blocks", **FP16}),
}  # fmt: skip

NARROW = {"fp32": 2.0**-15, "bf16": 2.0**-5, "fp16": 2.0**-8}
"""8 × the epsilon of a format: parts of products are rounded before they are added."""


SLOW = (
    *("compiled tp, full", "compiled cp", "compiled tp in fp16"),
    "compiled, backward in two halves",
    *(
        "tp, full",
        "cp by gathering in bf16, full",
        "tp in fp16, selective",
        "tp in bf16, full",
        "own module, tp, full",
    ),  # another model, or way of attention, stays
)


@pytest.mark.parametrize(
    "row", [pytest.param(r, marks=[pytest.mark.proof] if r in SLOW else []) for r in ROWS]
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
         'stages than the 2 blocks of GPT; try: layout={"schedule": "1f1b"}'}
    ]  # fmt: skip


def test_what_a_command_refuses_is_true_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    furnish(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    refused = []
    for number in range(40):
        layout, words = draw(random.Random(f"7.{number}"))
        try:
            start.prepare_run([f"{k}={v}" for k, v in {**words, "run.name": "x"}.items()], None)
        except UserError as refusal:
            refused.append((layout, str(refusal), reason_of(str(refusal), words)))
    assert len(refused) > 10
    assert [row for row in refused if not row[2][1]] == []


def test_a_reason_that_is_not_true_of_a_command_is_none() -> None:
    words = {"layout.strategy": "ddp", "launch.processes": "2", "memory.recompute": "full"}
    line = (
        "memory.recompute = full: layout.schedule = zbv runs a backward in two halves, so a block "
        "would be computed again for every weight in it (2.5 times the work); try: x"
    )
    assert reason_of(line, words) == ("computed again for each of two halves", False)
    assert reason_of("layout.compress = int8: is not wanted; try: none", words) == ("", False)
