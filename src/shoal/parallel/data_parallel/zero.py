"""ZeRO stages 1 and 2: every rank holds all weights, but steps only its own part of them.

The weights of each bucket are one flat buffer, cut into one part per rank. A rank's optimizer
sees views of its parts; after its step an all-gather completes the buffers on every rank.

    zero1   gradients are whole buffers; at the step's end each rank gets the sum of its part
            (sent once a step, however many micro-batches)
    zero2   only the sum of a rank's own part is kept. A bucket's gradients are collected in a
            transient buffer, which is sent when full, in every micro-batch; the received part is
            accumulated. `defer_sync` does as zero1 does and costs one whole gradient

On a CPU the buffers of transfers serve all steps, as DDP's buckets do (`TransferBuffer`).

Source: Rajbhandari et al. 2020 (ZeRO), §5; stage 2 with a reduce-scatter per micro-batch as there
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from shoal.base.errors import BugError
from shoal.base.plans.plan import Bucket
from shoal.base.plans.tensor_shards import Shard
from shoal.fabric.collectives.uneven_collectives import (
    PendingFlatReduceScatter,
    PendingGather,
    TransferBuffer,
)
from shoal.parallel.data_parallel.buckets import (
    BucketReducer,
    bucket_offsets,
    bucket_worlds,
    expert_parameters,
    reduce_dtype,
    second_gradient_error,
)
from shoal.parallel.program import HookedReducer, LocalParameter, Part, Program

IN_FLIGHT = 1
"""Buckets in flight under zero2 while the next is filled; more would hold more gradients.

A full bucket waits until an earlier one has arrived. That costs little: a network slower than the
backward pass would delay the end of the step anyway.
"""

TRANSFERS = 2
"""Buckets in flight on a CPU under zero1, and of new weights; gloo runs two collectives at once."""


def apply(program: Program) -> Program:
    """Shard weights, gradient sums and the optimizer's parameters over all ranks."""
    weights = FlatWeights(program)
    local = weights.local()
    once = program.plan.layout.zero == 1 or program.plan.defer_sync
    reducer = (_ZeroOneReducer if once else ScatterReducer)(program, weights, local)
    return add_sharded_reducer(program, reducer, weights, local)


def add_sharded_reducer(
    program: Program,
    reducer: BucketReducer | ScatterReducer,
    weights: FlatWeights,
    local: dict[str, LocalParameter],
) -> Program:
    """Give the program a reducer, and the parts of flat weights that this rank steps."""
    return replace(
        program,
        reducer=reducer,
        local=local,
        parts=weights.parts(local),
        on_close=(*program.on_close, reducer.close, weights.restore_masters),
    )


