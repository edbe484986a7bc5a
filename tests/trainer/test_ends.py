"""The main job's ends: what it exits with and says where the numbers or the disk were at fault."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shoal.base.errors import UNSAVED_CODE, ConfigError, TrainingError
from shoal.base.runlog.atomic_files import list_saved_steps
from shoal.view import summarise_run
from shoal.wire.phases import Phase, set_phase_listener


def told(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        ("no_count", "steps 1 – 4: all were skipped: the loss counted no target; no weight moved; "
                     "look at the data, where every target is ignored, or at the count that a loss "
                     "gives"),
        ("nan", "steps 1 – 4: all were skipped: non-finite loss or gradient; no weight moved; look "
                "at these samples, lower optimizer.lr, or set optimizer.clip"),
    ],
)  # fmt: skip
def test_a_run_in_which_nothing_moved_is_no_success(run: Any, loss: str, text: str) -> None:
    with pytest.raises(TrainingError) as caught:
        run(f"model.loss=my_ends:{loss}")
    assert str(caught.value) == text
    assert caught.value.exit_code == 3


def test_a_run_of_which_a_step_moved_completes(run: Any) -> None:
    folder, code = run("model.loss=my_ends:half")
    assert code == 0
    assert "skipped" in summarise_run(folder)
    assert list_saved_steps(folder)[-1] == 4


def test_an_end_without_its_checkpoint_is_told_once_and_is_no_success(run: Any) -> None:
    folder, code = run(before=lambda folder: (folder / "checkpoints").write_text("in the way"))
    assert code == UNSAVED_CODE
    events = told(folder)
    (ended,) = [e for e in events if e["event"] == "run_finished"]
    assert ended["how"] == "completed; the last checkpoint could not be written"
    failed = [e["step"] for e in events if e["event"] == "checkpoint_failed"]
    assert failed == sorted(set(failed)), "one event for each"
    assert not any("was not saved" in e.get("text", "") for e in events), "and no second line"
    assert summarise_run(folder).startswith(
        "completed at step 4; the last checkpoint could not be written\n"
    )


def test_the_summary_counts_samples_and_splits_the_time(run: Any) -> None:
    folder, _ = run()
    text = summarise_run(folder)
    assert "4 steps, 8 samples in " in text
    assert " samples/s" in text
    assert "token" not in text
    assert "MFU" not in text
    (took,) = [line for line in text.splitlines() if line.startswith("  took ")]
    assert " starting" in took


def test_samples_of_text_are_one_line(run: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        run("data.source=my_ends:strings")
    assert str(caught.value) == (
        "batch: holds no tensor whose dim 0 counts samples, but str; try: samples of tensors "
        "or numbers, or a collate function that makes them of these"
    )


def test_a_start_tells_what_it_is_busy_with_in_this_order(run: Any) -> None:
    heard: list[str] = []

    def hear(phases: list[Phase]) -> None:
        heard.extend(one.name for one in phases if one.name not in heard)

    set_phase_listener(hear)
    try:
        run()
    finally:
        set_phase_listener(None)
    wanted = ["data", "set up", "build", "first step", "save"]
    assert [name for name in heard if name in wanted] == wanted
