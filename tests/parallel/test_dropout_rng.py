"""Randomness is keyed by (seed, step, micro-batch, block): no draw depends on what ran before."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import shoal
from shoal.fabric import start_world
from shoal.parallel import dropout_rng


class Masks(nn.Module):
    """Remembers every dropout mask it drew, as one row of booleans per call."""

    def __init__(self, seen: list) -> None:
        super().__init__()
        self.seen, self.rate = seen, 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = F.dropout(torch.ones(64), self.rate, self.training)
        self.seen.append((mask > 0).tolist())
        return x * mask[: x.shape[-1]]


class Stack(nn.Module):
    """Blocks that draw, some of them first drawing `waste` numbers, or running `times` times."""

    def __init__(self, times: int = 1, waste: int = 0, recompute: bool = False) -> None:
        super().__init__()
        self.seen: list[list[list[bool]]] = [[], [], []]
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), Masks(self.seen[k])) for k in range(2)
        )
        self.last = Masks(self.seen[2])
        self.times, self.waste, self.recompute = times, waste, recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.rand(self.waste)
        for _ in range(self.times):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        torch.rand(self.waste)
        return self.last(x)


def run_of(model: nn.Module, **settings):
    torch.manual_seed(0)
    return shoal.parallelize(
        model,
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda o, t: (o - t) ** 2,
        world=start_world({}),
        batch=8,
        micro_batch=2,
        **settings,
    )


def batch(samples: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(samples, 4, generator=generator), torch.zeros(samples, 4)


def masks(model: Stack, samples: int = 8, steps: int = 1, **settings) -> list:
    run = run_of(model, **settings)
    for _ in range(steps):
        run.step(batch(samples))
    return model.seen


def test_a_mask_depends_on_its_key_only() -> None:
    """The third micro-batch draws what it draws, whatever was drawn before it, inside or outside."""
    plain = masks(Stack())
    torch.manual_seed(77)
    torch.rand(5)
    assert masks(Stack()) == plain
    wasteful = masks(Stack(waste=3))
    assert wasteful[:2] == plain[:2]
    for block in range(2):
        assert len({tuple(row) for row in plain[block]}) == 4, "micro-batches share a mask"
    assert plain[0] != plain[1], "blocks share their masks"


def test_what_follows_a_block_does_not_depend_on_how_much_it_drew() -> None:
    model, other = Stack(), Stack()
    other.blocks[1].append(nn.Dropout(0.5))
    assert masks(other)[2] == masks(model)[2]


def test_steps_and_seeds_draw_anew() -> None:
    once, twice = masks(Stack()), masks(Stack(), steps=2)
    assert twice[0][:4] == once[0]
    assert twice[0][4:] != once[0]
    assert masks(Stack(), seed=1)[0] != once[0]


def test_a_block_that_runs_twice_draws_two_masks() -> None:
    """With one key per block and micro-batch, a recurrent cell would drop the same units for ever."""
    seen = masks(Stack(times=2), samples=2)
    assert len(seen[0]) == 2
    assert seen[0][0] != seen[0][1]
    assert seen[0][0] == masks(Stack(times=1), samples=2)[0][0]


@pytest.mark.parametrize("times", [1, 2])
def test_recomputation_draws_the_same_masks(times: int) -> None:
    """Activation checkpointing runs blocks again, backwards: each call must find its own key."""
    plain, again = Stack(times), Stack(times, recompute=True)
    again.load_state_dict(plain.state_dict())
    runs = [run_of(plain), run_of(again)]
    for run in runs:
        for _ in range(2):
            run.step(batch())
    assert len(again.seen[0]) == 2 * len(plain.seen[0]), "nothing was recomputed"
    for ours, theirs in zip(plain.parameters(), again.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_the_users_generator_is_left_alone() -> None:
    run = run_of(Stack())
    torch.manual_seed(5)
    torch.rand(3)
    before = torch.get_rng_state()
    run.step(batch())
    assert torch.equal(torch.get_rng_state(), before)

    def broken(outputs, targets):
        raise ValueError("by chance")

    run.loss = broken
    with pytest.raises(ValueError, match="by chance"):
        run.step(batch())
    assert torch.equal(torch.get_rng_state(), before)


def set_rate(model: nn.Module, rate: float) -> None:
    for part in model.modules():
        if isinstance(part, Masks):
            part.rate = rate


@pytest.mark.parametrize("first", [2, 4])
def test_a_first_draw_that_comes_late_is_keyed(first: int) -> None:
    """A rate that a schedule raises from 0 draws nothing at first; torch skips such a dropout."""
    model = Stack()
    set_rate(model, 0.0)
    run = run_of(model)
    for step in range(1, 5):
        set_rate(model, 0.5 if step >= first else 0.0)
        run.step(batch())
    for ours, theirs in zip(model.seen, masks(Stack(), steps=4), strict=True):
        assert ours[4 * (first - 1) :] == theirs[4 * (first - 1) :]


class Forked(nn.Module):
    """Draws where torch puts the generator's state back afterwards."""

    def __init__(self, seen: list) -> None:
        super().__init__()
        self.seen, self.linear = seen, nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.random.fork_rng():
            self.seen.append(float(torch.rand(1)))
        return self.linear(x)


