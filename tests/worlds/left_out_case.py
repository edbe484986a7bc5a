"""A run in which some samples cannot be read, whichever rank asks for them."""

from __future__ import annotations

import errno
from typing import Any

from own_passes_case import classes_sum, counted, end, model, numbers_sum, opened, samples
from shoal.base.errors import ShoalError
from shoal.data.loading import read_retries
from shoal.data.loading.sample_order import samples_at
from shoal.fabric import World

SEED, BATCH, COUNT = 3, 8, 22


class Torn:
    """The samples of own_passes_case; those at some positions of the first epoch fail."""

    def __init__(self, positions: list[int]) -> None:
        order = samples_at(0, COUNT, COUNT, SEED, shuffle=True)[1].tolist()
        self.rows, self.torn = samples(), {order[position] for position in positions}

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        if index in self.torn:
            raise OSError(errno.EIO, "Input/output error", f"part-{index}.bin")
        return self.rows[index]


def trained(world: World, layout: Any, positions: list[int], **settings: Any) -> dict[str, Any]:
    """Losses, weights, and samples left out by step, as each rank was told; or the error."""
    read_retries.PAUSES_S = (0.001, 0.001, 0.001)
    run = opened(world, layout, **settings)
    losses, lost, own, error = [], [], [], ""
    try:
        for batch in run.loader(Torn(positions)):
            losses.append(run.step(batch).loss)
            lost.append(run.skips.lost)
            own += [index for ids in batch.sample_ids for index in ids]
    except ShoalError as failure:
        error = f"{type(failure).__name__}: {failure}"
    weights = {} if error else {k: v.tolist() for k, v in run.state_dict().items()}
    if not error:
        end(run)
    return {"losses": losses, "weights": weights, "lost": lost, "own": own, "error": error}


def plain(world: World, positions: list[int]) -> dict[str, Any]:
    """The same in torch alone, in one process, of the samples that can be read."""
    import torch

    module, data = model(), Torn(positions)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    order = samples_at(0, COUNT, COUNT, SEED, shuffle=True)[1].tolist()
    losses = []
    for start in range(0, COUNT, BATCH):
        rows = [data.rows[one] for one in order[start : start + BATCH] if one not in data.torn]
        tokens, targets = (torch.stack(column) for column in zip(*rows, strict=True))
        optimizer.zero_grad()
        outputs = module(tokens)
        loss = (classes_sum(outputs, targets) + numbers_sum(outputs)) / counted(targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "weights": {k: v.tolist() for k, v in module.state_dict().items()}}
