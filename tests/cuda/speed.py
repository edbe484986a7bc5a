"""A 124M Llama beside torch's FSDP2, on equal terms: one after the other, in pairs of steps.

Both have the same initial weights and samples, bf16 products over fp32 weights, fused AdamW,
clipping, the same micro-batches; FSDP2's loop is benchmarks/sharded_peers.py. What is told: the
ratio of medians with its 95 % interval, our program against itself (the noise), MFU of both by one
count of FLOPs and one measured matrix rate, and the losses of every step, which must agree.
"""

from __future__ import annotations

import gc
import json
import statistics
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from child import Sheet
from device import DEVICE, GPUS, ON_GPU, PATIENCE, pick, synchronize
from layouts import Worlds
from shoal.fabric import World

GPT2_SIZE = {"vocabulary": 50304, "dim": 768, "layers": 12, "heads": 12, "kv_heads": 12}
ARGUMENTS = pick(
    {**GPT2_SIZE, "hidden": 2048, "sequence": 1024},
    {"vocabulary": 128, "dim": 32, "layers": 2, "heads": 2, "kv_heads": 2, "hidden": 48}
    | {"sequence": 16},
)
MICRO_BATCH, ACCUMULATE, PAIRS = pick(16, 2), 2, pick(60, 3)
WARM_UP, AGREE, AGREEING = 4, 2e-2, 24
"""Losses agree for so many steps; later the model knows the few samples by heart, and rounding grows."""
ROW_S, PAIRS_S = 80.0 * PATIENCE, 30.0


def one_gpu(sheet: Sheet) -> None:
    """Shoal on one device against FSDP2 on one device."""
    beside(sheet, 1, "single", compiled=False)


def one_gpu_compiled(sheet: Sheet) -> None:
    """The same with blocks compiled on both sides, a part of its own: compiling takes long."""
    beside(sheet, 1, "single", compiled=True)


def several_gpus(sheet: Sheet) -> None:
    """`fsdp` against FSDP2 on all GPUs."""
    beside(sheet, max(2, GPUS), "fsdp", compiled=False)


def several_gpus_compiled(sheet: Sheet) -> None:
    """The same with blocks compiled on both sides."""
    beside(sheet, max(2, GPUS), "fsdp", compiled=True)


def beside(sheet: Sheet, ranks: int, layout: str, compiled: bool) -> None:
    """One row: both in turn, in a world of their own."""
    ending = ", both compiled" if compiled else ""
    with sheet.row(f"{layout} × {ranks} beside FSDP2{ending}") as told:
        with tempfile.TemporaryDirectory() as folder:
            worlds = Worlds(Path(folder))
            try:
                answers = worlds(ranks).call(
                    "speed:pairs", deadline_s=ROW_S, layout=layout, compiled=compiled
                )
            finally:
                worlds.drop(ranks)
        told.update(answers[0])
        assert told["loss_difference"] < AGREE, told["losses"]


