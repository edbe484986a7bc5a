"""A 124M Llama in the speed mode beside compiled PyTorch by hand: pairs of steps, MFU, losses, 1B.

The programs are those of `training_programs.py`. A step of each follows the other's in one process,
each between two synchronisations. Rows have the ratio of medians with its 95 % interval, our program
against itself (the noise), MFU of all by one count of FLOPs and one measured matrix rate.
"""

from __future__ import annotations

import gc
import json
import statistics
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from child import Sheet
from device import GPUS, ON_GPU, PATIENCE, left_s, pick, synchronize
from layouts import Worlds
from shoal.fabric import World
from training_programs import (
    ARGUMENTS,
    BILLION,
    NAMES,
    Setting,
    alone,
    initial_weights,
    make,
    micro_batch,
    one_rank_group,
    text_rows,
    timed,
)

PAIRS, WARM_UP = pick(100, 3), 3
AGREE, AGREEING = 2e-2, 24
"""Losses agree for so many steps; later the model knows the few samples by heart, and rounding grows."""
ROW_S, SPARE_S = 140.0 * PATIENCE, 8.0 * PATIENCE
STEPS, LAST = pick(200, 6), pick(20, 3)
"""Steps of the two courses of losses, and how many of the last ones are compared by their mean."""


def one_gpu(sheet: Sheet) -> None:
    """The speed mode on one device beside FSDP2 and plain PyTorch; a row as soon as it is known."""
    setting = Setting(ARGUMENTS, micro_batch())
    with sheet.row("the programs") as told:
        world = alone()
        weights, flops = initial_weights(setting)
        told.update(setting.as_json(), flops_of_a_step=flops * setting.rows)
    data = data_of(setting, world)
    programs: dict[str, Any] = {}
    for name in NAMES:
        with sheet.row(f"{name}: first steps") as told:
            program = make(name, setting, world, weights, "single")
            told["first_step_s"] = timed(lambda made=program: made.step(*data[0]))
            for n in range(1, WARM_UP):
                program.step(*data[n])
            programs[name] = program
    with sheet.row("pairs of steps") as told:
        told.update(time_pairs(world, programs, data, flops * setting.rows))
        assert told["loss_difference"] < AGREE, told["losses"]


def several_gpus(sheet: Sheet) -> None:
    """The speed mode under `fsdp` beside FSDP2 on all GPUs."""
    ranks = max(2, GPUS)
    with sheet.row(f"fsdp × {ranks} beside FSDP2, both compiled") as told:
        with tempfile.TemporaryDirectory() as folder:
            worlds = Worlds(Path(folder))
            try:
                answers = worlds(ranks).call("speed:pairs", deadline_s=ROW_S)
            finally:
                worlds.drop(ranks)
        told.update(answers[0])
        assert told["loss_difference"] < AGREE, told["losses"]


def pairs(world: World) -> dict[str, Any]:
    """On every rank of a world: build all, warm them up, time them in turn."""
    setting = Setting(ARGUMENTS, micro_batch(16))
    weights, flops = initial_weights(setting)
    one_rank_group(world)
    data, programs = data_of(setting, world), {}
    for name in ("shoal", "again", "fsdp2"):
        programs[name] = make(name, setting, world, weights, "fsdp")
        for n in range(WARM_UP):
            programs[name].step(*data[n])
    group = torch.distributed.get_backend()
    told = time_pairs(world, programs, data, flops * setting.rows * world.size)
    return {"group": group, **setting.as_json(), **told}


def data_of(setting: Setting, world: World) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """A few steps' samples of this rank, on the device."""
    from timed_steps import batches

    return [(x.to(world.device), y.to(world.device)) for x, y in batches(setting.case, world.rank)]


