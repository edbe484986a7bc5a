"""What the check at the start says, and what it leaves as it was."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from threads import on_ranks
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from user_modules import FlatLayer

from shoal.parallel.spmd import block_check as check_module
from shoal.parallel.spmd.autograd_collectives import Axis
from shoal.parallel.spmd.block_check import check_class
from shoal.parallel.spmd.block_trial import BlockTrial, sketch_gradient
from shoal.parallel.spmd.check_causes import CheckFinding
from shoal.parallel.spmd.labelling import label_graph
from shoal.parallel.spmd.model_split import plan_split
from shoal.parallel.spmd.split_block import BlockClass
from shoal.parallel.spmd.verified_blocks import skip_verified_blocks
from shoal.trace.flow.forward_record import ForwardRecord


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
    split = plan_split(ForwardRecord(module, lambda m: m(x)), 2)
    before = {n: p.clone() for n, p in module.named_parameters()}
    random = torch.get_rng_state()
    (group,) = split.classes
    assert on_ranks(2, lambda axis: check_class(module, group, axis)) == [None, None]
    assert torch.equal(random, torch.get_rng_state())
    for name, p in module.named_parameters():
        assert torch.equal(p, before[name])
        assert p.grad is None


def test_one_line_says_what_and_why() -> None:
    outputs = CheckFinding("blocks.0", 0.25, ("o.weight",), "the cause")
    assert outputs.text() == (
        "split, it computes something else: its outputs differ by 2.5e-01 of their norm; likely "
        "cause: the cause"
    )
    gradients = CheckFinding("blocks.0", 0.0, ("o.weight", "q.weight"), "the cause")
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
    split = plan_split(ForwardRecord(module, lambda m: m(x)), 2)
    (group,) = split.classes
    assert on_ranks(2, lambda axis: check_class(module, group, axis)) == [None, None]


def test_parts_that_readers_put_together_wrongly_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank's places of every sample are no run of the flattened dim: Llama 4's experts."""
    module, x = nn.Sequential(FlatLayer(8), FlatLayer(8)), torch.randn(2, 4, 8)

    def findings() -> list[CheckFinding | None]:
        split = plan_split(ForwardRecord(module, lambda m: m(x)), 2, sequence=True)
        (group,) = [one for one in split.classes if one.names[0].endswith("experts")]
        assert group.split.sequence_dim == 1
        return on_ranks(2, lambda axis: check_class(module, group, axis))

    assert findings() == [None, None]
    monkeypatch.setattr(label_graph, "may_stay_split", lambda _: True)
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
    split = plan_split(ForwardRecord(module, lambda m: m(x)), 2)
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
        (group,) = plan_split(ForwardRecord(module, lambda m: m(x)), 2).classes
        return module, group

    proof, run = split(torch.float64), split(torch.float32)
    others = [split(torch.float32, scale=2.0), split(torch.float32, samples=3)]
    ran: list[int] = []
    unsplit = BlockTrial.run_unsplit
    monkeypatch.setattr(BlockTrial, "run_unsplit", lambda trial: (ran.append(1), unsplit(trial))[1])

    def trials(given: list[tuple[nn.Module, BlockClass]]) -> int:
        ran.clear()

        def on_a_rank(axis: Axis) -> None:
            with skip_verified_blocks():
                assert [check_class(*one, axis) for one in given] == [None] * len(given)

        on_ranks(2, on_a_rank)
        return len(ran) // 2

    assert trials([proof, run]) == 1
    assert trials([proof, *others]) == 3
    assert trials([run]) == 1  # another start
    on_ranks(2, lambda axis: [check_class(*run, axis) for _ in range(2)])
    assert len(ran) == 2 + 4  # no start at all


