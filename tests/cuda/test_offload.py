"""Offload and recompute on one GPU: the same bits as without, less device memory.

`make test-cuda`; nothing here runs where there is no GPU, and pytest says so.
"""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch

from shoal.base.layout import Layout
from shoal.base.plan import Plan
from shoal.fabric import start_world
from shoal.models.catalog import build
from shoal.models.loss import token_loss
from shoal.parallel import offload, randomness, recompute
from shoal.parallel.program import Program, undivided

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")

DIM, LAYERS, SEQUENCE, BATCH = 512, 8, 512, 8


def program_of(dropout: float = 0.1) -> Program:
    torch.manual_seed(0)
    arguments = {"dim": DIM, "layers": LAYERS, "heads": 8, "dropout": dropout}
    model = build("llama", arguments, vocabulary=1024, sequence=SEQUENCE).cuda()
    world = start_world({})
    plan = Plan(Layout(), "", BATCH, BATCH, 1, "bf16", 0)
    program = undivided(model, plan, world)
    return randomness.apply(program, 3)


def forward_backward(program: Program, micro_batches: int = 2) -> None:
    for index in range(micro_batches):
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(1024, (BATCH, SEQUENCE), generator=generator).cuda()
        with ExitStack() as around:
            for enter in program.around:
                around.enter_context(enter(0, index))
            with torch.autocast("cuda", torch.bfloat16):
                total, _ = token_loss(program.module(tokens), tokens)
            total.backward()


def gradients(program: Program) -> tuple[list[torch.Tensor], int]:
    """Gradients of two micro-batches, and the peak of device memory beyond what was there."""
    forward_backward(program, 1)  # workspaces, pinned buffers
    program.module.zero_grad()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    forward_backward(program)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    return [p.grad for p in program.module.parameters() if p.grad is not None], peak


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch):
    """Atomic additions would differ in the last bit from run to run."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("policy", ["selective", "full"])
def test_recompute_gives_the_same_bits(policy: str) -> None:
    expected, plain_peak = gradients(program_of())
    ours, peak = gradients(recompute.apply(program_of(), policy))
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))
    assert peak < plain_peak


@pytest.mark.parametrize("policy", ["none", "selective", "full"])
def test_parked_activations_give_the_same_bits(policy: str) -> None:
    expected, plain_peak = gradients(recompute.apply(program_of(), policy))
    ours, peak = gradients(offload.apply(recompute.apply(program_of(), policy), "activations"))
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))
    if policy == "none":
        assert peak < 0.8 * plain_peak


def test_parked_activations_survive_a_busy_device() -> None:
    """Copies that lag far behind computing must neither be overtaken nor read too early."""
    side = offload.apply(program_of(0.0), "activations")
    plain = program_of(0.0)
    filler = torch.randn(8192, 8192, device="cuda")
    for _ in range(3):
        for program in (plain, side):
            program.module.zero_grad()
            filler @ filler  # the device is behind when the forward pass is launched
            forward_backward(program)
    for ours, theirs in zip(side.module.parameters(), plain.module.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def stepped(streams: bool) -> tuple[list[torch.Tensor], torch.optim.Optimizer, int]:
    program = program_of(0.0)
    parameters = list(program.parameters.values())
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=True)
    if streams:
        offload.stream_state(optimizer, program.world.device, piece_bytes=8 * 2**20)
    for _ in range(3):
        forward_backward(program)
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    return parameters, optimizer, torch.cuda.memory_allocated()


def test_streamed_state_gives_the_same_bits_and_lies_on_the_host() -> None:
    before = torch.cuda.memory_allocated()
    parameters, plain, plain_bytes = stepped(False)
    expected = [p.detach().cpu() for p in parameters]
    moments = [plain.state[p]["exp_avg"].cpu() for p in parameters]
    del parameters, plain
    torch.cuda.synchronize()
    start = torch.cuda.memory_allocated()
    ours, streamed, streamed_bytes = stepped(True)
    for parameter, weight, moment in zip(ours, expected, moments, strict=True):
        assert torch.equal(parameter.detach().cpu(), weight)
        assert torch.equal(streamed.state[parameter]["exp_avg"].cpu(), moment)
    large = [p for p in ours if p.nbytes >= offload.LEAST_BYTES]
    assert large
    for parameter in large:
        kept = streamed.state[parameter]["exp_avg_sq"]
        assert kept.device.type == "cpu"
        assert kept.is_pinned()
    saved = (plain_bytes - before) - (streamed_bytes - start)
    assert saved > 0.95 * 2 * sum(p.nbytes for p in large)
