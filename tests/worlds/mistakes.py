"""Mistakes that users make, one function each, run by every rank of a world as their script would.

    @mistake("the line that names it")      or  @mistake(RIGHT) for one that must be computed right
    def what_was_done(world, layout): ...

A function raises what Shoal raises; what is told by a line is collected. One that must be right
gives the largest difference to the same training in plain PyTorch, in one process, over all samples.
Add yours below: the test takes every function that is marked.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
)

import cases
import shoal
from guards import Lines
from shoal.base.errors import ShoalError
from shoal.fabric import World
from shoal.trainer.process.watchdog_client import start_watchdog
from shoal.wire import phases

RIGHT = "right"
BOTH = ("ddp", "fsdp")


@dataclass(frozen=True)
class Mistake:
    """One of them. expected  part of the line by layout · hangs  it ends the processes"""

    act: Callable[[World, str], Any]
    expected: dict[str, str]
    hangs: bool = False


TABLE: dict[str, Mistake] = {}


def mistake(*expected: str, layouts: tuple[str, ...] = BOTH, hangs: bool = False):
    """Put a function into the table; one line for all layouts, or one for each."""

    def mark(act: Callable[[World, str], Any]) -> Callable[[World, str], Any]:
        lines = expected * len(layouts) if len(expected) == 1 else expected
        TABLE[act.__name__] = Mistake(act, dict(zip(layouts, lines, strict=True)), hangs)
        return act

    return mark


def attempt(world: World, name: str, layout: str) -> dict[str, Any]:
    """What came of it: the error's text, the lines that were told, the value."""
    error, value = "", None
    if TABLE[name].hangs:  # a world that is given by hand is watched by nobody
        assert start_watchdog(world, None, own=True)
    with Lines() as told:
        try:
            value = TABLE[name].act(world, layout)
        except ShoalError as failure:
            error = f"{type(failure).__name__}: {failure}"
    return {"error": error, "lines": told.lines, "value": value}


# ---- what the scripts share

X = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
Y = torch.randn(32, 2, generator=torch.Generator().manual_seed(2))
DATA = TensorDataset(X, Y)


def net(drop: float = 0.0) -> nn.Module:
    """Blocks, so that fsdp has units to gather."""
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(drop), block, nn.Linear(8, 2))


def squares(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - targets) ** 2


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def begin(world: World, layout: str, model: Any = None, optimizer: Any = sgd, loss: Any = squares,
          **more: Any) -> shoal.Run:  # fmt: skip
    if layout in ("tp", "pp"):
        more.setdefault("sample", (X[:4], Y[:4]))
    return shoal.parallelize(
        net() if model is None else model, optimizer, loss, layout, world=world, **more
    )


