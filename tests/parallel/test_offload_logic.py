"""Offload's logic on the CPU, whose streams do nothing: who is copied, when, and that bits survive.

What only a GPU can show (overlap, memory, order of streams) is in tests/cuda/host_memory.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shoal.base.errors import PlanError
from shoal.base.layouts.layout import Layout
from shoal.base.plans.plan import Plan
from shoal.fabric import World
from shoal.fabric.rendezvous.process_info import ProcessInfo
from shoal.models.catalog import build
from shoal.models.loss import token_loss
from shoal.parallel import offload, recompute
from shoal.parallel.build.mmap_init import is_mapped
from shoal.parallel.compose import prepare
from shoal.parallel.offload.copy_stream import CopyStream
from shoal.parallel.offload.offloaded_activations import ActivationOffload
from shoal.parallel.offload.optimizer_state import keep_in_files, stream_state
from shoal.parallel.program import Program, make_undivided_program
from shoal.trace.isolation.module_copies import copy_to_meta

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def program_of(model: nn.Module, device: str = "cpu", layout: Layout | None = None) -> Program:
    layout = layout or Layout()
    world = World(ProcessInfo(size=layout.processes), torch.device(device), None)
    plan = Plan(layout, 8, 2, 4, compute="fp64")
    return make_undivided_program(model, plan, world)


def test_a_run_on_the_cpu_has_everything_on_the_host_already() -> None:
    for policy in ("optimizer", "parameters", "activations"):
        program = program_of(nn.Linear(2, 2)).but(offload=policy)
        assert offload.apply(program) is program
        assert program.notices == [
            f"memory.offload = {policy}: this run computes on the CPU, so it is in the host's "
            "memory already; memory.offload_to=files keeps states in files"
        ]
        optimizer = torch.optim.SGD(program.module.parameters())
        assert offload.hand_over(program, optimizer) is program
    program = program_of(nn.Linear(2, 2))
    assert offload.apply(program) is program
    assert not program.notices


def test_a_policy_that_cannot_hold_is_refused_before_the_model_is_recorded() -> None:
    nothing = "with memory.offload = {} there is nothing to put there; try: memory."
    for device, policy, line in (
        ("cpu", "none", nothing.format("none")),
        ("cpu", "activations", nothing.format("activations")),
        ("cuda", "optimizer", "states in files are stepped by the CPU, and this run computes on "),
    ):
        whole = program_of(nn.Linear(2, 2), device, Layout(tp=2))
        plan = replace(whole.plan, offload=policy, offload_to="files")
        with pytest.raises(PlanError) as failure:
            prepare(whole.module, plan, whole.world)
        assert str(failure.value).startswith(f"memory.offload_to = files: {line}")


def test_parameters_must_be_split() -> None:
    with pytest.raises(PlanError) as failure:
        offload.apply(
            program_of(nn.Linear(2, 2), "cuda", Layout(dp_replicate=2)).but(offload="parameters")
        )
    assert str(failure.value) == (
        "memory.offload = parameters: ddp needs whole parameters on every device; try: "
        "layout.strategy=fsdp, or memory.offload=optimizer"
    )
    split = program_of(nn.Linear(2, 2), "cuda", Layout(dp_shard=2, zero=3))
    split = split.but(offload="parameters")
    assert offload.apply(split) is split


def llama() -> nn.Module:
    torch.manual_seed(0)
    arguments = {"dim": 32, "layers": 3, "heads": 4, "kv_heads": 2}
    return build("llama", arguments, vocabulary=61, sequence=16).double()


def gradients(model: nn.Module, park: ActivationOffload | None) -> list[torch.Tensor]:
    tokens = torch.randint(61, (3, 16), generator=torch.Generator().manual_seed(1))
    for index in range(2):
        if park is None:
            token_loss(model(tokens), tokens)[0].backward()
        else:
            with park.micro_batch(0, index):
                token_loss(model(tokens), tokens)[0].backward()
    return [p.grad for p in model.parameters()]


class Counted(CopyStream):
    """Counts copies, and overwrites what left, so that a use of it is seen."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.sent: list[tuple[int, ...]] = []
        self.brought = 0

    def copy_to_host(self, tensor, host=None):
        self.sent.append(tuple(tensor.shape))
        return super().copy_to_host(tensor, host)

    def copy_to_device(self, host, into=None):
        self.brought += 1
        return super().copy_to_device(host, into)


@pytest.mark.parametrize("policy", ["none", "selective", "full"])
def test_parked_activations_give_the_same_bits(policy: str) -> None:
    expected = gradients(llama(), None)
    model = llama()
    recompute.apply(program_of(model).but(recompute=policy))
    park = ActivationOffload(model, (), CPU, least_bytes=1)
    park.lane = lane = Counted()
    ours = gradients(model, park)
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))
    assert 0 < lane.brought < len(lane.sent), "the last few are still here when their turn comes"
    if policy == "full":
        # tokens, a block's input times 3, and around the head: two norms' worth and the loss
        assert len([shape for shape in lane.sent if shape == (3, 16, 32)]) <= 2 * (3 + 3)


def test_a_module_with_parked_activations_can_be_copied() -> None:
    """As fsdp does, to have the shapes of what it shards; a stream cannot be copied."""
    model = llama()
    park = ActivationOffload(model, ("blocks.0",), CPU)
    assert copy_to_meta(model).blocks[0] is not model.blocks[0]
    park.close()


