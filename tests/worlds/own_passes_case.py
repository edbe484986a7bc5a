"""Steps in a loop of the user's own: forward and losses written out, on ranks and in plain torch."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn import functional

from shoal.base.errors import ShoalError
from shoal.fabric import World
from shoal.models.catalog import build
from shoal.models.loss import token_loss
from shoal.parallel import compiling
from shoal.trainer.parallelize import parallelize
from shoal.trainer.run import Run

SAMPLES, BATCH, MICRO_BATCH, STEPS = 22, 8, 2, 5
IGNORED = -100


class Tagger(nn.Module):
    """Tokens to classes, and to a number each; the embedding is tied to one head."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.table = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
            for _ in range(2)
        )
        self.classes = nn.Linear(8, 16, bias=False)
        self.classes.weight = self.table.weight
        self.number = nn.Linear(8, 1)
        self.number.bias.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.table(tokens)
        for layer in self.layers:
            hidden = hidden + self.dropout(layer(hidden))
        return self.classes(hidden), self.number(hidden).squeeze(-1)


def model(dropout: float = 0.0) -> Tagger:
    torch.manual_seed(0)
    return Tagger(dropout).double()


def samples() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Tokens [6], and classes of some of them: unequal counts, here and there none."""
    drawn = torch.Generator().manual_seed(1)
    tokens = torch.randint(16, (SAMPLES, 6), generator=drawn)
    targets = torch.randint(16, (SAMPLES, 6), generator=drawn)
    targets[torch.rand(targets.shape, generator=drawn) < 0.4] = IGNORED
    return list(zip(tokens, targets, strict=True))


def classes_sum(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    """Cross-entropy, summed over targets."""
    logits = outputs[0]
    return functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )


def numbers_sum(outputs: Any) -> torch.Tensor:
    """Squares of every number: its count is all tokens."""
    return outputs[1].square().sum()


def counted(targets: torch.Tensor) -> torch.Tensor:
    """Targets that are not ignored."""
    return (targets != IGNORED).sum()


def step(run: Run, batch: Any, how: str) -> Any:
    """One optimizer step, the loop written out."""
    own = [targets for _, targets in batch.values]
    if how == "two counts":
        classes = run.total(sum(int(counted(t)) for t in own))
        numbers = run.total(sum(t.numel() for t in own))
    for micro in run.micro_batches(batch):
        outputs = run.model(micro.inputs)
        one, other = classes_sum(outputs, micro.targets), numbers_sum(outputs)
        if how == "one loss":
            run.backward(one + other, counted(micro.targets))
        elif how == "two losses":
            run.backward(one, counted(micro.targets), retain_graph=True)
            run.backward(other, counted(micro.targets))
        elif how == "penalty":
            (slope,) = torch.autograd.grad(other, run.model.number.weight, create_graph=True)
            run.backward(one + slope.square().sum(), counted(micro.targets))
        elif how == "two passes":
            run.backward(one, counted(micro.targets))
            run.backward(numbers_sum(run.model(micro.inputs)))
        else:
            run.backward(one / classes + other / numbers)
    return run.update()


def opened(world: World, layout: Any, dropout: float = 0.0, **settings: Any) -> Run:
    tokens, targets = zip(*samples()[:2], strict=True)
    return parallelize(
        (lambda: model(dropout).float()) if "precision" in settings else lambda: model(dropout),
        lambda p: torch.optim.AdamW(p, lr=1e-2),
        lambda outputs, targets: (
            classes_sum(outputs, targets) + numbers_sum(outputs),
            counted(targets),
        ),
        layout=layout,
        batch=BATCH,
        micro_batch=MICRO_BATCH,
        clip=0.5,
        seed=3,
        sample=(torch.stack(tokens), torch.stack(targets)),
        world=world,
        **settings,
    )


def trained(world: World, layout: Any, how: str, **settings: Any) -> dict[str, Any]:
    """Losses of the steps, and the weights after them."""
    run = opened(world, layout, **settings)
    losses: list[float] = []
    while len(losses) < STEPS:
        for batch in run.loader(samples()):
            done = run.step(batch) if how == "step" else step(run, batch, how)
            losses.append(done.loss)
            if len(losses) == STEPS:
                break
    weights = {name: tensor.tolist() for name, tensor in run.state_dict().items()}
    end(run)
    return {"losses": losses, "weights": weights}


def sequences(world: World, name: str, layout: Any, how: str, **settings: Any) -> list[float]:
    """Losses of three steps of one of our models on tokens, which ranks share under cp."""
    options = {"dim": 16, "layers": 2, "heads": 4}
    options |= {"experts": 4, "hidden": 12} if name == "moe" else {}
    drawn = torch.Generator().manual_seed(2)
    tokens = torch.randint(61, (12, 17), generator=drawn)
    pairs = [(one[:-1], one[1:].clone()) for one in tokens]
    for number, (_, targets) in enumerate(pairs):
        targets[: number % 5] = IGNORED
    run = parallelize(
        lambda: build(name, options, vocabulary=61, sequence=16).double(),
        lambda p: torch.optim.AdamW(p, lr=1e-2),
        token_loss,
        layout=layout,
        batch=4,
        micro_batch=1,
        sample=(torch.stack([pairs[0][0]]), torch.stack([pairs[0][1]])),
        world=world,
        **settings,
    )
    losses = []
    for batch in run.loader(pairs):
        if how == "step":
            losses.append(run.step(batch).loss)
            continue
        for micro in run.micro_batches(batch):
            outputs = run.model(micro.inputs)
            with mock.patch.object(torch.Tensor, "new_empty", _new_without_numbers):
                run.backward(*token_loss(outputs, micro.targets))
        losses.append(run.update().loss)
    end(run)
    return losses


def _new_without_numbers(tensor: torch.Tensor, *size: Any, **kind: Any) -> torch.Tensor:
    """Return what new_empty may: memory that an earlier tensor has left."""
    return tensor.new_full(size, torch.nan, **kind)


def plain(world: World, how: str) -> dict[str, Any]:
    """The same in plain torch, a step's samples at once."""
    run = opened(world, "single")
    own = model()
    optimizer = torch.optim.AdamW([p for p in own.parameters() if p.requires_grad], lr=1e-2)
    losses: list[float] = []
    while len(losses) < STEPS:
        for batch in run.loader(samples()):
            loss = whole(own, batch.values, how)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(own.parameters(), 0.5)
            optimizer.step()
            losses.append(loss.item())
            if len(losses) == STEPS:
                break
    end(run)
    return {"losses": losses, "weights": {n: t.tolist() for n, t in own.state_dict().items()}}


