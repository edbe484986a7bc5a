"""Experts on other ranks, against one process: our mixture, transformers' Mixtral, a user's own."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import any_case
import cases
from inside_causes import explained
from shoal.base.errors import ConfigError, PlanError
from shoal.data.loading.sample_order import permute
from shoal.fabric import TrafficCounter, World, start_world
from shoal.fabric.axis_worlds import axis_world
from shoal.models.catalog import build
from shoal.models.moe import Mixture, balanced_loss
from shoal.parallel import expert_parallel
from shoal.parallel.data_parallel.buckets import BucketReducer
from shoal.parallel.expert_parallel import expert_load
from shoal.parallel.program import Program
from shoal.proof import Battery, TrialSide
from shoal.proof.battery import SGD
from shoal.trainer.metrics_recorder import MetricsRecorder
from shoal.trainer.parallelize import parallelize
from shoal.trainer.step.optimizer_step import StepResult

LAYOUTS: dict[str, dict[str, Any]] = {
    "ep2": {"dp_replicate": 2, "ep": 2},
    "ep4": {"strategy": "ep"},
    "ddp4 ep2": {"dp_replicate": 4, "ep": 2},
    "zero1 ep2": {"dp_shard": 4, "zero": 1, "ep": 2},
    "zero2 ep2": {"dp_shard": 4, "zero": 2, "ep": 2},
    "fsdp4 ep2": {"dp_shard": 4, "ep": 2},
    "fsdp4 ep4": {"dp_shard": 4, "ep": 4},
    "hsdp ep2": {"dp_replicate": 2, "dp_shard": 2, "ep": 2},
    "hsdp ep4": {"dp_replicate": 2, "dp_shard": 2, "ep": 4},
    "pp2 ep2": {"pp": 2, "dp_replicate": 2, "ep": 2},
    "pp2 fsdp2 ep2": {"pp": 2, "dp_shard": 2, "ep": 2},
    "tp2 ep2": {"tp": 2, "dp_replicate": 2, "ep": 2},
    "fsdp2 ep2": {"dp_shard": 2, "ep": 2},
}

BATCH, MICRO_BATCH, SAMPLES = 8, 2, 19
"""Steps of 8, 8 and 3 samples: in the last one some of 4 ranks have nothing of their own to run."""

MOE = {"dim": 32, "layers": 2, "experts": 8, "hidden": 24, "balance": 0.1, "dropout": 0.1}


def mixture(**changes: Any) -> nn.Module:
    """Our model, with a router of strong opinions: some experts get no token at all."""
    torch.manual_seed(7)
    model = build("moe", {**MOE, **changes}, vocabulary=61, sequence=12)
    with torch.no_grad():
        for part in model.modules():
            if isinstance(part, Mixture):
                part.router.weight.mul_(20.0)
                part.router.weight[5] = -part.router.weight[2]
    return model


class OwnExperts(nn.Module):
    """A user's experts: other names, an order of arguments of their own, and biases."""

    def __init__(self, kinds: int, dim: int) -> None:
        super().__init__()
        self.kinds = kinds
        self.inner = nn.Parameter(torch.randn(kinds, dim, 2 * dim) / math.sqrt(dim))
        self.shift = nn.Parameter(torch.randn(kinds, 2 * dim))
        self.outer = nn.Parameter(torch.randn(kinds, 2 * dim, dim) / math.sqrt(dim))

    def forward(self, picked: Tensor, odds: Tensor, hidden: Tensor) -> Tensor:
        """[n, k], [n, k], [n, dim] to [n, dim]; only experts that somebody chose run."""
        # The number of experts is read here: a rank with fewer must be told.
        busy = odds.new_zeros(self.kinds).index_add(0, picked[:, 0], odds[:, 0])
        if len(busy) != len(self.inner):
            raise ValueError(f"{len(self.inner)} experts, {len(busy)} were promised")
        mixed = torch.zeros_like(hidden)
        for expert in picked.unique().tolist():
            token, place = torch.where(picked == expert)
            inner = F.gelu(hidden[token] @ self.inner[expert] + self.shift[expert])
            outer = inner @ self.outer[expert] * odds[token, place, None]
            mixed = mixed.index_add(0, token, outer)
        return mixed


class OwnLayer(nn.Module):
    """Routes to one of four, by a softmax that is not normalised again."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(dim), nn.Linear(dim, 4)
        self.experts = OwnExperts(4, dim)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, dim] to [batch, dim]."""
        h = self.norm(x)
        odds, picked = self.router(h).softmax(-1).topk(1, -1)
        moved: Tensor = x + self.experts(hidden=h, picked=picked, odds=odds)
        return moved