def share(world: World, step: int = 0, rows: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's own samples."""
    first = (step * world.size + world.rank) * rows % 32
    return X[first : first + rows], Y[first : first + rows]


def off_by(
    run: shoal.Run,
    steps: Iterable[tuple[torch.Tensor, torch.Tensor]],
    build: Callable[[], nn.Module] = net,
) -> float:
    """Largest difference of the run's weights to plain PyTorch over whole steps."""
    model = build()
    optimizer = sgd(model.parameters())
    for inputs, targets in steps:
        optimizer.zero_grad()
        squares(model(inputs), targets).mean().backward()
        optimizer.step()
    plain = model.state_dict()
    got = run.state_dict()
    return max(float((got[name] - plain[name]).abs().max()) for name in plain)


def whole(world: World, step: int = 0, rows: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """The samples of all ranks."""
    first = step * world.size * rows % 32
    return X[first : first + world.size * rows], Y[first : first + world.size * rows]


# ---- data


@mistake("run.step: the DataLoader has a RandomSampler, so each of 2 ranks would train on")
def own_shuffled_loader(world: World, layout: str) -> None:
    run = begin(world, layout)
    torch.manual_seed(world.rank)
    for batch in DataLoader(DATA, batch_size=8, shuffle=True):
        run.step(batch)


@mistake("run.step: the DataLoader has a SubsetRandomSampler")
def own_loader_of_a_part(world: World, layout: str) -> None:
    run = begin(world, layout)
    torch.manual_seed(world.rank)
    for batch in DataLoader(DATA, batch_size=8, sampler=SubsetRandomSampler(range(24))):
        run.step(batch)


@mistake("run.step: the DataLoader has a SequentialSampler")
def own_loader_in_order(world: World, layout: str) -> None:
    run = begin(world, layout)
    for batch in DataLoader(DATA, batch_size=8):
        run.step(batch)


@mistake("step 1: ranks 0 and 1 brought the same 8 samples, so each would count twice")
def equal_seeds(world: World, layout: str) -> None:
    run = begin(world, layout)
    order = torch.randperm(32, generator=torch.Generator().manual_seed(0))
    for part in order.split(8):
        run.step((X[part], Y[part]))


@mistake("step 1: batch = 8 samples over all ranks were asked for, and 16 (8 + 8) were brought")
def whole_batch_on_every_rank(world: World, layout: str) -> None:
    run = begin(world, layout, batch=8)
    run.step(share(world))


@mistake("step 2: batch = 64 samples over all ranks were asked for, and 16 (8 + 8) were brought")
def batch_of_another_size(world: World, layout: str) -> None:
    run = begin(world, layout, batch=64)
    run.step(share(world, 0))
    run.step(share(world, 1))


class Dealt(IterableDataset):
    """A stream that deals itself to ranks."""

    def __init__(self, world: World) -> None:
        self.world = world

    def __iter__(self):
        yield from (DATA[n] for n in range(self.world.rank, 32, self.world.size))


@mistake("run.loader: the data differ between rank 0 (the first 8 samples, ")
def dealt_stream(world: World, layout: str) -> None:
    run = begin(world, layout, batch=8)
    for batch in run.loader(Dealt(world)):
        run.step(batch)


@mistake("run.loader: the data differ between rank 0 (16 samples, ")
def dealt_dataset(world: World, layout: str) -> None:
    run = begin(world, layout, batch=8)
    for batch in run.loader(Subset(DATA, range(world.rank, 32, world.size))):
        run.step(batch)


@mistake("every rank must give the same dataset, which run.loader splits over ranks; try: one seed")
def unseeded_dataset(world: World, layout: str) -> None:
    run = begin(world, layout, batch=8)
    torch.manual_seed(world.rank)
    for batch in run.loader(TensorDataset(torch.randn(32, 4), torch.randn(32, 2))):
        run.step(batch)


@mistake("run.steps: the DataLoader has a RandomSampler, so each of 2 ranks would train on the")
def shuffled_loader_in_steps(world: World, layout: str) -> None:
    for _ in begin(world, layout).steps(DataLoader(DATA, batch_size=8, shuffle=True)):
        pass


@mistake(RIGHT)
def distributed_sampler(world: World, layout: str) -> float:
    """No mistake: the user's own deal, with a short last step."""
    run = begin(world, layout, batch=12)
    dealt = DistributedSampler(DATA, world.size, world.rank, shuffle=False)
    for batch in DataLoader(DATA, batch_size=6, sampler=dealt):
        run.step(batch)
    rows = [torch.arange(first, min(first + 12, 32)) for first in (0, 12, 24)]
    return off_by(run, [(X[part], Y[part]) for part in rows])


@mistake(RIGHT)
def own_part_of_the_data(world: World, layout: str) -> float:
    """No mistake: each rank shuffles a part of its own."""
    run = begin(world, layout)
    part = Subset(DATA, range(world.rank, 32, world.size))
    for batch in DataLoader(part, batch_size=16, shuffle=True):
        run.step(batch)
    return off_by(run, [(X, Y)])


@mistake(RIGHT)
def shares_of_unequal_size(world: World, layout: str) -> float:
    run = begin(world, layout)
    rows = slice(0, 5) if world.rank == 0 else slice(5, 16)
    run.step((X[rows], Y[rows]))
    return off_by(run, [(X[:16], Y[:16])])


@mistake(RIGHT)
def constant_data(world: World, layout: str) -> float:
    """No mistake: ones everywhere, to see whether it runs."""
    run = begin(world, layout)
    inputs, targets = torch.ones(8, 4), torch.ones(8, 2)
    for _ in range(4):
        run.step((inputs, targets))
    return off_by(run, [(inputs, targets)] * 4)


@mistake("step 1: ranks 0 and 1 hold different samples, and layout", layouts=("tp", "pp"))
def unseeded_batches(world: World, layout: str) -> None:
    run = begin(world, layout)
    torch.manual_seed(world.rank)
    run.step((torch.randn(8, 4), torch.randn(8, 2)))


@mistake(RIGHT, layouts=("tp", "pp"))
def equal_batches(world: World, layout: str) -> float:
    """No mistake: these ranks work on the same samples."""
    run = begin(world, layout, batch=8)
    run.step((X[:8], Y[:8]))
    return off_by(run, [(X[:8], Y[:8])])


# ---- the form of a batch


@mistake('got tuple of 3; try: return (inputs, targets) from the dataset or collate function; '
         'for a model of several inputs ({"a": a, "b": b}, targets) with call="kwargs"')  # fmt: skip
def triple(world: World, layout: str) -> None:
    inputs, targets = share(world)
    begin(world, layout).step((inputs, inputs, targets))


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = net()

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return self.inner(a + b)


@mistake('model: forward() takes 2 inputs and was given one tuple of them; try: a batch '
         '({"a": …, "b": …}, targets) with call="kwargs"')  # fmt: skip
def pair_of_inputs(world: World, layout: str) -> None:
    inputs, targets = share(world)
    begin(world, layout, TwoInputs()).step(((inputs, inputs), targets))


@mistake("model: forward() takes a, b by name and was given one dict")
def dict_for_several_inputs(world: World, layout: str) -> None:
    inputs, targets = share(world)
    loss = lambda outputs, batch: squares(outputs, batch["y"])  # noqa: E731
    begin(world, layout, TwoInputs(), loss=loss).step({"a": inputs, "b": inputs, "y": targets})


@mistake("model: forward() takes no y, and a batch that is one dict goes to it whole")
def targets_among_the_inputs(world: World, layout: str) -> None:
    inputs, targets = share(world)
    run = begin(world, layout, TwoInputs(), call="kwargs")
    run.step({"a": inputs, "b": inputs, "y": targets})


@mistake("loss: the default loss takes a tensor of integer targets, got one dict (a, b)")
def default_loss_of_a_dict(world: World, layout: str) -> None:
    inputs, _ = share(world)
    begin(world, layout, TwoInputs(), loss=None, call="kwargs").step({"a": inputs, "b": inputs})


@mistake("run.loader: a batch is one whole step, several micro-batches, and cannot be taken apart")
def unpacked_batch(world: World, layout: str) -> None:
    run = begin(world, layout, batch=8)
    for inputs, targets in run.loader(DATA):
        run.step((inputs, targets))


@mistake("the default loss needs integer targets")
def labels_as_floats(world: World, layout: str) -> None:
    begin(world, layout, loss=None).step((share(world)[0], torch.ones(8)))


@mistake("the default loss needs integer targets of shape [8]")
def labels_in_a_column(world: World, layout: str) -> None:
    begin(world, layout, loss=None).step((share(world)[0], torch.ones(8, 1).long()))


# ---- the loss


@mistake("loss returned a mean: ranks with unequal token counts would weigh wrongly")
def mean_loss(world: World, layout: str) -> None:
    begin(world, layout, loss=F.mse_loss).step(share(world))


@mistake("loss returned (mean, 8), where (sum, count) is wanted")
def mean_with_a_count(world: World, layout: str) -> None:
    begin(world, layout, loss=lambda o, t: (F.mse_loss(o, t), len(t))).step(share(world))


@mistake("loss returned (mean, 1), where (sum, count) is wanted")
def mean_counted_once(world: World, layout: str) -> None:
    begin(world, layout, loss=lambda o, t: (squares(o, t).mean(), 1)).step(share(world))


@mistake("loss: no parameter got a gradient")
def loss_of_detached_outputs(world: World, layout: str) -> None:
    begin(world, layout, loss=lambda o, t: squares(o.detach(), t)).step(share(world))


@mistake("ConfigError: loss: gives 8 × 8 numbers for 8 samples: outputs [8, 1] and targets [8]")
def every_output_against_every_target(world: World, layout: str) -> None:
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    model = nn.Sequential(nn.Linear(4, 8), block, nn.Linear(8, 1))
    inputs, targets = share(world)
    begin(world, layout, model, loss=lambda o, t: (o - t) ** 2).step((inputs, targets[:, 0]))


def negatives(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Every sample's own target against those of all others in the batch."""
    likeness = F.normalize(outputs, dim=1) @ F.normalize(targets, dim=1).T
    return F.cross_entropy(likeness * 5, torch.arange(len(outputs)), reduction="none")


@mistake("only the 8 of a micro-batch are beside each other, of which the step has 2")
def negatives_out_of_the_batch(world: World, layout: str) -> None:
    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            found = self.net(inputs)
            return found, found.roll(1, 1)

    run = begin(world, layout, Pairs(), loss=lambda out, _: negatives(*out))
    run.step(share(world))


def spread(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Squares, and how far the batch's outputs lie apart."""
    return ((outputs - targets) ** 2).sum(1) + (outputs - outputs.mean(0)).square().sum(1)


@mistake("loss: what a sample adds depends on the others beside it")
def spread_of_the_batch(world: World, layout: str) -> None:
    begin(world, layout, loss=spread).step(share(world))


@mistake("loss: no parameter got a gradient")
def step_without_gradients(world: World, layout: str) -> None:
    run = begin(world, layout)
    with torch.no_grad():
        run.step(share(world))


class Tokens(nn.Module):
    """A language model as people write it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(19, 8)
        self.mix = nn.GRU(8, 8, batch_first=True)
        self.head = nn.Linear(8, 19)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.mix(self.tokens(ids))[0])


def unshifted(world: World) -> tuple[torch.Tensor, torch.Tensor]:
    """Hugging Face's labels: a copy of the ids, −100 where nothing counts."""
    generator = torch.Generator().manual_seed(world.rank)
    ids = torch.randint(0, 19, (4, 12), generator=generator)
    labels = ids.clone()
    labels[:, :3] = -100
    return ids, labels


@mistake("batch: the targets are the inputs themselves, and the loss compares place t with place t")
def unshifted_labels(world: World, layout: str) -> None:
    begin(world, layout, Tokens(), loss=None).step(unshifted(world))


@mistake("if a copy is meant, all is well")
def unshifted_labels_own_loss(world: World, layout: str) -> None:
    loss = lambda o, t: F.cross_entropy(o.transpose(1, 2), t, reduction="none")  # noqa: E731
    begin(world, layout, Tokens(), loss=loss).step(unshifted(world))


@mistake("ConfigError: batch: the targets are the inputs themselves")
def unshifted_labels_of_a_causal_model(world: World, layout: str) -> None:
    class SmallForCausalLM(Tokens):
        pass

    begin(world, layout, SmallForCausalLM(), loss=None).step(unshifted(world))


def shifting(outputs: torch.Tensor, labels: torch.Tensor) -> Any:
    rows = outputs[:, :-1].transpose(1, 2)
    total = F.cross_entropy(rows, labels[:, 1:], reduction="sum")
    return total, (labels[:, 1:] != -100).sum()


@mistake(RIGHT)
def labels_shifted_in_the_loss(world: World, layout: str) -> float:
    """No mistake, and no line."""
    with Lines() as told:
        begin(world, layout, Tokens(), loss=shifting).step(unshifted(world))
    return float(sum("batch:" in line for line in told.lines))


class Named(Tokens):
    """Takes and gives what Hugging Face's models do; with labels it has a loss, shifted inside."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        logits = super().forward(input_ids)
        loss = None if labels is None else shifting(logits, labels)[0]
        return {"logits": logits} if loss is None else {"loss": loss, "logits": logits}


def unshifted_dict(world: World) -> dict[str, torch.Tensor]:
    ids, labels = unshifted(world)
    return {"input_ids": ids, "labels": labels}


@mistake("batch: the targets are the inputs themselves", layouts=("ddp", "fsdp"))
def unshifted_labels_by_name(world: World, layout: str) -> None:
    ids, labels = unshifted(world)
    loss = lambda o, t: (  # noqa: E731
        F.cross_entropy(o["logits"].flatten(0, 1), t.flatten(), reduction="sum"), t.numel()
    )  # fmt: skip
    begin(world, layout, Named(), loss=loss, call="kwargs").step(({"input_ids": ids}, labels))


@mistake("batch: the targets are the inputs themselves", layouts=("ddp", "fsdp"))
def unshifted_labels_in_one_dict(world: World, layout: str) -> None:
    """The model's own loss is right, and this script has another one."""
    loss = lambda o, b: (  # noqa: E731
        F.cross_entropy(o["logits"].flatten(0, 1), b["labels"].flatten(), reduction="sum"),
        b["labels"].numel(),
    )
    begin(world, layout, Named(), loss=loss, call="kwargs").step(unshifted_dict(world))


@mistake(RIGHT)
def labels_shifted_in_the_model(world: World, layout: str) -> float:
    """No mistake, and no line: the loss is what the model made of the labels."""
    loss = lambda o, b: (o["loss"], (b["labels"][:, 1:] != -100).sum())  # noqa: E731
    with Lines() as told:
        begin(world, layout, Named(), loss=loss, call="kwargs").step(unshifted_dict(world))
    return float(sum("batch:" in line for line in told.lines))


# ---- the model and its weights


@mistake("UserError: model: the builder raised KeyError: 'width' (")
def builder_that_raises(world: World, layout: str) -> None:
    begin(world, layout, lambda: {}["width"])


@mistake("weights differ across ranks in 6 of 6 tensors, first: 0.weight; rank 0's are used")
def unseeded_model(world: World, layout: str) -> None:
    model = net()
    torch.manual_seed(world.rank)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    begin(world, layout, model).step(share(world))


@mistake("every rank must build the same model: look for a builder that reads the rank")
def another_model_on_rank_1(world: World, layout: str) -> None:
    begin(world, layout, nn.Linear(4, 2 + world.rank)).step(share(world))


class Held(nn.Linear):
    """Holds its rows' norms down, as convolutions for EEG do."""

    how = "data"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        short = torch.renorm(self.weight.data, p=2, dim=0, maxnorm=0.3)
        if self.how == "data":
            self.weight.data = short
        else:
            with torch.no_grad():
                self.weight.copy_(short)
        return super().forward(x)


def held(how: str = "data") -> nn.Module:
    torch.manual_seed(0)
    block = nn.Sequential(Held(8, 8), nn.Tanh())
    block[0].how = how
    return nn.Sequential(nn.Linear(4, 8), block, nn.Linear(8, 2))


@mistake(
    RIGHT,
    "1.0.weight: the model's own forward pass puts it into other memory, and zero1 (dp_shard = 2) "
    "in fp32 would lose what it wrote; try: torch.nn.utils.parametrize, which",
    "1.0.weight: the model's own forward pass puts it into other memory, and fsdp (dp_shard = 2)",
    layouts=("ddp", "zero1", "fsdp"),
)
def weight_set_in_forward(world: World, layout: str) -> float:
    run = begin(world, layout, held())
    for step in range(3):
        run.step(share(world, step))
    return off_by(run, [whole(world, step) for step in range(3)], held)


@mistake(
    RIGHT,
    RIGHT,
    "1.0.weight: the model's own forward pass writes it, and fsdp (dp_shard = 2) in fp32 would",
    "1.0.weight: the model's own forward pass writes it, and tp (tp = 2) in fp32 would",
    layouts=("ddp", "zero1", "fsdp", "tp"),
)
def weight_written_in_forward(world: World, layout: str) -> float:
    run = begin(world, layout, held("copy"))
    for step in range(3):
        run.step(share(world, step))
    return off_by(run, [whole(world, step) for step in range(3)], lambda: held("copy"))


@mistake(
    "1.0.weight: the model's own forward pass writes it, and ddp (dp_replicate = 2) in bf16 would "
    "lose what it wrote; try: torch.nn.utils.parametrize, which computes a weight from the one "
    'that trains, or layout="ddp" with precision="fp32"',
    "1.0.weight: the model's own forward pass writes it, and fsdp (dp_shard = 2) in bf16",
)
def narrow_weight_written_in_forward(world: World, layout: str) -> None:
    begin(world, layout, held("copy"), precision="bf16").step(share(world))


class Short(nn.Module):
    """What may be written in the place of `Held`."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return torch.renorm(weight, p=2, dim=0, maxnorm=0.3)


def short() -> nn.Module:
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    nn.utils.parametrize.register_parametrization(block[0], "weight", Short())
    return nn.Sequential(nn.Linear(4, 8), block, nn.Linear(8, 2))


@mistake(RIGHT, layouts=("ddp", "zero1", "fsdp"))
def weight_computed_from_another(world: World, layout: str) -> float:
    """What the lines above advise."""
    run = begin(world, layout, short())
    for step in range(3):
        run.step(share(world, step))
    return off_by(run, [whole(world, step) for step in range(3)], short)


class Router(nn.Linear):
    """Computes in float32, whatever it was built in: Switch Transformers' does so."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.to(torch.float32)
        return super().forward(x.float()).to(x.dtype)


def routed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Sequential(Router(8, 8), nn.Tanh()), nn.Linear(8, 2))


@mistake(
    "1.0.weight: the model's own forward pass turns it into float32, and ddp (dp_replicate = 2) in "
    "bf16 would train on without it; try: cast values there (weight.to(torch.float32) in the "
    'place of module.to(torch.float32)), or precision="fp32"',
    "1.0.weight: the model's own forward pass turns it into float32, and fsdp (dp_shard = 2) in",
)
def router_cast_in_place(world: World, layout: str) -> None:
    begin(world, layout, routed(), precision="bf16").step(share(world))


@mistake(RIGHT)
def router_that_is_float32_already(world: World, layout: str) -> float:
    run = begin(world, layout, routed())
    run.step(share(world))
    return off_by(run, [whole(world)], routed)


class Table(nn.Module):
    """Looks rows up, and shortens those that are long."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows = nn.Embedding(32, 4, max_norm=0.5)
        self.block = nn.ModuleList([nn.Linear(4, 2)])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        for layer in self.block:
            ids = layer(self.rows(ids))
        return ids


@mistake(
    "rows.weight: max_norm shortens the rows that a pass looks up, which on 2 ranks are those",
    "rows.weight: the model's own forward pass writes it, and fsdp (dp_shard = 2) in fp32 would",
)
def table_with_a_longest_norm(world: World, layout: str) -> None:
    ids = torch.arange(32)[world.rank * 8 : world.rank * 8 + 8]
    begin(world, layout, Table()).step((ids, torch.ones(8, 2)))


@mistake("the model is in evaluation mode while it trains: dropout is off and BatchNorm frozen")
def left_in_evaluation_mode(world: World, layout: str) -> None:
    run = begin(world, layout, net(0.1))
    run.model.eval()
    run.step(share(world))


@mistake("step 1: the model is in training mode on rank 0 and in evaluation mode on rank 1")
def evaluation_mode_on_rank_1(world: World, layout: str) -> None:
    run = begin(world, layout)
    run.model.train(world.rank == 0)
    run.step(share(world))


@mistake("step 1: weights were changed beside the run on rank 0 and not on rank 1")
def weights_changed_on_rank_0(world: World, layout: str) -> None:
    run = begin(world, layout)
    if world.rank == 0:
        with torch.no_grad():
            for parameter in run.model.parameters():
                parameter.mul_(0.5)
    run.step(share(world))


@mistake("step 2: weights were changed beside the run on rank 0 and not on rank 1")
def data_changed_on_rank_0(world: World, layout: str) -> None:
    run = begin(world, layout)
    run.step(share(world))
    if world.rank == 0:
        for parameter in run.model.parameters():
            parameter.data.mul_(0.5)
    run.step(share(world, 1))


@mistake("step 1: weights on rank 1 are not those on rank 0", layouts=("ddp", "zero1"))
def noise_of_each_rank(world: World, layout: str) -> None:
    run = begin(world, layout)
    torch.manual_seed(world.rank)
    for parameter in run.model.parameters():
        parameter.data.add_(torch.randn_like(parameter))
    run.step(share(world))


@mistake(RIGHT, layouts=("ddp", "zero1"))
def the_same_change_on_all(world: World, layout: str) -> float:
    """No mistake: weights are clipped, as in a Wasserstein GAN."""
    run = begin(world, layout)
    run.step(share(world))
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.clamp_(-0.1, 0.1)
    run.step(share(world, 1))
    told = [float(p.detach().abs().max()) for p in run.model.parameters()]
    return max(0.0, max(told) - 0.2)


@mistake("step 1: weights were changed beside the run on rank 0 and not on rank 1",
         "model.load_state_dict(…): this rank holds a part of 0.weight only (layout")  # fmt: skip
def loaded_on_rank_0(world: World, layout: str) -> None:
    run = begin(world, layout)
    if world.rank == 0 or layout == "fsdp":
        run.model.load_state_dict({n: v / 2 for n, v in net().state_dict().items()})
    run.step(share(world))


@mistake(RIGHT, "try: run.state_dict(), called on every rank",
         "holds a part of 0.weight only (layout zero1 (dp_shard = 2) in bf16)",
         layouts=("ddp", "fsdp", "zero1"))  # fmt: skip
def state_dict_in_bf16(world: World, layout: str) -> float:
    run = begin(world, layout, precision="bf16")
    run.step(share(world))
    mine, all_of_it = run.model.state_dict(), run.state_dict()
    same = all(torch.equal(mine[name], all_of_it[name]) for name in all_of_it)
    plain = net()
    plain.load_state_dict(mine)
    rounded = all(torch.equal(p, p.bfloat16().float()) for p in plain.parameters())
    return float(not same or rounded)


@mistake(RIGHT, layouts=("ddp", "zero2", "fsdp", "tp"))
def whole_state_of_tied_weights(world: World, layout: str) -> float:
    """`run.state_dict()`: the module's own names, in its order, tied once, to the bit."""
    plain = cases.build("gpt").state_dict()
    ids = torch.arange(48).view(4, 12)
    run = begin(
        world, layout, cases.build("gpt"), lambda p: torch.optim.SGD(p, lr=0.0), None,
        precision="bf16", sample=(ids, ids.flip(1)),
    )  # fmt: skip
    got = run.state_dict()
    tied = got["head.weight"] is got["tokens.weight"]
    same = list(got) == list(plain) and all(torch.equal(got[n], plain[n]) for n in plain)
    return float(not (tied and same))


@mistake(RIGHT, layouts=("ddp",))
def average_of_a_bf16_model(world: World, layout: str) -> float:
    """No mistake: a copy of the model has weights of its own, also in its state dict."""
    run = begin(world, layout, precision="bf16")
    average = copy.deepcopy(run.model)
    run.step(share(world))
    with torch.no_grad():
        for parameter in average.parameters():
            parameter.fill_(3.0)
    return max(float((v - 3).abs().max()) for v in average.state_dict().values())


@mistake("was changed beside the run, but it is a bf16 copy", layouts=("ddp",))
def bf16_copy_changed(world: World, layout: str) -> None:
    run = begin(world, layout, precision="bf16")
    with torch.no_grad():
        run.model[0].weight.mul_(0.5)
    run.step(share(world))


@mistake(RIGHT)
def own_part_in_steps(world: World, layout: str) -> float:
    """No mistake: the loader of `run.steps` holds what this rank was dealt."""
    run = begin(world, layout)
    part = Subset(DATA, range(world.rank, 32, world.size))
    for _ in run.steps(DataLoader(part, batch_size=16, shuffle=True)):
        pass
    return off_by(run, [(X, Y)])


@mistake(RIGHT)
def wrapped_in_ddp_before(world: World, layout: str) -> float:
    model = net()
    run = begin(world, layout, DistributedDataParallel(model), sgd(model.parameters()))
    run.step(share(world))
    return off_by(run, [whole(world)])


# ---- the optimizer and gradients


@mistake("PlanError: optimizer: parameter 0 of group 0, shape [8, 4], is not in the model")
def optimizer_of_another_model(world: World, layout: str) -> None:
    begin(world, layout, net(), sgd(net().parameters())).step(share(world))


@mistake("optimizer.step() was called beside the run: each rank would step on its own samples'")
def own_backward_and_step(world: World, layout: str) -> None:
    model = net()
    optimizer = sgd(model.parameters())
    run = begin(world, layout, model, optimizer)
    inputs, targets = share(world)
    squares(run.model(inputs), targets).mean().backward()
    optimizer.step()


@mistake("optimizer.step() was called beside the run")
def half_of_ours_half_of_theirs(world: World, layout: str) -> None:
    run = begin(world, layout)
    run.forward_backward(share(world))
    run.optimizer.step()


@mistake("optimizer.step() was called beside the run")
def own_gradient_scaler(world: World, layout: str) -> None:
    run = begin(world, layout)
    scaler = torch.amp.GradScaler("cpu")
    run.forward_backward(share(world))
    scaler.scale(torch.ones(()))
    scaler.step(run.optimizer)


@mistake(
    "gradients were changed beside the run (by loss.backward(), or by clipping after run.step)"
)
def own_backward_that_is_lost(world: World, layout: str) -> None:
    run = begin(world, layout)
    inputs, targets = share(world)
    squares(run.model(inputs), targets).mean().backward()
    run.step((inputs, targets))


@mistake("gradients were changed beside the run", layouts=("ddp",))
def clipped_after_the_step(world: World, layout: str) -> None:
    run = begin(world, layout)
    run.step(share(world))
    nn.utils.clip_grad_norm_(run.model.parameters(), 0.001)
    run.step(share(world, 1))


@mistake(RIGHT)
def own_zero_grad(world: World, layout: str) -> float:
    run = begin(world, layout)
    for step in range(3):
        run.optimizer.zero_grad()
        run.step(share(world, step))
        run.model.zero_grad(set_to_none=step == 1)
    return off_by(run, [whole(world, step) for step in range(3)])


@mistake(RIGHT)
def same_batch_twice(world: World, layout: str) -> float:
    run = begin(world, layout)
    for _ in range(2):
        run.step(share(world))
    return off_by(run, [whole(world)] * 2)


@mistake("run.update was called before run.forward_backward")
def update_after_step(world: World, layout: str) -> None:
    run = begin(world, layout)
    run.step(share(world))
    run.update()


@mistake("run.forward_backward was called twice without run.update between")
def accumulated_by_hand(world: World, layout: str) -> None:
    run = begin(world, layout)
    run.forward_backward(share(world, 0))
    run.forward_backward(share(world, 1))


@mistake("optimizer: the learning rate is 0.1 on rank 0, 0.01 on rank 1")
def scheduler_of_a_rank(world: World, layout: str) -> None:
    run = begin(world, layout)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(run.optimizer, patience=0)
    for own_loss in (1.0, 0.5 + world.rank):
        plateau.step(own_loss)
    run.step(share(world))


@mistake(RIGHT)
def scheduler_of_all(world: World, layout: str) -> float:
    run = begin(world, layout, optimizer=lambda p: torch.optim.SGD(p, lr=0.2))
    scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, 1, gamma=0.5)
    scheduler.step()
    run.step(share(world))
    return off_by(run, [whole(world)])


@mistake("optimizer: lr was set to 5 beside the run, which sets it by schedule = cosine")
def two_schedules(world: World, layout: str) -> None:
    run = begin(world, layout, schedule=shoal.OptimizerPolicy(schedule="cosine"), total_steps=9)
    run.step(share(world))
    run.optimizer.param_groups[0]["lr"] = 5.0
    run.step(share(world, 1))


@mistake("0.weight was frozen when shoal.parallelize was called and trains now", layouts=("ddp",))
def unfrozen_later(world: World, layout: str) -> None:
    model = net()
    model[0].weight.requires_grad_(False)
    run = begin(world, layout, model)
    model[0].weight.requires_grad_(True)
    run.step(share(world))


@mistake("shoal.parallelize has no argument batch_size; try: batch")
def unknown_argument(world: World, layout: str) -> None:
    begin(world, layout, batch_size=8)


@mistake("loss returned one number without a count")
def metric_that_is_a_mean(world: World, layout: str) -> None:
    begin(world, layout, loss=F.mse_loss).evaluate([share(world)])


@mistake("shoal.parallelize: seed is 0 on rank 0 and 1 on rank 1; every rank must say the same")
def seed_of_the_rank(world: World, layout: str) -> None:
    begin(world, layout, seed=world.rank)


@mistake("shoal.parallelize: optimizer group 0: weight_decay is 0 on rank 0 and 1 on rank 1")
def weight_decay_of_the_rank(world: World, layout: str) -> None:
    begin(world, layout, optimizer=lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=world.rank))


@mistake("model: 6 of 6 trainable tensors are bfloat16, first: 0.weight; updates smaller than")
def narrow_model(world: World, layout: str) -> None:
    run = begin(world, layout, net().bfloat16())
    inputs, targets = share(world)
    run.step((inputs.bfloat16(), targets.bfloat16()))


@mistake("0.weight lies in other memory than when shoal.parallelize was called",
         layouts=("ddp", "zero1"))  # fmt: skip
def made_narrow_later(world: World, layout: str) -> None:
    run = begin(world, layout)
    run.model.half()
    inputs, targets = share(world)
    run.step((inputs.half(), targets.half()))


@mistake("step 1: ranks train unlike numbers of parameters (5, 6 by rank)", layouts=("ddp",))
def frozen_on_rank_0(world: World, layout: str) -> None:
    run = begin(world, layout)
    next(run.model.parameters()).requires_grad_(world.rank > 0)
    run.step(share(world))


@mistake(RIGHT)
def frozen_later_on_all(world: World, layout: str) -> float:
    """No mistake: the first layer stays as it is from here on."""
    run = begin(world, layout)
    before = run.state_dict()["0.weight"].clone()
    next(run.model.parameters()).requires_grad_(False)
    run.step(share(world))
    return float((run.state_dict()["0.weight"] - before).abs().max())


def ends_with(act: Callable[[], Any]) -> None:
    """An error on one rank ends its process, as it does in a script; the others lose their peer."""
    try:
        act()
    except ShoalError as failure:
        sys.stderr.write(f"shoal: {failure}\n")
        sys.stderr.flush()
        phases.page.close()  # as a script does that ends with an error
        os._exit(failure.exit_code)


# ---- calls that not all ranks make: without a watch they wait for ever


@mistake(RIGHT, layouts=("ddp",))
def forward_on_rank_0_is_well(world: World, layout: str) -> float:
    run = begin(world, layout)
    run.step(share(world))
    if world.rank == 0:
        run.model(X)
    run.step(share(world, 1))
    return off_by(run, [whole(world, 0), whole(world, 1)])


@mistake("ranks wait for each other: rank 0 called run.model(…) (",
         layouts=("fsdp",), hangs=True)  # fmt: skip
def forward_on_rank_0(world: World, layout: str) -> None:
    run = begin(world, layout)
    run.step(share(world))
    if world.rank == 0:
        run.model(X)
    run.step(share(world, 1))


@mistake("requires_grad_() was called on some ranks only", layouts=("fsdp",), hangs=True)
def frozen_on_rank_0_of_shards(world: World, layout: str) -> None:
    run = begin(world, layout)
    next(run.model.parameters()).requires_grad_(world.rank > 0)
    if world.rank == 0:
        ends_with(lambda: run.step(share(world)))
    run.step(share(world))


@mistake("rank 0 called run.save (", hangs=True)
def saved_on_rank_0(world: World, layout: str) -> None:
    run = begin(world, layout)
    run.step(share(world))
    if world.rank == 0:
        run.save("never")
    run.step(share(world, 1))


@mistake("rank 0 called run.evaluate (", hangs=True)
def evaluated_on_rank_0(world: World, layout: str) -> None:
    run = begin(world, layout)
    if world.rank == 0:
        run.evaluate([share(world)])
    run.step(share(world, 1))


@mistake("rank 0 called run.step (", hangs=True)
def one_batch_more_on_rank_0(world: World, layout: str) -> None:
    run = begin(world, layout)
    for step in range(3 - world.rank):
        run.step(share(world, step))
    run.close()


def written_out(run: Any, batch: Any, backwards: int) -> None:
    """A step with its passes written out, and so many backward passes in each."""
    for micro in run.micro_batches(batch):
        loss = ((run.model(micro.inputs) - micro.targets) ** 2).sum()
        for _ in range(backwards):
            run.backward(loss, len(micro.targets), retain_graph=True)
    run.update()


@mistake("rank 0 called run.backward (", layouts=("fsdp",), hangs=True)
def backward_left_out_on_rank_1(world: World, layout: str) -> None:
    written_out(begin(world, layout), share(world), 1 - world.rank)


@mistake("rank 0 called run.backward (", layouts=("fsdp",), hangs=True)
def backward_doubled_on_rank_0(world: World, layout: str) -> None:
    written_out(begin(world, layout), share(world), 2 - world.rank)


@mistake("rank 0 called torch.distributed.barrier (", hangs=True)
def own_barrier_on_rank_0(world: World, layout: str) -> None:
    run = begin(world, layout)
    run.step(share(world))
    if world.rank == 0:
        torch.distributed.barrier()
    run.step(share(world, 1))


@mistake(
    "PlanError: loss: it computes with 2.0.weight, and under fsdp (dp_shard = 2) a rank holds parts",
    "PlanError: loss: it computes with ",
    layouts=("fsdp", "tp"),
)
def penalty_on_weights(world: World, layout: str) -> None:
    """Under tp it was a sum over parts, without a line; ddp and zero compute it right."""
    model = net()
    penalty = lambda: sum(p.pow(2).sum() for p in model.parameters())  # noqa: E731
    loss = lambda o, t: (squares(o, t).sum() + len(t) * penalty(), len(t))  # noqa: E731
    batch = share(world) if layout == "fsdp" else (X, Y)
    begin(world, layout, model, loss=loss).step(batch)


class Pair(nn.Module):
    """Two blocks of one class; a hook inside of the second changes what it gives."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks = (nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)) for _ in range(2))
        self.blocks, self.out = nn.ModuleList(blocks), nn.Linear(4, 2)
        self.blocks[1][0].register_forward_hook(lambda module, inputs, outputs: 2.0 * outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.out(x)


@mistake(RIGHT, layouts=("ddp", "fsdp", "tp", "pp"))
def hook_that_changes_an_output(world: World, layout: str) -> float:
    """Under tp equal blocks share a graph, which had no hook."""
    run = begin(world, layout, Pair(), micro_batch=8)
    divided = layout in ("tp", "pp")
    for step in range(3):
        run.step(whole(world, step) if divided else share(world, step))
    return off_by(run, [whole(world, step) for step in range(3)], Pair)


@mistake(
    RIGHT,
    RIGHT,
    "PlanError: nothing of Pair can be split over layout.tp = 2: blocks.0 stays",
    layouts=("ddp", "fsdp", "tp"),
)
def feature_kept_by_a_hook(world: World, layout: str) -> float:
    """A loss on what a hook kept of a layer inside of a block, as perceptual losses have it."""
    kept: dict[str, torch.Tensor] = {}

    def build() -> nn.Module:
        model = Pair()
        model.blocks[0][0].register_forward_hook(
            lambda layer, inputs, output: kept.update(one=output)
        )
        return model

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return ((outputs - targets) ** 2).sum(1) + kept["one"].square().sum(1)

    run = begin(world, layout, build(), micro_batch=8, loss=loss)
    for step in range(2):
        run.step(whole(world, step) if layout == "tp" else share(world, step))
    plain = build()
    optimizer = sgd(plain.parameters())
    for step in range(2):
        optimizer.zero_grad()
        inputs, targets = whole(world, step)
        loss(plain(inputs), targets).mean().backward()
        optimizer.step()
    right, got = plain.state_dict(), run.state_dict()
    return max(float((got[name] - right[name]).abs().max()) for name in right)


class Remembering(nn.Module):
    """Keeps its last hidden state in a plain attribute, as examples of stateful recurrence do."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRUCell(4, 8), nn.Linear(8, 2)
        self.state: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = self.rnn(x, self.state)
        self.state = state.detach()
        return self.head(state)


@mistake("model: state is computed in one pass and read in the next: every rank carries its own")
def state_from_batch_to_batch(world: World, layout: str) -> None:
    """Right as a stream per rank, otherwise other numbers in every layout."""
    run = begin(world, layout, Remembering())
    for step in range(2):
        run.step(share(world, step))


# ---- a model that becomes another one beside the run

REPLACED = "ConfigError: model: 3.weight was replaced since shoal.parallelize was called"


@mistake(REPLACED, layouts=("ddp", "zero2", "fsdp"))
def layer_replaced_later(world: World, layout: str) -> None:
    """It trained on with a layer that nothing steps."""
    run = begin(world, layout)
    run.model[3] = nn.Linear(8, 2)
    run.step(share(world))


@mistake("ConfigError: model: 2.weight was replaced", layouts=("ddp",))
def tied_later(world: World, layout: str) -> None:
    torch.manual_seed(0)
    run = begin(world, layout, nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)))
    run.model[2].weight = run.model[0].weight
    run.step(share(world))


