"""What hooks ask for, and the runs in which they cannot."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shoal.base.errors import ConfigError
from shoal.fabric import World
from shoal.fabric.rendezvous.process_info import ProcessInfo
from shoal.trainer.metrics_recorder import MetricsRecorder


def recorder() -> MetricsRecorder:
    return MetricsRecorder(None, World(ProcessInfo(), torch.device("cpu"), None))


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
