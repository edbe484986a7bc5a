"""Bytes that a forward pass saves for its backward, under Shoal's fsdp and under FSDP2 by hand.

Both in bf16 with a bf16 residual stream, without recompute and with full recompute. The last line is
{model: {recompute: {"ours", "theirs", "wide": with fp32 residuals}}}. A pass saves what a device holds
more after it than after the same pass without gradients: weights and outputs are then equal.
No backward pass runs: the simulated device has none of a bf16 layer norm.
"""

from __future__ import annotations

import gc
import json
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel

import shoal
from shoal.fabric import World, start_world
from shoal.models.catalog import build

VOCABULARY, SEQUENCE, ROWS = 256, 64, 4
SIZES = {"dim": 128, "layers": 6, "heads": 4}


def model_of(name: str) -> nn.Module:
    """The model with fixed weights."""
    torch.manual_seed(0)
    return build(name, SIZES, vocabulary=VOCABULARY, sequence=SEQUENCE)


def saved_bytes(world: World, forward: Any) -> int:
    """Bytes of a device that only a pass with gradients holds."""
    held = []
    for gradients in (False, True):
        with torch.set_grad_enabled(gradients):
            outputs = forward()
        gc.collect()
        torch.cuda.synchronize(world.device)
        held.append(torch.cuda.memory_allocated(world.device))
        del outputs
    return held[1] - held[0]


def by_hand(world: World, name: str, recompute: str, ids: Tensor) -> int:
    """FSDP2: every block a unit, then the root; activation checkpointing inside of the units."""
    model = model_of(name).to(world.device)
    if recompute == "full":
        for place, block in enumerate(model.blocks):
            model.blocks[place] = checkpoint_wrapper(block)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    model(ids)  # units prepare themselves in their first pass
    return saved_bytes(world, lambda: model(ids))


def ours(world: World, name: str, recompute: str, residual: str, ids: Tensor) -> int:
    """Shoal's fsdp."""
    run = shoal.parallelize(
        model_of(name),
        lambda p: torch.optim.SGD(p, lr=0.1),
        layout="fsdp",
        batch=ROWS * world.size,
        micro_batch=ROWS,
        precision="bf16",
        residual=residual,
        recompute=recompute,
        world=world,
    )

    def forward() -> Any:
        with run.program.autocast():
            return run.program.module(ids)

    forward()
    found = saved_bytes(world, forward)
    for undo in run.program.on_close:
        undo()
    return found


def main() -> None:
    """See the module."""
    torch.set_num_threads(1)
    world = start_world()
    torch.manual_seed(world.rank)
    ids = torch.randint(VOCABULARY, (ROWS, SEQUENCE), device=world.device)
    found: dict[str, Any] = {}
    with sdpa_kernel(SDPBackend.MATH):  # what the device has
        for name in ("llama", "gpt"):
            for recompute in ("none", "full"):
                found.setdefault(name, {})[recompute] = {
                    "theirs": by_hand(world, name, recompute, ids),
                    "ours": ours(world, name, recompute, "bf16", ids),
                    "wide": ours(world, name, recompute, "fp32", ids),
                }
    if world.is_first:
        print(json.dumps(found), flush=True)
    world.close()


if __name__ == "__main__":
    main()
