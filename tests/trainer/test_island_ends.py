"""The end of an island's main job, as test_ends.py has it of a run without islands."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest

from shoal.base.errors import UNSAVED_CODE, TrainingError
from shoal.base.runlog.atomic_files import list_saved_steps
from shoal.trainer.islands.island_job import STOPPED
from shoal.trainer.islands.island_loop import IslandRounds
from shoal.trainer.run import Run
from shoal.view import summarise_run


@pytest.fixture
def island(run: Any) -> Any:
    """Trains one island alone, two rounds of two steps, in this process; folder and exit code."""
    words = ("islands.method=diloco", "islands.count=1", "islands.period=2")
    return functools.partial(run, *words)


def ended(folder: Path) -> str:
    """How the run's last event says it went."""
    told = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    (end,) = [event for event in told if event["event"] == "run_finished"]
    return str(end["how"])


@pytest.mark.parametrize(
    ("loss", "last", "why"),
    [("no_count", 6, "the loss counted no target"), ("nan", 4, "non-finite loss or gradient")],
)
def test_an_island_in_which_nothing_moved_is_no_success(
    island: Any, loss: str, last: int, why: str
) -> None:
    """Rounds that are merged of no target at all are discarded, and the last of them ends it."""
    with pytest.raises(TrainingError, match=f"steps 1 – {last}: all were skipped: {why}") as caught:
        island(f"model.loss=my_ends:{loss}")
    assert "; no step of this island moved a weight; look at the" in str(caught.value)
    assert caught.value.exit_code == 3
    if loss == "nan":
        assert list_saved_steps(Path("runs/x"))[-1] == 4, "what the others learnt would be kept"


def test_an_island_of_which_a_step_moved_completes(island: Any) -> None:
    folder, code = island("model.loss=my_ends:half")
    assert (code, ended(folder)) == (0, "completed")


def test_an_island_that_ends_without_its_checkpoint_is_no_success(
    island: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its disk is full from the last round on: nobody votes on that any more."""
    after: list[Path] = []
    close_round = IslandRounds._close_round

    def fill(rounds: IslandRounds, *given: Any) -> None:
        if rounds.common.round == 1:
            folder = after[0] / "checkpoints"
            rounds.run.checkpoint_saver.wait_pending()
            folder.rename(folder.with_name("before"))
            folder.write_text("in the way")
        close_round(rounds, *given)

    monkeypatch.setattr(IslandRounds, "_close_round", fill)
    folder, code = island(before=after.append)
    assert code == UNSAVED_CODE
    assert ended(folder) == "completed; the last checkpoint could not be written"
    assert summarise_run(folder).startswith(
        "completed at step 4; the last checkpoint could not be written\n"
    )


@pytest.mark.parametrize("full", [False, True])
def test_a_stop_promises_only_what_was_saved(
    island: Any, monkeypatch: pytest.MonkeyPatch, full: bool
) -> None:
    one_step = Run.step

    def ask(run: Run, batch: Any) -> Any:
        run.request_stop()
        return one_step(run, batch)

    def fill(folder: Path) -> None:
        if full:
            (folder / "checkpoints").write_text("in the way")

    monkeypatch.setattr(Run, "step", ask)
    folder, code = island(before=fill)
    assert code == (UNSAVED_CODE if full else STOPPED)
    trouble = "; the last save failed" if full else ""
    assert ended(folder) == f"stopped on request after round 1{trouble}"
