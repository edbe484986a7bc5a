"""Trains with states in files under a layout: what every rank holds at the end, as a digest."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from shoal.fabric import World
from shoal.models.catalog import build
from shoal.parallel.build.mmap_init import is_mapped
from shoal.trainer.parallelize import parallelize

SEQUENCE, VOCABULARY, ROWS = 16, 256, 4
MODEL = {"dim": 512, "layers": 2, "heads": 8}


def trained(world: World, layout: str, words: list[dict[str, str]]) -> list[dict[str, Any]]:
    """Losses and states of two steps by each of `words`, and how much of the states is in files."""
    return [_trained(world, layout, one) for one in words]


def _trained(world: World, layout: str, words: dict[str, str]) -> dict[str, Any]:
    draws = torch.Generator().manual_seed(3)
    tokens = torch.randint(VOCABULARY, (ROWS, SEQUENCE), generator=draws)
    run = parallelize(
        lambda: build("llama", MODEL, vocabulary=VOCABULARY, sequence=SEQUENCE),
        lambda p: torch.optim.AdamW(p, lr=1e-3),
        layout=layout,
        batch=ROWS,
        micro_batch=1,
        clip=0.1,
        sample=(tokens, tokens.flip(0)),
        world=world,
        **words,
    )
    own = tokens[world.rank :: world.size]
    losses = [run.step((own, own.flip(0))).loss.hex() for _ in range(2)]
    found, in_files, large = hashlib.sha256(), 0, 0
    for local in run.program.local.values():
        state = run.optimizer.state[local.parameter]
        for tensor in (local.parameter.detach(), *(state[key] for key in sorted(state))):
            found.update(tensor.contiguous().view(-1).view(torch.uint8).numpy())
            large += tensor.nbytes >= 2**20
            in_files += is_mapped(tensor) and tensor.nbytes >= 2**20
    for undo in run.program.on_close:
        undo()
    return {"losses": losses, "states": found.hexdigest(), "files": in_files, "large": large}
