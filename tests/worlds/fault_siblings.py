"""Further examples of the faults in `loop_faults.py`: other ways to make the same mistake.

Each is tried by `make proof PART=faults`. Add yours below, as there: named, or right.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import loop_faults
from loop_faults import CHANGED, DROPPED, FOUR, SILENT, WRITTEN, Branch, fault, part, passes
from mistakes import DATA, begin, net, off_by, sgd, whole
from shoal.fabric import World
from shoal.planning.micro_batch_sizes import with_micro_batch
from shoal.trainer.autotune.share_fits import MicroBatchChooser, set_micro_batch
from shoal.trainer.run import Run

FIRST = len(loop_faults.ROWS)
attempt = loop_faults.attempt


def held(run: Any) -> list[torch.Tensor]:
    return [p.grad for p in run.model.parameters() if p.grad is not None]


# ---- A5: gradients changed between run.backward and run.update


@fault(CHANGED, proof=FOUR)
def multiplied_together(world: World, layout: str) -> None:
    run = begin(world, layout)
    passes(run, part(world, layout), inside=lambda: torch._foreach_mul_(held(run), 0.5))


@fault(CHANGED, proof=FOUR)
def divided_by_the_world(world: World, layout: str) -> None:
    """As scripts average by hand."""
    run = begin(world, layout)

    def divide() -> None:
        for p in run.model.parameters():
            if p.grad is not None:
                p.grad /= 2

    passes(run, part(world, layout), inside=divide)


@fault("ConfigError: step 1: gradients were ", proof=FOUR)
def another_gradient_put_in(world: World, layout: str) -> None:
    run = begin(world, layout)

    def put() -> None:
        for p in run.model.parameters():
            if p.grad is not None:
                p.grad = p.grad.clamp(-0.01, 0.01)

    passes(run, part(world, layout), inside=put)


@fault(CHANGED, proof=FOUR)
def centred(world: World, layout: str) -> None:
    """Gradient centralization: every row's mean is taken off."""
    run = begin(world, layout)

    def centre() -> None:
        for gradient in held(run):
            if gradient.dim() > 1:
                gradient.sub_(gradient.mean(1, keepdim=True))

    passes(run, part(world, layout), inside=centre)


@fault(CHANGED, proof=("ddp", "zero1", "zero2", "tp"))
def no_gradient_that_is_not_finite(world: World, layout: str) -> None:
    """Under fsdp torch writes through a copy, and finite numbers stay what they are."""
    run = begin(world, layout)

    def mend() -> None:
        for gradient in held(run):
            torch.nan_to_num(gradient, out=gradient)

    passes(run, part(world, layout), inside=mend)


@fault(f"ConfigError: step 1: clip_grads_with_norm_ was called {WRITTEN}", proof=FOUR)
def clipped_with_a_norm(world: World, layout: str) -> None:
    run = begin(world, layout)

    def clip() -> None:
        weights = list(run.model.parameters())
        norm = nn.utils.get_total_norm(held(run)) if held(run) else torch.tensor(9.0)
        nn.utils.clip_grads_with_norm_(weights, 1e-3, norm)

    passes(run, part(world, layout), inside=clip)


@fault(CHANGED, proof=FOUR)
def clipped_in_the_middle(world: World, layout: str) -> None:
    """Between two micro-batches, one layer alone."""
    run = begin(world, layout, micro_batch=4)
    calls: list[int] = []

    def clip() -> None:
        calls.append(1)
        weight = run.model[3].weight
        if len(calls) == 1 and weight.grad is not None:
            weight.grad.mul_(0.1)

    passes(run, part(world, layout), inside=clip)


# ---- A4c: gradients dropped before the update


@fault(f"ConfigError: step 1: {DROPPED}", proof=("ddp", "single", "tp"))
def zeroed_one_by_one(world: World, layout: str) -> None:
    run = begin(world, layout)
    run.forward_backward(part(world, layout))
    for parameter in run.model.parameters():
        parameter.grad.zero_()
    run.update()


@fault(f"ConfigError: step 1: {DROPPED}", proof=("zero1", "zero2", "fsdp", "pp"))
def zeroed_together(world: World, layout: str) -> None:
    run = begin(world, layout)
    run.forward_backward(part(world, layout))
    groups = run.optimizer.param_groups
    torch._foreach_zero_([p.grad for g in groups for p in g["params"] if p.grad is not None])
    run.update()


@fault("gradients were set to None or zero between run.backward and run.update",
       proof=("ddp", "tp", "single"))  # fmt: skip
def zero_grad_in_every_micro_batch(world: World, layout: str) -> None:
    """At the top of the inner loop: all but the last micro-batch would be lost."""
    run = begin(world, layout, micro_batch=4)
    passes(run, part(world, layout), top=lambda: run.optimizer.zero_grad(set_to_none=False))


@fault(SILENT, proof=("zero1", "zero2", "fsdp"))
def zero_grad_of_parts_in_every_micro_batch(world: World, layout: str) -> float:
    """What the optimizer steps has no gradient before the sum: nothing is lost."""
    run = begin(world, layout, micro_batch=4)
    passes(run, part(world, layout), top=lambda: run.optimizer.zero_grad(set_to_none=False))
    return off_by(run, [whole(world)])