def pairs(world: World, layout: str, compiled: bool) -> dict[str, Any]:
    """On every rank: build both, check that they agree, time them in turn."""
    import sharded_peers
    from peers import Case, Shoal
    from ratios import ratio
    from timed_steps import batches

    from shoal.machine.matmul import matmul_flops_per_s
    from shoal.models.llama import Llama

    case = Case("124M", ARGUMENTS, "bf16", MICRO_BATCH, ACCUMULATE)
    torch.manual_seed(0)
    source = Llama(**ARGUMENTS)
    weights = {name: tensor.clone() for name, tensor in source.state_dict().items()}
    one_rank_group(world)
    programs = {}
    for name in ("shoal", "twin", "fsdp2"):
        if name == "fsdp2":
            model = plain_llama(weights, compiled)
            programs[name] = sharded_peers.Fsdp2(case, model, tuned=True)
        else:
            own = Llama(**ARGUMENTS)
            own.load_state_dict(weights)
            compile = "blocks" if compiled else "none"
            programs[name] = Shoal(case, world, own, layout, compile)
    data = [(x.to(DEVICE), y.to(DEVICE)) for x, y in batches(case, world.rank)]

    def advance(name: str) -> float:
        world.barrier()
        synchronize()
        began_s = time.perf_counter()
        program = programs[name]
        program.step(*data[len(program.losses) % len(data)])
        synchronize()
        return time.perf_counter() - began_s

    for name in programs:
        for _ in range(WARM_UP):
            advance(name)
    gc.collect()
    gc.freeze()
    times: dict[str, list[float]] = {name: [] for name in programs}
    until_s = time.perf_counter() + PAIRS_S
    for pair in range(PAIRS):
        # Rank 0 decides for all; a slow device has fewer pairs, and a wider interval.
        if pair % 5 == 4 and world.broadcast_json(time.perf_counter() > until_s):
            break
        names = list(programs)
        for name in names if pair % 2 else names[::-1]:
            times[name].append(advance(name))
    slowest = {name: slowest_of(world, seconds) for name, seconds in times.items()}
    losses = {name: mean_losses(world, p.losses) for name, p in programs.items()}
    with tempfile.TemporaryDirectory() as cache:
        rate = matmul_flops_per_s(world, "bf16", Path(cache))
    samples = MICRO_BATCH * ACCUMULATE * world.size
    flops = samples * flops_of_one(source)
    step_s = {name: statistics.median(seconds) for name, seconds in slowest.items()}
    return {
        "group": torch.distributed.get_backend(),
        "parameters": sum(p.numel() for p in source.parameters()),
        "samples_per_step": samples,
        "step_s": step_s,
        "mfu": {name: flops / seconds / rate for name, seconds in step_s.items()},
        "matrix_flops_per_s": rate,
        "ratio": asdict(ratio(slowest["shoal"], slowest["fsdp2"])),
        "noise": asdict(ratio(slowest["shoal"], slowest["twin"])),
        "loss_difference": max(
            abs(a - b) / b
            for a, b in zip(losses["shoal"][:AGREEING], losses["fsdp2"][:AGREEING], strict=True)
        ),
        "losses": losses,
        "seconds": slowest,
        "peak_bytes": torch.cuda.max_memory_allocated() if ON_GPU else 0,
    }


def one_rank_group(world: World) -> None:
    """FSDP2 wants a process group also where there is one rank."""
    if world.size == 1 and not torch.distributed.is_initialized():
        store = torch.distributed.HashStore()
        backend = "nccl" if ON_GPU else "gloo"
        torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)


def plain_llama(weights: dict[str, torch.Tensor], compiled: bool) -> torch.nn.Module:
    """The peers' model, on the device."""
    from plain_llama import PlainLlama

    model = PlainLlama(**ARGUMENTS)
    model.load_state_dict(weights)
    model.to(DEVICE)
    if compiled:
        for block in model.blocks:
            block.compile()
    return model


def flops_of_one(model: torch.nn.Module) -> float:
    """Of one sample, forward and backward, by the planner's count of products (no recompute)."""
    from shoal.models.loss import token_loss
    from shoal.trace.costs.flops import count_training_flops

    tokens = torch.zeros(1, ARGUMENTS["sequence"], dtype=torch.long)
    found = count_training_flops(model, (tokens, tokens), lambda m, b: token_loss(m(b[0]), b[1])[0])
    assert found, "the FLOPs of a step could not be counted"
    return float(found)


def slowest_of(world: World, seconds: list[float]) -> list[float]:
    """Of every step the slowest rank's time."""
    return [max(step) for step in zip(*world.gather_json(seconds), strict=True)]


def mean_losses(world: World, losses: list[Any]) -> list[float]:
    """Of every step, over ranks; ours are global already, and so their own mean."""
    everyone = world.gather_json(json.loads(json.dumps([float(x) for x in losses])))
    return [statistics.fmean(step) for step in zip(*everyone, strict=True)]
