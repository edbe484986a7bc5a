"""What a loop over micro-batches gets of batches that are no (inputs, targets)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.base.errors import ConfigError


def opened() -> shoal.Run:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    return shoal.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1), batch=4)


def seen(run: shoal.Run, batch: Any) -> list[tuple[Any, Any]]:
    """(inputs, targets) of each micro-batch of one step."""
    found = []
    for micro in run.micro_batches(batch):
        found.append((micro.inputs, micro.targets))
        first = micro.inputs if isinstance(micro.inputs, torch.Tensor) else micro.inputs[0]
        run.backward(run.model(first).sum(), len(first))
    run.update()
    return found


def test_a_dataset_of_single_tensors() -> None:
    """A loop with losses of its own may have no targets, as a GAN's."""
    data = torch.arange(12.0).reshape(4, 3)
    with opened() as run:
        (batch,) = run.loader(data)
        parts = seen(run, batch)
    assert all(inputs is targets for inputs, targets in parts)
    assert torch.cat([inputs for inputs, _ in parts]).sum() == data.sum()


def test_three_tensors_are_whole_and_two_are_a_pair() -> None:
    x, y = torch.ones(4, 3), torch.zeros(4)
    with opened() as run:
        ((inputs, targets),) = seen(run, [x, y, y + 1])
    assert len(inputs) == len(targets) == 3
    assert torch.equal(inputs[2], y + 1)
    with opened() as run:
        ((inputs, targets),) = seen(run, (x, y))
    assert torch.equal(inputs, x)
    assert torch.equal(targets, y)


def test_a_step_asks_for_targets() -> None:
    """Its loss has them as its second argument."""
    with opened() as run, pytest.raises(ConfigError, match="one dict is wanted, got tuple of 3"):
        run.step((torch.ones(4, 3), torch.ones(4), torch.ones(4)))