@mistake("ConfigError: model: 4.weight is new since shoal.parallelize was called")
def layer_added_later(world: World, layout: str) -> None:
    run = begin(world, layout)
    run.model.append(nn.Linear(2, 2))
    run.step(share(world))


@mistake("ConfigError: model: 3.weight is gone since", layouts=("ddp",))
def layer_removed_between_steps(world: World, layout: str) -> None:
    run = begin(world, layout)
    run.step(share(world))
    run.model[3] = nn.Identity()
    run.step(share(world, 1))


@mistake("shoal.parallelize: loss is squares (mistakes.py:")
def loss_of_the_rank(world: World, layout: str) -> None:
    begin(world, layout, loss=squares if world.rank == 0 else lambda o, t: (o - t).abs())


# ---- hooks on gradients

SEES = "model: 1 weight with a gradient hook, first 3.weight: it sees sums over the targets of one"
LOST = (
    "model: 3.weight has a gradient hook (register_hook), and under {} the gradient goes to a part"
)


@mistake(SEES, SEES, LOST.format("fsdp (dp_shard = 2)"), layouts=("ddp", "zero2", "fsdp"))
def gradient_clamped_by_a_hook(world: World, layout: str) -> None:
    model = net()
    model[3].weight.register_hook(lambda gradient: gradient.clamp(-1, 1))
    begin(world, layout, model).step(share(world))