def time_pairs(
    world: World, programs: dict[str, Any], data: list[Any], flops: float
) -> dict[str, Any]:
    """Ratios, MFU and losses of programs that were warmed up; flops: of a step, all ranks."""
    from ratios import ratio

    from shoal.machine.matmul import matmul_flops_per_s

    with tempfile.TemporaryDirectory() as cache:
        rate = matmul_flops_per_s(world, "bf16", Path(cache)) * world.size

    def advance(name: str) -> float:
        program = programs[name]
        world.barrier()
        return timed(lambda: program.step(*data[len(program.losses) % len(data)]))

    gc.collect()
    gc.freeze()
    times: dict[str, list[float]] = {name: [] for name in programs}
    for pair in range(PAIRS):
        # Rank 0 decides for all; a slow device has fewer pairs, and a wider interval.
        if pair % 5 == 4 and world.broadcast_json(left_s() < SPARE_S):
            break
        names = list(programs)
        for name in names if pair % 2 else names[::-1]:
            times[name].append(advance(name))
    slowest = {name: slowest_of(world, seconds) for name, seconds in times.items()}
    losses = {name: mean_losses(world, p.losses) for name, p in programs.items()}
    step_s = {name: statistics.median(seconds) for name, seconds in slowest.items()}
    ours, others = losses["shoal"], [losses[name] for name in programs if name != "shoal"]
    return {
        "pairs": len(slowest["shoal"]),
        "step_s": step_s,
        "mfu": {name: flops / seconds / rate for name, seconds in step_s.items()},
        "matrix_flops_per_s": rate,
        "ratios": {
            name: asdict(ratio(slowest["shoal"], seconds))
            for name, seconds in slowest.items()
            if name != "shoal"
        },
        "loss_difference": max(
            abs(a - b) / b
            for other in others
            for a, b in zip(ours[:AGREEING], other[:AGREEING], strict=True)
        ),
        "losses": losses,
        "seconds": slowest,
        "peak_bytes": torch.cuda.max_memory_allocated() if ON_GPU else 0,
    }


def learning(sheet: Sheet) -> None:
    """200 steps on text that no step repeats: the speed mode and plain PyTorch learn the same."""
    setting = Setting(ARGUMENTS, micro_batch())
    with sheet.row("loss of Shoal and of plain PyTorch") as told:
        world = alone()
        weights, _ = initial_weights(setting)
        programs = {name: make(name, setting, world, weights, "single") for name in NAMES[::3]}
        for step in range(STEPS):
            if step % 10 == 9 and left_s() < SPARE_S:
                break
            rows = text_rows(setting, step)
            for program in programs.values():
                program.step(*rows)
        losses = {name: [float(x) for x in p.losses] for name, p in programs.items()}
        ends = {name: statistics.fmean(course[-LAST:]) for name, course in losses.items()}
        told.update(setting.as_json(), steps=len(losses["shoal"]), ends=ends, losses=losses)
        told["difference"] = abs(ends["shoal"] / ends["pytorch"] - 1)
        assert told["difference"] < AGREE, ends


def one_billion(sheet: Sheet) -> None:
    """1B parameters on one device, in the speed mode alone."""
    setting = Setting(BILLION, micro_batch(8, 0))
    with sheet.row("1B parameters") as told:
        told.update(setting.as_json())
        if not setting.micro_batch:
            told["reason"] = "not run: its states and activations want 60 GB"
            return
        from shoal.machine.matmul import matmul_flops_per_s

        world = alone()
        weights, flops = initial_weights(setting)
        told["parameters"] = sum(t.numel() for n, t in weights.items() if n != "head.weight")
        with tempfile.TemporaryDirectory() as cache:
            told["matrix_flops_per_s"] = rate = matmul_flops_per_s(world, "bf16", Path(cache))
        program = make("shoal", setting, world, weights, "single")
        del weights
        rows = text_rows(setting, 0)
        told["first_step_s"] = timed(lambda: program.step(*rows))
        seconds = []
        for n in range(1, pick(16, 3)):
            if left_s() < SPARE_S:
                break
            rows = text_rows(setting, n)
            seconds.append(timed(lambda batch=rows: program.step(*batch)))
        told["seconds"], told["losses"] = seconds, [float(x) for x in program.losses]
        told["step_s"] = statistics.median(seconds)
        told["mfu"] = flops * setting.rows / told["step_s"] / rate
        told["peak_bytes"] = torch.cuda.max_memory_allocated() if ON_GPU else 0
        assert told["losses"][-1] < told["losses"][0]


def slowest_of(world: World, seconds: list[float]) -> list[float]:
    """Of every step the slowest rank's time."""
    return [max(step) for step in zip(*world.gather_json(seconds), strict=True)]


def mean_losses(world: World, losses: list[Any]) -> list[float]:
    """Of every step, over ranks; ours are global already, and so their own mean."""
    synchronize()
    everyone = world.gather_json(json.loads(json.dumps([float(x) for x in losses])))
    return [statistics.fmean(step) for step in zip(*everyone, strict=True)]
