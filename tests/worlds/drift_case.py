"""Bits flipped in the memory of one rank, inside a world of processes, and what the run then says."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.nn import functional as F

import shoal
from guards import message
from shoal.checkpoint.format.listing import list_checkpoints
from shoal.checkpoint.load.read import load
from shoal.fabric import World, start_world
from shoal.fabric.collectives import json_messages
from shoal.trainer.guards.checksums import local_part
from shoal.trainer.guards.corruption import SHARE, CorruptionCheck
from shoal.trainer.run import Run

SAMPLES = torch.rand(64, 4, 8, generator=torch.Generator().manual_seed(0))
QUIET = "nothing was raised"


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def begin(world: World, layout: Any, drift: str = "every", **more: Any) -> Run:
    return shoal.parallelize(
        lambda: nn.Sequential(*(Layer() for _ in range(2))),
        lambda p: torch.optim.AdamW(p, lr=1e-3),
        lambda y, t: ((y - t) ** 2).flatten(1).sum(1),
        layout=layout,
        world=world,
        batch=16,
        micro_batch=4,
        sample=(SAMPLES[:4], SAMPLES[:4]),
        drift=drift,
        **more,
    )


def leave(run: Run) -> None:
    """As `run.close`, but for the group, which other checks use."""
    run.checkpoint_saver.close()
    for undo in run.program.on_close:
        undo()


def own(run: Run, rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's share of a step; ranks that hold parts of one copy of the model see the same."""
    data = run.program.data
    here = 16 // data.size
    rows = torch.arange(here) + here * (data.rank + data.size * step)
    return SAMPLES[rows % 64], SAMPLES[(rows + 1) % 64]


def targets(run: Run) -> list[tuple[str, torch.Tensor]]:
    """What of this rank may be hit: weights as they are stepped, and their moments."""
    found = [(name, one.parameter) for name, one in run.program.local.items()]
    for name, one in run.program.local.items():
        state = run.optimizer.state[one.parameter]
        found += [(f"{key} of {name}", state[key]) for key in ("exp_avg", "exp_avg_sq")]
    return [(name, tensor) for name, tensor in found if tensor.numel()]


