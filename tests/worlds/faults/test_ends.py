"""Stops on the real command, at times that are not between two steps: saved, or said otherwise."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from cli_run import TOY_ARGUMENTS, CommandLine
from shoal.checkpoint.format.listing import list_checkpoints

TWO = ("launch.processes=2", "data.source=toy:slow_to_validate", "checkpoint.every=100")


@pytest.mark.parametrize(
    ("layout", "workers"),
    [("ddp", 1), pytest.param("fsdp", 0, marks=pytest.mark.proof),
     pytest.param("pp", 0, marks=pytest.mark.proof), pytest.param("single", 2, marks=pytest.mark.proof)],
)  # fmt: skip
def test_a_stop_is_obeyed_within_a_validation_and_loader_processes_live_through_it(
    tmp_path: Path, layout: str, workers: int
) -> None:
    """The signal goes to whole groups, as from a cgroup; the validation would take a minute."""
    model = () if layout != "pp" else ("model.build=toy:build",)
    arguments = (*TOY_ARGUMENTS, *TWO, "train.validate_every=4", f"data.workers={workers}", *model)
    if layout == "single":
        arguments = (*arguments, "launch.processes=1")
    command = CommandLine(tmp_path, *arguments, f"layout.strategy={layout}")
    read = tmp_path / "held-out-read"
    command.wait_for(lambda: read.exists() and read.stat().st_size >= 16)
    for pid in command.pids().values():
        os.killpg(pid, signal.SIGTERM)
    command.process.send_signal(signal.SIGTERM)
    code, output = command.finish()
    assert code == 143, output
    assert read.stat().st_size < 4000, "not when the validation was over"
    assert command.steps() == 4
    assert [found.step for found in list_checkpoints(command.run / "checkpoints")] == [4]
    assert command.events("validated") == []
    assert command.events("worker_died") == []
    assert "stopped on request at step 4, by SIGTERM" in output


@pytest.mark.proof
def test_a_stop_of_one_rank_while_it_starts_ends_the_run(tmp_path: Path) -> None:
    command = CommandLine(tmp_path, *TOY_ARGUMENTS, *TWO)
    command.wait_for(lambda: len(command.events("worker_started")) == 2)
    command.kill(1, signal.SIGTERM)
    code, output = command.finish()
    assert code == 1, output
    assert output.splitlines()[-1] == (
        "stopped before the first step: nothing to save, and no run folder is left"
    )
