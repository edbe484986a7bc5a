"""Owners among real groups of processes: each member is one process of one of them."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

import shoal
from island_case import digest, leave, single
from owners_reference import federate
from shoal.base.errors import ClusterError, TrainingError
from shoal.base.layouts.island_options import IslandsPolicy
from shoal.data.loading.sample_order import permute
from shoal.fabric import World
from shoal.fabric.islands.inter_island_group import IslandLost
from shoal.islands.owner_schedule import OwnerSchedule
from shoal.parallel.build.full_state import gather_weights
from shoal.parallel.build.mmap_init import is_mapped
from shoal.trainer.islands.island_join import IslandConnection, join_islands, resume_common_round
from shoal.trainer.islands.owner_data import OwnerData, open_owner_loader
from shoal.trainer.islands.owner_rounds import OwnerRounds
from shoal.trainer.run import Run

LR, SEED = 0.1, 3
OPTIMIZERS = {
    "slow": lambda p: torch.optim.SGD(p, lr=1e-6),
    "sgd": lambda p: torch.optim.SGD(p, lr=LR),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
}
READ: list[tuple[int, int]] = []
"""(owner, sample) of every sample that this process read."""


class OwnNumbers:
    """Samples of one owner: a line of its own slope, so that owners are unlike."""

    draws_nothing = True

    def __init__(self, owner: int, length: int) -> None:
        self.owner, self.length = owner, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        READ.append((self.owner, index))
        generator = torch.Generator().manual_seed(1000 * self.owner + index)
        x = torch.randn(6, generator=generator, dtype=torch.float64)
        return x, x.sum() * (self.owner % 3) + self.owner


def build(width: int = 8) -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 1)).double()


def squares(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    error = (outputs.squeeze(-1) - targets) ** 2
    return error.sum(), torch.tensor(float(error.numel()))


def train(
    world: World,
    index: int,
    count: int,
    at: str,
    *,
    lengths: list[int],
    rounds: int,
    batch: int = 4,
    layout: Any = "single",
    optimizer: str = "sgd",
    last_epoch: int = 0,
    folder: str = "",
    wrong: int = -1,
    dies: list[list[int]] | None = None,
    width: int = 8,
    **asked: Any,
) -> dict[str, Any]:
    """Some rounds of owners; their merged weights after each.

    wrong   an owner whose change is reversed, times 1000
    dies    [group, round] of each group that dies in the middle of a round
    asked   keys of `IslandsPolicy`
    """
    torch.set_num_threads(1)
    READ.clear()
    run = shoal.parallelize(
        build(width), OPTIMIZERS[optimizer], squares, layout, batch=batch, micro_batch=2,
        precision="fp64", seed=SEED, folder=str(Path(folder) / f"island-{index}") if folder else None,
        world=world,
    )  # fmt: skip
    policy = IslandsPolicy(
        **{"method": "fedavg", "count": len(lengths), "data": "own", "concurrent": count, "at": at,
           "index": index, **asked}
    ).resolved()  # fmt: skip
    joined = join_islands(run, policy)
    owners = {}
    for owner in policy.owners_of(index):
        data = OwnNumbers(owner, lengths[owner])
        if len(data) and not run.feed.loaders:
            run.loader(data)
        source: Any = SimpleNamespace(train=data, collate=None)
        loader = open_owner_loader(run, source, 0) if len(data) else None
        owners[owner] = OwnerData(owner, str(owner), loader, None, source)
    resume_common_round(run, joined)
    began = joined.common.round
    schedule = OwnerSchedule(
        tuple(lengths), batch, policy.period, policy.epochs, last_epoch, policy.sample, SEED
    )
    loop = OwnerRounds(run, joined, owners, schedule)
    READ.clear()  # a resume reads some to compare the data
    _spoil(loop, wrong, dies or [])
    merges, weights = [], []
    try:
        loop.save_start()
        for _ in range(rounds - began):
            if loop.has_work:
                merges.append(loop.one())
                whole = gather_weights(run.program)
                weights.append({n: w.cpu().clone() for n, w in whole.items()})
    except (IslandLost, TrainingError, ClusterError) as stop:
        run.checkpoint_saver.wait_pending()
        leave(run, joined)
        return {"line": str(stop), "round": joined.common.round}
    if folder:
        run.checkpoint_saver.wait_pending()
        if world.is_first:
            torch.save(weights, Path(folder) / f"weights-{index}.pt")
    told = {
        "began": began,
        "weights": [digest(one) for one in weights],
        "positions": list(joined.common.positions),
        "admitted": [sorted(merge.verdict.admitted) for merge in merges],
        "refused": [{str(k): why for k, why in m.verdict.refused.items()} for m in merges],
        "sent_bytes": [merge.sent_bytes for merge in merges],
        "read": list(READ),
        "mapped": any(is_mapped(t) for one in loop.states.kept.values() for t in one.values()),
        "shares": {str(owner): sums for owner, sums in loop.shares.sums.items()},
        "kept": {str(o): digest(one) for o, one in loop.states.kept.items()},
    }
    leave(run, joined)
    return told


def _spoil(loop: OwnerRounds, wrong: int, dies: list[list[int]]) -> None:
    train_owner = loop._train_owner

    def altered(owner: int) -> Any:
        drawn = loop.schedule.draw(loop.common.round, loop.common.positions)
        own = [one for one in loop.policy.owners_of(loop.policy.index) if one in drawn]
        if [loop.policy.index, loop.common.round] in dies and owner == own[-1]:
            os.kill(os.getpid(), signal.SIGKILL)
        change, control = train_owner(owner)
        if owner == wrong:
            for tensor in change.message.values():
                tensor.mul_(-1000)
        return change, control

    loop._train_owner = altered  # type: ignore[method-assign]


def expected(lengths: list[int], **asked: Any) -> list[list[Tensor]]:
    """The reference's weights after each round, in the order of the module's parameters."""
    module = build()
    data = [OwnNumbers(owner, length) for owner, length in enumerate(lengths)]
    names = [name for name, _ in module.named_parameters()]

    def gradient(weights: list[Tensor], owner: int, numbers: Any) -> list[Tensor]:
        own = [w.detach().clone().requires_grad_() for w in weights]
        x, y = (torch.stack(part) for part in zip(*(data[owner][k] for k in numbers), strict=True))
        outputs = torch.func.functional_call(module, dict(zip(names, own, strict=True)), (x,))
        total, count = squares(outputs, y)
        return list(torch.autograd.grad(total / count, own))

    def order(owner: int, epoch: int, offset: int) -> int:
        return int(permute([offset], lengths[owner], SEED, epoch)[0])

    first = [w.detach().clone() for _, w in module.named_parameters()]
    return federate(first, lengths, gradient, order, lr=LR, seed=SEED, batch=4, **asked)


__all__ = ["IslandConnection", "Run", "expected", "single", "train"]
