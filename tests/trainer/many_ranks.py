"""Starts a run as one of 4,096 ranks, the others being torch's fake ones; says what that took.

A message of `gather_json` counts as if every rank said something else, which is what it costs then;
what is compared counts 72 bytes and, place by place, 16 bytes a number; what travels through the
store counts as it is. Weights are no messages.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from typing import Any
from unittest.mock import patch

os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "8"}

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from shoal.fabric import World, start_world
from shoal.trainer.guards.batch_consistency import BatchConsistencyGuard
from shoal.trainer.parallelize import parallelize
from shoal.trainer.run import Run
from shoal.trainer.step import optimizer_step, step_vector

RANKS, LAYERS, WIDTH, STEPS = 4096, 150, 64, 6


class Block(nn.Module):
    """Two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        nn.init.normal_(self.inner.weight, std=1e-3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.inner(x))


def build() -> nn.Module:
    """300 tensors, in blocks that a pipeline can cut."""
    return nn.Sequential(*(Block() for _ in range(LAYERS)))


def main(layout: Any) -> dict[str, Any]:
    """Bytes told by kind, and seconds of CPU, of one start."""
    world = start_world()
    told: Counter[str] = Counter()
    meter(told)
    world.store = Answering(told)
    sample = torch.zeros(1, WIDTH)
    began_s = time.process_time()
    run = parallelize(
        build,
        lambda p: torch.optim.AdamW(p, lr=1e-3),
        lambda outputs, targets: (outputs - targets).square().sum(1),
        layout=layout,
        batch=RANKS,
        micro_batch=1,
        skip_limit=STEPS + 1,  # what a stage's peers would send is missing
        sample=(sample, sample),
        world=world,
    )
    cpu_s = time.process_time() - began_s
    return {"told_bytes": dict(told), "cpu_s": cpu_s, **steps_of(run, sample)}


def steps_of(run: Run, sample: torch.Tensor) -> dict[str, Any]:
    """Take some steps; say what each sends in its all-reduce, what it writes, what that takes.

    The other ranks add nothing to a sum, so the terms that cancel each other out are left out; they
    are computed all the same.
    """
    rows: list[dict[str, Any]] = []
    run.add_callback(lambda record: rows.append(record) if record["event"] == "step" else None)
    sent: list[int] = []
    tally_s: list[float] = []
    terms, tally = step_vector.zero_sum_terms, optimizer_step._reduce_totals

    def alone(*given: Any) -> list[float]:
        return [0.0] * len(terms(*given))

    def timed(*given: Any) -> Any:
        began_s = time.process_time()
        found = tally(*given)
        tally_s.append(time.process_time() - began_s)
        sent.append(8 * sum(map(len, found.numbers.entries.values())))
        return found

    run.guards.all[:] = [
        one for one in run.guards.all if not isinstance(one, BatchConsistencyGuard)
    ]
    with (
        patch.object(step_vector, "zero_sum_terms", alone),
        patch.object(optimizer_step, "_reduce_totals", timed),
    ):
        for _ in range(STEPS):
            run.step((sample, sample))
    return {
        "vector_bytes": max(sent),
        "row_bytes": max(len(json.dumps(row)) for row in rows),
        "tally_s": min(tally_s),
    }


class Answering:
    """A store at which the other ranks have said all that is waited for; counts what is said."""

    def __init__(self, told: Counter[str]) -> None:
        self.told, self.said = told, {}

    def set(self, key: str, text: str) -> None:
        self.told["store"] += len(text)
        self.said[key] = text

    def get(self, key: str) -> str:
        return self.said[key]

    def wait(self, *_: Any) -> None:
        """They have."""

    def check(self, _: Any) -> bool:
        """They have."""
        return True


def meter(told: Counter[str]) -> None:
    """Count what goes through a world's messages from here on."""
    kinds = {
        "gather_json": lambda world, message: len(json.dumps(message)) * world.size,
        "broadcast_json": lambda world, message, source=0: len(json.dumps(message)),
        "find_differing_rank": lambda world, message: 72,
        "find_differing_indices": lambda world, numbers: 72 + 16 * len(numbers),
        "all_true": lambda world, flag: 8,
        "all_reduce_max": lambda world, number: 8,
    }
    for name, size_bytes in kinds.items():
        setattr(World, name, counted(getattr(World, name), told, name, size_bytes))


def counted(plain: Any, told: Counter[str], name: str, size_bytes: Any) -> Any:
    """The method, that counts its bytes first."""

    def call(world: World, *given: Any) -> Any:
        told[name] += size_bytes(world, *given)
        return plain(world, *given)

    return call


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    sys.stdout.write(json.dumps(main(json.loads(sys.argv[1]))) + "\n")
    sys.stdout.flush()
    os._exit(0)  # no peer is there to leave with
