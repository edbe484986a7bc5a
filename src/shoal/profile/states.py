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

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from shoal.profile._torch import pytree

MARK = "shoal: work that is looked at"


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
    """Bytes of this rank's live states; call it between steps, while gradients are alive.

    run     a `shoal.Run`
    Gives   bytes per kind; tensors on the meta device take none
    Limits  storages that nothing above reaches are not states: caches of kernels, gathered
            parameters that a layout has freed (their storage is empty) or keeps elsewhere
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
    """The tensors among `leaves`; of a distributed one, what lies on this rank."""
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            yield leaf.to_local() if hasattr(leaf, "to_local") else leaf.detach()


def peak_extra_bytes(work: Callable[[], object], device: torch.device, times: int = 3) -> int:
    """Most bytes that `work()` held at any moment beyond what was held when it began.

    work    something that may be repeated, such as a step
    times   CPU: how often it is looked at, after one more run that is not: the profiler does not
            see the release of what was allocated before it listened. The least peak counts, since
            what gloo's threads release last is not seen either and could only add to it
    CPU     every allocation and release that torch's allocator reports, in order
    CUDA    the allocator's own peak, of one run
    Limits  CPU: memory that torch does not allocate (gloo's, other libraries') is not seen, nor
            what threads allocate that `work` starts itself; under fsdp, whose buffers gloo often
            releases last, an upper bound (22.8 to 28.5 MiB in five runs of one model on a
            machine with other work). Never time work that is profiled
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before_bytes = torch.cuda.memory_allocated(device)
        work()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before_bytes
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        work()
        for _ in range(times):
            with record_function(MARK):
                work()
    results = recorded.profiler.kineto_results if recorded.profiler else None
    events = list(results.events()) if results else []
    spans = [(e.start_ns(), e.end_ns()) for e in events if e.name() == MARK]
    moves = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    moves.sort(key=lambda move: move[0])  # not by bytes: within a nanosecond the record's order
    return min((_peak(moves, *span) for span in spans), default=0)


def _peak(moves: list[tuple[int, int]], start_ns: int, end_ns: int) -> int:
    """Highest sum of (when, how many bytes) from the start of a span on."""
    live = peak = 0
    for at_ns, moved_bytes in moves:
        if start_ns <= at_ns <= end_ns:
            live += moved_bytes
            peak = max(peak, live)
    return peak
