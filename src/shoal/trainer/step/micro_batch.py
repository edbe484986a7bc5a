"""One micro-batch of a step on this rank: forward, loss, backward, at once or in pieces.

A pipeline runs the forward pass of one micro-batch between pieces of others, so everything that
belongs to one of them (its numbers, its generators' keys, its sums) is kept here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from shoal.parallel.program import Program
from shoal.trainer._torch import pytree
from shoal.trainer.step.call_contract import Loss, call_model, split_batch, sum_and_count
from shoal.wire import phases

JOINING = -1
"""Number of a pass that only joins the others' collectives; its loss weighs nothing."""

SUMS_LOCK = threading.Lock()
"""Replicas in threads add to the same sums."""


@dataclass
class MicroBatch:
    """One micro-batch on this rank as a `program.Pass`: it runs the model, the loss and backward.

    Attributes:
        step, index: keys of its randomness; JOINING: it weighs nothing.
        scale: what the loss is multiplied by before backward.
        sums: [loss sum, count of targets], added to by whoever computes the loss.
        note: hears what the loss returned, outputs and targets, of passes that weigh something.
    """

    program: Program
    loss: Loss
    step: int
    index: int
    batch: Any
    call: str
    scale: float
    sums: torch.Tensor
    note: Callable[[Any, Any, Any], None] | None = None

    def on(self, program: Program, sums: torch.Tensor) -> MicroBatch:
        """The same on a replica of the program."""
        return replace(self, program=program, sums=sums)

    def __call__(self, module: nn.Module, *, alone: bool = True) -> None:
        """Run it; gradients land in the module's parameters, loss and count in `sums`.

        Args:
            alone: no other pass runs at the same time, so generators and buffers may be keyed to
                it.
        """
        with self.entered() if alone else nullcontext():
            # The outputs are named nowhere: activations that only they hold are free in backward.
            total = self.total(self.outputs(module))
            if total.requires_grad:
                phases.part(phases.BACKWARD)
                total.backward()
                phases.part(phases.PASSES)
        self.__dict__.pop("parts", None)  # inputs of passes that are over need no memory

    def entered(self) -> AbstractContextManager[None]:
        """Generators and buffers are keyed to this micro-batch inside."""
        rules = (*filter(None, [self.program.keyed]), *self.program.around)
        return all_around(*(enter(self.step, self.index) for enter in rules))

    @cached_property
    def parts(self) -> tuple[Any, Any]:
        """(inputs, targets), on the device and in the format of the run."""
        return split_batch(prepared(self.program, self.batch))

    @property
    def signature(self) -> Hashable:
        """The shapes and formats of the inputs' tensors, and what else they are made of."""
        leaves, form = pytree.tree_flatten(self.parts[0])
        return str(form), tuple(
            (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else repr(leaf)
            for leaf in leaves
        )

    def outputs(self, module: nn.Module) -> Any:
        """The forward pass."""
        with self.program.autocast():
            return call_model(module, self.parts[0], self.call)

    def total(self, outputs: Any) -> torch.Tensor:
        """The scaled sum of losses; loss and count are added to the step's sums."""
        program, targets = self.program, self.parts[1]
        with program.autocast():
            result = self.loss(outputs, targets)
            total, count = sum_and_count(result, targets)
            if self.note is not None and self.index != JOINING:
                with SUMS_LOCK:
                    self.note(result, outputs, targets)
        if program.together and not total.requires_grad:
            # Parameters are gathered for every backward pass of every rank.
            total = total + _nothing_of(outputs)
        return self.weighed(total, count)

    def weighed(self, total: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        """Add a loss sum and its count to the step's sums; give what is to be differentiated."""
        if self.index == JOINING:
            total, count = total * 0, count * 0
        with SUMS_LOCK:
            self.sums.add_(torch.stack([total.detach().double(), count.to(self.sums)]))
        if not self.program.differentiates:
            return total * 0
        return total if self.scale == 1.0 else total * self.scale


def _nothing_of(outputs: Any) -> torch.Tensor | float:
    """Zero, by way of no element of the outputs: a backward pass whose gradients are zeros."""
    leaves = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
    return sum((leaf.reshape(-1)[:0].sum() for leaf in leaves if leaf.requires_grad), 0.0)


def prepared(program: Program, batch: Any) -> Any:
    """A batch as the model is to see it: on its device, in its format."""
    for prepare in program.prepare:
        batch = prepare(batch)
    return batch


def all_around(*contexts: AbstractContextManager[Any] | None) -> AbstractContextManager[None]:
    """Return one context that enters those that are there, in this order."""
    due = [one for one in contexts if one is not None]
    if len(due) < 2:
        return due[0] if due else nullcontext()
    return _entered(due)


@contextmanager
def _entered(contexts: Sequence[AbstractContextManager[Any]]) -> Iterator[None]:
    with ExitStack() as stack:
        for one in contexts:
            stack.enter_context(one)
        yield
