"""Steps on batches of the user's own: whole ones in plain torch, and a rank's samples in a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

import shoal
from guards import Lines
from shoal.base.errors import ShoalError
from shoal.fabric import World

Made = tuple[nn.Module, torch.optim.Optimizer, Callable[..., Any]]


def summary(model: dict[str, torch.Tensor], losses: list[float]) -> dict[str, Any]:
    return {"losses": losses, "weights": {n: one.flatten().tolist() for n, one in model.items()}}


def plain_steps(made: Made, batches: Iterable[Any], *, by_name: bool = False) -> dict[str, Any]:
    """Train on whole batches in plain torch: pairs, or one value for both.

    Args:
        made: model, optimizer and loss.
        batches: one for each step.
        by_name: the inputs are a dict of arguments.
    """
    net, optimizer, loss = made
    losses = []
    for batch in batches:
        inputs, targets = batch if isinstance(batch, tuple | list) else (batch, batch)
        outputs = net(**inputs) if by_name else net(inputs)
        optimizer.zero_grad()
        total, count = loss(outputs, targets)
        (total / count).backward()
        optimizer.step()
        losses.append(float(total / count))
    return summary(dict(net.state_dict()), losses)


def run_steps(
    world: World,
    made: Made,
    layout: Any,
    batches: Iterable[Any],
    *,
    written: bool = False,
    **more: Any,
) -> dict[str, Any]:
    """Train on this rank's samples, in micro-batches of 2.

    Args:
        world: the ranks.
        made: model, optimizer and loss.
        layout: of `shoal.parallelize`.
        batches: one for each step.
        written: the loop writes out the passes.
        more: arguments of `shoal.parallelize`.

    Returns:
        Losses and weights, or the error; the lines that were printed.
    """
    net, optimizer, loss = made
    losses, found, run = list[float](), dict[str, Any](), None
    with Lines() as heard:
        try:
            more = {"micro_batch": 2, "precision": "fp64", **more}
            given = None if written else loss
            run = shoal.parallelize(net, optimizer, given, layout, world=world, **more)
            for batch in batches:
                if written:
                    for micro in run.micro_batches(batch):
                        run.backward(*loss(run.model(micro.inputs), micro.targets))
                    losses.append(run.update().loss)
                else:
                    losses.append(run.step(batch).loss)
            found = summary(run.state_dict(), losses)
        except ShoalError as error:
            found["error"] = str(error)
    if run is not None:
        run.guards.close()
        for undo in run.program.on_close:
            undo()
    return {"error": "", **found, "lines": heard.lines}


def check_equal(found: dict[str, Any], plain: dict[str, Any]) -> None:
    """Compare a rank's losses and weights with those of plain torch, to 1e-12.

    Raises:
        AssertionError: they differ, or the rank ended with an error.
    """
    assert not found["error"], found["error"]
    pairs = {name: (found["weights"][name], wanted) for name, wanted in plain["weights"].items()}
    for one, other in [(found["losses"], plain["losses"]), *pairs.values()]:
        got, want = (torch.tensor(numbers, dtype=torch.float64) for numbers in (one, other))
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)
