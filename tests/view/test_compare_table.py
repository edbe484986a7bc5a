"""The table of layouts: what stands in it at 80 and 120 columns, blanks, reasons, honest notes."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from shoal.base.errors import ConfigError
from shoal.cli.compare_rows import add_relative_figures
from shoal.view import chart
from shoal.view.compare import comparison_lines, print_comparison
from shoal.view.compare_progress import ComparisonProgress

MIB = 2**20


def row(layout: str, parts: int, per_s: float | None = None, **more: Any) -> dict[str, Any]:
    """A row of compare.json before `add_relative_figures`."""
    rank = {"weights": 8 * MIB, "gradients": 8 * MIB, "optimizer": 16 * MIB, "rest": 30 * MIB}
    measured = {
        "text": layout, "precision": "fp32", "parameters": 2**21, "per_s": per_s,
        "step_s": [0.1, 0.11], "losses": [4.0, 3.5], "memory": [rank, {**rank, "rest": 40 * MIB}],
        "sent_bytes": {"all_reduce": 8 * MIB, "all_gather": 2 * MIB} if parts > 1 else {},
        "weight_difference": 1e-7, "reason": "",
    }  # fmt: skip
    if per_s is None:
        measured = dict.fromkeys(measured) | {"reason": "not built in this version"}
    return {"layout": layout, "parts": parts, "processes": parts, **measured, **more}


def record(*rows: dict[str, Any], cores: int = 2) -> dict[str, Any]:
    add_relative_figures(list(rows), cores)
    return {
        "machine": {"cores": cores, "memory_bytes": 2**34, "gpus": 0, "torch": "2.13.0",
                    "device": "cpu", "threads": 1},
        "model": "llama", "parameters": 2**21, "batch": 8, "micro_batch": 1, "steps": 6,
        "unit": "tokens", "rows": list(rows),
    }  # fmt: skip


def shown(kept: dict[str, Any], width: int) -> list[str]:
    return [text for text, _ in comparison_lines(kept, width)]


FULL = [
    ("single", 1, 5000.0), ("dp", 2, 7000.0), ("ddp", 2, 9000.0), ("zero1", 2, 8800.0),
    ("zero2", 2, 8700.0), ("fsdp", 2, 8600.0), ("ddp", 4, 9100.0),
]  # fmt: skip


@pytest.mark.parametrize("width", [80, 100, 120])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    rows = [row(*one) for one in FULL]
    rows += [row("streaming-diloco", 2), row("hsdp", 2, reason="hsdp is at least 2 × 2 " * 9)]
    assert all(len(line) <= width for line in shown(record(*rows), width))


def test_speedup_efficiency_memory_and_bytes() -> None:
    lines = shown(record(row("single", 1, 5000.0), row("ddp", 2, 9000.0)), 80)
    ddp = next(line for line in lines if line.startswith("ddp"))
    assert ddp.split() == ["ddp", "2", "9,000", "1.80×", "90%", "32.0", "40.0", "10.0", "1e-07"]
    single = next(line for line in lines if line.startswith("single"))
    assert single.split() == ["single", "1", "5,000", "1.00×", "100%", "32.0", "40.0", "0"]


def test_a_wide_terminal_splits_states_and_bytes() -> None:
    lines = shown(record(row("single", 1, 5000.0), row("ddp", 2, 9000.0)), 120)
    assert any("weights  gradients  optimizer  rest" in line for line in lines)
    assert any("all-reduce  all-gather" in line for line in lines)


def test_a_row_that_cannot_run_has_a_reason_and_no_figures() -> None:
    lines = shown(record(row("single", 1, 5000.0), row("tp", 2)), 80)
    tp = next(line for line in lines if line.startswith("tp"))
    assert tp.split(maxsplit=2) == ["tp", "2", "not built in this version"]
    assert sum(line.startswith("tp") for line in lines) == 1, "no bar without a figure"


def test_nothing_measured_is_still_a_table() -> None:
    lines = shown(record(row("single", 1, reason="killed by SIGKILL"), row("tp", 2)), 80)
    assert any("killed by SIGKILL" in line for line in lines)


def test_more_processes_than_cores_prove_nothing() -> None:
    lines = shown(record(row("single", 1, 5000.0), row("ddp", 4, 9000.0)), 80)
    assert any("9,000*" in line for line in lines)
    assert "prove nothing about speed" in " ".join(lines)
    enough = record(row("single", 1, 5000.0), row("ddp", 4, 9000.0), cores=4)
    assert "prove nothing" not in " ".join(shown(enough, 80))


def test_a_machine_that_was_not_quiet_is_told() -> None:
    kept = record(row("single", 1, 5000.0), row("ddp", 2, 9000.0))
    assert "not quiet" not in " ".join(shown(kept, 80))
    kept["machine"]["busy"] = 0.5
    assert "rough: other work took 50% of its cores just before." in " ".join(shown(kept, 200))
    uneven = row("ddp", 2, 9000.0, step_s=[0.1, 0.2, 0.3])
    said = " ".join(shown(record(row("single", 1, 5000.0), uneven), 200))
    assert "the middle half of one row's step times lies 50% apart" in said


def test_a_difference_beyond_rounding_is_marked() -> None:
    off = row("ddp", 2, 9000.0, losses=[4.0, 3.9])
    lines = shown(record(row("single", 1, 5000.0), off), 80)
    assert any("1e-01!" in line for line in lines)
    assert "shoal prove" in " ".join(lines)
    near = row("ddp", 2, 9000.0, losses=[4.0, 3.5000001])
    assert "!" not in " ".join(shown(record(row("single", 1, 5000.0), near), 80))
    broken = row("ddp", 2, 9000.0, losses=[4.0, None])
    assert "!" in " ".join(shown(record(row("single", 1, 5000.0), broken), 80))


def test_without_single_what_follows_from_it_is_blank() -> None:
    lost = row("single", 1, reason="out of memory")
    alone = row("fsdp", 2, 9000.0, weight_difference=None)
    lines = shown(record(lost, alone), 80)
    fsdp = next(line for line in lines if line.startswith("fsdp"))
    assert fsdp.split() == ["fsdp", "2", "9,000", "32.0", "40.0", "10.0"]


def test_memory_that_is_not_known_is_blank() -> None:
    one = row("dp", 2, 9000.0)
    one["memory"] = [{"weights": MIB, "gradients": MIB, "optimizer": 2 * MIB, "rest": None}]
    lines = shown(record(row("single", 1, 5000.0), one), 80)
    dp = next(line for line in lines if line.startswith("dp"))
    assert dp.split() == ["dp", "2", "threads", "9,000", "1.80×", "90%", "4.0", "10.0", "1e-07"]


def test_bars_are_as_long_as_rows_are_fast() -> None:
    lines = shown(record(row("single", 1, 5000.0), row("ddp", 2, 10000.0)), 80)
    bars = [line.count("█") for line in lines if "█" in line]
    assert bars[1] - 2 * bars[0] in (0, 1)


def test_a_terminal_that_knows_no_blocks_gets_hashes() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    kept = record(row("single", 1, 5000.0), row("ddp", 2, 10000.0))
    print_comparison(kept, stream, ["compare/x/compare.json"])
    stream.flush()
    text = stream.buffer.getvalue().decode("ascii")
    assert "##########" in text
    assert "kept: compare/x/compare.json" in text


def test_progress_in_a_pipe_is_one_line_per_row(tmp_path: Path) -> None:
    path, stream = tmp_path / "rows.jsonl", io.StringIO()
    waiting = ComparisonProgress(path, [("single", 1), ("tp", 2)], stream)
    waiting.tick()
    told = [{"unit": "tokens"}, {"began": 0}, {"row": 0, "per_s": 5000.4}, {"began": 1}]
    path.write_text("".join(json.dumps(one) + "\n" for one in told))
    waiting.tick()
    assert stream.getvalue() == "layout=single processes=1 tokens_per_s=5000\n"
    with path.open("a") as file:
        file.write(json.dumps({"row": 1, "reason": "no such axis"}) + "\n")
    waiting.finish()
    assert stream.getvalue().splitlines()[1:] == ['layout=tp processes=2 reason="no such axis"']


def test_a_picture_needs_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"--png: .* pip install 'shoal\[report\]'"):
        chart.check_matplotlib("--png")
    assert not chart.draw_comparison(record(row("single", 1, 5000.0)), tmp_path / "x.png")


def test_a_picture_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra `report` is not installed")
    path = tmp_path / "x.png"
    assert chart.draw_comparison(record(*[row(*one) for one in FULL]), path)
    assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match="cannot be written"):
        chart.draw_comparison(record(row("single", 1, 5000.0)), tmp_path / "none" / "x.png")


def test_only_the_first_steps_are_compared() -> None:
    """Training magnifies rounding: later losses differ in every layout and mean nothing."""
    base = row("single", 1, 5000.0, losses=[4.0] * 20)
    far = row("ddp", 2, 9000.0, losses=[4.0] * 8 + [5.0] * 12)
    assert "!" not in " ".join(shown(record(base, far), 80))
    early = row("ddp", 2, 9000.0, losses=[4.0] * 7 + [5.0] * 13)
    assert "!" in " ".join(shown(record(base, early), 80))