class Own(nn.Module):
    """A user's classifier of images."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 16)
        self.layers = nn.ModuleList(OwnLayer(16) for _ in range(2))
        self.last = nn.Linear(16, 10)

    def forward(self, images: Tensor) -> Tensor:
        """[batch, 1, 8, 8] to logits [batch, 10]."""
        h = self.first(images.flatten(1))
        for layer in self.layers:
            h = layer(h)
        logits: Tensor = self.last(h)
        return logits


class ListLayer(nn.Module):
    """Experts in a list, as they were written for years: a loop that picks each one's rows.

    busy_only   experts that nobody of this micro-batch chose are not called
    """

    def __init__(self, dim: int, busy_only: bool) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(dim), nn.Linear(dim, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
            for _ in range(4)
        )
        self.busy_only = busy_only

    def forward(self, x: Tensor) -> Tensor:
        """[batch, dim] to [batch, dim]."""
        h = self.norm(x)
        odds, picked = self.router(h).softmax(-1).topk(2, -1)
        mixed = torch.zeros_like(h)
        for number, expert in enumerate(self.experts):
            token, place = torch.where(picked == number)
            if len(token) or not self.busy_only:
                mixed = mixed.index_add(0, token, expert(h[token]) * odds[token, place, None])
        return x + mixed


def listed(busy_only: bool = False, favourite: int | None = None) -> nn.Module:
    """The user's classifier with lists; all tokens may go to one expert and its neighbour."""
    torch.manual_seed(7)
    made = Own()
    made.layers = nn.ModuleList(ListLayer(16, busy_only) for _ in range(2))
    for layer in made.layers:
        if favourite is not None:
            with torch.no_grad():
                layer.router.bias[favourite] = 50.0
    return made


def own(favourite: int | None = None) -> nn.Module:
    """The same weights on every rank; all tokens may go to one expert."""
    torch.manual_seed(7)
    made = Own()
    for layer in made.layers:
        if favourite is not None:
            nn.init.zeros_(layer.router.bias)
            with torch.no_grad():
                layer.router.bias[favourite] = 50.0
    return made


OURS = {
    "moe": mixture,
    "moe with capacity": functools.partial(mixture, capacity=1.0),
    "moe of one": functools.partial(mixture, top_k=1, tied=False),
    "moe without dropout": functools.partial(mixture, dropout=0.0),
    "own": own,
    "own one-sided": functools.partial(own, favourite=2),
    "own list": listed,
    "own list, busy ones": functools.partial(listed, busy_only=True, favourite=2),
}


def _first(data: Any) -> Any:
    return torch.utils.data.Subset(data, range(SAMPLES))


def train(model: str, side: TrialSide, **settings: Any) -> Iterator[tuple[str, StepResult]]:
    """What both sides do."""
    data = _first(cases.Images() if model.startswith("own") else cases.Tokens())
    run = side.parallelize(
        OURS[model],
        None if model.startswith("own") else balanced_loss,
        batch=BATCH,
        micro_batch=MICRO_BATCH,
        sample=lambda: torch.utils.data.default_collate([data[k] for k in range(3)]),
        **settings,
    )
    loader = run.loader(data)
    while True:
        for batch in loader:
            yield "", run.step(batch)


@functools.cache
def battery(model: str, steps: int) -> Battery:
    """One per model and process: the twin's records serve every layout."""
    trial = functools.partial(train, model) if model in OURS else any_case.trial_of(model)
    made = Battery(trial, steps=steps)
    return replace(made, optimizers={SGD: made.optimizers[SGD]})


def prove(world: World, model: str, layout: str, steps: int = 5) -> dict[str, Any]:
    """The report of a model on a layout, with what the run told."""
    torch.set_num_threads(1)
    told: list[str] = []

    def hear(recorder: MetricsRecorder, text: str) -> None:
        told.append(text)

    lift = any_case.CastsLifted() if model.startswith("hf ") else nullcontext()
    with (
        lift,
        mock.patch.object(MetricsRecorder, "notice", hear),
        mock.patch.object(any_case, "BATCH", BATCH),
    ):
        report = explained(battery(model, steps), world, LAYOUTS[layout])
    return {**report, "notices": list(dict.fromkeys(told))}


# ---- a last step that leaves ranks without samples


