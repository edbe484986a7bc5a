"""Kernels: flash attention, fused AdamW, attention in parts, narrow formats, compiled blocks."""

from __future__ import annotations

import torch
from torch.nn import functional as F

import shoal
from child import Sheet
from device import DEVICE, ON_GPU, pick
from one import Tokens, train
from shoal.base.layouts.policies import OptimizerPolicy
from shoal.fabric import start_world
from shoal.models.catalog import build
from shoal.optim.build import build_optimizer
from shoal.parallel.context_parallel.attention_kernels import (
    attend,
    attend_backward,
    merge_attention,
)

SIZE = pick((512, 8, 512), (64, 4, 32))  # dim, heads, sequence


def run_of(
    precision: str,
    compile: str = "none",
    recompute: str = "none",
    loss_scale: float = 0.0,
    plain: bool = False,
) -> shoal.Run:
    """A Llama with the optimizer of `shoal train`; `plain`: SGD, which blows no rounding up."""
    dim, heads, sequence = SIZE
    torch.manual_seed(2)
    world = start_world({})
    world.device = DEVICE
    return shoal.parallelize(
        build(
            "llama", {"dim": dim, "layers": 2, "heads": heads}, vocabulary=512, sequence=sequence
        ),
        lambda p: torch.optim.SGD(p, lr=0.3) if plain else build_optimizer(OptimizerPolicy(), p),
        batch=4,
        micro_batch=2,
        precision=precision,
        clip=1.0,
        compile=compile,
        recompute=recompute,
        loss_scale=loss_scale,
        world=world,
    )


def losses(run: shoal.Run, steps: int) -> list[float]:
    """Of some steps on the same few samples, so that they must fall."""
    batch = torch.utils.data.default_collate([Tokens(512, SIZE[2])[i] for i in range(4)])
    return [run.step(batch).loss for _ in range(steps)]


def kernels(sheet: Sheet) -> None:
    """Which kernels run, and that attention in parts is attention."""
    with sheet.row("bf16 on fused attention, fused AdamW") as told:
        run = run_of("bf16")
        assert run.plan.compute == "bf16"
        assert all(group["fused"] for group in run.optimizer.param_groups)
        stepped = [one.parameter.dtype for one in run.program.local.values()]
        assert all(dtype == torch.float32 for dtype in stepped), "weights are not kept in fp32"
        losses(run, 1)
        with torch.profiler.profile() as profile:
            losses(run, 1)
        told["attention"] = sorted({e.key for e in profile.key_averages() if "attention" in e.key})
        # Which one torch takes first on a chip changes between its versions: both are told by op.
        fused = ("flash_attention", "cudnn_attention")
        assert not ON_GPU or any(kind in name for name in told["attention"] for kind in fused)
    for dtype, bound in ((torch.bfloat16, 2e-2), (torch.float16, 4e-3), (torch.float32, 1e-5)):
        with sheet.row(f"attention in parts, {dtype}".replace("torch.", "")) as told:
            told.update(attention_in_parts(dtype))
            assert max(told.values()) < bound


def attention_in_parts(dtype: torch.dtype) -> dict[str, float]:
    """Two halves of the keys, added up, and their gradients, against attention in float64."""
    torch.manual_seed(3)
    sequence = pick(256, 16)
    q, k, v = (torch.randn(2, h, sequence, 32, device=DEVICE, dtype=dtype) for h in (4, 2, 2))
    near = torch.randn_like(q)
    half, scale = sequence // 2, 32**-0.5
    late = q[:, :, half:]  # these see the first half whole, and the second causally
    parts = [(k[:, :, :half], v[:, :, :half], False), (k[:, :, half:], v[:, :, half:], True)]
    seen = [attend(late, key, value, causal=c, scale=scale) for key, value, c in parts]
    total = type(seen[0])(seen[0].out.to(seen[0].lse.dtype).clone(), seen[0].lse.clone())
    merge_attention(total, seen[1])
    whole = type(total)(total.out.to(dtype), total.lse)
    given = near[:, :, half:]
    shares = [
        attend_backward(given, late, key, value, whole, causal=c, scale=scale)
        for key, value, c in parts
    ]
    dq = shares[0][0].double() + shares[1][0].double()
    dk = torch.cat([shares[0][1], shares[1][1]], 2)
    wide = [t.double().detach().requires_grad_() for t in (q, k, v)]
    truth = F.scaled_dot_product_attention(*wide, is_causal=True, enable_gqa=True)
    truth[:, :, half:].backward(given.double())
    return {
        "out": distance(total.out, truth[:, :, half:]),
        "dq": distance(dq, wide[0].grad[:, :, half:]),
        "dk": distance(dk, wide[1].grad),
    }


def distance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """As a share of the norm."""
    ours, theirs = ours.detach().double(), theirs.detach()
    return float((ours - theirs).norm() / theirs.norm())


def formats(sheet: Sheet) -> None:
    """bf16 and fp16 beside fp32: the same course, and an overflow that costs one step."""
    wanted: list[float] = []
    with sheet.row("fp32 learns") as told:
        told["losses"] = wanted = losses(run_of("fp32"), 8)
        assert wanted[-1] < wanted[0] - 0.1
    for precision in ("bf16", "fp16"):
        with sheet.row(f"{precision} follows fp32") as told:
            # A fixed scale: one that is found by overflows begins with steps that are skipped. The
            # loss is a sum over a thousand targets, so 1 is what 1024 is to a mean.
            run = run_of(precision, loss_scale=1.0 if precision == "fp16" else 0.0)
            told["losses"] = losses(run, 8)
            told["difference"] = max(
                abs(a - b) / b for a, b in zip(told["losses"], wanted, strict=True)
            )
            assert told["difference"] < 0.02
            told["evaluated"] = run.evaluate(Tokens(512, SIZE[2], 4))["loss"]
    with sheet.row("fp16 skips a step that overflows") as told:
        run = train("fp16", DEVICE, steps=1, loss_scale=0.0)
        before = [p.detach().clone() for p in run.model.parameters()]
        batch = torch.utils.data.default_collate([Tokens(97, 32)[i] for i in range(8)])
        block = next(p for p in run.model.parameters() if p.requires_grad)
        hook = block.register_hook(lambda gradient: gradient * float("inf"))
        told["skipped"] = run.step(batch).skipped
        hook.remove()
        assert told["skipped"]
        assert all(torch.equal(a, b) for a, b in zip(before, run.model.parameters(), strict=True))
        assert not run.step(batch).skipped


def compiled(sheet: Sheet) -> None:
    """`train.compile=blocks` computes what plain blocks do."""
    plain: list[float] = []
    with sheet.row("plain blocks"):
        plain = losses(run_of("fp32", plain=True), 4)
        assert plain[-1] < plain[0]
    for precision, recompute, bound in (
        ("fp32", "none", 1e-4),
        ("fp32", "full", 1e-4),
        ("bf16", "full", 2e-2),
    ):
        if not ON_GPU and precision == "bf16":
            continue  # a minute of C++ for the same lines
        with sheet.row(f"compiled blocks, {precision}, recompute {recompute}") as told:
            got = losses(run_of(precision, "blocks", recompute, plain=True), 4)
            told["difference"] = max(abs(a - b) / b for a, b in zip(got, plain, strict=True))
            assert told["difference"] < bound
