"""Bytes of weights, gradients and optimizer state on one rank, counted from live tensors.

States are the tensors that stay from step to step: weights, gradients, optimizer state. Every
storage that the run can reach counts once, with all its bytes, however many tensors view it. The
count of a split tensor is therefore that of its shard, padding included. Activations and all other
temporary tensors are the peak of a step's allocations beyond the states.

    weights      storages of the module's parameters and buffers
    gradients    `.grad` of those and of the pieces that the optimizer steps, the reducer's buffers
    optimizer    its state, and its parameters that are not in the module (fp32 masters)

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
    allocated_bytes,
    is_accelerator,
    peak_bytes,
    reset_peak_bytes,
    synchronize,
)
from shoal.machine._torch import count_all_threads, pytree, without_torch_functions

MARK = "shoal: work that is looked at"
SETTLE_S = 0.05
"""Pause between two measurements: gloo's threads free sent buffers shortly after a step's end."""


@dataclass(frozen=True)
class StateBytes:
    """Bytes of the states on one rank; each storage counts in the first kind that reaches it."""

    weights: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """Return the sum of all three kinds."""
        return self.weights + self.gradients + self.optimizer


class TrainedRun(Protocol):
    """Interface of a run whose memory is counted: its optimizer and its program."""

    @property
    def program(self) -> Any:
        """Return the `Program`, of which `module`, `local`, `parts` and `reducer` are read."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Return the optimizer whose state is counted."""


def count_state_bytes(run: TrainedRun) -> StateBytes:
    """Count the bytes of this rank's live weights, gradients and optimizer state, by kind.

    Call it between steps, while gradients are alive. A storage counts once, whole, in the first
    kind that reaches it.

    Args:
        run: a `shoal.Run`.

    Returns:
        A StateBytes: weights, gradients, optimizer. Tensors on the meta device count 0.

    Note:
        Unreachable storages are not states: caches of kernels, and gathered parameters that a
        layout has freed (their storage is empty) or moved.
    """
    program = run.program
    module = program.module
    pieces = [local.parameter for local in program.local.values()]
    parameters = list(module.parameters())
    seen: set[tuple[torch.device, int]] = set()
    weights = _add_storage_bytes([*parameters, *module.buffers()], seen)
    gradients = [p.grad for p in (*parameters, *pieces) if p.grad is not None]
    if program.reducer is not None:
        gradients += program.reducer.sums()
    gradient_bytes = _add_storage_bytes(gradients, seen)
    masters = [tensor for tensor, _ in program.parts.values()]
    kept = [*pieces, *masters, *pytree.tree_leaves(list(run.optimizer.state.values()))]
    return StateBytes(weights, gradient_bytes, _add_storage_bytes(kept, seen))


def _add_storage_bytes(tensors: Iterable[Any], seen: set[tuple[torch.device, int]]) -> int:
    """Return the bytes of the storages of `tensors` that are not in `seen`, and add them to it."""
    total = 0
    with without_torch_functions():  # a weight of another stage names this rank's device
        for tensor in _local_tensors(tensors):
            storage = tensor.untyped_storage()
            place = (tensor.device, storage.data_ptr())
            if place in seen or tensor.device.type == "meta":
                continue
            seen.add(place)
            total += storage.nbytes()
    return total


def _local_tensors(leaves: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors of `leaves` that have memory; for a DTensor its local part."""
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and not hasattr(leaf, "stands_for"):
            yield leaf.to_local() if hasattr(leaf, "to_local") else leaf.detach()


def measure_peak_bytes(work: Callable[[], object], device: torch.device, times: int = 5) -> int:
    """Measure the peak of bytes that `work()` holds beyond those held at its start.

    Args:
        work: a repeatable call, such as a step, that leaves as much memory allocated as before.
        times: on a CPU: number of counted runs, after one that is not counted, since the counter
            misses frees of older allocations. The middle peak counts: a delayed gloo thread holds
            its sent buffers a little longer.
        device: on a GPU the allocator's own peak of one run counts, whatever `times` is.

    Note:
        On a CPU the peak is that of torch's allocator, by its own counter, over all threads. Memory
        of other allocators (gloo's, other libraries') is missed. The counter is read whenever the
        calling thread allocates or frees, so it misses peaks of other threads while this one only
        waits (`dp`). If torch's build hides its counter, frees of other threads are missed: the
        result is an upper bound. Never time work that is being measured.
    """
    if is_accelerator(device):
        synchronize(device)
        reset_peak_bytes(device)
        before_bytes = allocated_bytes(device)
        work()
        synchronize(device)
        return peak_bytes(device) - before_bytes
    with (
        count_all_threads(),
        # Not `torch.profiler`'s wrapper of this one: it imports Inductor, for 3 CPU seconds.
        profile(use_kineto=True, profile_memory=True) as recorded,
    ):
        work()
        for _ in range(times):
            time.sleep(SETTLE_S)
            with record_function(MARK):
                torch.empty(1)  # so that the counter is read before the work
                work()
    spans, counts = _parse_profile(recorded)
    seen = [_span_memory(counts, *span) for span in spans]
    # Every run begins with the same tensors; buffers that a thread frees late are not part of it.
    return int(statistics.median(top for _, top in seen)) - min(begun for begun, _ in seen)


class _AllocatorEvent(NamedTuple):
    """Allocator event: its time, the bytes allocated or freed, and the total held after it."""

    at_ns: int
    moved_bytes: int
    held_bytes: int


def _parse_profile(recorded: profile) -> tuple[list[tuple[int, int]], list[_AllocatorEvent]]:
    """Return the (start, end) of each marked span, and the allocator's events in order."""
    results = recorded.kineto_results
    waiting = list(results.experimental_event_tree()) if results else []
    spans, counts = [], []
    while waiting:
        event = waiting.pop()
        waiting += event.children
        fields: Any = event.extra_fields  # their type depends on the tag
        if event.name == MARK:
            spans.append((event.start_time_ns, event.end_time_ns))
        elif event.tag.name == "Allocation" and fields.device.type == "cpu":
            counts.append(
                _AllocatorEvent(event.start_time_ns, fields.alloc_size, fields.total_allocated)
            )
    counts.reverse()  # the stack yields the last first; the sort keeps the order of equal times
    counts.sort(key=lambda count: count.at_ns)
    return spans, counts


def _span_memory(counts: list[_AllocatorEvent], start_ns: int, end_ns: int) -> tuple[int, int]:
    """Return the bytes held at the start of a span, and at its peak."""
    here = [count for count in counts if start_ns <= count.at_ns <= end_ns]
    begun = here[0].held_bytes - here[0].moved_bytes
    return begun, max(count.held_bytes for count in here)
