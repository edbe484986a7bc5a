"""The end of an island's main job, as test_ends.py has it of a run without islands."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from shoal.base.errors import UNSAVED_CODE, TrainingError
from shoal.base.files import saved_steps
from shoal.cli import start
from shoal.fabric import start_world
from shoal.trainer.loop import train
from shoal.trainer.rounds import STOPPED, Rounds
from shoal.trainer.run import Run
from shoal.view import summary

MODULE = """
import torch
from torch import nn
def build(): return nn.Linear(4, 3)
def data(): return [(torch.ones(4) * i, torch.tensor(i % 3)) for i in range(12)]
def no_count(outputs, targets): return outputs.sum() * 0.0, torch.tensor(0.0)
def nan(outputs, targets): return outputs.sum() * float("nan"), torch.tensor(1.0)
def half(outputs, targets):
    bad = float("nan") if targets[0] == 0 else 1.0
    return outputs.square().sum() * bad, torch.tensor(float(len(targets)))
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Measuring the machine takes seconds: once for all."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def island(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Trains one island alone, two rounds of two steps, in this process; folder and exit code."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHOAL_CACHE", str(cache))
    (tmp_path / "my_island.py").write_text(MODULE)
    monkeypatch.delitem(sys.modules, "my_island", raising=False)

    def one(*overrides: str, before: Any = None) -> tuple[Path, int]:
        base = ["model.build=my_island:build", "data.source=my_island:data", "train.batch=2",
                "train.steps=4", "layout.strategy=single", "run.name=x", "islands.method=diloco",
                "islands.count=1", "islands.period=2"]  # fmt: skip
        prepared = start.prepare([*base, *overrides], None, 1)
        prepared.folder.mkdir(parents=True)
        start.write_folder(prepared)
        if before is not None:
            before(prepared.folder)
        return prepared.folder, train(prepared.folder, world=start_world({}))

    return one


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
        island(f"model.loss=my_island:{loss}")
    assert "; no step of this island moved a weight; look at the" in str(caught.value)
    assert caught.value.exit_code == 3
    if loss == "nan":
        assert saved_steps(Path("runs/x"))[-1] == 4, "what the others learnt would be kept"


def test_an_island_of_which_a_step_moved_completes(island: Any) -> None:
    folder, code = island("model.loss=my_island:half")
    assert (code, ended(folder)) == (0, "completed")


def test_an_island_that_ends_without_its_checkpoint_is_no_success(
    island: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its disk is full from the last round on: nobody votes on that any more."""
    after: list[Path] = []
    close_round = Rounds._close_round

    def fill(rounds: Rounds, *given: Any) -> None:
        if rounds.common.round == 1:
            folder = after[0] / "checkpoints"
            rounds.run.saving.settle()
            folder.rename(folder.with_name("before"))
            folder.write_text("in the way")
        close_round(rounds, *given)

    monkeypatch.setattr(Rounds, "_close_round", fill)
    folder, code = island(before=after.append)
    assert code == UNSAVED_CODE
    assert ended(folder) == "completed; the last checkpoint could not be written"
    assert summary(folder).startswith(
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