def whole(own: Tagger, values: list[Any], how: str) -> torch.Tensor:
    """The loss of a step by its definition: of all samples at once, slopes by micro-batch."""
    tokens, targets = (torch.cat(part) for part in zip(*values, strict=True))
    outputs = own(tokens)
    classes = classes_sum(outputs, targets) / counted(targets)
    if how == "penalty":
        slopes = [
            torch.autograd.grad(numbers_sum(own(some)), own.number.weight, create_graph=True)[0]
            for some, _ in values
        ]
        return classes + sum(slope.square().sum() for slope in slopes) / counted(targets)
    count = targets.numel() if how == "two counts" else counted(targets)
    return classes + numbers_sum(outputs) / count


def with_penalty(run: Run, outputs: Any, targets: torch.Tensor) -> Any:
    """A loss that differentiates through the model."""
    weight = run.model.number.weight
    (slope,) = torch.autograd.grad(numbers_sum(outputs), weight, create_graph=True)
    return classes_sum(outputs, targets) + slope.square().sum(), counted(targets)


def by_outputs(outputs: Any, targets: torch.Tensor) -> Any:
    """A loss that differentiates itself by the outputs."""
    total = numbers_sum(outputs)
    (slope,) = torch.autograd.grad(total, outputs[1], create_graph=True)
    return classes_sum(outputs, targets) + slope.square().sum(), counted(targets)


def end(run: Run) -> None:
    """Close a run whose world goes on."""
    for undo in run.program.on_close:
        undo()


def told(world: World, layout: Any, mistake: str, **settings: Any) -> str:
    """What a mistake is answered with, by this rank; blocks are traced as ever, to slow code."""
    quick = partial(torch.compile, backend="aot_eager")  # Inductor's takes 30 CPU-s
    with mock.patch.object(compiling, "_compile", quick):
        return _told(opened(world, layout, **settings), world, mistake)


def _told(run: Run, world: World, mistake: str) -> str:
    batch = next(iter(run.loader(samples())))
    first = True
    try:
        if mistake == "penalty":
            return f"loss {step(run, batch, 'penalty').loss:.6f}"
        if mistake == "penalty in the loss":
            run.loss = partial(with_penalty, run)
            return f"loss {run.step(batch).loss:.6f}"
        if mistake == "by outputs":  # nothing of a layout lies between
            run.loss = by_outputs
            return f"loss {run.step(batch).loss:.6f}"
        if mistake == "outside":
            run.backward(torch.ones((), requires_grad=True), 1)
        for micro in run.micro_batches(batch):
            outputs = run.model(micro.inputs)
            loss, count = classes_sum(outputs, micro.targets), counted(micro.targets)
            wrong = first and world.rank == world.size - 1
            if mistake == "dims":
                loss = loss.reshape(1)
            elif mistake == "mean":
                loss = functional.cross_entropy(outputs[0].flatten(0, 1), micro.targets.flatten())
            elif mistake == "detached":
                loss = loss.detach()
            if mistake == "two counts":
                run.backward(loss, count, retain_graph=True)
                run.backward(loss, count + 1)
            elif mistake == "mixed":
                run.backward(loss, count if first else None)
            elif not (mistake == "never" or (mistake == "left out" and wrong)):
                run.backward(loss, count, retain_graph=True)
            if mistake in ("doubled", "doubled everywhere") and (wrong or mistake != "doubled"):
                run.backward(loss, count)
            first = False
            if mistake == "break":
                break
        return f"loss {run.update().loss:.6f}"
    except ShoalError as error:
        return str(error)
    finally:
        end(run)
