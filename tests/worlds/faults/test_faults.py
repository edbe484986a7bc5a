"""Faults of the numbers, and of builders, on the real command: contained, named, survived."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli_run import TOY_ARGUMENTS, CommandLine, final_hashes, lines, trajectory
from shoal.checkpoint.format.listing import list_checkpoints

TWO = "launch.processes=2"


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> tuple[CommandLine, str]:
    """A whole run with a sample that turns the loss into NaN, and what it said."""
    folder = tmp_path_factory.mktemp("poisoned")
    command = CommandLine(folder, *TOY_ARGUMENTS, TWO, "data.source=toy:poisoned")
    code, output = command.finish()
    assert code == 0, output
    return command, output


def test_nan_on_one_rank_is_skipped_by_all_and_named(poisoned: tuple[CommandLine, str]) -> None:
    command, output = poisoned
    skipped = command.events("step_skipped")
    rows = lines(command.run / "metrics.jsonl")
    assert [e["step"] for e in skipped] == [r["step"] for r in rows if r["skipped"]]
    # 12 steps of 16 over 70 samples see sample 13 in at least the two whole epochs.
    assert len(skipped) >= 2
    for event in skipped:
        (culprit,) = event["culprits"]
        assert event["ranks"] == [culprit["rank"]]
        assert any(13 in ids for ids in culprit["samples"]), "the poisoned sample is named"
        assert culprit["micro_batches"]
    assert rows[-1]["loss"] is not None, "the weights stayed finite"
    assert "skipped" in output


def test_damaged_newest_checkpoint_is_named_and_the_previous_one_used(
    poisoned: tuple[CommandLine, str],
) -> None:
    """The steps that are done again, one that is skipped may be among them, come out alike."""
    whole = poisoned[0]
    expected = trajectory(whole.run), final_hashes(whole.run)
    newest = list_checkpoints(whole.run / "checkpoints")[0].path
    victim = newest / "rank-1.safetensors"
    raw = bytearray(victim.read_bytes())
    raw[-100] ^= 1
    victim.write_bytes(raw)
    code, output = CommandLine(whole.folder, "--resume", "runs/run").finish()
    assert code == 0, output
    assert "rank-1.safetensors" in output
    (damaged,) = [
        e for e in lines(whole.run / "events.jsonl") if e["event"] == "checkpoint_damaged"
    ][:1]
    assert damaged["tensor"]
    assert "step-9" in output, "went on from the one before"
    assert (trajectory(whole.run), final_hashes(whole.run)) == expected


@pytest.mark.proof  # on one process, without the command: tests/trainer/test_numbers.py
def test_nan_for_ever_stops_with_a_clear_message(tmp_path: Path) -> None:
    arguments = (*TOY_ARGUMENTS, TWO, "data.source=toy:all_poison", "train.skip_limit=3")
    code, output = CommandLine(tmp_path, *arguments, "data.validation=0").finish()
    assert code == 3, output
    assert "non-finite loss or gradient on ranks 0 and 1, 3 steps in a row" in output
    assert "restarting" not in output


@pytest.mark.proof
def test_lists_of_samples_train_and_validate(tmp_path: Path) -> None:
    """Neither side is a Dataset object; every held-out sample counts once, on two ranks."""
    arguments = (*TOY_ARGUMENTS, TWO, "data.source=toy:lists", "train.steps=3")
    command = CommandLine(tmp_path, *arguments)
    code, output = command.finish()
    assert code == 0, output
    (validated,) = command.events("validated")
    assert validated["targets"] == 9


def test_a_builder_that_raises_is_one_line_and_is_tried_once(tmp_path: Path) -> None:
    arguments = (*TOY_ARGUMENTS, TWO, "model.build=toy:broken", "launch.restarts=1")
    code, output = CommandLine(tmp_path, *arguments).finish()
    assert code == 2, output
    assert "Traceback" not in output
    assert output.count("toy.py:") == 1
    assert "restart" not in output
    assert "--resume" not in output, "there is nothing to resume"
