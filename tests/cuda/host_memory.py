"""Recompute and offload on one device: the same bits as without, and less device memory."""

from __future__ import annotations

import gc
from contextlib import ExitStack
from dataclasses import replace

import torch

from child import Sheet
from device import DEVICE, ON_GPU, SMALL, peak_bytes, pick, synchronize
from shoal.base.layouts.layout import Layout
from shoal.base.plans.plan import Plan
from shoal.fabric import start_world
from shoal.models.catalog import build
from shoal.models.loss import token_loss
from shoal.parallel import dropout_rng, recompute
from shoal.parallel.offload.offloaded_activations import LEAST_BYTES, ActivationOffload
from shoal.parallel.offload.optimizer_state import stream_state
from shoal.parallel.program import Program, make_undivided_program

DIM, LAYERS, SEQUENCE, BATCH = pick((512, 8, 512, 8), (64, 3, 32, 2))
VOCABULARY = 1024
LEAST_PARKED = pick(LEAST_BYTES, 1)  # small sizes would stay on the device otherwise


def program_of(dropout: float = 0.1) -> Program:
    torch.manual_seed(0)
    arguments = {"dim": DIM, "layers": LAYERS, "heads": 8, "dropout": dropout}
    model = build("llama", arguments, vocabulary=VOCABULARY, sequence=SEQUENCE).to(DEVICE)
    world = start_world({})
    world.device = DEVICE
    plan = Plan(Layout(), BATCH, BATCH, 1, compute="bf16")
    return dropout_rng.apply(make_undivided_program(model, plan, world), 3)


def parking(program: Program, least_bytes: int = LEAST_PARKED) -> Program:
    """What `offload.apply` makes of it, also on the CPU, where that has nothing to relieve."""
    park = ActivationOffload(program.module, program.blocks, DEVICE, least_bytes)
    return replace(program, around=(*program.around, park.micro_batch))


def forward_backward(program: Program, micro_batches: int = 2) -> None:
    for index in range(micro_batches):
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(VOCABULARY, (BATCH, SEQUENCE), generator=generator).to(DEVICE)
        with ExitStack() as around:
            for enter in program.around:
                around.enter_context(enter(0, index))
            with torch.autocast(DEVICE.type, torch.bfloat16):
                total, _ = token_loss(program.module(tokens), tokens)
            total.backward()


def gradients(program: Program) -> tuple[list[torch.Tensor], int]:
    """Gradients of two micro-batches, and the peak of device memory beyond what was there."""
    forward_backward(program, 1)  # workspaces, pinned buffers
    program.module.zero_grad()
    peak = peak_bytes(lambda: forward_backward(program))
    return [p.grad for p in program.module.parameters() if p.grad is not None], peak


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    """Bit for bit."""
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def parked(sheet: Sheet) -> None:
    """Every policy beside none."""
    # Atomic additions differ by a bit; where torch only warns, fused attention goes on with them.
    torch.use_deterministic_algorithms(True, warn_only=True)
    for fused in ("cudnn", "flash", "mem_efficient"):
        getattr(torch.backends.cuda, f"enable_{fused}_sdp")(False)
    expected, plain_peak = gradients(program_of())
    with sheet.row("the same program twice gives the same bits"):
        assert same(gradients(program_of())[0], expected)
    for policy in ("selective", "full"):
        with sheet.row(f"recompute {policy}") as told:
            ours, told["peak_bytes"] = gradients(
                recompute.apply(program_of().but(recompute=policy))
            )
            told["plain_peak_bytes"] = plain_peak
            assert same(ours, expected)
            assert SMALL or told["peak_bytes"] < plain_peak
    for policy in ("none", "selective", "full"):
        with sheet.row(f"offload of activations, recompute {policy}") as told:
            program = parking(recompute.apply(program_of().but(recompute=policy)))
            ours, told["peak_bytes"] = gradients(program)
            told["plain_peak_bytes"] = plain_peak
            assert same(ours, expected)
            if not SMALL and policy == "none":
                assert told["peak_bytes"] < 0.8 * plain_peak
    with sheet.row("offload of activations on a busy device"):
        busy()
    with sheet.row("optimizer state on the host") as told:
        streamed(told)


def busy() -> None:
    """Copies that lag far behind computing must neither be overtaken nor read too early."""
    side = parking(program_of(0.0))
    plain = program_of(0.0)
    width = pick(8192, 256)
    filler = torch.randn(width, width, device=DEVICE)
    for _ in range(3):
        for program in (plain, side):
            program.module.zero_grad()
            filler @ filler  # the device is behind when the forward pass is launched
            forward_backward(program)
    ours, theirs = ([p.grad for p in of.module.parameters()] for of in (side, plain))
    assert same(ours, theirs)


def stepped(streams: bool) -> tuple[list[torch.Tensor], torch.optim.Optimizer, int]:
    """Three steps; gives weights, optimizer, and the bytes on the device at the end."""
    gc.collect()  # what earlier checks left is not let go in the middle
    before = torch.cuda.memory_allocated() if ON_GPU else 0
    program = program_of(0.0)
    parameters = list(program.parameters.values())
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=True)
    if streams:
        stream_state(optimizer, program.world.device, piece_bytes=pick(8 * 2**20, 2**14))
    for _ in range(3):
        forward_backward(program)
        optimizer.step()
        optimizer.zero_grad()
    synchronize()
    after = torch.cuda.memory_allocated() if ON_GPU else 0
    return parameters, optimizer, after - before


def streamed(told: dict[str, int]) -> None:
    """The same bits, and the moments of large parameters pinned in host memory."""
    parameters, plain, told["plain_bytes"] = stepped(False)
    expected = [p.detach().cpu() for p in parameters]
    moments = [plain.state[p]["exp_avg"].cpu() for p in parameters]
    del parameters, plain
    ours, other, told["streamed_bytes"] = stepped(True)
    for parameter, weight, moment in zip(ours, expected, moments, strict=True):
        assert torch.equal(parameter.detach().cpu(), weight)
        assert torch.equal(other.state[parameter]["exp_avg"].cpu(), moment)
    large = [p for p in ours if p.nbytes >= LEAST_BYTES]
    if SMALL:
        return  # nothing is large
    assert large
    for parameter in large:
        kept = other.state[parameter]["exp_avg_sq"]
        assert kept.device.type == "cpu"
        assert kept.is_pinned()
    saved = told["plain_bytes"] - told["streamed_bytes"]
    assert saved > 0.95 * 2 * sum(p.nbytes for p in large)
