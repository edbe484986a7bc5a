"""Recomputed blocks give the same bits as blocks that keep everything, and keep less."""

from __future__ import annotations

import copy
from contextlib import ExitStack

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from shoal.base.errors import PlanError
from shoal.base.layouts.layout import Layout
from shoal.base.plans.plan import Plan
from shoal.fabric import start_world
from shoal.models.catalog import build
from shoal.models.loss import token_loss
from shoal.parallel import dropout_rng, recompute
from shoal.parallel.buffers import batch_norm, sync_buffers
from shoal.parallel.program import Program, make_undivided_program

POLICIES = ["selective", "full"]
both = pytest.mark.parametrize("policy", POLICIES)


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def program_of(model: nn.Module, policy: str) -> Program:
    plan = Plan(Layout(), 8, 2, 4, compute="fp64")
    program = make_undivided_program(model, plan, start_world({}))
    program = dropout_rng.apply(program, 3)
    program = batch_norm.apply(program)
    program = sync_buffers.apply(program)
    return recompute.apply(program.but(recompute=policy))


def square(output: torch.Tensor) -> torch.Tensor:
    return (output.double() ** 2).sum()


def step(program: Program, batches: list, loss=square, autocast: bool = False) -> None:
    """Forward and backward of some micro-batches, gradients accumulated; running buffers moved."""
    for begin in program.on_begin:
        begin()
    for index, batch in enumerate(batches):
        with ExitStack() as around:
            for enter in program.around:
                around.enter_context(enter(0, index))
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                total = loss(program.module(batch))
            total.backward()
    for commit in program.on_update:
        commit([len(batches)])


def outcome(model: nn.Module, policy: str, batches: list, loss=square, steps: int = 1, **how):
    """Gradients and buffers after some steps without an optimizer, and the program."""
    program = program_of(model, policy)
    for _ in range(steps):
        step(program, batches, loss, **how)
    tensors = {f"gradient {n}": p.grad for n, p in model.named_parameters()}
    tensors |= dict(model.named_buffers())
    return {n: t.clone() for n, t in tensors.items() if t is not None}, program


def assert_same_bits(make, batches: list, loss=square, policies=POLICIES, **how) -> None:
    expected, _ = outcome(make(), "none", batches, loss, **how)
    assert any(t.abs().sum() > 0 for t in expected.values())
    for policy in policies:
        ours, program = outcome(make(), policy, batches, loss, **how)
        assert ours.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(ours[name], tensor), f"{policy}: {name}"
        assert program.notices == []


def seeded(make):
    def made() -> nn.Module:
        torch.manual_seed(0)
        return make().double()

    return made


def llama(dropout: float = 0.1, **arguments) -> nn.Module:
    arguments = {"dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, **arguments}
    return build("llama", {**arguments, "dropout": dropout}, vocabulary=61, sequence=128)


def tokens(rows: int, seq: int = 12) -> torch.Tensor:
    return torch.randint(61, (rows, seq), generator=torch.Generator().manual_seed(rows))


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(shape[0]), dtype=torch.double
    )


def next_token(outputs) -> torch.Tensor:
    return token_loss(outputs, torch.zeros(outputs.hidden.shape[:-1], dtype=torch.long))[0]


def test_llama_with_dropout_and_accumulation() -> None:
    assert_same_bits(seeded(llama), [tokens(2), tokens(3), tokens(1)], next_token, steps=2)


def test_cnn_moves_its_statistics_once() -> None:
    def make() -> nn.Module:
        return build("resnet", {"channels": 4, "stages": 2}, vocabulary=None, sequence=None)

    assert_same_bits(seeded(make), [numbers(n, 1, 8, 8) for n in (2, 3, 4)], steps=2)


def test_torchs_own_transformer() -> None:
    def make() -> nn.Module:
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        return nn.TransformerEncoder(layer, 2)

    assert_same_bits(seeded(make), [numbers(n, 5, 16) for n in (2, 3)])


class Counting(nn.Module):
    """Two layers between which something happens; counts its calls."""

    def __init__(self, between: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 4)
        self.between = between or nn.GELU()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.last(self.between(self.first(x)))


class Stack(nn.Module):
    """Runs its blocks one after the other, `times` times."""

    def __init__(self, *blocks: nn.Module, times: int = 1) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.times = times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            for block in self.blocks:
                x = block(x)
        return x


