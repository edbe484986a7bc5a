"""The look at a loop's first data: who reads them, what is counted, what is left as it was."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from trainer_small import Rows, run_of

from shoal.base.errors import ConfigError
from shoal.trainer.autotune import share_fits, trial_passes
from shoal.trainer.autotune.share_fits import is_small_share, read_few_samples
from shoal.trainer.metrics_recorder import MetricsRecorder
from shoal.trainer.step.saved_activations import count_saved_bytes


class Opened(Rows):
    """Remembers which process read it; a file that it opens is that process's."""

    reader = 0

    def __getitem__(self, index: int) -> Any:
        self.reader = os.getpid()
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 1])
def test_nobody_opens_or_moves_the_data_here(workers: int) -> None:
    data = Opened(32)
    sample = read_few_samples(data, None, workers)
    assert [(part.shape[0], part.dtype) for part in sample] == [(2, torch.float32)] * 2
    assert data.reader == 0


class Stream(torch.utils.data.IterableDataset[Any]):
    """Fails at its second sample; can be put back."""

    next = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.next < 1:
            self.next += 1
            yield torch.zeros(2)
        raise OSError("gone")

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


def test_a_stream_is_put_back_where_it_fails_too() -> None:
    stream = Stream()
    with pytest.raises(Exception, match="gone"):
        read_few_samples(stream, None, 0)
    assert stream.next == 0
    with pytest.raises(ConfigError, match="read by its worker processes alone"):
        read_few_samples(stream, None, 1)


class Itself(nn.Linear):
    """Is shared on purpose: its copy is itself."""

    def __deepcopy__(self, known: dict[int, Any]) -> Itself:
        return self


class Draws(nn.Module):
    """Holds what no twin can be made of: a generator, and a tensor in a list; it reads its numbers.

    It counts its passes, and keeps a running mean.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.kept = nn.Linear(4, 2), nn.BatchNorm1d(4), [torch.zeros(2)]
        self.rng, self.passes = torch.Generator(), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        x = self.norm(x + torch.rand(4, generator=self.rng))
        return self.layer(x) + self.kept[0] * (2 if float(x.detach().sum()) > 0 else 1)


def trained(model: nn.Module, told: list[str]) -> tuple[list[int], list[int]]:
    """Train an epoch of 16 samples: passes of the step, calls of the model's first layer."""
    first = next(part for part in model.modules() if isinstance(part, nn.Linear))
    ran: list[int] = []
    first.register_forward_hook(lambda *_: ran.append(1))
    before = [one.detach().clone() for one in model.state_dict().values()]
    drawn = model.rng.get_state() if isinstance(model, Draws) else None
    run = run_of(model, batch=16)
    loader = run.loader(Rows(16))
    assert all(map(torch.equal, before, model.state_dict().values()))
    if drawn is not None:
        assert torch.equal(drawn, model.rng.get_state())
        assert (model.passes, ran) == (0, [])
    passes = []
    for batch in loader:
        passes.append(len(batch))
        assert math.isfinite(run.step(batch).loss)
    run.close()
    return passes, ran


MODELS = {"shared": lambda: nn.Sequential(Itself(4, 8), nn.Linear(8, 2)), "draws": Draws}


