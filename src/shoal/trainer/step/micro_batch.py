"""Run one micro-batch of a step on this rank: forward, loss, backward, at once or in pieces.

A pipeline runs the forward pass of one micro-batch between pieces of others. So this object holds
all state of its micro-batch: its index, the keys of its random generators, its sums.
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
from shoal.trainer.batches.batch_values import has_objects, says_samples
from shoal.trainer.step.call_contract import (
    Loss,
    call_model,
    reduce_result,
    split_batch,
    sum_and_count,
)
from shoal.wire import phases

JOINING = -1
"""Index of a pass that only takes part in the collectives of other ranks; its loss has weight 0."""
JOINING_PASS = (
    "run.micro_batches: a pass of weight 0 on this rank (micro.index = -1), since other ranks have "
    "more micro-batches and every pass gathers weights: it changes no gradient, but numbers that "
    "the loop adds up count its samples twice; try: run.log(name=(sum, count)), or skip them where "
    "micro.index < 0"
)
"""Notice on a pass that keeps ranks together."""

SUMS_LOCK = threading.Lock()
"""Lock for replicas in threads, which add to the same sums."""


@dataclass
class MicroBatch:
    """One micro-batch on this rank as a `program.Pass`, which runs model, loss and backward.

    Attributes:
        program: the run's program, or a replica of it.
        loss: the run's loss.
        step, index: keys of its random generators; index JOINING: its loss has weight 0.
        batch: inputs and targets, as the loader returned them.
        call: as in `call_model`.
        scale: factor of the loss before backward.
        sums: [loss sum, count of targets], to which the loss is added.
        note: called with the loss's result, outputs and targets, except in passes of weight 0.
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
        """Return the same micro-batch for a replica of the program."""
        return replace(self, program=program, sums=sums)

    def __call__(self, module: nn.Module, *, alone: bool = True) -> None:
        """Run forward and backward; add gradients to the module's, loss and count to `sums`.

        Args:
            module: the model, or the replica's.
            alone: no other pass runs at the same time, so generators and buffers may be keyed to
                this one.
        """
        with self.keyed_context() if alone else nullcontext():
            # No name holds the outputs: backward frees activations that only they hold.
            total = self.compute_loss(self.outputs(module))
            if total.requires_grad:
                phases.record_step_part(phases.BACKWARD)
                try:
                    total.backward()
                except RuntimeError as error:
                    from shoal.trainer.backward_errors import raise_named_error

                    raise_named_error(error)
                    raise
                phases.record_step_part(phases.PASSES)
        self.__dict__.pop("parts", None)  # free the inputs of a finished pass

    def keyed_context(self) -> AbstractContextManager[None]:
        """Return a context in which generators and buffers are keyed to this micro-batch."""
        rules = (*filter(None, [self.program.keyed]), *self.program.around)
        return combine_contexts(*[enter(self.step, self.index) for enter in rules])

    @cached_property
    def parts(self) -> tuple[Any, Any]:
        """Return (inputs, targets), on the device and in the dtype of the run."""
        return split_batch(prepare_batch(self.program, self.batch))

    @property
    def signature(self) -> Hashable:
        """Return shapes and dtypes of the inputs' tensors, and the structure around them."""
        inputs = self.parts[0]
        if has_objects(inputs):  # whose texts are addresses, of no meaning to another rank
            from shoal.trainer.batches.batch_objects import open_objects

            inputs = open_objects(inputs)
        leaves, form = pytree.tree_flatten(inputs)
        return str(form), tuple(
            (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else repr(leaf)
            for leaf in leaves
        )

    def outputs(self, module: nn.Module) -> Any:
        """Run the forward pass, and return its outputs."""
        return self._run_in_format(call_model, module, self.parts[0], self.call)

    def compute_loss(self, outputs: Any) -> torch.Tensor:
        """Return the scaled sum of losses; add loss and count to the step's sums."""
        program = self.program
        total, count = self._run_in_format(self._apply_loss, outputs)
        if program.together and not total.requires_grad:
            # Parameters are gathered for every backward pass of every rank.
            total = total + _zero_from_outputs(outputs)
        return self.add_to_sums(total, count)

    def _run_in_format(self, function: Callable[..., Any], *operands: Any) -> Any:
        """Call a function in the format of forward passes."""
        if self.program.autocast is nullcontext:  # entering it takes as long as a small operation
            return function(*operands)
        with self.program.autocast():
            return function(*operands)

    def _apply_loss(self, outputs: Any) -> tuple[torch.Tensor, Any]:
        result, targets = self.loss(outputs, self.parts[1]), self.parts[1]
        if self.note is not None and self.index != JOINING:
            with SUMS_LOCK:
                self.note(result, outputs, targets)
        return reduce_result(result, targets)

    def add_to_sums(self, total: torch.Tensor, count: Any) -> torch.Tensor:
        """Add a loss sum and its count to the step's sums; return the tensor to differentiate.

        Args:
            total: the sum of losses, without dims.
            count: of targets: a tensor without dims, or a number.
        """
        if self.index == JOINING:
            total, count = total * 0, count * 0
        with SUMS_LOCK:  # in float64, the format of the sums
            if self.sums.is_cpu and total.is_cpu:  # a fifth of the time of operations on tensors
                numbers = self.sums.numpy()
                numbers[0] += total.item()  # a fraction counts in torch's default format
                numbers[1] += count if type(count) is int else torch.as_tensor(count).item()
            else:
                losses, counts = self.sums.unbind()
                losses.add_(total.detach())
                counts.add_(sum_and_count((total, count), None)[1].to(counts.device))
        if not self.program.differentiates:
            return total * 0
        return total if self.scale == 1.0 else total * self.scale


def _zero_from_outputs(outputs: Any) -> torch.Tensor | float:
    """Return a zero that depends on the outputs, so that a backward pass makes zero gradients."""
    leaves = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
    return sum((leaf.reshape(-1)[:0].sum() for leaf in leaves if leaf.requires_grad), 0.0)


def prepare_batch(program: Program, batch: Any) -> Any:
    """Return a batch as the model takes it: on its device, in its dtype.

    An object that says its samples is what it returns for all of them.
    """
    if says_samples(batch):
        from shoal.trainer.batches.batch_objects import cut_object

        batch = cut_object(batch, 0, len(batch))
    for prepare in program.prepare:
        batch = prepare(batch)
    if program.prepare and has_objects(batch):
        from shoal.trainer.batches.batch_objects import map_tensors

        for prepare in program.prepare:
            batch = map_tensors(batch, prepare)
    return batch


def combine_contexts(*contexts: AbstractContextManager[Any] | None) -> AbstractContextManager[None]:
    """Return one context that enters all given contexts in order; None entries are skipped."""
    due = [one for one in contexts if one is not None]
    if len(due) < 2:
        return due[0] if due else nullcontext()
    return _enter_all(due)


@contextmanager
def _enter_all(contexts: Sequence[AbstractContextManager[Any]]) -> Iterator[None]:
    with ExitStack() as stack:
        for one in contexts:
            stack.enter_context(one)
        yield
