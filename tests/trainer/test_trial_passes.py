"""Passes in a copy of the process: what they measure, what they leave alone, when they give up."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn
from trainer_small import Rows

from shoal.trainer.autotune import trial_passes as trial
from shoal.trainer.autotune.trial_passes import PassBytes, run_trial_passes


class Reads(nn.Module):
    """Reads its numbers, keeps 16 of them a sample, and does what it is told besides."""

    def __init__(self, also: Any = None) -> None:
        super().__init__()
        self.layer, self.also = nn.Linear(4, 16), also

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.also is not None:
            self.also()
        out = torch.tanh(self.layer(x))
        return out if float(out.detach().sum()) > -1e9 else out * 2


def test_what_a_sample_keeps_is_the_difference_of_two_passes() -> None:
    """Inputs of 4, what tanh keeps (16), and three times the outputs, for a loss."""
    found = run_trial_passes(Reads, Rows(8), None, "single")
    assert found == PassBytes(fixed=0, sample=4 * (4 + 16 + 3 * 16), weights=80)


def test_few_samples_are_used_again_and_a_stream_is_not_moved() -> None:
    assert run_trial_passes(Reads, Rows(1), None, "single") is not None
    stream = iter(Rows(8))

    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return stream

    assert run_trial_passes(Reads, Stream(), None, "single") is not None
    assert len(list(stream)) == 8


def test_the_largest_size_leaves_half_of_the_memory_free() -> None:
    one = PassBytes(fixed=100, sample=10, weights=10)
    needed = 2 * (16 * 10 + 2 * (100 + 8 * 10))
    assert one.largest([16, 8, 4], needed) == 8
    assert one.largest([16, 8, 4], needed - 1) == 4
    assert one.largest([16, 8, 4], 100) == 0


@pytest.mark.parametrize("fails", ["raises", "hangs", "takes all memory", "ends the process"])
def test_a_model_that_cannot_be_tried_is_not_known(
    fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "AT_MOST_S", 1.5)
    monkeypatch.setattr(trial, "FREE", 0.25)

    def does() -> None:
        if fails == "raises":
            raise ValueError("not today")
        if fails == "hangs":
            time.sleep(60)
        if fails == "ends the process":
            raise SystemExit(3)
        torch.ones(2**40)

    began_s = time.monotonic()
    assert run_trial_passes(lambda: Reads(does), Rows(8), None, "single") is None
    assert time.monotonic() - began_s < 30
