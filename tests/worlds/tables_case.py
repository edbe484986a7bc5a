"""Models with embedding tables of every kind, for servers that hold tables alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import shoal
from shoal.base.errors import ShoalError
from shoal.base.plans.placement import Placement
from shoal.fabric import World
from shoal.parallel.data_parallel.fetched_rows import RemoteTable
from shoal.proof import Battery, Trial, TrialSide
from shoal.trainer.step.optimizer_step import StepResult

SAMPLES, BATCH, MICRO_BATCH = 54, 24, 2
"""Steps of 24, 24 and 6 samples; accumulation 12, 6 and 4 with one, two and three workers."""


class Clicks:
    """Words with padding, bags of unequal lengths with weights, and numbers; targets of 0 to 3."""

    draws_nothing = True

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        generator = torch.Generator().manual_seed(7000 + index)
        draw = torch.rand(6, generator=generator) ** 3  # a few rows often, most never
        inputs = {
            "words": (draw * 50).long(),
            "bag": (torch.rand(4, generator=generator) * 37).long(),
            "weights": torch.rand(4, generator=generator),
            "dense": torch.randn(5, generator=generator),
        }
        inputs["words"][: index % 4] = 3  # padding
        target = torch.tensor(index % 5 - 1 if index % 5 else -100)
        return inputs, target


class Scaled(nn.Embedding):
    """A class of a user's, with a forward pass of its own."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * self.embedding_dim**0.5


class Clicked(nn.Module):
    """Several tables, one of a single column, one that lookups share, one frozen; and layers."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 7, padding_idx=3)
        self.scaled = Scaled(50, 7, scale_grad_by_freq=True)
        self.wide = nn.Embedding(50, 1)
        self.sums = nn.EmbeddingBag(37, 5, mode="sum")
        self.means = nn.EmbeddingBag(37, 5, mode="mean", padding_idx=2, include_last_offset=True)
        self.most = nn.EmbeddingBag(37, 5, mode="max")
        self.again = nn.Embedding(37, 5)
        self.again.weight = self.sums.weight
        self.still = nn.Embedding(50, 4)
        self.still.weight.requires_grad_(False)
        self.never = nn.Embedding(9, 4)
        self.norm = nn.BatchNorm1d(5)
        self.drop = nn.Dropout(0.1)
        self.body = nn.Sequential(nn.Linear(39, 16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        words, bag = inputs["words"], inputs["bag"]
        offsets = torch.arange(0, bag.numel() + 1, bag.shape[1])
        parts = [
            self.words(words).mean(1) + self.words(words[:, :1]).squeeze(1),
            self.scaled(words).sum(1),
            self.wide(words).sum(1),
            self.sums(bag, per_sample_weights=inputs["weights"]),
            self.means(bag.reshape(-1), offsets),
            self.most(bag) + self.again(bag).mean(1),
            self.still(words).mean(1),
            self.norm(inputs["dense"]),
        ]
        return self.body(self.drop(torch.cat(parts, 1)))


def counted(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum, count) over targets that are not ignored."""
    total = F.cross_entropy(logits, targets.clamp(min=-100), ignore_index=-100, reduction="sum")
    return total, (targets != -100).sum()


CASES: dict[str, tuple[Callable[[], nn.Module], Any, Any]] = {"clicked": (Clicked, Clicks, counted)}


def trial_of(case: str) -> Trial:
    """What both sides train."""
    build, data, loss = CASES[case]

    def train(side: TrialSide) -> Iterator[tuple[str, StepResult]]:
        run = side.parallelize(build, loss, batch=BATCH, micro_batch=MICRO_BATCH)
        loader = run.loader(data())
        while True:
            for batch in loader:
                yield "", run.step(batch)

    return train


def prove(
    world: World,
    case: str,
    servers: int,
    serves: str = "embeddings",
    optimizer: str = "",
    **words: Any,
) -> dict[str, Any]:
    """The report of a case, with its tables on servers."""
    torch.set_num_threads(1)
    battery = Battery(trial_of(case), precision="fp64", steps=4)
    if optimizer:
        battery = replace(battery, optimizers={optimizer: battery.optimizers[optimizer]})
    layout = {"strategy": "parameter-server", "servers": servers, "serves": serves}
    return battery.prove(world, layout, words)