@mistake(".weight has a gradient hook (register_hook), and under tp (tp = 2)", layouts=("tp",))
def hook_on_a_weight_that_is_cut(world: World, layout: str) -> None:
    model = net()
    for weight in model.parameters():
        weight.register_hook(lambda gradient: gradient.clamp(-1, 1))
    begin(world, layout, model)


@mistake(SEES, LOST.format("fsdp (dp_shard = 2)"))
def hook_on_the_runs_weight(world: World, layout: str) -> None:
    run = begin(world, layout)
    run.model[3].weight.register_hook(lambda gradient: gradient.clamp(-1, 1))
    run.step(share(world))


def half(module: nn.Module) -> nn.Module:
    module[3].weight.register_hook(lambda gradient: 0.5 * gradient)
    return module


@mistake(RIGHT, layouts=("ddp", "zero1", "zero2"))
def factor_by_a_hook(world: World, layout: str) -> float:
    run = begin(world, layout, half(net()))
    for step in range(3):
        run.step(share(world, step))
    return off_by(run, [whole(world, step) for step in range(3)], lambda: half(net()))


# ---- what a reader tried


@mistake("model: layer 1 is Dropout(p=0.1, inplace=False) on rank 0, and 1 is Dropout(p=0.3")
def dropout_of_the_rank(world: World, layout: str) -> None:
    begin(world, layout, net(0.1 + 0.2 * world.rank))


