"""One GPU, no network, the machine's own torch: correctness, kernels, precision, MFU.

`make test-cuda`; nothing here runs where there is no GPU, and pytest says so.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import shoal
from shoal.base.plan import Plan
from shoal.fabric import start_world
from shoal.models.catalog import build
from shoal.parallel import ddp
from shoal.parallel.compose import compose, divide, facts
from shoal.planner.buckets import plan_buckets
from shoal.profile.flops import backward_flops
from shoal.profile.matmul import matmul_flops_per_s
from shoal.trainer.step import forward_backward, update

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")


class Tokens:
    """Deterministic token samples with unequal numbers of ignored targets."""

    draws_nothing = True

    def __init__(self, vocabulary: int, sequence: int, samples: int = 64) -> None:
        self.vocabulary, self.sequence, self.samples = vocabulary, sequence, samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, self.vocabulary, (self.sequence + 1,), generator=generator)
        targets = tokens[1:].clone()
        targets[: index % 7] = -100
        return tokens[:-1], targets


def llama(dropout: float = 0.0) -> torch.nn.Module:
    torch.manual_seed(1)
    return build("llama", {"dim": 64, "layers": 2, "dropout": dropout}, vocabulary=97, sequence=32)


def train(precision: str, device: str, steps: int = 5, dropout: float = 0.0) -> shoal.Run:
    world = start_world({})
    world.device = torch.device(device)
    run = shoal.parallelize(
        llama(dropout),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        batch=8,
        micro_batch=2,
        precision=precision,
        clip=1.0,
        world=world,
    )
    for batch in run.loader(Tokens(97, 32)):
        run.step(batch)
        if run.step_count == steps:
            break
    return run


def test_float64_equals_the_cpu() -> None:
    gpu, cpu = train("fp64", "cuda"), train("fp64", "cpu")
    for (name, ours), theirs in zip(
        gpu.model.state_dict().items(), cpu.model.state_dict().values(), strict=True
    ):
        difference = (ours.cpu() - theirs).norm() / theirs.norm()
        assert difference < 1e-12, name


def test_dropout_is_the_same_in_two_runs() -> None:
    one, other = train("fp32", "cuda", dropout=0.1), train("fp32", "cuda", dropout=0.1)
    for ours, theirs in zip(one.model.parameters(), other.model.parameters(), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)


def test_loss_head_equals_cross_entropy() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(300, 64, device="cuda", dtype=torch.float64, requires_grad=True)
    weight = torch.randn(1000, 64, device="cuda", dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 1000, (300,), device="cuda")
    targets[::3] = -100
    total, count = shoal.linear_cross_entropy(hidden, weight, targets, chunk_rows=64)
    ours = torch.autograd.grad(total, (hidden, weight))
    plain = F.cross_entropy(hidden @ weight.T, targets, reduction="sum")
    theirs = torch.autograd.grad(plain, (hidden, weight))
    assert int(count) == 200
    assert torch.allclose(total, plain, rtol=1e-12)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-12)


def test_buckets_over_nccl_equal_one_process() -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29617")
    torch.distributed.init_process_group("nccl", rank=0, world_size=1)
    try:
        world = start_world()
        model = llama().double().cuda()
        plan = Plan(_single(), "", 8, 2, 4, "fp64", 0)
        program = divide(model, plan, world)
        buckets = plan_buckets(facts(program), 4096)
        program = replace(program, plan=replace(plan, buckets=buckets))
        program = ddp.apply(compose(program, seed=0))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batch = torch.utils.data.default_collate([Tokens(97, 32)[i] for i in range(4)])
        from shoal.models.loss import token_loss

        tally = forward_backward(program, [(0, batch)], token_loss, step=0)
        done = update(program, optimizer, tally, clip=0.0)
        assert not done.skipped
        twin = llama().double().cuda()
        inputs, targets = (t.cuda() for t in batch)
        total, count = token_loss(twin(inputs), targets)
        (total / count).backward()
        for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.allclose(ours.grad, theirs.grad, rtol=1e-9, atol=1e-13)
    finally:
        torch.distributed.destroy_process_group()


def _single():
    from shoal.base.layout import Layout

    return Layout()


def test_bf16_uses_flash_attention_and_fused_adamw(tmp_path: Path) -> None:
    from shoal.base.policies import OptimizerPolicy
    from shoal.optim.build import build_optimizer

    model = build("llama", {"dim": 512, "layers": 2, "heads": 8}, vocabulary=2048, sequence=512)
    run = shoal.parallelize(
        model, lambda p: build_optimizer(OptimizerPolicy(), p), batch=4, micro_batch=4
    )
    assert run.plan.precision == "bf16"
    assert all(group["fused"] for group in run.optimizer.param_groups)
    loader = iter(run.loader(Tokens(2048, 512)))
    first = run.step(next(loader))
    with torch.profiler.profile() as profile:
        run.step(next(loader))
    names = " ".join(event.key for event in profile.key_averages())
    assert "flash" in names.lower()
    assert all(p.dtype == torch.float32 for p in run.model.parameters())
    assert first.loss == pytest.approx(7.6, abs=0.5)


def test_save_and_restore_bit_for_bit(tmp_path: Path) -> None:
    run = train("fp32", "cuda")
    run.save(tmp_path)
    other = train("fp32", "cuda", steps=2)
    assert other.restore(tmp_path)
    for ours, theirs in zip(run.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_mfu_is_reported(tmp_path: Path) -> None:
    model = build(
        "llama", {"dim": 1024, "layers": 12, "heads": 16}, vocabulary=32000, sequence=1024
    )
    run = shoal.parallelize(
        model, lambda p: torch.optim.AdamW(p, fused=True), batch=16, micro_batch=8, precision="bf16"
    )
    rate = matmul_flops_per_s(run.world, "bf16", tmp_path)
    batches = list(zip(range(8), run.loader(Tokens(32000, 1024, 512)), strict=False))
    sample = torch.utils.data.default_collate([Tokens(32000, 1024)[0]])
    from shoal.models.loss import token_loss

    flops = backward_flops(run.model, sample, lambda m, b: token_loss(m(b[0]), b[1])[0])
    assert flops
    for _, batch in batches[:3]:
        run.step(batch)
    torch.cuda.synchronize()
    began_s = time.perf_counter()
    for _, batch in batches[3:]:
        run.step(batch)
    torch.cuda.synchronize()
    step_s = (time.perf_counter() - began_s) / (len(batches) - 3)
    mfu = flops * 16 / step_s / rate
    print(f"matmul {rate / 1e12:.0f} TFLOP/s, step {step_s * 1e3:.1f} ms, MFU {mfu:.1%}")
    assert 0.05 < mfu < 1.0