class Large(nn.Module):
    """One table of many rows, and a head."""

    def __init__(self, rows: int = 20_000) -> None:
        super().__init__()
        self.emb = nn.Embedding(rows, 16)
        self.head = nn.Linear(16, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.emb(ids).mean(1))


def _run(world: World, build: Callable[[], nn.Module], layout: Any, **more: Any) -> Any:
    torch.set_num_threads(1)
    return shoal.parallelize(
        build, lambda p: torch.optim.AdamW(p, lr=0.01), counted, layout, world=world, batch=24,
        micro_batch=2, **more,
    )  # fmt: skip


def _end(run: Any) -> None:
    """Leave the module alone; the world goes on."""
    for undo in run.program.on_close:
        undo()


def _servers(servers: int, serves: str = "embeddings") -> dict[str, Any]:
    return {"strategy": "parameter-server", "servers": servers, "serves": serves}


class Ids:
    """Ten numbers of rows for each sample."""

    draws_nothing = True

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        return torch.randint(0, 20_000, (10,), generator=generator), torch.tensor(index % 3)


def bytes_of_a_step(world: World, servers: int) -> dict[str, Any]:
    """What messages sent in one step, rows that this worker used, bytes of the table here."""
    found: dict[str, Any] = {}
    for name, layout in (("ddp", "ddp"), ("served", _servers(servers))):
        run = _run(world, Large, layout)
        batch = next(iter(run.loader(Ids())))
        world.traffic.pop_counts()
        rows = [ids for m in batch.micro_batches for ids in m.value[0].reshape(-1).tolist()]
        run.forward_backward(batch)
        sent = world.traffic.pop_counts()[0]
        run.update()
        if name == "ddp":
            found["ddp"] = sent["all_reduce"]
        else:
            table = run.program.parameters.get("emb.weight")
            held = 0 if table is None else table.nbytes
            found |= {"sent": sent.get("send", 0), "rows": len(set(rows)), "held_bytes": held}
        _end(run)
    return found


def evaluated(world: World, servers: int) -> dict[str, Any]:
    """The loss over all samples on servers and in one process; is there an output here?"""
    run = _run(world, Large, _servers(servers), precision="fp64")
    with torch.no_grad():
        model = Large().double()
        model.load_state_dict(run.state_dict())
        alone = torch.utils.data.default_collate([Ids()[n] for n in range(len(Ids()))])
        total, count = counted(model(alone[0]), alone[1])
    served = run.evaluate(Ids())["loss"]
    outputs = run.predict(alone[0])
    same = outputs is not None and torch.allclose(outputs, model(alone[0]), rtol=1e-12)
    _end(run)
    return {"served": served, "alone": float(total / count), "predicted": bool(same)}


class Tied(Large):
    """Its head is its table."""

    def __init__(self) -> None:
        super().__init__(30)
        self.head = nn.Linear(16, 30, bias=False)
        self.head.weight = self.emb.weight


class Short(Large):
    """Its rows are held short."""

    def __init__(self) -> None:
        super().__init__(30)
        self.emb.max_norm = 1.0


class Read(Large):
    """Its forward pass reads the table itself."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) + self.emb.weight.norm()


def refused(world: World) -> dict[str, str]:
    """What is said, by what was done."""
    said = {}
    tries = {"unknown": (Large, "never_there"), "tied": (Tied, ""), "max_norm": (Short, "")}
    for name, (build, serves) in tries.items():
        try:
            _run(world, build, _servers(1, serves or "embeddings"))
        except ShoalError as told:
            said[name] = str(told)
    if world.rank == 0:  # of these a worker alone has passes
        row = Placement("emb.weight", (30, 16), "float32", True)
        weight = RemoteTable.of(nn.Parameter(torch.zeros(30, 16)), row)
        for name, use in (
            ("read otherwise", torch.norm),
            ("outside", lambda w: F.embedding(NONE, w)),
        ):
            try:
                use(weight)
            except ShoalError as told:
                said[name] = str(told)
    return said


NONE = torch.zeros(1, dtype=torch.int64)