def test_weights_and_small_and_expanded_tensors_stay() -> None:
    model = llama()
    park = ActivationOffload(model, (), CPU, least_bytes=32 * 32 * 8)
    park.lane = lane = Counted()
    gradients(model, park)
    assert lane.sent
    shapes = {tuple(p.shape) for p in model.parameters()}
    shapes |= {shape[::-1] for shape in shapes}
    # the loss head saves a gradient, which has its weight's shape
    assert shapes & set(lane.sent) == {(61, 32)}
    assert lane.sent.count((61, 32)) == 2
    with park.micro_batch(0, 0):
        row = torch.ones(1, 64)
        assert park.offload(row) is row
        wide = row.expand(1000, 64)
        assert park.offload(wide) is wide


def test_a_tensor_that_is_saved_three_times_leaves_once() -> None:
    model = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)).double()
    park = ActivationOffload(model, (), CPU, least_bytes=1)
    park.lane = lane = Counted()
    x = torch.randn(4, 8, dtype=torch.double)
    with park.micro_batch(0, 0):
        for layer in model:
            park._note_weights(layer, ())
        h = x * 1
        sum(layer(h).sum() for layer in model).backward()
    assert lane.sent == [(4, 8)]


def test_another_tensor_in_the_same_memory_is_another() -> None:
    """A key is an address: it counts only as long as its tensor is still here."""
    park = ActivationOffload(nn.Identity(), (), CPU, least_bytes=1)
    with park.micro_batch(0, 0):
        memory = torch.zeros(4)
        first = park.offload(memory)
        assert torch.equal(park.fetch(first), torch.zeros(4))
        with torch.no_grad():
            memory.data.fill_(1.0)  # by torch's count of writes nothing happened
        assert torch.equal(park.fetch(park.offload(memory)), torch.ones(4))


def test_nothing_is_left_between_micro_batches() -> None:
    model = llama()
    park = ActivationOffload(model, (), CPU, least_bytes=1)
    gradients(model, park)
    assert not park.leaving
    assert not park.returning
    assert not park.parked
    park.close()
    assert not any(part._forward_pre_hooks for part in model.modules())


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
}


def train(name: str, piece_bytes: int | None, steps: int = 3, files: bool = False):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = OPTIMIZERS[name](groups)
    undo = lambda: None  # noqa: E731
    if piece_bytes is not None and files:
        undo = keep_in_files(optimizer, piece_bytes=piece_bytes, least_bytes=8)
    elif piece_bytes is not None:
        undo = stream_state(optimizer, CPU, piece_bytes=piece_bytes, least_bytes=8)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for seed in range(steps):
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(seed))
        optimizer.zero_grad()
        F.mse_loss(model(x), x.sin()).backward()
        if seed == 1:
            model[2].weight.grad = None  # a step in which a parameter has none
        optimizer.step()
        schedule.step()
    return model, optimizer, undo


@pytest.mark.parametrize("files", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("piece_bytes", [1, 200, 10**6])
def test_stepping_in_pieces_is_stepping_at_once(name: str, piece_bytes: int, files: bool) -> None:
    model, optimizer, _ = train(name, None)
    ours, streamed, undo = train(name, piece_bytes, files=files)
    for state in streamed.state.values() if files else ():
        large = [v for v in state.values() if isinstance(v, torch.Tensor) and v.nbytes >= 8]
        assert all(is_mapped(value) for value in large)
    for a, b in zip(ours.parameters(), model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert streamed.param_groups[0]["params"] == list(p for p in ours.parameters() if p.dim() == 2)
    states = zip(ours.parameters(), model.parameters(), strict=True)
    for a, b in states:
        assert streamed.state[a].keys() == optimizer.state[b].keys()
        for key, value in optimizer.state[b].items():
            assert torch.equal(torch.as_tensor(streamed.state[a][key]), torch.as_tensor(value))
    undo()
    assert "step" not in streamed.__dict__
    streamed.step()
    optimizer.step()
    for a, b in zip(ours.parameters(), model.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("files", [False, True])
def test_state_that_a_checkpoint_brought_is_used(files: bool) -> None:
    model, optimizer, _ = train("adamw", None)
    ours, streamed, _ = train("adamw", 200, files=files)
    for a, b in zip(ours.parameters(), model.parameters(), strict=True):
        streamed.state[a]["exp_avg"] = torch.full_like(a, 0.5)
        optimizer.state[b]["exp_avg"].fill_(0.5)
    for one in (streamed, optimizer):
        one.step()
    for a, b in zip(ours.parameters(), model.parameters(), strict=True):
        assert torch.equal(a, b)
        assert is_mapped(streamed.state[a]["exp_avg"]) == files


class Counting(torch.optim.SGD):
    """Counts its steps per group, as some optimizers do."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        return super().step(closure)


def test_an_optimizer_that_counts_per_group_is_refused() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = Counting([weight], lr=0.1)
    stream_state(optimizer, CPU)
    weight.grad = torch.ones(3)
    with pytest.raises(PlanError) as failure:
        optimizer.step()
    assert str(failure.value) == (
        "memory.offload = optimizer: Counting counts k per group, and its parameters are stepped "
        "in pieces; try: memory.offload=none, or an optimizer of torch.optim"
    )
    assert optimizer.param_groups[0]["params"] == [weight]
