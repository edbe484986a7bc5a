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


REFUSED = {
    "of layout torch.sparse_coo": lambda: torch.ones(4, 3).to_sparse(),
    "a nested tensor": lambda: torch.nested.nested_tensor([torch.ones(3)] * 4),
    "has a graph behind it": lambda: torch.ones(4, 3, requires_grad=True) * 2,
}


@pytest.mark.parametrize("part", REFUSED)
def test_after_a_refused_batch_the_next_one_trains(part: str) -> None:
    model = nn.Linear(3, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with shoal.parallelize(model, sgd, lambda o, y: (o - y) ** 2, batch=4, micro_batch=2) as run:
        with pytest.raises(ConfigError, match=part):
            run.step((REFUSED[part](), torch.ones(4, 1)))
        assert run.step((torch.ones(4, 3), torch.ones(4, 1))).step == 1


@pytest.mark.parametrize(("guards", "lines"), [("on", 1), ("off", 0)])
def test_a_run_without_guards_tries_no_losses(
    guards: Any, lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with shoal.parallelize(model, sgd, batch=8, micro_batch=2, guards=guards) as run:
        for micro in run.micro_batches((torch.randn(8, 3), torch.randn(8, 3))):
            gain = micro.targets[:, 0] - micro.targets[:, 0].mean()
            outputs = run.model(micro.inputs).log_softmax(-1)
            run.backward(-(outputs[:, 0] * gain).sum(), len(gain))
        run.update()
    found = [one for one in caplog.messages if "depends on the others" in one]
    assert len(found) == lines, caplog.messages