class FlatWeights:
    """All weights of a program in one buffer per bucket; the parameters are views into it.

    Attributes:
        flats: buffers that forward passes read, whole, in the bucket's compute dtype.
        masters: this rank's parts in the dtype of the optimizer: views of `flats`, or tensors of
            their own if forward passes read narrow copies.
        buffers: memory of transfers on a CPU, one for each in flight; (): all buckets may be in
            flight, each in its own memory.
    """

    def __init__(self, program: Program) -> None:
        parameters, buckets = program.parameters, program.plan.buckets
        self.parameters, self.buckets = parameters, buckets
        self.traffic, self.place = program.world.traffic, program.shard_of
        self.worlds = bucket_worlds(program)
        on_host = program.world.device.type == "cpu"
        self.buffers: Sequence[TransferBuffer] = make_buffers(TRANSFERS if on_host else 0)
        self.flats: list[torch.Tensor] = []
        self.masters: list[torch.Tensor] = []
        self.spans: list[tuple[int, int]] = []
        for bucket, world in zip(buckets, self.worlds, strict=True):
            if not bucket.cuts:
                raise BugError("a bucket without cuts came to a zero stage")
            wide = torch.zeros(
                bucket.elements, dtype=getattr(torch, bucket.dtype), device=world.device
            )
            at = bucket_offsets(bucket, parameters)
            for name, (start, stop) in at.items():
                wide[start:stop].view(parameters[name].shape).copy_(parameters[name].detach())
            low, high = bucket.cuts[world.rank : world.rank + 2]
            self.spans.append((low, high))
            flat = wide.to(getattr(torch, bucket.compute or bucket.dtype))
            for name, (start, stop) in at.items():
                parameters[name].data = flat[start:stop].view(parameters[name].shape)
            self.flats.append(flat)
            self.masters.append(wide[low:high].clone() if bucket.compute else flat[low:high])

    def local(self) -> dict[str, LocalParameter]:
        """Return the flat part of every parameter that this rank steps; absent if it has none."""
        found: dict[str, LocalParameter] = {}
        for bucket, master, span in zip(self.buckets, self.masters, self.spans, strict=True):
            low, high = span
            for name, (start, stop) in bucket_offsets(bucket, self.parameters).items():
                first, last = max(start, low), min(stop, high)
                if first >= last:
                    continue
                shape = tuple(self.parameters[name].shape)
                piece = master[first - low : last - low]
                whole = (first, last) == (start, stop)  # an uncut matrix keeps its shape (Muon)
                part = nn.Parameter(piece.view(shape) if whole else piece)
                here = self.place(name)
                slices = here.part(first - start, last - start)
                shard = Shard(name, here.global_shape, bucket.dtype, slices)
                found[name] = LocalParameter(part, shard)
        # The module's own order, so that sums over parameters have the same bits in every layout.
        return {name: found[name] for name in self.parameters if name in found}

    def parts(self, local: dict[str, LocalParameter]) -> dict[str, Part]:
        """Return this rank's part, maybe empty, of each parameter with sharded masters."""
        found: dict[str, Part] = {}
        for bucket, master in zip(self.buckets, self.masters, strict=True):
            for name in bucket.names if bucket.compute else ():
                nothing = Shard(name, self.place(name).global_shape, bucket.dtype, ())
                found[name] = (master[:0], nothing)
                if name in local:
                    found[name] = (local[name].parameter.detach(), local[name].shard)
        return found

    def restore_masters(self) -> None:
        """Set the narrow (bf16) parameters to the full masters, all-gathered in their dtype.

        Every rank calls it.
        """
        for number, (flat, master, bucket) in enumerate(self._each_bucket()):
            if not bucket.compute:
                continue
            low, high = self.spans[number]
            wide = torch.zeros_like(flat, dtype=master.dtype)
            wide[low:high] = master
            work = self.worlds[number].all_gather_parts(wide, bucket.cuts)
            if work is not None:
                work.wait()
            for name, (start, stop) in bucket_offsets(bucket, self.parameters).items():
                parameter = self.parameters[name]
                parameter.data = wide[start:stop].view(parameter.shape)

    def publish(self) -> None:
        """All-gather the updated parts, so that every rank has all weights."""
        works: deque[PendingGather | None] = deque()
        for number, (flat, master, bucket) in enumerate(self._each_bucket()):
            if bucket.compute:
                low, high = self.spans[number]
                flat[low:high].copy_(master)
            world = self.worlds[number]
            if not self.buffers:
                works.append(world.all_gather_parts(flat, bucket.cuts))
                continue
            if len(works) == len(self.buffers) and (oldest := works.popleft()) is not None:
                with self.traffic.waiting():
                    oldest.wait()
            buffer = self.buffers[number % len(self.buffers)]
            works.append(world.all_gather_parts(flat, bucket.cuts, buffer))
        with self.traffic.waiting(len(works)):
            for work in works:
                if work is not None:
                    work.wait()

    def _each_bucket(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, Bucket]]:
        """Return per bucket (flat weights, this rank's masters, bucket)."""
        return zip(self.flats, self.masters, self.buckets, strict=True)


def make_buffers(count: int) -> tuple[TransferBuffer, ...]:
    """Return buffers for so many transfers in flight."""
    return tuple(TransferBuffer() for _ in range(count))


class _ZeroOneReducer(BucketReducer):
    """Reducer of full gradients (ZeRO-1), of which this rank gets the sum of its part."""

    def __init__(
        self, program: Program, weights: FlatWeights, local: dict[str, LocalParameter]
    ) -> None:
        super().__init__(program, local)
        self.weights = weights
        self.buffers = weights.buffers
        self.narrow = make_buffers(len(self.buffers))

    def publish(self) -> None:
        """All-gather the updated weights, so that every rank has all of them."""
        self.weights.publish()


@dataclass
class _StagedBucket:
    """One bucket's gradients of a micro-batch.

    Attributes:
        number: of the bucket.
        buffer: memory of `flat`.
    """

    number: int
    flat: torch.Tensor
    buffer: TransferBuffer


