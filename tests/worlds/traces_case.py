"""Traced steps on ranks of a world, which keep no watch page."""

from __future__ import annotations

from typing import Any

import torch

import shoal
import statistics_case
from shoal.fabric import World
from shoal.models.catalog import build
from shoal.wire import phases


def trace(world: World, folder: str, layout: Any) -> bool:
    """Train three steps of which the last two are traced; return whether no trace of it stays."""
    torch.set_num_threads(1)
    name, sizes = statistics_case.SIZES["llama"]
    torch.manual_seed(0)
    model = build(name, sizes, vocabulary=31, sequence=8)
    data = statistics_case.rows()[:16]
    sample = tuple(map(torch.stack, zip(*data[:2], strict=True)))
    page, watched = phases.page, world.traffic.page
    run = shoal.parallelize(
        model, lambda p: torch.optim.SGD(p, lr=0.1), layout=layout, batch=8, micro_batch=2,
        sample=sample, folder=folder, world=world, prove="off", trace="2:3",
    )  # fmt: skip
    method = torch.distributed.ProcessGroup.allreduce
    while run.step_count < 3:
        for batch in run.loader(data):
            run.step(batch)
            if run.step_count == 3:
                break
    after = phases.page is page and world.traffic.page is watched
    restored = torch.distributed.ProcessGroup.allreduce is method
    for undo in run.program.on_close:
        undo()
    return after and restored
