"""The table of `shoal plan --explain`: folded blocks, notes written once, 100 columns."""

from __future__ import annotations

import io
from dataclasses import replace

from shoal.base.plans.parameter_splits import ExchangeRow, SplitReport, SplitRow
from shoal.view.split_lines import fold_rows, print_splits, split_lines

WHY = "column: its product's input is whole on every rank, and every head needs its own rows only"
GATE = SplitRow("blocks.0.mlp.gate.weight", (704, 256), "tp", "rows 0:352 of 704", reason=WHY)
DOWN = replace(
    GATE, name="blocks.0.mlp.down.weight", shard="columns 0:352 of 704",
    collective="all_reduce forward", reason="row",
)  # fmt: skip
NORM = SplitRow("norm.weight", (256,), "", "whole", reason="outside of blocks")


def blocks(count: int) -> tuple[SplitRow, ...]:
    return tuple(
        replace(row, name=row.name.replace("0", str(k)))
        for k in range(count)
        for row in (GATE, DOWN)
    )


def lines(explained: SplitReport) -> list[str]:
    return [text for text, _ in split_lines(explained)]


def test_equal_blocks_are_one_line() -> None:
    explained = SplitReport("llama", "tp (tp = 2)", (*blocks(12), NORM))
    shown = lines(explained)
    assert shown[0] == "llama: 25 parameters under tp (tp = 2), 24 split, 1 whole on every rank"
    assert [line.split()[0] for line in shown[3:] if not line.startswith(" ")] == [
        "blocks.0–11.mlp.gate.weight", "blocks.0–11.mlp.down.weight", "norm.weight",
    ]  # fmt: skip
    assert any(line.endswith("all_reduce forward · row") for line in shown)
    assert max(map(len, shown)) <= 100


def test_a_block_that_differs_stands_alone() -> None:
    rows = list(blocks(4))
    rows[4] = replace(rows[4], axis="", shard="whole", reason="a hook of the user's")
    assert [row.name for row in fold_rows(rows)] == [
        "blocks.0,1,3.mlp.gate.weight", "blocks.0–3.mlp.down.weight", "blocks.2.mlp.gate.weight",
    ]  # fmt: skip


def test_numbers_at_two_places() -> None:
    rows = [replace(GATE, name=f"layers.{a}.experts.{b}.w") for a in range(3) for b in range(4)]
    assert [row.name for row in fold_rows(rows)] == ["layers.0–2.experts.0–3.w"]
    assert [row.name for row in fold_rows(rows[:-1])] == [
        "layers.0,1.experts.0–3.w", "layers.2.experts.0–2.w",
    ]  # fmt: skip


def test_a_long_text_of_several_lines_is_written_once() -> None:
    up = replace(GATE, name="blocks.0.mlp.up.weight")
    shown = lines(SplitReport("llama", "tp (tp = 2)", (GATE, up, DOWN)))
    text = "\n".join(shown)
    assert text.count("[1]") == 3  # two lines and the note itself
    assert " ".join(text.split()).count(WHY) == 1


def test_stages_exchanges_and_notices() -> None:
    staged = replace(GATE, stage=(0,), axis="", shard="whole", reason="")
    tied = replace(NORM, stage=(0, 1))
    explained = SplitReport(
        "mine", "pp (pp = 2)", (staged, tied),
        exchanges=(
            ExchangeRow("blocks.0", "all_reduce", "forward", 96 * 1024, 2),
            ExchangeRow("blocks.1", "all_reduce", "forward", 96 * 1024, 2),
        ),
        notices=("blocks.3 stays whole: data-dependent code " + "x " * 60,),
        samples=3,
    )  # fmt: skip
    shown = lines(explained)
    assert "whole on every rank of their stage" in shown[0]
    assert "stage" in shown[2]
    assert "0, 1" in shown[4]
    assert "  a forward and backward pass of 3 samples exchanges over tp:".strip() in shown
    folded = [line for line in shown if "all_reduce" in line]
    assert len(folded) == 1
    assert folded[0].split()[0] == "blocks.0,1"
    assert folded[0].endswith("forward   2 × all_reduce of 96.0 KiB")
    assert any("blocks.3 stays whole" in line for line in shown)
    assert max(map(len, shown)) <= 100


def test_long_names_are_broken_not_cut() -> None:
    name = "encoder.layers.0.self_attention.output_projection.dense.weight"
    stream = io.StringIO()
    print_splits(SplitReport("m", "tp (tp = 2)", (replace(GATE, name=name),)), stream)
    shown = stream.getvalue().splitlines()
    assert name in "".join(line[:40].strip() for line in shown[3:])


def test_the_document_names_every_parameter() -> None:
    record = SplitReport("llama", "tp (tp = 2)", (*blocks(3), NORM), samples=3).record()
    assert record["version"] == 1
    assert len(record["parameters"]) == 7, "folding is for the eye only"
    assert record["parameters"][0]["shape"] == (704, 256)
