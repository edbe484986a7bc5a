"""The shapes that a block would give for inputs of another size, without running it.

Code between the blocks runs on every stage, so where a block that lives elsewhere gives something
of no consequence, that must at least have the right shape: a mask may be made from it. The sample
tells it for inputs of its own size. For others a twin of the block without data runs once and is
remembered; where the twin cannot run (routing by values), a result that had the shape of an input
has it again.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from shoal.base.errors import PlanError
from shoal.parallel.pipeline.partition_model import CallPlan, StageCut
from shoal.trace.shapes import first_line, map_tensors, tensors_of


class Shapes:
    """What every call of a unit gives, as tensors on the meta device."""

    def __init__(self, cut: StageCut) -> None:
        self.cut = cut
        self.known: dict[Hashable, Any] = {}
        for number, plan in enumerate(cut.calls):
            self.known[number, _signature(plan.inputs)] = plan.outputs

    def of(self, number: int, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """The result of call `number` for these inputs.

        Errors  PlanError where neither the sample nor the twin tells it
        """
        key = (number, _signature((inputs, named)))
        if key not in self.known:
            self.known[key] = self._derived(self.cut.calls[number], inputs, named)
        return self.known[key]

    def _derived(self, plan: CallPlan, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        twin = self.cut.twin.get_submodule(plan.name)
        args, kwargs = map_tensors(_meta, (inputs, named))
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                outputs = twin(*args, **kwargs)
        except Exception as failure:  # whatever a block of the user's needs values for
            return _like_inputs(plan, (inputs, named), failure)
        return map_tensors(_meta, outputs)


def _like_inputs(plan: CallPlan, inputs: Any, failure: Exception) -> Any:
    now = tensors_of(inputs)
    then = tensors_of(plan.inputs)

    def like(output: torch.Tensor) -> torch.Tensor:
        for before, present in zip(then, now, strict=False):
            if before.shape == output.shape:
                return torch.empty(present.shape, dtype=output.dtype, device="meta")
        if not output.dim():
            return output
        raise PlanError(
            f"layout.pp: {plan.name} cannot be run without values ({first_line(failure)}), so the "
            f"shape that it gives for inputs {[tuple(t.shape) for t in now]} is not known on other "
            f"stages; nearest: micro-batches of one size and length"
        ) from failure

    return map_tensors(like, plan.outputs)


def _signature(inputs: Any) -> Hashable:
    return tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors_of(inputs))


def _meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