def flip(tensor: torch.Tensor, bit: int) -> None:
    """Turn one bit of a tensor's memory over, past everything that torch counts."""
    raw = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    assert raw.ctypes.data == tensor.data_ptr(), "a copy would be hit"
    raw[bit // 8] ^= 1 << bit % 8


def steps(run: Run, count: int, first: int | None = None) -> None:
    """So many steps, over samples of those numbers."""
    first = run.step_count if first is None else first
    for step in range(first, first + count):
        run.step(own(run, run.world.rank, step))


def flips(
    world: World, layout: Any, folder: str, count: int, seed: int, drift: str = "every"
) -> dict[str, Any]:
    """So many bits flipped, one at a time, half seen by a step and half by a save; then undone.

    Gives what was hit by (tensor's kind, rank), what was not named rightly, clean steps and saves
    between, which of those were blamed, and what checkpoints hold that were written while a bit
    was over
    """
    rng, root = random.Random(seed), Path(folder) / str(seed)
    run = begin(world, layout, drift, folder=root)
    steps(run, 2)
    wrong: list[str] = []
    alarms: list[str] = []
    hit: dict[str, int] = {}
    clean = {"steps": 2, "saves": 0}
    looks = 0
    for trial in range(count):
        rank, chance, saves = rng.randrange(world.size), rng.random(), bool(trial % 2)
        mine = targets(run) if world.rank == rank else []
        name, bit, undo = "", 0, None
        if mine:
            name, tensor = mine[int(chance * len(mine))]
            bit = rng.randrange(tensor.nbytes * 8)
            flip(tensor, bit)
            undo = tensor
        rng = random.Random(f"{seed} {trial}")  # the same again on all ranks
        name, bit = world.broadcast_json([name, bit], rank)
        before = len(list_checkpoints(root / "checkpoints"))
        act: Callable[[], Any] = run.save if saves else lambda: steps(run, 1)
        told = message(act)
        if undo is not None:
            flip(undo, bit)
        run.step_state.tally = None
        looks += told != QUIET
        hit[f"{name.split(' of ')[0] if ' of ' in name else 'weight'} {rank}"] = (
            hit.get(f"{name.split(' of ')[0] if ' of ' in name else 'weight'} {rank}", 0) + 1
        )
        right = (
            told.startswith("ClusterError: step ")
            and f" of rank {rank} (" in told
            and f": {name} changed in memory" in told
            and f": bit {bit % 32} of one element flipped" in told
            and len(list_checkpoints(root / "checkpoints")) == before
        )
        if not right:
            wrong.append(f"{'save' if saves else 'step'}, rank {rank}, {name}, bit {bit}: {told}")
        if trial % 10 == 9:
            told = message(lambda: steps(run, 1))
            clean["steps"] += 1
            alarms += [told] * (told != QUIET)
        if trial % 50 == 49:
            told = message(run.save)
            clean["saves"] += 1
            alarms += [told] * (told != QUIET)
    leave(run)
    return {
        "flips": count, "told": looks, "hit": hit, "wrong": wrong, "clean": clean,
        "false alarms": alarms,
    }  # fmt: skip


def flips_by_default(
    world: World, layout: Any, folder: str, count: int, seed: int
) -> dict[str, Any]:
    """So many bits flipped while looks are made at some steps only, up to the next save.

    Everything is put back after each. Outcomes: "named", no checkpoint was written; "gone", the
    checkpoint has the bits of a twin that nothing was done to (rounding erased a low bit of a
    moment before it reached a weight); "saved", it has others
    """
    rng, root = random.Random(seed), Path(folder) / str(seed)
    run = begin(world, layout, "auto", folder=root)
    steps(run, 3)
    found: dict[str, int] = {"named": 0, "gone": 0, "saved": 0}
    wrong: list[str] = []
    looked: list[int] = []
    for _ in range(count):
        before, at = _held(run), rng.randrange(64)
        rank, chance = rng.randrange(world.size), rng.random()
        apart, ahead = rng.randrange(4), rng.randrange(4)
        steps(run, apart + ahead, at)
        clean = _held(run)
        _put_back(run, before)
        steps(run, apart, at)
        mine = targets(run)
        name, tensor = mine[int(chance * len(mine))]
        bit = rng.randrange(tensor.nbytes * 8)
        if world.rank == rank:
            flip(tensor, bit)
        told = message(partial(_up_to_a_save, run, ahead, at + apart))
        run.step_state.tally = None
        same = all(torch.equal(now, then) for now, then in zip(_held(run), clean, strict=True))
        alike = all(world.gather_json(same))
        outcome = (
            "named" if told.startswith("ClusterError: step ") else "gone" if alike else "saved"
        )
        found[outcome] += 1
        looked.append(run.guards.writes.drift.every)
        if outcome == "saved":
            wrong.append(f"rank {rank}, {name}, bit {bit}, {apart} and {ahead} steps: {told}")
        _put_back(run, before)
        if world.is_first:
            for kept in list_checkpoints(root / "checkpoints"):
                shutil.rmtree(kept.path)
        world.barrier()
        steps(run, 1)
    leave(run)
    return {"flips": count, **found, "wrong": wrong, "k": sorted({min(looked), max(looked)})}


def unlike_at_a_reading(world: World, noise: bool) -> str:
    """Weights of rank 1 become others, past torch's counters, in a step that no look follows.

    noise   by what a user's unseeded code does to a tensor; else one bit flips
    """
    run = begin(world, "ddp", "auto")
    steps(run, 2)
    run.guards.writes.drift._next, run.guards.writes.drift.taken = 1000, None
    steps(run, 2)
    weight = next(iter(run.program.local.values())).parameter
    if world.rank == 1:
        if noise:
            weight.data += torch.randn(weight.shape)
        else:
            flip(weight, 13)
    told = message(lambda: steps(run, 4))
    run.step_state.tally = None
    leave(run)
    return told


def _up_to_a_save(run: Run, count: int, first: int) -> None:
    steps(run, count, first)
    run.save()
    run.checkpoint_saver.wait_pending()


def _held(run: Run) -> list[torch.Tensor]:
    """Copies of all weights and states of the optimizer on this rank."""
    return [tensor.detach().clone() for tensor in _stepped(run)]


def _stepped(run: Run) -> list[torch.Tensor]:
    states = [run.optimizer.state[one.parameter] for one in run.program.local.values()]
    found = [one.parameter for one in run.program.local.values()]
    if run.plan.layout.zero < 3:
        found += run.program.parameters.values()
    found += [t for state in states for t in state.values() if isinstance(t, torch.Tensor)]
    return [local_part(tensor) for tensor in found]


def _put_back(run: Run, held: list[torch.Tensor]) -> None:
    """As a checkpoint would be loaded: looks go on at their pace."""
    with torch.no_grad():
        for now, then in zip(_stepped(run), held, strict=True):
            now.copy_(then)
    run.guards.writes.updated(run.step_count)


def unwatched(world: World, layout: Any, folder: str) -> dict[str, Any]:
    """The same flip with nobody looking: it is in the checkpoint, so the injection is real."""
    run = begin(world, layout, "off", folder=folder)
    steps(run, 2)
    name, one = next(iter(run.program.local.items()))
    if world.rank == world.size - 1:
        flip(one.parameter, 30)
    flipped = one.parameter.detach().clone()
    told = message(lambda: run.save() and None)
    (newest,) = list_checkpoints(Path(folder) / "checkpoints")
    kept = load(newest.path, [replace(one.shard, name=f"model.{name}")])[f"model.{name}"]
    leave(run)
    return {"told": told, "kept": bool(torch.equal(kept.reshape(flipped.shape), flipped))}


def clean_steps(world: World, layout: Any, count: int, drift: str = "every") -> dict[str, Any]:
    """Steps in which nothing happens: (what was raised, steps from one look to the next)."""
    run = begin(world, layout, drift, average=0.9)
    told = message(lambda: steps(run, count))
    leave(run)
    return {"told": told, "steps": run.step_count, "every": run.guards.writes.drift.every}


def wrong_update(world: World, layout: Any) -> str:
    """One rank's optimizer adds one unit in the last place to one weight, by ordinary operations."""
    run = begin(world, layout)
    steps(run, 3)
    stepped = run.optimizer.step

    def step(*given: Any, **named: Any) -> Any:
        done = stepped(*given, **named)
        if world.rank == 1:
            name = sorted(run.program.local)[0]
            with torch.no_grad():
                weight = run.program.local[name].parameter.reshape(-1)[:1]
                weight.copy_(torch.nextafter(weight, torch.tensor(9.0)))
        return done

    with patch.object(run.optimizer, "step", step):
        told = message(lambda: steps(run, 1))
        assert told == QUIET, told  # it is known when the ranks meet again
    told = message(lambda: steps(run, 1))
    leave(run)
    return told


def written(world: World, layout: Any) -> list[str]:
    """What user code does to weights past torch's counters is meant, where all ranks do it."""
    run = begin(world, layout)
    told = []
    for _ in range(4):
        told.append(message(lambda: steps(run, 1)))
        for parameter in run.model.parameters():
            parameter.data.clamp_(-0.1, 0.1)
    leave(run)
    return told


def wrong_sum(world: World) -> list[str]:
    """An all-reduce that gives rank 1 another sum at one place of the longer message."""
    json_messages._checked.discard(world)
    summed = World.all_reduce

    def all_reduce(self: World, tensor: torch.Tensor, **named: Any) -> Any:
        done = summed(self, tensor, **named)
        if self.rank == 1 and tensor.numel() == json_messages.LENGTHS[1]:
            tensor[77] += 1
        return done

    with patch.object(World, "all_reduce", all_reduce):
        told = message(lambda: begin(world, "ddp"))
    json_messages._checked.discard(world)
    return [told, message(lambda: json_messages.check_sums(world))]


def costs() -> dict[str, dict[str, float]]:
    """A look in CPU seconds of this thread, beside those of a step, by parameters (one process)."""
    alone = start_world({})
    found = {}
    for width, layers, rows in ((64, 2, 256), (256, 4, 1024), (512, 8, 1024)):
        torch.manual_seed(0)
        blocks = [
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(),
                          nn.Linear(4 * width, width))
            for _ in range(layers)
        ]  # fmt: skip
        model = nn.Sequential(*blocks)
        batch = (torch.randn(rows, width), torch.randn(rows, width))
        run = shoal.parallelize(
            model,
            lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
            lambda y, t: ((y - t) ** 2).sum(1),
            world=alone,
            batch=rows,
            micro_batch=rows,
            drift="off",
        )
        watched = CorruptionCheck(replace(run.program, plan=replace(run.plan, drift="every")),
                        run.optimizer, None, run.recorder)  # fmt: skip
        took: list[tuple[float, float]] = []
        for _ in range(12):
            began_s = time.thread_time()
            run.step(batch)
            step_s = time.thread_time()
            watched.record_checksums(run.step_count)
            watched.sums()
            took.append((step_s - began_s, time.thread_time() - step_s))
        step_s, look_s = (sorted(one)[len(took) // 2] for one in zip(*took, strict=True))
        found[f"{run.plan.parameters} parameters, {rows} rows"] = {
            "step_s": round(step_s, 5), "look_s": round(look_s, 5), "share": round(look_s / step_s, 4),
            "k of train.drift=auto": max(1, -(-look_s // (step_s * SHARE))),
        }  # fmt: skip
    return found