class Wide(nn.Module):
    """A layer of four weights of one size, beside which all else that it holds is small."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(128, 512, bias=False), nn.Linear(512, 128, bias=False)
        self.more, self.less = nn.Linear(128, 512, bias=False), nn.Linear(512, 128, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(self.up(x).relu())
        return x + self.less(self.more(x).relu())


class Held(TorchDispatchMode):
    """Counts the bytes of tensors that operations made, in memory that was not there before.

    most_bytes   of what somebody still held, at most
    """

    def __init__(self, before: nn.Module) -> None:
        super().__init__()
        self.before = {p.untyped_storage()._cdata for p in before.parameters()}
        self.held: dict[int, int] = {}
        self.most_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for one in pytree.tree_leaves(made):
            if isinstance(one, Tensor) and not one.is_meta:
                memory = one.untyped_storage()
                name = memory._cdata
                if name not in self.before and name not in self.held:
                    self.held[name] = memory.nbytes()
                    weakref.finalize(memory, self.held.pop, name, None)
        self.most_bytes = max(self.most_bytes, sum(self.held.values()))
        return made


def test_all_that_a_check_holds_is_a_run_and_one_gradient() -> None:
    """All ranks of a machine check at once: what each keeps beside its run counts many times."""
    module, x = nn.Sequential(Wide(), Wide()), torch.randn(1, 2, 128)
    (group,) = plan_split(ForwardRecord(module, lambda m: m(x)), 2).classes
    weight_bytes = 8 * module[0].up.weight.numel()

    def on_a_rank(axis: Axis) -> list[float]:
        trial, most = BlockTrial(module[0], group, (axis,)), []
        for run in (trial.run_unsplit, trial.run_split):
            with Held(module) as held:
                kept = run()
            most.append(held.most_bytes / weight_bytes)
            told = sum(t.untyped_storage().nbytes() for t in kept.gradients.values())
            assert told < 0.4 * weight_bytes
        return most

    for alone, together in on_ranks(2, on_a_rank):
        assert 5 < alone < 6  # four weights, a gradient, this rank's half of it
        assert 3 < together < 3.75  # four halves, and while they are made a whole one and its half


def test_a_gradient_in_brief_is_linear_and_misses_nothing() -> None:
    draws = torch.Generator().manual_seed(0)
    for shape in [(), (5,), (4096,), (3, 500), (300, 200), (8, 40, 60), (64, 32, 3, 3)]:
        one, other = (torch.randn(shape, generator=draws, dtype=torch.float64) for _ in range(2))
        assert torch.allclose(
            sketch_gradient(one) + sketch_gradient(other), sketch_gradient(one + other), atol=1e-12
        )
        assert 0.3 < float(sketch_gradient(one).norm() / one.norm()) < 3
        for place in range(0, one.numel(), max(1, one.numel() // 50)):
            wrong = one.clone()
            wrong.view(-1)[place] += 1e-6
            assert 1e-7 < float((sketch_gradient(wrong) - sketch_gradient(one)).norm()) < 3e-6


def test_a_block_that_failed_is_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = nn.Sequential(FlatLayer(8), FlatLayer(8)), torch.randn(2, 4, 8)
    monkeypatch.setattr(label_graph, "may_stay_split", lambda _: True)
    split = plan_split(ForwardRecord(module, lambda m: m(x)), 2, sequence=True)
    (group,) = [one for one in split.classes if one.names[0].endswith("experts")]

    def twice(axis: Axis) -> list[CheckFinding | None]:
        with skip_verified_blocks():
            return [check_class(module, group, axis) for _ in range(2)]

    for found in on_ranks(2, twice):
        assert None not in found


def test_a_device_without_room_is_no_fault_of_the_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run ends as it does for any memory that is missing, and no layer is said to be wrong."""
    module, x = Stack(), torch.randn(2, 4, 8)
    split = plan_split(ForwardRecord(module, lambda m: m(x)), 2)

    def full(*given: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 MiB.")

    monkeypatch.setattr(check_module, "_check_in_dtype", full)
    with pytest.raises(torch.OutOfMemoryError, match="9.00 MiB"):
        on_ranks(1, lambda axis: check_class(module, split.classes[0], axis))
