"""What a moved script relies on: counted means, steps over its own batches, a line from rank 0."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler

import shoal
from shoal.trainer.loaders.run_loaders import RunLoaders
from shoal.trainer.step.call_contract import sum_and_count


def small_run(loss: object, **settings: object) -> shoal.Run:
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    return shoal.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, **settings)


def test_every_sample_once_where_the_old_sampler_repeats_some() -> None:
    dataset = torch.utils.data.TensorDataset(
        torch.randn(1003, 4).double(), torch.randint(0, 3, (1003,))
    )
    assert sum(len(DistributedSampler(dataset, 4, rank)) for rank in range(4)) == 1004
    run = small_run(None, batch=64)
    assert [sum(r.targets for r in run.steps(dataset)) for _ in range(2)] == [1003, 1003]
    assert run.step_count == 32


def test_a_mean_over_valid_targets_is_that_of_the_whole_step() -> None:
    """Where shares hold unequal numbers of targets, DDP's mean of means is another gradient."""
    inputs, targets = torch.randn(8, 4).double(), torch.randint(0, 3, (8,))
    targets[:3] = -100
    run = small_run(shoal.mean_of_samples(nn.CrossEntropyLoss()), micro_batch=4)
    before = {n: p.detach().clone() for n, p in run.model.named_parameters()}

    def gradient(*shares: slice) -> torch.Tensor:
        weight, bias = (before[n].clone().requires_grad_() for n in ("weight", "bias"))
        means = [F.cross_entropy(inputs[s] @ weight.T + bias, targets[s]) for s in shares]
        (sum(means) / len(means)).backward()
        return weight.grad

    result = run.step((inputs, targets))
    assert result.targets == 5
    moved = (before["weight"] - run.model.weight.detach()) / 0.1
    assert torch.allclose(moved, gradient(slice(8)), rtol=0, atol=1e-13)
    mean_of_means = gradient(slice(4), slice(4, 8))
    assert (mean_of_means - gradient(slice(8))).norm() > 0.1 * moved.norm()


INDICES = torch.tensor([[0, 2, -100], [1, -100, 2]])


@pytest.mark.parametrize(
    ("loss", "targets"),
    [
        (nn.CrossEntropyLoss(), INDICES),
        (nn.CrossEntropyLoss(ignore_index=2, label_smoothing=0.1), INDICES.clamp_min(0)),
        (nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 5.0])), INDICES),
        (nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 5.0]), label_smoothing=0.2), INDICES),
        (nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 5.0])), torch.rand(2, 3, 3)),
        (nn.NLLLoss(weight=torch.tensor([1.0, 2.0, 5.0])), INDICES),
    ],
)
def test_sum_over_count_is_torchs_own_mean(loss: nn.Module, targets: torch.Tensor) -> None:
    torch.manual_seed(0)
    outputs = torch.randn(2, 3, 3).log_softmax(1)
    total, count = sum_and_count(shoal.mean_of_samples(loss)(outputs, targets), targets)
    assert torch.allclose(total / count, loss(outputs, targets), rtol=1e-6)
    assert loss.reduction == "mean", "the user's own object stays as it is"


@pytest.mark.parametrize(
    ("name", "value"),
    [("label_smoothing", 0.2), ("weight", torch.tensor([1.0, 2.0, 5.0])), ("ignore_index", 2)],
)
def test_what_a_loop_changes_of_its_criterion_counts(name: str, value: Any) -> None:
    """From the next batch on, as without the wrapper."""
    outputs, targets = torch.randn(6, 3), torch.tensor([0, 1, 2, 0, 1, 2])
    loss = nn.CrossEntropyLoss(weight=torch.ones(3))
    wrapped = shoal.mean_of_samples(loss)
    before = loss(outputs, targets)
    setattr(loss, name, value)
    total, count = sum_and_count(wrapped(outputs, targets), targets)
    assert torch.allclose(total / count, loss(outputs, targets), rtol=1e-6)
    assert not torch.allclose(total / count, before)


def test_a_share_without_valid_targets_adds_nothing() -> None:
    """torch's mean over no target is NaN; the sum is 0, and so is the count."""
    total, count = shoal.mean_of_samples(nn.CrossEntropyLoss())(
        torch.randn(2, 3), torch.tensor([-100, -100])
    )
    assert (total.item(), count.item()) == (0.0, 0)


def test_probabilities_of_one_sample_without_a_batch() -> None:
    outputs, targets = torch.randn(3), torch.rand(3)
    total, count = shoal.mean_of_samples(nn.CrossEntropyLoss())(outputs, targets)
    assert count == 1
    assert torch.allclose(total, F.cross_entropy(outputs, targets))


def test_a_loader_that_gives_every_rank_everything_is_refused() -> None:
    dataset = torch.utils.data.TensorDataset(torch.randn(8, 4), torch.randint(0, 3, (8,)))
    plan = small_run(None).plan

    def opened(data: object, ranks: int, other: object = None) -> int:
        """Batches of an epoch; `other` is what the second rank tells of its data."""
        tells = lambda mine: [mine, other or mine]  # noqa: E731
        world = SimpleNamespace(size=ranks, rank=0, gather_json=tells)
        return len(list(RunLoaders(plan, world, notice=print).training_batches(data, 0, None)))

    for loader, kind in (
        (DataLoader(dataset, batch_size=2, shuffle=True), "RandomSampler"),
        (DataLoader(dataset, batch_size=2), "SequentialSampler"),
    ):
        assert opened(loader, 1) == 4
        assert opened(loader, 2, other=[8, "the other", "half"]) == 4
        with pytest.raises(shoal.ConfigError) as failure:
            opened(loader, 2)
        assert str(failure.value) == (
            f"run.steps: the DataLoader has a {kind}, so each of 2 ranks would train on the whole "
            f"dataset; try: run.steps(loader.dataset), or a DistributedSampler in the loader"
        )

    class OwnOrder(BatchSampler):
        """Somebody's own: it may well know the rank."""

    dealt = DataLoader(dataset, batch_size=2, sampler=DistributedSampler(dataset, 2, 0))
    own = DataLoader(dataset, batch_sampler=OwnOrder(RandomSampler(dataset), 2, False))
    batches = [next(iter(dealt))]
    for data, count in ((dealt, 2), (own, 4), (batches, 1), (iter(batches), 1)):
        assert opened(data, 2) == count


def test_steps_over_own_batches_and_a_line_from_rank_0(capsys: pytest.CaptureFixture[str]) -> None:
    run = small_run(None)
    batches = [(torch.randn(5, 4).double(), torch.randint(0, 3, (5,))) for _ in range(3)]
    results = list(run.steps(iter(batches)))
    assert [r.step for r in results] == [1, 2, 3]
    assert results[0].item() == results[0].loss
    run.print("loss", 0.5)
    run.print("a", "b", sep="-", end=";", flush=True)
    run.print("to", "stderr", file=sys.stderr)
    run.program.world.rank = 1
    run.print("not I")
    captured = capsys.readouterr()
    assert captured.out == "loss 0.5\na-b;"
    assert captured.err.endswith("to stderr\n")
