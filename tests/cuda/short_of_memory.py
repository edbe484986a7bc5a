"""Models that a device has no room for: offload under a limit of the device's allocator.

One process trains a model of which the device holds some blocks at a time, beside the same steps
without a limit; two ranks under fsdp share a device of which each has less than its shards.
"""

from __future__ import annotations

import gc
import json
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import plans
import shoal
from child import Sheet
from device import DEVICE, ON_GPU, PATIENCE, SMALL, pick, synchronize
from layouts import Worlds
from one import Tokens
from shoal.fabric import World, start_world
from shoal.models.catalog import build

# 0.82 B parameters, of which 17 M are in no block.
SIZES = pick(
    ["model.dim=2048", "model.layers=16", "data.sequence=1024"],
    ["model.dim=64", "model.layers=2", "data.sequence=32"],
)
BATCH = pick(["train.batch=16", "train.micro_batch=4"], ["train.batch=4", "train.micro_batch=2"])
LEAST = 0.75
"""The limit, as a share of what the run holds without offload; of the fp32 weights alone."""

# 0.2 B parameters in blocks of 27 MiB: what two ranks gather goes by way of the host.
SHARED = pick(
    {"dim": 768, "layers": 32, "heads": 8, "kv_heads": 8},
    {"dim": 64, "layers": 2, "heads": 4, "kv_heads": 4},
)
SHARE, STEPS, SEQUENCE, VOCABULARY = 0.9, 3, pick(64, 16), 512


@contextmanager
def limited(limit_bytes: float | None) -> Iterator[None]:
    """Let this process have so much of the device, and no more."""
    if not ON_GPU:
        yield
        return
    whole = torch.cuda.get_device_properties(0).total_memory
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(min(1.0, (limit_bytes or whole) / whole))
    torch.cuda.reset_peak_memory_stats()
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        gc.collect()
        torch.cuda.empty_cache()


def most_bytes() -> int:
    """Most that the allocator gave out since `limited` began."""
    synchronize()
    return torch.cuda.max_memory_allocated() if ON_GPU else 0


def one_device(sheet: Sheet) -> None:
    """The same steps with states on the device, the optimizer's on the host, and all on the host."""
    world = start_world()
    world.device = DEVICE
    found: dict[str, dict[str, Any]] = {}
    for offload in ("none", "optimizer", "parameters"):
        if offload != "none" and not ON_GPU:
            continue  # there is no host beside the device
        with sheet.row(f"offload {offload}") as told:
            whole = found.get("none", {"parameters": 0, "most_bytes": 0})
            limits = {"optimizer": whole["most_bytes"], "parameters": 4 * whole["parameters"]}
            told["limit_bytes"] = LEAST * limits[offload] if offload in limits else None
            words = ["precision.compute=bf16", "memory.recompute=full", *SIZES, *BATCH]
            words.append(f"memory.offload={offload}")
            with limited(told["limit_bytes"]):
                told.update(plans.one(world, words, "single", compared=0))
                told["most_bytes"] = most_bytes()
            told["median_step_s"] = statistics.median(told["step_s"])
            found[offload] = dict(told)
            plain = found["none"]["losses"]
            told["difference"] = max(
                abs(a - b) / b for a, b in zip(told["losses"], plain, strict=True)
            )
            assert told["difference"] < 1e-2, told["losses"]  # atomic additions, in bf16
            if told["limit_bytes"] and not SMALL:
                assert told["most_bytes"] <= told["limit_bytes"]


def sharded(sheet: Sheet) -> None:
    """fsdp on two ranks of one device, each with less than its shards, beside one process."""
    with sheet.row("fsdp × 2, offload of parameters") as told, tempfile.TemporaryDirectory() as at:
        worlds = Worlds(Path(at))
        try:
            single = worlds(1).call(
                "short_of_memory:trained", deadline_s=60 * PATIENCE, layout="single"
            )
            worlds.drop(1)
            ours = worlds(2).call(
                "short_of_memory:trained", deadline_s=100 * PATIENCE, layout="fsdp"
            )
        finally:
            worlds.drop(1)
            worlds.drop(2)
        told["single"], told["ranks"] = single[0], ours
        losses = zip(ours[0]["losses"], single[0]["losses"], strict=True)
        told["difference"] = max(abs(a - b) / b for a, b in losses)
        assert told["difference"] < 1e-5
        for rank in ours if ON_GPU else ():
            assert rank["most_bytes"] <= rank["limit_bytes"] < 4 * rank["parameters"] / 2


def trained(world: World, layout: str) -> dict[str, Any]:
    """Some steps in fp32; under fsdp offloaded, with a limit below this rank's shards of weights."""
    parameters = sum(p.numel() for p in made("meta").parameters())
    fsdp = layout == "fsdp"
    limit_bytes = SHARE * 4 * parameters / world.size if fsdp else None
    more: dict[str, Any] = {"offload": "parameters"} if fsdp and ON_GPU else {}
    with limited(limit_bytes):
        run = shoal.parallelize(
            made,
            lambda p: torch.optim.SGD(p, lr=0.05),
            layout=layout,
            batch=2,
            micro_batch=1,
            precision="fp32",
            clip=1.0,
            world=world,
            **more,
        )
        losses = []
        for batch in run.loader(Tokens(VOCABULARY, SEQUENCE)):
            losses.append(float(run.step(batch).loss))
            if len(losses) == STEPS:
                break
        most = most_bytes()
        for undo in run.program.on_close:
            undo()
        del run
    told = {"parameters": parameters, "limit_bytes": limit_bytes, "most_bytes": most}
    return json.loads(json.dumps({**told, "losses": losses}))


def made(device: str = "cpu") -> torch.nn.Module:
    """The model of `sharded`, from a seed."""
    torch.manual_seed(1)
    with torch.device(device):
        return build("llama", dict(SHARED), vocabulary=VOCABULARY, sequence=SEQUENCE)