@both
def test_a_block_runs_twice_where_gradients_are_wanted(policy: str) -> None:
    model = Stack(Counting()).double()
    names = list(model.state_dict())
    program = program_of(model, policy)
    step(program, [numbers(2, 4)])
    assert model.blocks[0].calls == 2
    with torch.no_grad():
        model(numbers(2, 4))
    assert model.blocks[0].calls == 3
    with torch.inference_mode():
        assert torch.equal(model(numbers(2, 4)), Stack.forward(model, numbers(2, 4)))
    model.blocks[0].calls = 3
    model.eval()
    step(program, [numbers(2, 4)])
    assert model.blocks[0].calls == 5
    assert list(model.state_dict()) == names


@pytest.mark.parametrize("autocast", [False, True])
def test_a_block_that_is_called_several_times(autocast: bool) -> None:
    """Under autocast the second call finds its weights cast already, its second run does not."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        model = Stack(Counting(nn.Dropout(0.3)), Counting(), times=3)
        return model if autocast else model.double()

    batch = numbers(5, 4)
    assert_same_bits(make, [batch.float() if autocast else batch], autocast=autocast, steps=2)


def test_a_kept_output_that_is_changed_in_place_is_made_again() -> None:
    assert_same_bits(
        seeded(lambda: Stack(Counting(nn.ReLU(inplace=True)), Counting())), [numbers(5, 4)], steps=2
    )


class Outside(nn.Module):
    """Changes a block's output, a matrix product that the block kept, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Two()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product, bent = self.blocks[0](x)
        return product.relu_() + bent


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.layer(x)
        return y, y.sigmoid() * 2


def test_a_kept_output_that_is_changed_outside_is_made_again() -> None:
    assert_same_bits(seeded(Outside), [numbers(5, 4)], steps=2)


class Picky(nn.Module):
    """Wants all kinds of arguments and gives a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.2)

    def forward(self, pair, power: int, *, bias, mode: str = "none", hole=None):
        assert (power, mode, hole) == (2, "sum", None)
        x, (y, scale) = pair
        out = self.drop(torch.tanh(self.layer(x)) ** power + bias * y * scale)
        return {"out": out, "rest": [y, 3]}


class Caller(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([Picky()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.entry(x)
        told = self.blocks[0]((h, (h.sin(), 0.5)), 2, bias=h.cos(), mode="sum")
        assert told["rest"][1] == 3
        return told["out"] + told["rest"][0]


def test_arguments_and_outputs_of_any_structure() -> None:
    assert_same_bits(seeded(Caller), [numbers(3, 4), numbers(2, 4)])


class Average(nn.Module):
    """Centres by a moving average that it moves, by writing or by replacing the buffer."""

    def __init__(self, replaces: bool = False, from_call: int = 0) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(8))
        self.register_buffer("table", torch.arange(8.0))
        self.replaces, self.waits = replaces, from_call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.waits -= 1
        if self.waits < 0:
            moved = self.average * 0.9 + x.detach().mean(0) * 0.1
            if self.replaces:
                self.average = moved
            else:
                self.average.copy_(moved)
        return torch.tanh(x - self.average) * self.table


@pytest.mark.parametrize("replaces", [False, True])
def test_a_buffer_moves_once_and_each_run_sees_it_as_it_was(replaces: bool) -> None:
    def make() -> nn.Module:
        return Stack(Counting(Average(replaces)), Counting(Average(replaces)), times=2)

    assert_same_bits(seeded(make), [numbers(3, 4), numbers(2, 4)], steps=2)


def test_spectral_norm_steps_its_vectors_once() -> None:
    def make() -> nn.Module:
        block = Counting()
        nn.utils.parametrizations.spectral_norm(block.first)
        return Stack(block)

    assert_same_bits(seeded(make), [numbers(3, 4), numbers(2, 4)])


class OwnStatistics(nn.Module):
    """Keeps a BatchNorm's statistics by hand: F.batch_norm writes them past the count of writes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("spread", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.batch_norm(x, self.mean, self.spread, training=True)


def test_statistics_that_are_written_past_the_count_move_once() -> None:
    assert_same_bits(
        seeded(lambda: Stack(Counting(OwnStatistics()), times=2)), [numbers(3, 4)], steps=2
    )