@mistake("step 2: the model changed: layer 1 is Dropout(p=0.1, inplace=False) on rank 0, and 1 is ")
def dropout_changed_on_rank_1(world: World, layout: str) -> None:
    run = begin(world, layout, net(0.1))
    run.step(share(world))
    if world.rank == 1:
        run.model[1].p = 0.3
    run.step(share(world, 1))


@mistake("model: a run trains it already, and two would both sum its gradients; try: run.close")
def parallelized_twice(world: World, layout: str) -> None:
    model = net()
    first = begin(world, layout, model)
    first.step(share(world))
    begin(world, layout, model)


@mistake(RIGHT)
def compiled_before(world: World, layout: str) -> float:
    run = begin(world, layout, torch.compile(net(), backend="eager"))
    run.step(share(world))
    return off_by(run, [whole(world)])


@mistake("model: 0.weight has no shape yet, its layer is a lazy one; try: one forward pass")
def lazy_layers(world: World, layout: str) -> None:
    begin(world, layout, nn.Sequential(nn.LazyLinear(8), nn.LazyLinear(2)))


@mistake("model: 0.weight is on the meta device and has no values; try: a function that builds")
def built_on_meta(world: World, layout: str) -> None:
    with torch.device("meta"):
        model = net()
    begin(world, layout, model)


