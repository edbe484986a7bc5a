"""What hooks ask for, and the runs in which they cannot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.base.errors import ConfigError
from shoal.fabric import World
from shoal.fabric.rendezvous.process_info import ProcessInfo
from shoal.trainer.metrics_recorder import MetricsRecorder
from shoal.trainer.step import metrics_rows
from shoal.trainer.step.metrics_rows import write_row, write_rows_together


def recorder(folder: Path | None = None) -> MetricsRecorder:
    return MetricsRecorder(folder, World(ProcessInfo(), torch.device("cpu"), None))


def test_a_word_that_there_is_none_of() -> None:
    told = recorder()
    told.add_callback(lambda record: "halt")
    wanted = r'hook <lambda>: gave "halt"; it may give "stop", "save" or None'
    with pytest.raises(ConfigError, match=wanted):
        told.events.emit("notice", text="a")


def test_where_saves_are_not_for_hooks_to_ask_for() -> None:
    """Islands save what they have agreed on; a save within a round is none to go on from."""
    told, heard = recorder(), list[Any]()
    told.saves_apart = "hooks: no saves here"

    def hook(record: dict[str, Any]) -> str:
        heard.append(record.get("text"))
        return "save" if record["step"] is None else "stop"

    told.add_callback(hook)
    told.events.emit("notice", text="a")
    told.events.emit("notice", text="b")
    assert heard == ["a", "hooks: no saves here", "b"], "one line"
    assert told.wanted == set()
    told.events.emit("notice", text="c", step=1)
    assert told.wanted == {"stop"}


def test_rows_of_fast_steps_are_written_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the end, at an error too, and while steps last; every other row at once."""
    told, heard = recorder(tmp_path), list[int]()
    told.add_callback(lambda record: heard.append(record["step"]))

    def step(number: int) -> list[int]:
        write_row(told, {"step": number, "loss": float("nan"), "tokens": 1}, 1)
        path = tmp_path / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line)["step"] for line in lines]

    assert step(1) == [1]

    def fail_after_two_steps() -> None:
        with write_rows_together(told):
            assert step(2) == step(3) == [1]
            assert heard == [1, 2, 3], "callbacks do not wait"
            raise ValueError("later")

    with pytest.raises(ValueError, match="later"):
        fail_after_two_steps()
    assert step(4) == [1, 2, 3, 4]
    monkeypatch.setattr(metrics_rows, "ROWS_S", 0.0)
    with write_rows_together(told):
        assert step(5) == [1, 2, 3, 4, 5], "a slow step"