class Sorted(nn.Module):
    """Experts in a list; a sample's first number names its own."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        """[batch, 8] to [batch, 8]; experts that nobody names are not called."""
        mixed, stays = x, x.new_ones(8).index_fill(0, torch.tensor([0]), 0)
        for number, expert in enumerate(self.experts):
            (rows,) = torch.where(x[:, 0] == number)
            if len(rows):
                mixed = mixed.index_add(0, rows, expert(x[rows]) * stays)
        return mixed


def sorted_net() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Sequential(Sorted(), Sorted()), nn.Linear(8, 3)).double()


def sorted_samples(last: int) -> list[tuple[Tensor, Tensor]]:
    """18 samples of three experts, but the two that an epoch ends with: those name expert `last`."""
    kinds = [number % 3 for number in range(18)]
    for place in permute(range(16, 18), 18, 0, 0):
        kinds[int(place)] = last
    drawn = torch.Generator().manual_seed(3)
    inputs = torch.randn(18, 8, generator=drawn, dtype=torch.float64)
    inputs[:, 0] = torch.tensor(kinds)
    return list(zip(inputs, inputs[:, 1:4] * 2, strict=True))


def uneven(world: World, layout: Any, how: str, last: int) -> dict[str, list[Any]]:
    """Weights after an epoch whose last step, of 2 samples, is one rank's alone.

    how   the passes are the run's ("step") or the loop's own; AdamW moves a weight whose gradient
          is zero, and leaves one alone that has none
    """
    data = sorted_samples(last)
    run = parallelize(
        sorted_net,
        lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
        lambda outputs, targets: (((outputs - targets) ** 2).sum(), len(targets)),
        layout=layout,
        batch=16,
        micro_batch=4,
        precision="fp64",
        sample=tuple(torch.stack(one) for one in zip(*data[:3], strict=True)),
        world=world,
    )
    for batch in run.loader(data):
        if how == "step":
            run.step(batch)
            continue
        for micro in run.micro_batches(batch):
            squares = (run.model(micro.inputs) - micro.targets) ** 2
            run.backward(squares.sum(), len(micro.targets))
        run.update()
    weights = {name: tensor.tolist() for name, tensor in run.state_dict().items()}
    run.guards.writes.close()
    return weights


# ---- planted bugs


def on_sums(of: Any) -> Any:
    """Gradients of experts are summed over another world: `of(program)`."""
    right = expert_parallel.apply

    def apply(program: Program, layers: Any) -> Program:
        done = right(program, layers)
        changed = {n: (of(done), *w[1:]) for n, w in done.sums.items() if done.is_expert(n)}
        return replace(done, sums={**done.sums, **changed})

    return mock.patch.object(expert_parallel, "apply", apply)


@contextmanager
def over_all_ranks() -> Iterator[None]:
    """Experts' gradients are summed over all data-parallel ranks, like all others."""
    with on_sums(lambda program: program.data):
        yield


@contextmanager
def averaged() -> Iterator[None]:
    """Experts' gradients are divided by the ranks that exchange tokens."""
    right = BucketReducer.finish

    def finish(self: BucketReducer) -> None:
        right(self)
        for bucket, flat in zip(self.plan, self.flats, strict=True):
            if "experts" in bucket.names[0]:
                flat.div_(2)

    with mock.patch.object(BucketReducer, "finish", finish):
        yield


@contextmanager
def never_summed() -> Iterator[None]:
    """Ranks that hold the same experts keep what their own group's tokens gave."""
    with on_sums(lambda program: axis_world(program.world, program.plan.layout.degrees, ["pp"])):
        yield


BUGS = {
    "over all ranks": over_all_ranks,
    "averaged": averaged,
    "never summed": never_summed,
}


def planted(world: World, bug: str, layout: str) -> dict[str, Any]:
    """The report on a layout with a planted bug."""
    with BUGS[bug]():
        return prove(world, "moe", layout, steps=3)


# ---- what a run does beside training


def moe_run(world: World, layout: dict[str, Any], model: str = "moe", **settings: Any) -> Any:
    """A run of our mixture in float64, and its loader."""
    torch.set_num_threads(1)
    data = _first(cases.Tokens())
    run = parallelize(
        OURS[model],
        lambda p: torch.optim.AdamW(p, lr=3e-3, fused=True),
        balanced_loss,
        layout,
        batch=BATCH,
        micro_batch=MICRO_BATCH,
        sample=lambda: torch.utils.data.default_collate([data[k] for k in range(3)]),
        # A world of its own, which the run closes.
        world=start_world() if world.size > 1 else world,
        **{"precision": "fp64", "clip": 1.0, **settings},
    )
    return run, run.loader(data)


def leg(world: World, layout: dict[str, Any], folder: str, steps: int) -> dict[str, Any]:
    """Go on with a run for some steps on a layout, and save; then what it evaluates to."""
    run, loader = moe_run(world, layout, folder=folder)
    run.restore()
    began, losses = run.step_count, []
    while len(losses) < steps:
        for batch in loader:
            done = run.step(batch)
            losses.append([done.loss, done.grad_norm])
            if len(losses) == steps:
                break
    run.save()
    told = {"began": began, "losses": losses, "evaluated": run.evaluate(_first(cases.Tokens()))}
    run.close()
    return told


