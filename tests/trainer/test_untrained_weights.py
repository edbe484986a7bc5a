"""Weights that do not train are told in a line; what rests, or is left out on purpose, is not."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from trainer_small import pair, run_of

from shoal.optim.muon import MuonWithAdamW
from shoal.trainer.metrics_recorder import MetricsRecorder

CUT_OFF, NEVER, UNHELD = "computed in step 1", "got no gradient in", "are in no optimizer"


class NoBackward(torch.autograd.Function):
    """A kernel that knows a gradient for its input alone."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> Any:
        return upstream * ctx.saved_tensors[0], None


class Scale(nn.Module):
    """A weight per channel, in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.weight = way, nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.way == "kernel":
            return NoBackward.apply(x, self.weight)
        if self.way == "numpy":
            return torch.from_numpy(x.data.numpy() * self.weight.data.numpy())
        return x * (self.weight.detach() if self.way == "weight" else self.weight)


class Net(nn.Module):
    """A trunk of two blocks, a head; `way` says what is done between them."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way, self.calls = way, 0
        self.first, self.scale = nn.Linear(4, 8), Scale(way)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Tanh()) for _ in range(2)
        )
        self.aside, self.head = nn.Linear(8, 8), nn.Linear(8, 2)
        self.token = nn.Parameter(torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        h = self.scale(self.first(x))
        for number, block in enumerate(self.blocks):
            if not (self.way == "layerdrop" and number == self.calls % 2):
                h = h + block(h)
        if self.way == "added":
            h = h + self.aside(h).detach()
        elif self.way == "last block":
            h = h.detach()
        elif self.way == "pooler":
            self.pooled = self.aside(h)  # read by nobody
        elif self.way == "no_grad tower":
            with torch.no_grad():
                seen = self.aside(x.repeat(1, 2))
            h = h + seen
        elif self.way == "frozen input":
            h = self.aside(x.new_zeros(len(x), 8)) + h.mul(1.0)
        elif self.way == "statistics":
            self.mean = h.detach().mean()
        elif self.way == "rests" and self.calls > 20:
            h = self.aside(h)
        return self.head(h)


def lines_of(
    act: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, close: bool = False
) -> list[str]:
    told: list[str] = []
    monkeypatch.setattr(MetricsRecorder, "notice", lambda recorder, text: told.append(text))
    run = act()
    if close:
        run.close()
    return told


def trained(way: str, steps: int = 1, optimizer: Any = None) -> Any:
    run = run_of(Net(way), optimizer)
    for _ in range(steps):
        run.step(pair())
    return run


@pytest.mark.parametrize(
    ("way", "first"),
    [
        ("added", "aside.weight (and 1 more)"),
        ("last block", "first.weight (and 10 more)"),
        ("kernel", "scale.weight"),
        ("weight", "scale.weight"),
        ("numpy", "first.weight (and 2 more)"),
    ],
)
def test_a_weight_that_is_cut_off_is_named_in_step_1(
    way: str, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = lines_of(lambda: trained(way), monkeypatch)
    (line,) = [one for one in lines if CUT_OFF in one]
    assert f"model: {first} {CUT_OFF}, and no rank got a gradient" in line
    assert "; try: requires_grad_(False)" in line


@pytest.mark.parametrize(
    "way", ["pooler", "layerdrop", "rests", "statistics", "no_grad tower", "frozen input", ""]
)
def test_what_rests_is_listed_at_the_end_alone(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Detached to be logged, run for nothing, left out of a step: the loss trains all that counts."""
    lines = lines_of(lambda: trained(way, 3), monkeypatch)
    assert not lines
    lines = lines_of(lambda: trained(way, 3), monkeypatch, close=True)
    (line,) = lines
    left = "token" if way == "frozen input" else "token (and 2 more)"
    assert line.startswith(f"model: {left} {NEVER} 3 steps")


class Checkpointed(nn.Module):
    """A block under a reentrant checkpoint, behind a frozen layer."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head = nn.Linear(4, 8), nn.Linear(8, 2)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.first.requires_grad_(not frozen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(checkpoint(self.block, self.first(x), use_reentrant=True))


@pytest.mark.parametrize("frozen", [True, False])
def test_a_checkpoint_whose_inputs_have_no_gradient(
    frozen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of adapters on a frozen model with gradient checkpointing, without its input's hook."""

    def act() -> Any:
        run = run_of(Checkpointed(frozen))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run.step(pair())
        return run

    lines = lines_of(act, monkeypatch)
    assert [line.partition(" and no rank")[0] for line in lines] == (
        [f"model: block.0.weight (and 1 more) {CUT_OFF},"] if frozen else []
    )


def test_a_head_that_wakes_up_is_not_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = lines_of(lambda: trained("rests", 22), monkeypatch, close=True)
    assert [line.partition(" got")[0] for line in lines] == ["model: token"]


def test_every_method_of_a_tensor_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.Tensor.detach
    run = trained("added")
    assert torch.Tensor.detach is before
    assert not run.model.aside._forward_hooks
    assert not run.model.aside._forward_pre_hooks


def matrices(model: nn.Module) -> torch.optim.Optimizer:
    """What torch's Muon takes, and no more."""
    return torch.optim.SGD([p for p in model.parameters() if p.ndim == 2], lr=0.1)


def weights_alone(model: nn.Module) -> torch.optim.Optimizer:
    """The group without weight decay was forgotten."""
    named = model.named_parameters()
    return torch.optim.SGD([p for n, p in named if not n.endswith("bias")], lr=0.1)


@pytest.mark.parametrize(("build", "count"), [(matrices, 9), (weights_alone, 6)])
def test_weights_that_no_optimizer_holds(
    build: Any, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def act() -> Any:
        model = Net("")
        run = run_of(model, build(model))
        run.step(pair())
        return run

    (line,) = lines_of(act, monkeypatch)
    assert line.startswith(
        f"optimizer: {count} of the weights that get gradients {UNHELD}, first: "
    )
    assert "; try: a group for them" in line


class Scaled(nn.Module):
    """A temperature beside a network, which the optimizer of the network does not hold."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.temperature = Net(""), nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x) * self.temperature


def test_a_bare_scalar_that_no_optimizer_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    def act() -> Any:
        model = Scaled()
        run = run_of(model, torch.optim.SGD(model.net.parameters(), lr=0.1))
        run.step(pair())
        return run

    (line,) = lines_of(act, monkeypatch)
    assert line.startswith(f"optimizer: 1 of the weights that get gradients {UNHELD}, first: temp")


def head_alone(model: Net) -> Any:
    return model.head.parameters()


def last_block_and_head(model: Net) -> Any:
    return [*model.blocks[1].parameters(), *model.head.parameters()]


def biases(model: Net) -> Any:
    return [p for p in model.parameters() if p.ndim == 1]


def norms(model: Net) -> Any:
    return [p for block in model.blocks for p in block[0].parameters()]


@pytest.mark.parametrize("chosen", [head_alone, last_block_and_head, biases, norms])
def test_parts_that_are_left_out_on_purpose(chosen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def act() -> Any:
        model = Net("")
        run = run_of(model, torch.optim.SGD(list(chosen(model)), lr=0.1))
        run.step(pair())
        return run

    assert not [line for line in lines_of(act, monkeypatch) if UNHELD in line or CUT_OFF in line]


def test_weights_of_a_second_optimizer_and_of_muon_with_adamw(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def act() -> Any:
        model = Net("")
        other = torch.optim.AdamW([p for p in model.parameters() if p.ndim < 2], lr=0.1)
        run = run_of(model, matrices(model))
        run.step(pair())
        assert other.param_groups
        again = run_of(Net(""), lambda p: MuonWithAdamW(p, lr=0.1))
        again.step(pair())
        return run

    assert not lines_of(act, monkeypatch)
