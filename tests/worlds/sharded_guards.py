"""What the tests of sharded runs do on every member of a world."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import cases
import shoal
from shoal.fabric import World
from shoal.parallel.build.full_state import gather_weights


def fresh(world: World, model: nn.Module, optimizer: Any, layout: str, **more: Any) -> shoal.Run:
    """A run of the llama case over `model`, in float64."""
    return shoal.parallelize(
        model,
        optimizer,
        None,
        layout,
        batch=cases.BATCH,
        micro_batch=cases.MICRO_BATCH,
        precision="fp64",
        seed=3,
        world=world,
        **more,
    )


def done(run: shoal.Run) -> None:
    """Leave the world to the next check."""
    run.checkpoint_saver.close()
    for undo in run.program.on_close:
        undo()
    if run.lease is not None:
        run.lease.release()


def frozen_in_the_optimizer(world: World, layout: str, folder: str) -> list[str]:
    """An optimizer over all parameters, some of them frozen, as fine-tuning scripts have it."""
    model = cases.build("llama")
    frozen = next(iter(model.named_parameters()))[0]
    dict(model.named_parameters())[frozen].requires_grad_(False)
    run = fresh(world, model, torch.optim.AdamW(model.parameters()), layout, folder=folder)
    for batch in run.loader(cases.dataset("llama")):
        run.step(batch)
    saved = run.save()
    done(run)
    return [frozen, saved.name if saved else ""]


def forward_between_steps(world: World, layout: str) -> list[float]:
    """The user looks at the model before and between steps; training must not notice."""
    sums = []
    sample = torch.zeros(1, 12, dtype=torch.long)
    for looks in (False, True):
        run = fresh(
            world, cases.build("llama"), lambda p: torch.optim.SGD(p, lr=0.1), layout, average=0.5
        )
        if looks:
            with torch.inference_mode():
                run.model(sample)
        for batch in run.loader(cases.dataset("llama")):
            run.step(batch)
            if looks:
                with torch.no_grad():
                    run.model(sample)
        told = run.evaluate(cases.dataset("llama"))["loss"]
        sums += [told, float(sum(t.double().sum() for t in gather_weights(run.program).values()))]
        done(run)
    return sums


def a_loss_without_a_graph(world: World, layout: str) -> list[float]:
    """On one rank the loss of a micro-batch is a constant: its targets are all ignored."""

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> Any:
        if world.rank == 1 and targets.shape[0] == 1:
            return torch.zeros((), dtype=torch.float64), 0
        return (outputs - targets) ** 2

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    run = shoal.parallelize(
        model, lambda p: torch.optim.SGD(p, lr=0.1), loss, layout, micro_batch=1, batch=2 * world.size,
        precision="fp64", world=world,
    )  # fmt: skip
    told = []
    for _ in range(2):
        told.append(run.step((torch.ones(2, 4), torch.zeros(2, 2))).loss)
    done(run)
    return told


def counted_gathers(world: World) -> list[int]:
    """Return how many calls of all ranks each act of user code on a weight counts, under fsdp."""
    run = fresh(world, model := cases.build("llama"), torch.optim.AdamW(model.parameters()), "fsdp")
    weight = next(iter(run.model.parameters()))
    run.forward_backward(next(iter(run.loader(cases.dataset("llama")))))
    acts = (
        weight.full_tensor,
        lambda: float(weight.detach().norm()),
        lambda: nn.utils.clip_grad_norm_(run.model.parameters(), 1.0),
        lambda: weight.detach().clone(),
        lambda: weight.shape,
    )
    found = []
    for act in acts:
        before = run.meeting.turn
        act()
        found.append(run.meeting.turn - before)
    run.update()
    done(run)
    return found
