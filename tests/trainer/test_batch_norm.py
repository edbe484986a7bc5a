"""BatchNorm in one process is plain PyTorch's: every momentum, every way to call it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from trainer_small import assert_same_bits, bits, pair, run_of, sgd


class Net(nn.Module):
    """Calls its BatchNorm `calls` times in one forward pass."""

    def __init__(self, momentum: float | None, calls: int) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6, momentum=momentum)
        self.head = nn.Linear(6, 2)
        self.calls = calls

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(self.calls):
            x = torch.tanh(self.norm(x))
        return self.head(x)


def net(momentum: float | None = 0.1, calls: int = 1) -> Net:
    torch.manual_seed(3)
    return Net(momentum, calls)


@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("momentum", [0.1, 1.0, 0.0, None])
def test_equals_plain_torch(momentum: float | None, calls: int) -> None:
    ours, plain = net(momentum, calls), net(momentum, calls).double()
    run = run_of(ours, batch=8, micro_batch=4, precision="fp64")
    steps = sgd(plain.parameters())
    for step in range(4):
        x, y = (t.double() for t in pair(seed=step))
        run.step((x, y))
        steps.zero_grad()
        for part in (slice(0, 4), slice(4, 8)):
            ((plain(x[part]) - y[part]) ** 2).sum().div(y.numel()).backward()
        steps.step()
    kept = plain.state_dict()
    for name, tensor in bits(ours).items():
        assert torch.allclose(tensor.double(), kept[name].double(), rtol=0, atol=1e-12), name
    assert int(ours.norm.num_batches_tracked) == 4 * 2 * calls


def test_a_layer_in_evaluation_mode_keeps_and_uses_its_statistics() -> None:
    """Fine-tuning freezes statistics; a layer that read scratch buffers would divide by zero."""
    ours, plain = net(), net()
    for model in (ours, plain):
        with torch.no_grad():
            model.norm.running_mean.fill_(0.5)
            model.norm.running_var.fill_(4.0)
        model.norm.eval()
    run = run_of(ours)
    steps = sgd(plain.parameters())
    for step in range(3):
        x, y = pair(seed=step)
        run.step((x, y))
        run.evaluate([(x, y)])  # must not put the layer back into training
        steps.zero_grad()
        F.mse_loss(plain(x), y).backward()
        steps.step()
    assert ours.norm.training is False
    assert ours.first.training is True
    assert ours.norm.running_mean.tolist() == [0.5] * 6
    assert int(ours.norm.num_batches_tracked) == 0
    for name, tensor in bits(ours).items():
        assert torch.allclose(tensor, plain.state_dict()[name], atol=1e-6), name


def test_a_model_in_evaluation_mode_is_put_into_training() -> None:
    """from_pretrained gives such models; dropout would be off, silently."""
    model = net().eval()
    run_of(model)
    assert all(m.training for m in model.modules())


def test_a_layer_that_is_not_called_does_not_move() -> None:
    class Skips(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.first(x))

    torch.manual_seed(0)
    model = Skips(0.1, 1)
    before = bits(model)
    run_of(model).step(pair())
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        assert torch.equal(bits(model)[f"norm.{name}"], before[f"norm.{name}"])


def test_evaluation_reads_and_does_not_write() -> None:
    model = net()
    run = run_of(model)
    run.step(pair())
    before = bits(model)
    run.evaluate([pair(seed=9)])
    assert_same_bits(bits(model), before)
    with torch.no_grad():
        model.eval()
        x, y = pair(seed=9)
        expected = F.mse_loss(model(x), y)
        model.train()
    assert run.evaluate([(x, y)])["loss"] == pytest.approx(expected.item(), rel=1e-6)
