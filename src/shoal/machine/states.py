"""What one rank's memory holds of a model in training, counted from the tensors that are alive.

States are what stays from step to step: weights, gradients, optimizer state. Every storage that the
run can reach counts once, with all its bytes, however many tensors look into it; what a layout
splits over ranks is therefore counted as it is split, padding included. Activations and everything
else that comes and goes are the peak of what a step allocates beyond that.

    weights      what the module's parameters and buffers live in
    gradients    `.grad` of those and of the pieces that the optimizer steps, the reducer's buffers
    optimizer    its state, and what it steps that is no part of the module (fp32 masters)

Source: the accounting of ZeRO (Rajbhandari et al. 2020, §3.1): 16 bytes per fp32 parameter, Adam.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch.autograd.profiler import profile, record_function

from shoal.fabric.device import (
    forget_peak_bytes,
    held_bytes,
    is_accelerator,
    peak_bytes,
    synchronize,
)
from shoal.machine._torch import all_threads_counted, pytree

MARK = "shoal: work that is looked at"
SETTLE_S = 0.05
"""Between two looks: gloo's threads let go of what the step before sent a moment after its end."""


@dataclass(frozen=True)
class StateBytes:
    """Bytes of the states on one rank, each storage in the first kind that reaches it."""

    weights: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """All three together."""
        return self.weights + self.gradients + self.optimizer


class Trained(Protocol):
    """What is looked at of a run: its optimizer; its program's module, local pieces, reducer."""

    @property
    def program(self) -> Any:
        """A `Program`: its `module`, `local`, `parts` and `reducer` are looked at."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Has the state."""


def state_bytes(run: Trained) -> StateBytes:
    """Count the bytes of this rank's live weights, gradients and optimizer state, by kind.

    Call it between steps, while gradients are alive. A storage counts once, whole, in the first
    kind that reaches it.

    Args:
        run: a `shoal.Run`.

    Returns:
        a StateBytes: weights, gradients, optimizer; tensors on the meta device take none.

    Note:
        storages that nothing above reaches are not states: caches of kernels, gathered parameters
        that a layout has freed (their storage is empty) or keeps elsewhere.
    """
    program = run.program
    module = program.module
    pieces = [local.parameter for local in program.local.values()]
    parameters = list(module.parameters())
    seen: set[tuple[torch.device, int]] = set()
    weights = _new_bytes([*parameters, *module.buffers()], seen)
    gradients = [p.grad for p in (*parameters, *pieces) if p.grad is not None]
    if program.reducer is not None:
        gradients += program.reducer.sums()
    gradient_bytes = _new_bytes(gradients, seen)
    masters = [tensor for tensor, _ in program.parts.values()]
    kept = [*pieces, *masters, *pytree.tree_leaves(list(run.optimizer.state.values()))]
    return StateBytes(weights, gradient_bytes, _new_bytes(kept, seen))


def _new_bytes(tensors: Iterable[Any], seen: set[tuple[torch.device, int]]) -> int:
    """Bytes of the storages behind `tensors` that are not in `seen`, which they join."""
    total = 0
    for tensor in _local(tensors):
        storage = tensor.untyped_storage()
        place = (tensor.device, storage.data_ptr())
        if place in seen or tensor.device.type == "meta":
            continue
        seen.add(place)
        total += storage.nbytes()
    return total


def _local(leaves: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors among `leaves` that have memory; of a distributed one, what lies on this rank."""
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and not hasattr(leaf, "stands_for"):
            yield leaf.to_local() if hasattr(leaf, "to_local") else leaf.detach()


def peak_extra_bytes(work: Callable[[], object], device: torch.device, times: int = 5) -> int:
    """Measure the most bytes that `work()` held at any moment beyond what was held when it began.

    Args:
        work: something that may be repeated, such as a step, and leaves as much as it found.
        times: CPU: how often it is looked at, after one more run that is not: what was allocated
            before anybody counted is not known when it is freed. The middle peak counts: a thread
            of gloo that is kept waiting by other work holds what it sent a little longer.
        device: the allocator's own peak, of one run, whatever `times` is.

    CPU     what torch's allocator holds by its own count, over all threads, whichever frees

    Note:
        CPU: memory that torch does not allocate (gloo's, other libraries') is not seen. The count
        is read whenever the calling thread allocates or frees, so a peak that threads make of their
        own, while this one only waits, is missed (`dp`). Where torch's build hides its counter,
        frees of other threads are missed: an upper bound. Never time work that is looked at.
    """
    if is_accelerator(device):
        synchronize(device)
        forget_peak_bytes(device)
        before_bytes = held_bytes(device)
        work()
        synchronize(device)
        return peak_bytes(device) - before_bytes
    with (
        all_threads_counted(),
        # Not `torch.profiler`'s, around this one: it imports Inductor, for 3 CPU seconds.
        profile(use_kineto=True, profile_memory=True) as recorded,
    ):
        work()
        for _ in range(times):
            time.sleep(SETTLE_S)
            with record_function(MARK):
                torch.empty(1)  # so that the count is read before anything else happens
                work()
    spans, counts = _recorded(recorded)
    seen = [_held(counts, *span) for span in spans]
    # Every run begins with the same tensors; what a thread was late to let go of is none of them.
    return int(statistics.median(top for _, top in seen)) - min(begun for begun, _ in seen)


class _Count(NamedTuple):
    """When the allocator gave or took back memory, how much, and what it then had given in all."""

    at_ns: int
    moved_bytes: int
    held_bytes: int


def _recorded(recorded: profile) -> tuple[list[tuple[int, int]], list[_Count]]:
    """When marked work began and ended, and the allocator's counts in order."""
    results = recorded.kineto_results
    waiting = list(results.experimental_event_tree()) if results else []
    spans, counts = [], []
    while waiting:
        event = waiting.pop()
        waiting += event.children
        fields: Any = event.extra_fields  # of a kind that the tag tells
        if event.name == MARK:
            spans.append((event.start_time_ns, event.end_time_ns))
        elif event.tag.name == "Allocation" and fields.device.type == "cpu":
            counts.append(_Count(event.start_time_ns, fields.alloc_size, fields.total_allocated))
    counts.reverse()  # a stack gives the last first; within a nanosecond that order stays
    counts.sort(key=lambda count: count.at_ns)
    return spans, counts


def _held(counts: list[_Count], start_ns: int, end_ns: int) -> tuple[int, int]:
    """Bytes held when a span began, and at its peak."""
    here = [count for count in counts if start_ns <= count.at_ns <= end_ns]
    begun = here[0].held_bytes - here[0].moved_bytes
    return begun, max(count.held_bytes for count in here)