@mistake(RIGHT, "optimizer.load_state_dict(…): this rank steps a part of the weights only (layout "
         "fsdp (dp_shard = 2)); try: load before shoal.parallelize, or run.restore()",
         "optimizer.load_state_dict(…): this rank steps a part of the weights only (layout zero1",
         layouts=("ddp", "fsdp", "zero1"))  # fmt: skip
def optimizer_state_loaded_late(world: World, layout: str) -> float:
    model = net()
    plain = torch.optim.AdamW(model.parameters())
    squares(model(X), Y).mean().backward()
    plain.step()
    run = begin(world, layout, optimizer=torch.optim.AdamW)
    run.optimizer.load_state_dict(plain.state_dict())
    moments = [state["exp_avg"] for state in run.optimizer.state.values()]
    before = [state["exp_avg"] for state in plain.state.values()]
    return max(float((a - b).abs().max()) for a, b in zip(moments, before, strict=True))


@mistake(RIGHT)
def optimizer_state_loaded_before(world: World, layout: str) -> float:
    """No mistake: moments that an optimizer has already go with the weights."""
    model, same = net(), net()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, same)]
    for one, optimizer in zip((model, same), optimizers, strict=True):
        squares(one(X), Y).mean().backward()
        optimizer.step()
    run = begin(world, layout, model, optimizers[0])
    run.step(share(world))
    optimizers[1].zero_grad()
    inputs, targets = whole(world)
    squares(same(inputs), targets).mean().backward()
    optimizers[1].step()
    got, plain = run.state_dict(), same.state_dict()
    return max(float((got[name] - plain[name]).abs().max()) for name in plain)