def counted(world: World, layout: dict[str, Any]) -> dict[str, Any]:
    """One step's all-to-all bytes on this rank, what they should be, and what this rank holds.

    Shares of all ranks are needed for what comes back: they are added up by the test.
    """
    run, loader = moe_run(world, layout, "moe with capacity")
    ep, experts = run.plan.layout.ep, MOE["experts"]
    own = run.world.rank % ep
    away = {"rows": 0, "calls": 0}

    def watch(part: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        places = inputs[1].flatten()
        travelling = (places < experts) & (places // (experts // ep) != own)
        away["rows"] += int(travelling.sum())
        away["calls"] += 1

    for part in run.model.modules():
        if isinstance(part, Mixture):
            part.experts.register_forward_pre_hook(watch)
    sent: Counter[str] = Counter()
    count = TrafficCounter.count

    def heard(
        traffic: TrafficCounter, kind: str, payload_bytes: int, degree: int, *axis: str
    ) -> None:
        sent[kind] += payload_bytes
        count(traffic, kind, payload_bytes, degree, *axis)

    with mock.patch.object(TrafficCounter, "count", heard):
        run.step(next(iter(loader)))
    stacks = [p for name, p in run.program.parameters.items() if "experts" in name]
    told = {
        "sent": sent["all_to_all"],
        "rows_bytes": 4 * away["rows"] * MOE["dim"] * 8,
        "counts_bytes": away["calls"] * (ep - 1) * (experts // ep) * 8,
        "stored_bytes": sum(p.untyped_storage().nbytes() for p in stacks),
        "whole_bytes": sum(8 * row.elements for row in run.plan.placements if row.is_expert),
    }
    run.close()
    return told


def lines(world: World, every: int) -> list[str]:
    """What a run tells of how tokens spread, every so many steps."""
    told: list[str] = []

    def hear(recorder: MetricsRecorder, text: str) -> None:
        told.append(text)

    with (
        mock.patch.object(MetricsRecorder, "notice", hear),
        mock.patch.object(expert_load, "EVERY", every),
    ):
        run, loader = moe_run(world, {"strategy": "ep"}, "moe with capacity")
        for batch in loader:
            run.step(batch)
        run.close()
    return told


class Restless(OwnExperts):
    """Experts that drop out."""

    def forward(self, picked: Tensor, odds: Tensor, hidden: Tensor) -> Tensor:
        """As the plain ones, on other tokens."""
        return super().forward(picked, odds, F.dropout(hidden, 0.5, self.training))


class Meeting(OwnExperts):
    """Experts whose tokens see each other: no sum over places."""

    def forward(self, picked: Tensor, odds: Tensor, hidden: Tensor) -> Tensor:
        """As the plain ones, less the mean."""
        return super().forward(picked, odds, hidden - hidden.mean(0))


class Centred(nn.Module):
    """Rows see each other."""

    def forward(self, rows: Tensor) -> Tensor:
        """[n, dim]."""
        return rows - rows.mean(0)


def odd_one(kind: str) -> nn.Module:
    """A user's model whose experts cannot be dealt out."""
    torch.manual_seed(7)
    made = Own()
    if kind.startswith("listed"):
        made.layers = nn.ModuleList(ListLayer(16, False) for _ in range(2))
        inside = {"dropout": nn.Dropout(0.1), "mean": Centred(), "three": nn.GELU()}
        for layer in made.layers:
            count = 3 if kind == "listed three" else 4
            layer.router = nn.Linear(16, count)
            layer.experts = nn.ModuleList(
                nn.Sequential(nn.Linear(16, 16), inside[kind.partition(" ")[2]])
                for _ in range(count)
            )
        return made
    if kind == "dense":
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    for layer in made.layers:
        if kind == "three":
            layer.router, layer.experts = nn.Linear(16, 3), OwnExperts(3, 16)
        else:
            layer.experts = {"dropout": Restless, "mean": Meeting}[kind](4, 16)
    return made


def refusal(
    world: World, kind: str, layout: dict[str, Any], optimizer: str = "SGD", **settings: Any
) -> str:
    """The line of the refusal."""
    data = _first(cases.Images())
    try:
        parallelize(
            lambda: Own() if kind == "own" else odd_one(kind),
            lambda p: getattr(torch.optim, optimizer)(p, lr=0.1),
            None,
            layout,
            batch=2 * world.size,
            micro_batch=2,
            **{"sample": (torch.stack([data[0][0]]), data[0][1][None]), **settings},
            world=world,
        )
    except (PlanError, ConfigError) as error:
        return str(error)
    return "nothing"