def test_draws_that_leave_no_trace_are_keyed_by_block() -> None:
    seen: list[float] = []
    run = run_of(nn.Sequential(*[Forked(seen) for _ in range(3)]))
    for _ in range(3):
        run.step(batch())
    assert len(set(seen)) == len(seen) == 3 * 4 * 3


class Scaled(nn.Module):
    """Scales by what `numpy.random` draws, if it does."""

    def __init__(self, draws: bool = True) -> None:
        super().__init__()
        self.linear, self.draws, self.seen = nn.Linear(4, 4), draws, list[float]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.draws:
            self.seen.append(float(np.random.randn()))
        return self.linear(x) * (self.seen[-1] if self.draws else 1.0)


@pytest.mark.parametrize("drawn", ["rand", "randn", "nothing"])
def test_numpy_is_keyed_and_the_users_stream_goes_on(drawn: str) -> None:
    """Whatever the user draws between steps, a second normal number that waits included."""
    always, later = Scaled(), Scaled(draws=False)
    runs = [run_of(always), run_of(later)]
    for number in range(4):
        later.draws = number == 3
        expected = []
        for run in (None, *runs):
            np.random.seed(9)
            if drawn != "nothing":
                getattr(np.random, drawn)()
            if run is not None:
                run.step(batch())
                run.step(batch())
            expected.append([np.random.randn(), np.random.rand(), repr(np.random.get_state())])
        assert expected[0] == expected[1] == expected[2]
    assert later.seen == always.seen[-8:], "its first draws are those of who always drew"


def test_numpys_draws_in_a_model_do_not_hang_on_the_users_stream() -> None:
    """They are keyed by step and micro-batch: two runs after other draws see the same numbers."""
    seen = []
    for start in (1, 2):
        np.random.seed(start)
        model = Scaled()
        run = run_of(model)
        run.step(batch())
        run.step(batch())
        seen.append(list(model.seen))
    assert seen[0] == seen[1]


def test_numpy_keeps_another_bit_generator_of_the_users() -> None:
    """numpy cannot seed such a one anew; it says so, and its state is put back."""
    kept = np.random.get_bit_generator()
    run = run_of(Scaled(draws=False))
    run.step(batch())
    np.random.set_bit_generator(np.random.MT19937(3))
    try:
        before = repr(np.random.get_state())
        run.step(batch())
        assert repr(np.random.get_state()) == before
    finally:
        np.random.set_bit_generator(kept)


def test_building_a_model_leaves_the_users_generator_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = run_of_builder(3)
    assert torch.equal(torch.get_rng_state(), before)
    second, other = run_of_builder(3), run_of_builder(4)
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


def run_of_builder(seed: int) -> torch.Tensor:
    run = shoal.parallelize(
        lambda: nn.Linear(4, 4),
        lambda p: torch.optim.SGD(p, lr=0.1),
        seed=seed,
        world=start_world({}),
    )
    return run.model.weight.detach().clone()


