"""Input gradients first, weights later: together exactly the whole backward, nothing done twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.parallel.pipeline.split_backward import input_gradients

WIDE = {"dtype": torch.float64}


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape, **WIDE))


class Block(nn.Module):
    """A residual block whose parameters are used in most ways there are."""

    def __init__(self, form: Callable[[Block, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.form = form
        self.first, self.second = nn.Linear(6, 8, **WIDE), nn.Linear(8, 6, **WIDE)
        self.norm = nn.LayerNorm(6, **WIDE)
        self.scale, self.table, self.unused = weight(6), weight(5, 6), weight(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.form(self, x)


def plain(b: Block, x: torch.Tensor) -> torch.Tensor:
    return x + b.second(F.gelu(b.first(b.norm(x))))


def used_twice(b: Block, x: torch.Tensor) -> torch.Tensor:
    h = F.linear(b.first(x).tanh(), b.first.weight.T)
    return b.norm(h * b.scale).tanh() * b.scale + b.norm(x)


def weights_of_weights(b: Block, x: torch.Tensor) -> torch.Tensor:
    made = b.first.weight * torch.sigmoid(b.second.weight.T) / b.first.weight.norm()
    return b.norm(F.linear(x, made) @ made) + F.linear(x, made, b.first.bias)[..., :6]


def beside_the_input(b: Block, x: torch.Tensor) -> torch.Tensor:
    rows = b.table[torch.tensor([0, 1, 1, 4])]
    return (x + rows) * b.scale.exp() + b.norm(b.table).sum()


class Doubling(torch.autograd.Function):
    """A Function that may run backward once only."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        ctx.runs = 0
        return x * w

    @staticmethod
    def backward(ctx, gradient):
        ctx.runs += 1
        assert ctx.runs == 1
        x, w = ctx.saved_tensors
        return gradient * w, (gradient * x).sum(0)


def written_in_python(b: Block, x: torch.Tensor) -> torch.Tensor:
    return b.norm(Doubling.apply(x, b.scale)).sin()


def without_input(b: Block, x: torch.Tensor) -> torch.Tensor:
    return b.norm(b.table[:4]) * x.detach()


def changed_by_hooks(b: Block, x: torch.Tensor) -> torch.Tensor:
    h = b.first(x)
    h.register_hook(lambda g: g * 3)
    h = b.second(h.tanh())
    h.register_hook(lambda g: g + 1)
    return h


FORMS = [plain, used_twice, weights_of_weights, beside_the_input, written_in_python,
         without_input, changed_by_hooks]  # fmt: skip


def both(block: nn.Module, *, split: bool, hooks: bool = True) -> dict[str, torch.Tensor | None]:
    """Gradients of two passes, the second over the first; with a hook on a parameter."""
    torch.manual_seed(1)
    found: dict[str, torch.Tensor | None] = {}
    block.zero_grad()
    handle = block.scale.register_hook(lambda g: 2 * g + 1)
    for _ in range(2):
        x = torch.randn(4, 6, **WIDE, requires_grad=True)
        other = torch.randn(4, 6, **WIDE, requires_grad=True)
        y, seed = block(x) + 0 * other.sum(), torch.randn(4, 6, **WIDE)
        aside = block.norm.weight.square().sum()  # an output of weights only
        outputs = [y, x, aside]
        seeds = [seed, torch.ones_like(x), torch.ones_like(aside)]
        if split:
            edges = [get_gradient_edge(one) for one in outputs]
            before = {name: copied(p.grad) for name, p in block.named_parameters()}
            gradients, weights = input_gradients(edges, seeds, [x, other])
            del y, outputs, aside
            assert all(same(p.grad, before[name]) for name, p in block.named_parameters())
            weights.accumulate()
            found["x"], found["other"] = gradients
            assert x.grad is None
        else:
            torch.autograd.backward(outputs, seeds)
            found["x"], found["other"] = x.grad, other.grad
    handle.remove()
    return found | {name: p.grad for name, p in block.named_parameters()}


def copied(one: torch.Tensor | None) -> torch.Tensor | None:
    return None if one is None else one.clone()


def same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return (one is None) == (other is None) and (one is None or torch.equal(one, other))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_both_halves_are_the_whole(form) -> None:
    torch.manual_seed(0)
    block = Block(form)
    whole = {name: copied(g) for name, g in both(block, split=False).items()}
    halves = both(block, split=True)
    assert whole.keys() == halves.keys()
    for name, gradient in whole.items():
        assert (gradient is None) == (halves[name] is None), name
        if gradient is not None:
            assert (gradient - halves[name]).norm() <= 1e-14 * (1 + gradient.norm()), name


class Counting(TorchDispatchMode):
    """Operations on tensors, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_every_product_is_made_once_and_in_its_half() -> None:
    """Three Linears in a row: 3 products for the input, then 3 for the weights, as in the whole."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)))

    def products(work: Callable[[], object]) -> int:
        with Counting() as ops:
            work()
        return ops.counts["mm"]

    x = torch.randn(4, 6, requires_grad=True)
    assert products(model(x).sum().backward) == 6
    total = model(x).sum()
    first: list[object] = []
    roots, seeds = [get_gradient_edge(total)], [torch.ones_like(total)]
    assert products(lambda: first.append(input_gradients(roots, seeds, [x]))) == 3
    assert products(first[0][1].accumulate) == 3


def test_hooks_of_weights_fire_once_in_the_second_half() -> None:
    block = Block(used_twice)
    seen: Counter[str] = Counter()
    for name, p in block.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: seen.update([name]))
    x = torch.randn(4, 6, **WIDE, requires_grad=True)
    total = block(x).sum()
    _, weights = input_gradients([get_gradient_edge(total)], [torch.ones_like(total)], [x])
    assert not seen
    weights.accumulate()
    assert set(seen) == {"first.weight", "first.bias", "norm.weight", "norm.bias", "scale"}
    assert set(seen.values()) == {1}


def test_nothing_is_left_on_the_graph() -> None:
    block, x = Block(plain), torch.randn(4, 6, **WIDE, requires_grad=True)
    total = block(x).sum()
    edge = get_gradient_edge(total)
    _, weights = input_gradients([edge], [torch.ones_like(total)], [x])
    held = [start.node for start in weights.starts]
    assert held
    weights.accumulate()
    assert not weights.starts
    with pytest.raises(RuntimeError, match="second time"):
        total.backward()