class ScatterReducer(HookedReducer):
    """Reducer of `zero2`: one reduce-scatter per bucket and micro-batch.

    Attributes:
        free: buffers of staged buckets that are not in use: one is filled while another is in
            flight.
        received, own, narrow: buffers of received parts, of this rank's sum of them, and of what is
            sent in `precision.reduce`.
    """

    def __init__(
        self, program: Program, weights: FlatWeights, local: dict[str, LocalParameter]
    ) -> None:
        parameters, buckets = program.parameters, program.plan.buckets
        self.weights, self.local = weights, local
        self.reduce = reduce_dtype(program.plan)
        self.parameters, self.plan, self.dealt = parameters, buckets, expert_parameters(program)
        self.traffic, self.worlds = weights.traffic, weights.worlds
        self.places = [bucket_offsets(bucket, parameters) for bucket in buckets]
        self.bucket_of = {name: n for n, bucket in enumerate(buckets) for name in bucket.names}
        self.parts = [torch.zeros_like(master) for master in weights.masters]
        self.active = False
        self.rounds = self.round = self.next = 0
        self.once = True
        self.seen: set[str] = set()
        self.fresh: set[str] = set()
        self.filled: set[str] = set()
        self.staged: dict[int, _StagedBucket] = {}
        # (bucket, what is sent of it, its sum)
        self.pending: list[tuple[_StagedBucket, torch.Tensor, PendingFlatReduceScatter]] = []
        self.received, shared = weights.buffers or make_buffers(2)
        self.free, self.own, self.narrow = [shared], TransferBuffer(), TransferBuffer()
        self.norms: list[torch.Tensor] = []
        self.hooks = [
            parameter.register_post_accumulate_grad_hook(self._hook(name))
            for name, parameter in parameters.items()
        ]

    def start_step(self, rounds: int) -> None:
        """Zero this rank's parts and drop the gradients of parameters."""
        if self.parts:
            torch._foreach_zero_(self.parts)
        for parameter in self.parameters.values():
            parameter.grad = None
        self.active, self.rounds, self.round = True, rounds, 0
        self.seen, self.fresh = set(), set()
        self.norms, self.pending = [], []

    def prepare_backward(self, last: bool, once: bool = True) -> None:
        """Start a pass, which sends all buckets in the plan's order (several: at their end)."""
        self.next, self.once = 0, once
        self.filled, self.staged = set(), {}

    def end_backward(self, counted: bool) -> None:
        """Send the buckets that the pass left incomplete; unused parameters count as zero."""
        while self.next < len(self.plan):
            self._send()
        self.round += 1
        self.seen |= self.fresh if counted else self.fresh & self.dealt
        self.fresh = set()

    def finish(self) -> None:
        """Join other ranks' remaining reduce-scatters with zeros, then wait for all sums."""
        while self.round < self.rounds:
            self.prepare_backward(last=True)
            self.end_backward(counted=False)
        while self.pending:
            self._receive()
        self.active = False
        for name, local in self.local.items():
            number = self.bucket_of[name]
            low = self.weights.spans[number][0]
            first = max(self.places[number][name][0] - low, 0)
            part = self.parts[number][first : first + local.parameter.numel()]
            local.parameter.grad = part.view(local.parameter.shape)

    def publish(self) -> None:
        """All-gather the updated weights, so that every rank has all of them."""
        self.weights.publish()

    def close(self) -> None:
        """Remove the hooks and the gradient views of buffers."""
        for hook in self.hooks:
            hook.remove()
        for local in self.local.values():
            local.parameter.grad = None

    def local_norms(self) -> list[torch.Tensor]:
        """Return the norm of each bucket per micro-batch, as this rank computed it."""
        return self.norms

    def sums(self) -> list[torch.Tensor]:
        """Return this rank's parts of the sum, one tensor per bucket."""
        return self.parts

    def _hook(self, name: str) -> Callable[[torch.Tensor], None]:
        number = self.bucket_of[name]
        start, stop = self.places[number][name]

        def ready(parameter: torch.Tensor) -> None:
            if not self.active:
                return
            if number < self.next or (self.once and name in self.filled):
                raise second_gradient_error(name)
            gradient = parameter.grad
            if gradient is None:
                return
            self.fresh.add(name)
            self.filled.add(name)
            staged = self._stage(number).flat[start:stop].view(parameter.shape)
            if self.once:
                staged.copy_(gradient)
            else:
                staged.add_(gradient)
            parameter.grad = None
            while self.once and self.next < len(self.plan) and self._is_full(self.next):
                self._send()

        return ready

    def _is_full(self, number: int) -> bool:
        return self.filled.issuperset(self.plan[number].names)

    def _stage(self, number: int) -> _StagedBucket:
        """Return the bucket's gradients of this micro-batch, zeros at first."""
        if number not in self.staged:
            like, buffer = self.parts[number], self.free.pop() if self.free else TransferBuffer()
            flat = buffer.acquire(self.plan[number].elements, like.dtype, like.device)
            self.staged[number] = _StagedBucket(number, flat.zero_(), buffer)
        return self.staged[number]

    def _send(self) -> None:
        number = self.next
        self.next += 1
        staged = self._stage(number)
        del self.staged[number]
        while len(self.pending) >= IN_FLIGHT:  # before the send, which needs up to three copies
            self._receive()
        # Taken before the sum mixes ranks, so that a bad norm points to its rank.
        self.norms.append(torch.linalg.vector_norm(staged.flat))
        sent, cuts = self._narrowed(staged.flat), self.plan[number].cuts
        arriving = self.worlds[number].reduce_scatter(sent, cuts, self.received)
        self.pending.append((staged, sent, arriving))

    def _receive(self) -> None:
        staged, sent, arriving = self.pending.pop(0)
        total = self.parts[staged.number]
        part = self.own.acquire(total.numel(), total.dtype, total.device)
        with self.traffic.waiting():
            arriving.result(out=part)
        total.add_(part)
        self.own.release(part)
        if sent is not staged.flat:
            self.narrow.release(sent)
        staged.buffer.release(staged.flat)
        self.free.append(staged.buffer)

    def _narrowed(self, flat: torch.Tensor) -> torch.Tensor:
        """Return a bucket in the dtype in which it is sent."""
        if self.reduce is None or self.reduce == flat.dtype:
            return flat
        return self.narrow.acquire(flat.numel(), self.reduce, flat.device).copy_(flat)
