"""Peers that shard: FSDP2 by hand, Fabric's ModelParallelStrategy, DeepSpeed ZeRO.

    fsdp2            fully_shard on every block and on the root, fused AdamW on DTensors, clipping
    fabric_fsdp      the same wrapping through Lightning Fabric
    deepspeed_0 … 3  ZeRO stages on DeepSpeed's CPU accelerator, clipping at the same norm

`tuned=False` is what each one's own quick start shows: no clipping, no fused optimizer.

In bf16 each has fp32 weights and sums and computes in bf16, by its own means: FSDP2's mixed
precision policy, Fabric's bf16-mixed, DeepSpeed's bf16 section.
"""

from __future__ import annotations

from typing import Any

import torch
from peers import CLIP, LR, Case, Program
from plain_llama import mean_loss
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def parts_of(case: Case, tokens: Tensor, targets: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The micro-batches of a step."""
    cut = case.micro_batch
    return list(zip(tokens.split(cut), targets.split(cut), strict=True))


def adamw(model: nn.Module, tuned: bool) -> torch.optim.AdamW:
    """The optimizer: fused, or as a quick start makes it."""
    return torch.optim.AdamW(model.parameters(), lr=LR, fused=tuned or None)


def shard(model: nn.Module, policy: MixedPrecisionPolicy) -> nn.Module:
    """Blocks first, then the root, as PyTorch's documentation does."""
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


class Fsdp2(Program):
    """A loop over torch's `fully_shard`."""

    def __init__(self, case: Case, model: nn.Module, *, tuned: bool) -> None:
        self.losses = []
        self.case, self.tuned = case, tuned
        bf16 = case.precision == "bf16"
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if bf16 else None, reduce_dtype=torch.float32
        )
        self.model = shard(model, policy)
        self.optimizer = adamw(self.model, tuned)

    def step(self, tokens: Tensor, targets: Tensor) -> None:
        parts = parts_of(self.case, tokens, targets)
        kept = []
        for x, y in parts:
            loss = mean_loss(self.model(x), y) / len(parts)
            loss.backward()
            kept.append(loss.detach())
        if self.tuned:
            nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(sum(kept))


class FabricFsdp(Program):
    """The loop of Lightning Fabric's documentation for ModelParallelStrategy."""

    def __init__(self, case: Case, model: nn.Module, processes: int, *, tuned: bool) -> None:
        import lightning
        from lightning.fabric.strategies import ModelParallelStrategy

        self.losses = []
        self.case, self.tuned = case, tuned

        def parallelize(module: nn.Module, device_mesh: Any) -> nn.Module:
            mesh = device_mesh["data_parallel"]
            for block in module.blocks:
                fully_shard(block, mesh=mesh)
            return fully_shard(module, mesh=mesh)

        strategy = ModelParallelStrategy(
            parallelize_fn=parallelize, data_parallel_size=processes, tensor_parallel_size=1
        )
        self.fabric = lightning.Fabric(
            accelerator="cpu",
            devices=processes,
            strategy=strategy,
            precision="bf16-mixed" if case.precision == "bf16" else "32-true",
        )
        self.fabric.launch()
        self.model = self.fabric.setup_module(model)
        self.optimizer = self.fabric.setup_optimizers(adamw(self.model, tuned))

    def step(self, tokens: Tensor, targets: Tensor) -> None:
        parts = parts_of(self.case, tokens, targets)
        kept = []
        for x, y in parts:
            with self.fabric.autocast():
                loss = mean_loss(self.model(x), y) / len(parts)
            self.fabric.backward(loss)
            kept.append(loss.detach())
        if self.tuned:
            self.fabric.clip_gradients(self.model, self.optimizer, max_norm=CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(sum(kept))


class DeepSpeed(Program):
    """`deepspeed.initialize`, one ZeRO stage."""

    def __init__(
        self, case: Case, model: nn.Module, stage: int, processes: int, *, tuned: bool
    ) -> None:
        import deepspeed

        self.losses = []
        self.case = case
        bf16 = case.precision == "bf16"
        settings = {
            "train_batch_size": case.micro_batch * case.accumulate * processes,
            "train_micro_batch_size_per_gpu": case.micro_batch,
            "gradient_accumulation_steps": case.accumulate,
            "gradient_clipping": CLIP if tuned else 0.0,
            "zero_optimization": {"stage": stage},
            "bf16": {"enabled": bf16},
            **({"data_types": {"grad_accum_dtype": "fp32"}} if bf16 else {}),
            "zero_allow_untested_optimizer": True,
        }
        self.engine, *_ = deepspeed.initialize(
            model=model, optimizer=adamw(model, tuned), config=settings, dist_init_required=False
        )

    def step(self, tokens: Tensor, targets: Tensor) -> None:
        kept = []
        for x, y in parts_of(self.case, tokens, targets):
            loss = mean_loss(self.engine(x), y)
            self.engine.backward(loss)
            self.engine.step()
            kept.append(loss.detach().float())
        self.losses.append(sum(kept) / len(kept))