def test_threads_of_one_process_notice_draws_of_the_gpus_generator(monkeypatch) -> None:
    """`dp` runs its replicas in turn where a pass draws: on a GPU from that GPU's generator."""
    from shoal.base.layouts.layout import Layout
    from shoal.base.plans.plan import Plan
    from shoal.fabric import World
    from shoal.fabric.rendezvous.process_info import ProcessInfo
    from shoal.parallel.data_parallel import thread_replicas
    from shoal.parallel.program import make_undivided_program

    gpu = torch.Generator().manual_seed(5)  # stands in for the device's own
    monkeypatch.setattr(torch.cuda, "default_generators", (gpu,))
    plan = Plan(Layout(threads=2), 4, 2, 2, compute="fp32")
    program = make_undivided_program(
        nn.Linear(2, 2), plan, World(ProcessInfo(), torch.device("cuda", 0), None)
    )
    replicas = thread_replicas.ThreadReplicas(program)
    torch.manual_seed(0)  # building drew
    replicas._note_draws()
    assert not replicas.in_turn
    torch.rand(1, generator=gpu)
    replicas._note_draws()
    replicas.close()
    assert replicas.in_turn


class Plain:
    """What a plain Sequential draws: in its blocks, in a hook and in the loss."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, all_keyed: bool, hook: bool) -> None:
        self.seen: list[list[bool]] = []
        if all_keyed:
            monkeypatch.setattr(dropout_rng, "_blocks_without_draws", lambda model: set())
        model = nn.Sequential(
            nn.Linear(4, 4), nn.ReLU(), Masks(self.seen), nn.Linear(4, 4), nn.Tanh(),
            nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 4), nn.Dropout(0.5),
            nn.Linear(4, 4),
        )  # fmt: skip
        if hook:
            model[3].register_forward_hook(lambda *_: self.note())
        torch.manual_seed(0)
        self.run = shoal.parallelize(
            model, lambda p: torch.optim.SGD(p, lr=0.1), self.loss, world=start_world({}), batch=8,
            micro_batch=2, recompute="full",
        )  # fmt: skip
        self.keyed = [name for name, one in model.named_children() if one._forward_pre_hooks]
        self.results = [self.run.step(batch()).loss for _ in range(3)]
        self.run.close()
        monkeypatch.undo()

    def note(self) -> None:
        self.seen.append((torch.rand(8) > 0.5).tolist())

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.note()
        return F.dropout(outputs, 0.5) ** 2


@pytest.mark.parametrize("hook", [False, True])
def test_torchs_modules_that_draw_nothing_need_no_key(
    monkeypatch: pytest.MonkeyPatch, hook: bool
) -> None:
    """In a plain Sequential, between others; every mask is the same as with a key for each."""
    some = Plain(monkeypatch, all_keyed=False, hook=hook)
    each = Plain(monkeypatch, all_keyed=True, hook=hook)
    assert some.seen == each.seen
    assert some.results == each.results
    expected = {"2", "7"} | ({"3"} if hook else set())
    assert set(some.keyed) == expected
    assert len(each.keyed) == 9


@pytest.mark.parametrize("by_bytes", [True, False])
def test_the_users_own_random_goes_on_where_it_was(
    monkeypatch: pytest.MonkeyPatch, by_bytes: bool
) -> None:
    """The cached second number of a normal pair included; keyed draws are those of `random.seed`."""
    assert dropout_rng.PYTHON._is_raw, "CPython's state lies behind the object's head"
    monkeypatch.setattr(dropout_rng.PYTHON, "_is_raw", by_bytes)
    random.seed(1)
    random.gauss(0, 1)
    before = random.getstate()
    assert before[2] is not None
    kept = dropout_rng.PYTHON.state()
    random.seed(7)
    drawn = random.random(), random.gauss(0, 1)
    dropout_rng.PYTHON.restore(kept)
    assert random.getstate() == before
    random.seed(7)
    assert drawn == (random.random(), random.gauss(0, 1))