@mistake("loss: calls torch.distributed.all_reduce; the run sums what it returns over all ranks")
def count_summed_in_the_loss(world: World, layout: str) -> None:
    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> Any:
        values = squares(outputs, targets)
        count = torch.tensor(float(values.numel()))
        torch.distributed.all_reduce(count)
        return values.sum(), count

    begin(world, layout, loss=loss).step(share(world))


@mistake("loss: calls torch.distributed.get_world_size; the run sums")
def loss_divided_by_ranks(world: World, layout: str) -> None:
    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return squares(outputs, targets) / torch.distributed.get_world_size()

    begin(world, layout, loss=loss).step(share(world))


@mistake("optimizer: the learning rate is 0.5 on rank 0, 0.1 on rank 1")
def rate_set_on_rank_0(world: World, layout: str) -> None:
    run = begin(world, layout)
    run.step(share(world))
    if world.rank == 0:
        run.optimizer.param_groups[0]["lr"] = 0.5
    run.step(share(world, 1))


@mistake("every rank must give the same dataset, which run.loader splits over ranks; try: one seed")
def files_listed_in_other_order(world: World, layout: str) -> None:
    order = torch.randperm(32, generator=torch.Generator().manual_seed(world.rank))
    run = begin(world, layout, batch=8)
    for batch in run.loader(TensorDataset(X[order], Y[order])):
        run.step(batch)


class Masked(nn.Module):
    """Hides inputs by a mask out of numpy, as speech models do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.as_tensor(np.random.rand(*x.shape) < 0.5)
        return self.net(x.masked_fill(hidden, 0.0))


@mistake(RIGHT)
def mask_out_of_numpy(world: World, layout: str) -> float:
    """No mistake: each micro-batch draws the same mask whatever came before on its rank."""
    losses = []
    for before in (0, 1 + world.rank):
        np.random.seed(before)
        run = begin(world, layout, Masked())
        losses.append(run.step(share(world)).loss)
        np.random.rand(before)
    return abs(losses[0] - losses[1])


class Settling(nn.Module):
    """Settles what it is made of in its first call, as BigBird does."""

    def __init__(self) -> None:
        super().__init__()
        self.draft, self.net = nn.Linear(4, 4), net(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(self.draft, nn.Linear):
            weights, self.draft = self.draft, nn.Sequential(nn.Linear(4, 4))
            self.draft[0] = weights
        return self.net(self.draft(x))


@mistake("draft: the model's first forward pass replaces this Linear, so ranks would not compute")
def modules_replaced_in_the_first_call(world: World, layout: str) -> None:
    begin(world, layout, Settling()).step(share(world))