@pytest.mark.parametrize("model", MODELS)
def test_a_model_that_shapes_cannot_run_is_tried_in_another_process(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights, draws, counts and hooks stay its own, and its share is one pass."""
    told: list[str] = []
    monkeypatch.setattr(MetricsRecorder, "notice", lambda recorder, text: told.append(text))
    monkeypatch.setattr(share_fits, "is_small_share", lambda *_: False)
    passes, ran = trained(MODELS[model](), told)
    assert (passes, len(ran), told) == ([1], 1, [])


@pytest.mark.parametrize("model", MODELS)
def test_a_model_that_cannot_be_tried_is_left_alone(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gets an eighth and one line, and trains."""
    told: list[str] = []
    monkeypatch.setattr(MetricsRecorder, "notice", lambda recorder, text: told.append(text))
    monkeypatch.setattr(share_fits, "is_small_share", lambda *_: False)
    monkeypatch.setattr(trial_passes, "run_trial_passes", lambda *_: None)
    passes, ran = trained(MODELS[model](), told)
    assert (passes, len(ran)) == ([8], 8)
    (line,) = [one for one in told if one.startswith("micro-batch:")]
    assert line.startswith(
        "micro-batch: 2 samples, an eighth of the batch, since what a pass needs"
    )
    assert line.endswith("; try: batch=16 and micro_batch=16")


def test_generators_and_the_model_stay_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of a run with the look differs from one that was told its micro-batch."""
    monkeypatch.setattr(share_fits, "is_small_share", lambda *_: False)

    def weights(**given: int) -> list[torch.Tensor]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))
        run = run_of(model, batch=16, **given)
        for batch in run.loader(Rows(64)):
            run.step(batch)
            torch.rand(1)  # of the user's own generator
        run.close()
        return [*run.model.state_dict().values(), torch.rand(3)]

    for one, other in zip(weights(), weights(micro_batch=16), strict=True):
        assert torch.equal(one, other)


class OwnDraws(nn.Module):
    """Multiplies by numbers of its own generators, which no run knows of."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.torch, self.numpy = torch.Generator().manual_seed(0), np.random.default_rng(0)
        self.python = random.Random(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        drawn = [float(torch.rand(1, generator=self.torch)), float(self.numpy.random())]
        factors = [1 + number for number in (*drawn, self.python.random())]
        return self.layer(x) * math.prod(factors)


def test_a_trial_draws_nothing_of_the_models_own_generators() -> None:
    """The copy that is tried on samples together and apart has generators of its own."""

    def losses(guards: str) -> list[float]:
        torch.manual_seed(3)
        run = run_of(OwnDraws(), batch=16, micro_batch=4, guards=guards)
        found = [run.step(batch).loss for batch in run.loader(Rows(32))]
        run.close()
        return found

    assert losses("on") == losses("off")


class Counted(nn.Module):
    """Keeps its input and one product of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x))


def test_what_autograd_keeps_is_counted() -> None:
    """An input of 2 × 8 for the layer, an output of 2 × 16 for tanh, three times that for a loss."""
    with torch.device("meta"):
        twin = Counted()
    assert count_saved_bytes(twin, torch.zeros(2, 8), "single") == 4 * (2 * 8 + 2 * 16 + 3 * 2 * 16)
    assert count_saved_bytes(twin, torch.zeros(4, 8), "single") == 2 * 4 * (
        2 * 8 + 2 * 16 + 3 * 2 * 16
    )


def test_a_model_whose_share_does_not_fit_is_looked_at_closely(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The planner's answer is taken, and told where it cannot count."""
    told: list[str] = []
    monkeypatch.setattr(MetricsRecorder, "notice", lambda recorder, text: told.append(text))
    monkeypatch.setattr(share_fits, "is_small_share", lambda *_: False)
    monkeypatch.setattr(share_fits.MicroBatchChooser, "_fits", lambda *_: False)
    run = run_of(nn.Linear(4, 2), batch=16)
    loader = run.loader(Rows(64))
    assert run.plan.micro_batch == loader.micro_batch
    assert run.plan.micro_batch * run.plan.accumulate == 16
    run.close()
    assert not told


def test_a_small_model_is_seen_to_be_small_and_a_large_one_is_not() -> None:
    for width, small in ((8, True), (4096, False)):
        model = nn.Sequential(nn.Linear(4, width), nn.Linear(width, 2000), nn.Linear(2000, 2))
        run = run_of(model, batch=256)
        assert is_small_share(run, read_few_samples(Rows(8), None, 0)) == small
        run.close()