def test_statistics_that_start_as_zeros_move_once() -> None:
    """Behind a layer that starts at 0 the first run changes no value of a running mean."""

    def train(policy: str) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = Stack(Counting(nn.BatchNorm1d(8))).double()
        first = model.blocks[0].first
        start = first.weight.detach().clone()
        program = program_of(model, policy)
        for weight in (torch.zeros_like(start), start):
            with torch.no_grad():
                first.weight.copy_(weight)
                first.bias.zero_()
            step(program, [numbers(3, 4)])
        return dict(model.named_buffers())

    expected = train("none")
    for policy in POLICIES:
        for name, tensor in train(policy).items():
            assert torch.equal(tensor, expected[name]), name


def test_training_after_evaluation_learns_again_which_buffers_move() -> None:
    def train_late(policy: str) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = Stack(Counting(nn.Sequential(nn.BatchNorm1d(8), nn.Tanh()))).double()
        program = program_of(model.eval(), policy)
        step(program, [numbers(3, 4)])
        model.train()
        step(program, [numbers(3, 4)])
        return {**dict(model.named_buffers()), "gradient": model.blocks[0].first.weight.grad}

    expected, ours = train_late("none"), train_late("full")
    for name, tensor in expected.items():
        assert torch.equal(ours[name], tensor), name


def test_a_buffer_that_starts_to_move_later_is_refused() -> None:
    program = program_of(Stack(Counting(Average(from_call=2))).double(), "full")
    with pytest.raises(PlanError) as failure:
        step(program, [numbers(2, 4)] * 3)
    assert str(failure.value) == (
        "memory.recompute = full: blocks.0.between.average changes in some forward passes only, so "
        "its value before this one was not kept; try: memory.recompute=none"
    )


class Overwriting(Counting):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x += self.last(self.between(self.first(x * 1)))
        return x


@pytest.mark.parametrize("by_name", [False, True])
def test_a_block_that_changes_its_input_in_place_is_refused(by_name: bool) -> None:
    model = Stack(Overwriting()).double()
    program = program_of(model, "full")
    block = model.blocks[0]
    model.forward = lambda x: block(x=x * 1) if by_name else block(x * 1)
    with pytest.raises(PlanError) as failure:
        step(program, [numbers(2, 4)])
    assert str(failure.value) == (
        "memory.recompute = full: blocks.0 changes its input in place, so it cannot run again from "
        "that input; write x = x + y for x += y, or memory.recompute=none"
    )


def test_an_input_that_is_changed_later_is_noticed_by_torch() -> None:
    """As without recompute; torch.utils.checkpoint alone overlooks arguments by name."""
    model = Stack(Counting()).double()
    block = model.blocks[0]

    def forward(x: torch.Tensor) -> torch.Tensor:
        h = x * 1
        y = block(x=h)
        h.add_(1)
        return y

    model.forward = forward
    for policy in ("none", "full"):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            step(program_of(model, policy), [numbers(2, 4)])


class Growing(Counting):
    """Fills a cache of its own, so that every run does more than the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.cache.append(self.first(x))
        return self.last(torch.cat(self.cache).tanh())


@both
def test_a_second_run_that_does_not_match_is_one_line(policy: str) -> None:
    program = program_of(Stack(Growing()).double(), policy)
    with pytest.raises(PlanError) as failure:
        step(program, [numbers(2, 4)])
    assert str(failure.value) == (
        f"memory.recompute = {policy}: blocks.0 saved other tensors in its second run than in its "
        "first: it depends on something beside its inputs, its buffers and torch's generators (a "
        "cache that it fills, Python's random); try: memory.recompute=none"
    )


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)),
        build("mlp", {"inputs": 4, "hidden": 8}),
        Counting(),
    ],
    ids=["layers", "mlp", "no list"],
)
def test_a_model_without_blocks_says_so(model: nn.Module) -> None:
    program = program_of(model.double(), "full")
    assert program.notices == [
        "memory.recompute = full: nothing to recompute: the model has no ModuleList or Sequential "
        "whose entries are blocks of several layers"
    ]
    step(program, [numbers(2, 4)])


def test_close_leaves_the_blocks_as_they_were() -> None:
    model = Stack(Counting(), Counting())
    own = model.blocks[1].forward
    model.blocks[1].forward = own
    before = [dict(block.__dict__) for block in model.blocks]
    program = program_of(model, "full")
    assert model.blocks[0].__dict__ != before[0]
    for undo in program.on_close:
        undo()
    assert [dict(block.__dict__) for block in model.blocks] == before


def test_a_copy_of_the_model_computes_with_its_own_weights() -> None:
    """An average of weights, or a twin on the meta device, is made by a deep copy."""
    model = Stack(Counting()).double()
    program_of(model, "full")
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied.blocks[0].last.weight.zero_()
        copied.blocks[0].last.bias.zero_()
    square(copied(numbers(2, 4)) + 1).backward()
    assert torch.equal(copied(numbers(2, 4)), torch.zeros(2, 4, dtype=torch.double))
    assert copied.blocks[0].last.weight.grad is not None
    assert model.blocks[0].last.weight.grad is None


class Itself(Stack):
    """Recomputes its blocks already."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


