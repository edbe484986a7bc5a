"""Events on a full disk: a line is there whole, or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from shoal.base.runlog.events import EventLog, append_line


def test_half_a_line_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a nearly full disk: the next event was glued to the half that it took."""
    path, write = tmp_path / "events.jsonl", os.write
    append_line(path, {"event": "first"})
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda file, data: write(file, data[:5]))
        with pytest.raises(OSError, match="No space left on device"):
            append_line(path, {"event": "lost"})
        log = EventLog(path, 0)
        log.emit("notice", text="lost too")
        assert log.dropped == 1
    append_line(path, {"event": "last"})
    assert [json.loads(line)["event"] for line in path.read_text().splitlines()] == [
        "first",
        "last",
    ]


def test_every_line_is_json_for_a_strict_reader(tmp_path: Path) -> None:
    """A metric whose count is 0 is a NaN inside of `metrics`, and JSON has none."""

    def refuse(word: str) -> None:
        raise AssertionError(word)

    values = {"p": float("nan"), "by_source": [{"loss": float("-inf")}]}
    append_line(tmp_path / "metrics.jsonl", {"step": 1, "loss": float("inf"), "metrics": values})
    EventLog(tmp_path / "events.jsonl", 0).emit("validated", loss=float("nan"), metrics=values)
    null = {"p": None, "by_source": [{"loss": None}]}
    for name in ("metrics.jsonl", "events.jsonl"):
        row = json.loads((tmp_path / name).read_text(), parse_constant=refuse)
        assert (row["loss"], row["metrics"]) == (None, null)
