"""A run in a group of processes that was made before it, not by it: a script's own, a test world's."""

from __future__ import annotations

from unittest import mock

import torch

import shoal
from shoal.fabric import World
from shoal.models.catalog import build
from shoal.parallel.build import shared_build


def built(world: World) -> tuple[list[str], list[float], str, bool]:
    """Devices that this rank's builder was asked to build on, losses, whose group, if with a store."""
    made: list[str] = []

    def make() -> torch.nn.Module:
        made.append(torch.get_default_device().type)
        return build("gpt", {"dim": 32, "layers": 2}, vocabulary=32, sequence=16)

    with mock.patch.object(shared_build, "LEAST_BYTES", 0):
        run = shoal.parallelize(
            make, lambda p: torch.optim.SGD(p, 0.1), layout="fsdp", batch=8, micro_batch=2
        )
    tokens = torch.arange(8 * 16).view(8, 16) % 32
    losses = [run.step(one).loss for one in run.loader([(row, (row + 1) % 32) for row in tokens])]
    came_from, with_store = run.world.started_by, run.world.store is not None
    run.close()
    world.barrier()  # the group is as it was
    return made, losses, came_from, with_store