@both
def test_a_model_that_recomputes_itself_is_told_once(policy: str) -> None:
    def make() -> nn.Module:
        return Itself(Counting(nn.Dropout(0.3)), Counting(nn.Dropout(0.3)))

    expected, _ = outcome(seeded(make)(), "none", [numbers(3, 4)])
    ours, program = outcome(seeded(make)(), policy, [numbers(3, 4)])
    for name, tensor in expected.items():
        assert torch.equal(ours[name], tensor), name
    assert program.notices == [
        f"memory.recompute = {policy}: the model recomputes blocks.1 itself, so it runs three "
        "times; switch off one of the two"
    ]


def test_which_outputs_are_worth_keeping() -> None:
    """Scores grow with seq²; fused attention that drops out draws numbers, so it must run again."""
    aten = torch.ops.aten
    q, weights = torch.empty(2, 64, 16), torch.empty(2, 64, 64)
    assert recompute.is_worth_keeping(aten.mm.default, (q[0], weights[0]), weights[0])
    assert not recompute.is_worth_keeping(aten.bmm.default, (q, q.mT), weights)
    assert recompute.is_worth_keeping(aten.bmm.default, (weights, q), q)
    flash = aten._scaled_dot_product_flash_attention.default
    assert recompute.is_worth_keeping(flash, (q, q, q), (q,))
    assert not recompute.is_worth_keeping(flash, (q, q, q, 0.1), (q,))
    efficient = aten._scaled_dot_product_efficient_attention.default
    assert recompute.is_worth_keeping(efficient, (q, q, q, None, True), (q,))
    assert not recompute.is_worth_keeping(efficient, (q, q, q, None, True, 0.1), (q,))


def test_only_what_a_second_run_needs_is_kept() -> None:
    """A block's last product is its output: nobody asks for it again after the first step."""
    model = Stack(Counting()).double()
    program = program_of(model, "selective")
    step(program, [numbers(2, 4)])
    unneeded = model.blocks[0].forward.unneeded
    assert unneeded == {(torch.ops.aten.addmm.default, 1)}


def peak_bytes(policy: str, dtype: torch.dtype = torch.float32) -> int:
    """Bytes that the allocator reports, live at most during a step, beyond the gradients."""
    torch.manual_seed(0)
    model = llama(0.0, dim=64, layers=6).to(dtype)
    program, batch = program_of(model, policy), [tokens(4, 128)]
    step(program, batch, next_token)
    for parameter in model.parameters():
        parameter.grad = None
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step(program, batch, next_token)
    moves = [
        (event.start_ns(), event.nbytes())
        for event in recorded.profiler.kineto_results.events()
        if event.name() == "[memory]"
    ]
    live = peak = 0
    for _, moved_bytes in sorted(moves, key=lambda move: move[0]):
        live += moved_bytes
        peak = max(peak, live)
    return peak - sum(p.numel() * p.element_size() for p in model.parameters())


def test_recompute_takes_less_memory() -> None:
    none, selective, full = (peak_bytes(policy) for policy in ("none", *POLICIES))
    assert selective < 0.75 * none
    assert full < 0.5 * none


def test_functional_dropout_inside_a_block_is_drawn_again() -> None:
    class Drops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.dropout(self.layer(F.dropout(x, 0.5)).tanh(), 0.5)

    assert_same_bits(seeded(lambda: Stack(Drops(), Drops())), [numbers(6, 4)])
