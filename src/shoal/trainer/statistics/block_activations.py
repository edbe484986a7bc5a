"""Root mean square and largest value of each block's outputs, in the steps that record them.

A hook on each block sees its output; of a structure the first tensor of floating-point numbers
counts, which is the hidden state. Each element of the whole output is counted once:

    data parallel   each rank has micro-batches of its own; passes of weight 0 do not count
    tp, cp          a shard of the sequence is a part; of a whole output the first rank counts
    pp              on the stage that computes the block; others get a value in its place
    recompute       the forward pass counts, not its repetition in the backward pass
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shoal.base.layouts.policies import CompilePolicy
from shoal.fabric import World
from shoal.parallel._torch import graph_task_id, pytree
from shoal.parallel.program import Program, own_blocks
from shoal.trace.isolation.replaced_forward import ReplacedForward
from shoal.trainer.step.optimizer_step import sum_of_squares


class BlockActivations:
    """Sums over the outputs of the blocks on this rank, in one step.

    Compiled blocks and replicas in threads have none: they run no hook that is added later.

    Args:
        program: the run's.

    Attributes:
        names: blocks of the whole model, the same on all ranks.
        sums: by block: sum of squares, number of elements, largest absolute value.
    """

    def __init__(self, program: Program) -> None:
        plan = program.plan
        bare = plan.differs_from_default(CompilePolicy) or plan.layout.threads > 1
        self.program = program
        self.names = () if bare else program.blocks
        self.sums: dict[str, tuple[Any, int, Any]] = {}
        self._handles: list[Any] = []
        self._joins = False

    def start(self) -> None:
        """Start to count the outputs of a step."""
        self.stop()
        self.sums = {}
        if self.names:
            for name, block in own_blocks(self.program):
                self._handles.append(block.register_forward_hook(self._make_hook(name)))

    def stop(self) -> None:
        """Remove the hooks; the sums stay."""
        while self._handles:
            self._handles.pop().remove()

    def micro_batch(self, step: int, index: int) -> AbstractContextManager[None] | None:
        """Return the context of a micro-batch; None outside of a step that counts."""
        del step
        return self._mark_joining(index < 0) if self._handles else None

    @contextmanager
    def _mark_joining(self, joins: bool) -> Iterator[None]:
        """Exclude a pass from the statistics if it only joins other ranks' collectives."""
        before, self._joins = self._joins, joins
        try:
            yield
        finally:
            self._joins = before

    def _make_hook(self, name: str) -> Any:
        def add(block: nn.Module, inputs: Any, outputs: Any) -> None:
            del inputs
            if self._joins or not torch.is_grad_enabled() or graph_task_id() >= 0:
                return
            if not _computes_outputs(block):
                return
            part = self._own_part(outputs)
            if part is None or not part.numel():
                return
            if part.element_size() < 4:  # bf16 and fp16 would round their own sums
                part = part.float()
            low, high = torch.aminmax(part)
            largest = torch.maximum(-low, high)
            squares, count, most = self.sums.get(name, (0.0, 0, largest))
            squares = squares + sum_of_squares([part])
            self.sums[name] = squares, count + part.numel(), torch.maximum(most, largest)

        return add

    def _own_part(self, outputs: Any) -> Tensor | None:
        """Return this rank's part of a block's first output; None if another rank counts it."""
        leaves = pytree.tree_leaves(outputs, is_leaf=lambda one: hasattr(one, "deal"))
        floats = (one for one in leaves if isinstance(one, Tensor) and one.is_floating_point())
        found: Any = next(floats, None)
        context, tensor = self.program.context, self.program.tensor
        is_split: set[World] = set()
        while hasattr(found, "deal"):  # a SequenceShard; an operation on it would gather the whole
            is_split.add(context if found.deal.summands else tensor)
            found = found.local
        if found is None or any(world.rank for world in {context, tensor} - is_split):
            return None
        return found.detach()


def _computes_outputs(block: nn.Module) -> bool:
    """Return whether a block's last call computed its outputs; False on other stages of pp."""
    forward = block.__dict__.get("forward")
    while isinstance(forward, ReplacedForward):
        if not forward.computes:
            return False
        forward = forward.replaced
    return True