@fault("gradients were set to None or zero between run.backward and run.update",
       proof=("ddp", "zero2", "fsdp", "tp", "single"))  # fmt: skip
def models_zero_grad_in_every_micro_batch(world: World, layout: str) -> None:
    run = begin(world, layout, micro_batch=4)
    passes(run, part(world, layout), top=run.model.zero_grad)


# ---- A4a, A4b: weights that do not train


class Cut(Branch):
    """A block whose weights are cut off by a checkpoint, or by a copy through `.data`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.way == "checkpoint":
            h = self.first(x).detach() * 1.0 if self.calls < 0 else self.first(x)
            return self.head(checkpoint(self.block, h, use_reentrant=True))
        h = self.first(x)
        return self.head(self.block(h) + self.aside(h.detach()).data)


def cut(way: str) -> nn.Module:
    model = Cut(way)
    if way == "checkpoint":
        model.first.requires_grad_(False)
        del model.aside
    return model


def trainable(model: nn.Module) -> torch.optim.Optimizer:
    return sgd([p for p in model.parameters() if p.requires_grad])


@fault("model: block.0.weight (and 1 more) computed in step 1, and no rank got a gradient",
       proof=("ddp", "zero1", "zero2", "fsdp", "single"))  # fmt: skip
def checkpoint_behind_a_frozen_layer(world: World, layout: str) -> None:
    model = cut("checkpoint")
    begin(world, layout, model, trainable(model)).step(part(world, layout))


@fault("model: aside.weight (and 1 more) got no gradient in 1 steps", proof=("ddp", "fsdp"))
def a_branch_through_data(world: World, layout: str) -> None:
    """`.data` is seen by nobody: the end lists it."""
    run = begin(world, layout, cut("data"))
    run.step(part(world, layout))
    run.guards.untrained.close()  # as run.close does, which would close the world of all tests too


class Warm(nn.Module):
    """A network and a learned temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.temperature = net(), nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x) * self.temperature


@fault("optimizer: 1 of the weights that get gradients are in no optimizer, first: temperature",
       proof=("ddp", "zero1", "zero2", "fsdp"))  # fmt: skip
def optimizer_without_the_temperature(world: World, layout: str) -> None:
    model = Warm()
    begin(world, layout, model, sgd(model.net.parameters())).step(part(world, layout))


@fault("are in no optimizer, first: 0.bias", proof=("ddp", "fsdp"))
def optimizer_without_biases(world: World, layout: str) -> None:
    model = net()
    named = model.named_parameters()
    weights = [p for name, p in named if not name.endswith("bias")]
    begin(world, layout, model, sgd(weights)).step(part(world, layout))


@fault(SILENT, proof=("ddp", "zero1", "fsdp"))
def optimizer_of_the_last_block_and_the_head(world: World, layout: str) -> float:
    model = net()
    held_here = [*model[2].parameters(), *model[3].parameters()]
    run = begin(world, layout, model, sgd(held_here))
    run.step(part(world, layout))
    got, plain = run.state_dict(), net().state_dict()
    return float(not torch.equal(got["0.weight"], plain["0.weight"]))


# ---- A10: norms over a micro-batch


class Normed(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.head = nn.Linear(4, 8), norm, nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.first(x)))


def kept_eighth(chooser: MicroBatchChooser, run: Run, *_: Any) -> None:
    """The micro-batch of a share that does not fit, or that other ranks have chosen."""
    set_micro_batch(run, with_micro_batch(run.plan, run.plan.batch // 8))


def by_a_loader(world: World, layout: str, norm: nn.Module, **more: Any) -> None:
    run = begin(world, layout, Normed(norm), batch=32, **more)
    for batch in run.loader(DATA):
        run.step(batch)


@fault("model: norm is a BatchNorm, whose statistics are those of a micro-batch",
       proof=("ddp", "zero2", "fsdp", "single"))  # fmt: skip
@patch.object(MicroBatchChooser, "choose", kept_eighth)
def batch_norm_of_a_loader(world: World, layout: str) -> None:
    by_a_loader(world, layout, nn.BatchNorm1d(8, affine=False))


@fault(SILENT, proof=("ddp", "zero2", "fsdp", "single"))
def batch_norm_of_a_whole_share(world: World, layout: str) -> float:
    by_a_loader(world, layout, nn.BatchNorm1d(8, affine=False))
    return 0.0


@fault("model: norm is a BatchNorm, whose statistics are those of a micro-batch", proof=("ddp",))
@patch.object(MicroBatchChooser, "choose", kept_eighth)
def batch_norm_without_running_statistics(world: World, layout: str) -> None:
    by_a_loader(world, layout, nn.BatchNorm1d(8, track_running_stats=False))


@fault("model: norm.1 is a BatchNorm", proof=("ddp", "fsdp"))
@patch.object(MicroBatchChooser, "choose", kept_eighth)
def batch_norm_inside_of_a_block(world: World, layout: str) -> None:
    norm = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU())
    by_a_loader(world, layout, norm)


@fault(SILENT, proof=("ddp", "fsdp"))
def norm_of_a_layer(world: World, layout: str) -> float:
    by_a_loader(world, layout, nn.LayerNorm(8))
    return 0.0


ROWS = [(name, layout) for name, layout, _ in loop_faults.ROWS[FIRST:]]
TABLE = {name: loop_faults.TABLE[name] for name, _ in ROWS}
