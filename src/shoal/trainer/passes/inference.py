"""Model outputs for the user's own inputs, on every rank and in every layout.

Each rank passes its own inputs; ranks that hold parts of one copy of the model (tp, pp) pass the
same ones. Under pp the last stage broadcasts the outputs.
"""

from __future__ import annotations

from typing import Any

import torch

from shoal.base.errors import BugError, ConfigError
from shoal.fabric import World
from shoal.models.loss import Unprojected
from shoal.parallel.program import Program
from shoal.trainer._torch import pytree
from shoal.trainer.batches.batch_values import to_tensor
from shoal.trainer.passes.evaluate import evaluation_mode
from shoal.trainer.step.micro_batch import MicroBatch


@torch.no_grad()
def predict(program: Program, inputs: Any, call: str) -> Any:
    """Run the model in evaluation mode, without gradients.

    Args:
        program: the run's.
        inputs: this rank's inputs, as the model takes them.
        call: as `call_model`.

    Returns:
        The outputs, on this rank's device; for Shoal's language models, logits.

    Raises:
        ConfigError: the layout has cp, whose ranks hold a part of each sequence.
    """
    if program.plan.layout.cp > 1:
        raise ConfigError(
            f"run.predict: layout.cp = {program.plan.layout.cp} leaves each rank a part of every "
            f"sequence; try: a metric of run.evaluate, which sees these parts"
        )
    inputs = pytree.tree_map(to_tensor, inputs)
    with evaluation_mode(program):
        one = MicroBatch(program, _no_loss, 0, 0, (inputs, None), call, 1.0, torch.zeros(2))
        outputs = program.forward(program, one)
        if isinstance(outputs, Unprojected):  # now, while the head's weights are gathered
            with program.autocast():
                outputs = outputs.logits()
    pipe = program.pipe
    return outputs if pipe.size == 1 else _broadcast_outputs(outputs, pipe)


def _broadcast_outputs(outputs: Any, pipe: World) -> Any:
    """Broadcast the outputs of the one rank that has them.

    Raises:
        ConfigError: the outputs are more than tensors and numbers; the same on all ranks.
    """
    leaves: list[Any] = []
    told: dict[str, Any] = {"has": outputs is not None}
    if outputs is not None:
        leaves, form = pytree.tree_flatten(outputs)
        try:
            told["form"] = pytree.treespec_dumps(form)
        except NotImplementedError:
            told["form"] = ""
        if not all(leaf is None or isinstance(leaf, PLAIN) for leaf in leaves):
            told["form"] = ""  # an object that pytree knows nothing of is a leaf to it
        told["leaves"] = [
            {"shape": list(leaf.shape), "dtype": str(leaf.dtype).removeprefix("torch.")}
            if isinstance(leaf, torch.Tensor)
            else {"value": leaf if isinstance(leaf, str | int | float) else None}
            for leaf in leaves
        ]
    everyone = pipe.gather_json(told)
    source = next(rank for rank, one in enumerate(everyone) if one["has"])
    known = everyone[source]
    if not known["form"]:
        raise ConfigError(
            "run.predict: under pp the model's outputs are told to the other stages, and these are "
            "of a class that pytree cannot write; try: tensors, tuples and dicts of them"
        )
    here: list[Any] = []
    for place, leaf in enumerate(known["leaves"]):
        if "shape" not in leaf:
            here.append(leaf["value"])
            continue
        dtype = getattr(torch, leaf["dtype"])
        tensor = (
            leaves[place].contiguous()
            if outputs is not None
            else torch.empty(leaf["shape"], dtype=dtype, device=pipe.device)
        )
        pipe.broadcast(tensor, source)
        here.append(tensor)
    return (
        outputs
        if outputs is not None
        else pytree.tree_unflatten(here, pytree.treespec_loads(known["form"]))
    )


PLAIN = (torch.Tensor, str, int, float)
"""Types that can be broadcast to another rank."""


def _no_loss(_outputs: Any, _targets: Any) -> Any:
    raise BugError("a pass without a loss was asked for one")
