"""What the check at the start says, and what it leaves as it was."""

from __future__ import annotations

import pytest
import torch
from threads import on_ranks
from torch import Tensor, nn
from user_modules import FlatLayer

from shoal.parallel.spmd import label
from shoal.parallel.spmd.autograd_collectives import Axis
from shoal.parallel.spmd.check import Finding, check_class
from shoal.parallel.spmd.model_split import plan_split
from shoal.parallel.spmd.passed import checked_once
from shoal.parallel.spmd.split_block import BlockClass
from shoal.parallel.spmd.trial import Trial
from shoal.trace.record import Record


class Cast(nn.Module):
    """A layer that computes in float32 inside, and has zero biases and a mask of infinities."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        nn.init.zeros_(self.down.bias)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        weights = ((x @ x.transpose(1, 2)).float() + mask).softmax(-1).to(x.dtype)
        return x + self.down(self.up(weights @ x).relu())


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.layers = nn.ModuleList(Cast() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        mask = torch.full((x.shape[1], x.shape[1]), -torch.inf).triu(1)
        for layer in self.layers:
            x = layer(x, mask)
        return x


def test_a_right_split_passes_and_nothing_is_touched() -> None:
    module = Stack()
    x = torch.randn(2, 4, 8)
    split = plan_split(Record(module, lambda m: m(x)), 2)
    before = {n: p.clone() for n, p in module.named_parameters()}
    random = torch.get_rng_state()
    (group,) = split.classes
    assert on_ranks(2, lambda axis: check_class(module, group, axis)) == [None, None]
    assert torch.equal(random, torch.get_rng_state())
    for name, p in module.named_parameters():
        assert torch.equal(p, before[name])
        assert p.grad is None


def test_one_line_says_what_and_why() -> None:
    outputs = Finding("blocks.0", 0.25, ("o.weight",), "the cause")
    assert outputs.text() == (
        "split, it computes something else: its outputs differ by 2.5e-01 of their norm; likely "
        "cause: the cause"
    )
    gradients = Finding("blocks.0", 0.0, ("o.weight", "q.weight"), "the cause")
    assert "outputs are right, the gradient of o.weight and 1 more differs" in gradients.text()


class Remembers(Cast):
    """Keeps what it computed last, as recurrent layers and those that show their attention do."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        self.last = {"state": super().forward(x, mask)}
        return self.last["state"]


def test_a_layer_that_keeps_its_last_output_is_split() -> None:
    module = Stack()
    module.layers = nn.ModuleList(Remembers() for _ in range(2))
    x = torch.randn(2, 4, 8)
    module(x)
    split = plan_split(Record(module, lambda m: m(x)), 2)
    (group,) = split.classes
    assert on_ranks(2, lambda axis: check_class(module, group, axis)) == [None, None]


def test_parts_that_readers_put_together_wrongly_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank's places of every sample are no run of the flattened dim: Llama 4's experts."""
    module, x = nn.Sequential(FlatLayer(8), FlatLayer(8)), torch.randn(2, 4, 8)

    def findings() -> list[Finding | None]:
        split = plan_split(Record(module, lambda m: m(x)), 2, sequence=True)
        (group,) = [one for one in split.classes if one.names[0].endswith("experts")]
        assert group.split.sequence_dim == 1
        return on_ranks(2, lambda axis: check_class(module, group, axis))

    assert findings() == [None, None]
    monkeypatch.setattr(label, "may_stay_split", lambda _: True)
    for found in findings():
        assert found is not None
        assert found.outputs > 0.1


class NoFloat64(Cast):
    """Some fused products, and constants of another format's range, exist in short formats only."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        if x.dtype == torch.float64:
            raise RuntimeError("value cannot be converted to type float without overflow")
        return super().forward(x, mask)


def test_a_layer_without_float64_is_checked_in_float32() -> None:
    module = Stack()
    module.layers = nn.ModuleList(NoFloat64() for _ in range(2))
    x = torch.randn(2, 4, 8)
    split = plan_split(Record(module, lambda m: m(x)), 2)
    (group,) = split.classes
    assert on_ranks(2, lambda axis: check_class(module, group, axis)) == [None, None]


class Plain(nn.Module):
    """A layer without casts; `scale` is a number in its code."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.up, self.down, self.scale = nn.Linear(8, 16), nn.Linear(16, 8), scale

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(self.up(x).relu())


def test_what_passed_in_a_start_is_not_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def split(
        dtype: torch.dtype, scale: float = 1.0, samples: int = 2
    ) -> tuple[nn.Module, BlockClass]:
        module = nn.Sequential(Plain(scale), Plain(scale)).to(dtype)
        x = torch.randn(samples, 4, 8, dtype=dtype)
        (group,) = plan_split(Record(module, lambda m: m(x)), 2).classes
        return module, group

    proof, run = split(torch.float64), split(torch.float32)
    others = [split(torch.float32, scale=2.0), split(torch.float32, samples=3)]
    ran: list[int] = []
    alone = Trial.alone
    monkeypatch.setattr(Trial, "alone", lambda trial: (ran.append(1), alone(trial))[1])

    def trials(given: list[tuple[nn.Module, BlockClass]]) -> int:
        ran.clear()

        def on_a_rank(axis: Axis) -> None:
            with checked_once():
                assert [check_class(*one, axis) for one in given] == [None] * len(given)

        on_ranks(2, on_a_rank)
        return len(ran) // 2

    assert trials([proof, run]) == 1
    assert trials([proof, *others]) == 3
    assert trials([run]) == 1  # another start
    on_ranks(2, lambda axis: [check_class(*run, axis) for _ in range(2)])
    assert len(ran) == 2 + 4  # no start at all


def test_what_was_compared_is_let_go_of() -> None:
    """All ranks of a machine check at once: what each keeps beside its run counts many times."""
    module, x = nn.Sequential(Plain(1.0), Plain(1.0)), torch.randn(2, 4, 8)
    (group,) = plan_split(Record(module, lambda m: m(x)), 2).classes

    def on_a_rank(axis: Axis) -> None:
        trial = Trial(module[0], group, (axis,))
        expected, kept = trial.alone(), trial.together()
        again = dict(trial.numbers())
        assert all(torch.equal(t, again[n]) for n, t in trial.numbers())
        got = trial.together(against=expected.gradients)
        assert (got.gradients, got.own) == ({}, {})
        assert set(got.off) == set(kept.gradients) == set(expected.gradients)
        for n, whole in kept.gradients.items():
            assert got.off[n] == float((whole - expected.gradients[n]).norm()) < 1e-12
        wrong = {n: g + 1 for n, g in expected.gradients.items()}
        assert all(off > 0.5 for off in trial.together(against=wrong).off.values())

    on_ranks(2, on_a_rank)


def test_a_block_that_failed_is_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = nn.Sequential(FlatLayer(8), FlatLayer(8)), torch.randn(2, 4, 8)
    monkeypatch.setattr(label, "may_stay_split", lambda _: True)
    split = plan_split(Record(module, lambda m: m(x)), 2, sequence=True)
    (group,) = [one for one in split.classes if one.names[0].endswith("experts")]

    def twice(axis: Axis) -> list[Finding | None]:
        with checked_once():
            return [check_class(module, group, axis) for _ in range(2)]

    for found in on_ranks(2, twice):
        assert None not in found
