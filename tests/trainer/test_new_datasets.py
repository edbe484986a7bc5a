"""A dataset that is made anew for each epoch: its stream goes on, as if it had been made once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import shoal
from shoal.trainer.run import Run
from shoal.trainer.run_folder import resume_checks

INPUTS, TARGETS = torch.randn(32, 4, generator=torch.Generator().manual_seed(0)), torch.arange(32)
EPOCHS, STEPS = 3, 4
Make = Callable[[], Dataset]


def begin(folder: Path) -> Run:
    torch.manual_seed(0)
    return shoal.parallelize(
        nn.Linear(4, 32),
        lambda p: torch.optim.SGD(p, lr=0.01),
        lambda y, t: (nn.functional.cross_entropy(y, t, reduction="sum"), len(t)),
        batch=8,
        micro_batch=4,
        folder=folder,
        precision="fp32",
    )


def taken(run: Run, make: Make, stop: int = 0, workers: int = 0) -> list[list[int]]:
    """Samples by step, until `stop` was saved or all epochs are over."""
    seen = []
    for _ in run.epochs(EPOCHS):
        for batch in run.loader(make(), workers=workers):
            run.step(batch)
            seen.append(sorted(number for ids in batch.sample_ids for number in ids))
            if run.step_count == stop:
                run.save()
                return seen
    return seen


def new() -> Dataset:
    return TensorDataset(INPUTS.clone(), TARGETS.clone())


@pytest.mark.parametrize("workers", [0, 1])
def test_epochs_are_those_of_one_dataset_and_resume(tmp_path: Path, workers: int) -> None:
    kept = new()
    once, anew = begin(tmp_path / "once"), begin(tmp_path / "anew")
    expected = taken(once, lambda: kept, workers=workers)
    assert len(expected) == EPOCHS * STEPS
    assert taken(anew, new, workers=workers) == expected
    assert expected[:STEPS] != expected[STEPS : 2 * STEPS], "another order in each epoch"
    once.close()
    anew.close()
    for stop in (STEPS, STEPS + 2):  # at an epoch's end, and within one
        folder = tmp_path / f"broken-{stop}"
        broken = begin(folder)
        before = taken(broken, new, stop, workers)
        broken.close()
        resumed = begin(folder)
        assert resumed.restore()
        assert before + taken(resumed, new, workers=workers) == expected
        resumed.close()


def test_a_look_that_sees_fewer_samples_is_no_other_dataset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look takes a tenth of a second: on a busy machine, or of a slow disk, that is one sample."""
    kept, made = new(), []

    def slower() -> Dataset:
        made.append(1)
        monkeypatch.setattr(resume_checks, "LOOK_S", 9.0 if len(made) < 3 else -1.0)
        return new()

    once, anew = begin(tmp_path / "once"), begin(tmp_path / "anew")
    expected = taken(once, lambda: kept)
    assert taken(anew, slower) == expected
    once.close()
    anew.close()


def test_two_at_once_stay_two_and_others_are_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = begin(tmp_path / "run")
    other = TensorDataset(INPUTS + 1, TARGETS)
    for _ in range(2):
        pairs = list(zip(run.loader(new()), run.loader(new()), strict=True))
        assert len(pairs) == STEPS
        for one, two in pairs:
            assert one.sample_ids == two.sample_ids
            run.step(one)
    assert "another TensorDataset" not in caplog.text
    for _ in range(2):
        for batch in run.loader(other):
            run.step(batch)
    told = caplog.text
    assert told.count("run.loader: another TensorDataset of 32 samples, and other ones") == 1
    run.close()
