"""Predicted beside measured, in a comparison and at the end of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shoal.view.forecast_errors import forecast_error_lines, predicted_and_measured
from shoal.view.summary import summarise_run


def row(**changed: Any) -> dict[str, Any]:
    return {
        "layout": "ddp",
        "parts": 2,
        "step_s": [0.1, 0.2, 0.1],
        "memory": [{"weights": 2**20, "rest": 2**20}, {"weights": 2**20, "rest": 3 * 2**20}],
        "sent_bytes": {"all_reduce": 1000},
        "predicted": {"step_s": 0.11, "allocated_bytes": 5 * 2**20, "sent_bytes": 1000.0},
        **changed,
    }


def test_a_row_shows_how_far_the_prediction_was() -> None:
    lines = [text for text, _ in forecast_error_lines([row()])]
    assert lines[1].split() == [
        "ddp", "2", "110.0", "ms", "(0.91", "×)", "5.0", "MiB", "(0.80", "×)", "1000", "B", "(1.00",
        "×)",
    ]  # fmt: skip
    assert all(len(line) <= 80 for line in lines)


def test_what_is_not_known_is_left_out() -> None:
    assert forecast_error_lines([row(predicted=None), row(predicted={"reason": "no sample"})]) == []
    assert forecast_error_lines([row(step_s=None, memory=None, sent_bytes=None)]) == []
    unseen = row(memory=[{"weights": 1, "rest": None}], sent_bytes={})
    assert list(predicted_and_measured(unseen)) == ["step"]


def test_a_run_ends_with_what_was_foreseen(tmp_path: Path) -> None:
    said = {"step_s": 0.09, "peak_memory_bytes": 2**20, "sent_bytes": 2000.0}
    (tmp_path / "plan.json").write_text(json.dumps({"predicted": said}))
    steps = [
        {"step": n, "step_s": 0.1, "peak_memory_bytes": 2**21, "comm_bytes": 1000, "loss": 1.0}
        for n in range(1, 4)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    line = next(text for text in summarise_run(tmp_path).splitlines() if "foreseen" in text)
    assert line.split(None, 1)[1] == (
        "step 90.0 ms → 100.0 ms (1.11 ×), peak 1.0 MiB → 2.0 MiB (2.00"
    )
    assert "far off" not in summarise_run(tmp_path)
    (tmp_path / "plan.json").write_text(json.dumps({"predicted": {**said, "step_s": 9.0}}))
    assert "forecast far off: the machine was busy when it was" in summarise_run(tmp_path)
    (tmp_path / "plan.json").write_text(json.dumps({"predicted": {"reason": "no sample"}}))
    assert "foreseen" not in summarise_run(tmp_path)
