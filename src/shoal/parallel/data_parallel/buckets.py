"""The one gradient reducer of `ddp` and `zero1`: fixed buckets, sent while backward still runs.

Each bucket of the plan is one flat buffer, and every `parameter.grad` is a view into it, so
gradients exist once in memory and accumulation happens in place. In the step's last backward pass
a post-accumulate hook counts the gradients that are ready. A full bucket is sent at once, always in
the plan's order, which is the same on every rank and cannot deadlock. Earlier micro-batches send
nothing. The sum is not divided: the step divides by the global count of targets.

    ddp     all-reduce: every rank gets the whole sum, in place
    zero1   reduce-scatter: a rank gets the sum of its own part only, in place. On a CPU two
            buckets are in flight, whose receive buffers serve all steps

If forward passes read narrow copies of the weights, a parameter's gradient is narrow too: the
hook adds it to its view of the fp32 buffer and drops it. `precision.reduce` may make the sent
gradients narrower than the buffer.

Source: Li et al. 2020 (PyTorch Distributed); differs from torch's DDP in fixed buckets (DDP
rebuilds them after step 1, which changes the rounding of sums on resume) and in never averaging.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch import nn

from shoal.base.errors import PlanError
from shoal.base.plans.plan import Bucket, Plan
from shoal.fabric import World
from shoal.parallel.program import HookedReducer, LocalParameter, Program, view_like

if TYPE_CHECKING:
    from shoal.fabric.collectives.uneven_collectives import (
        PendingFlatReduceScatter,
        TransferBuffer,
    )

    Pending = dist.Work | PendingFlatReduceScatter | None

REDUCE = {"fp32": "float32", "bf16": "bfloat16"}
"""`precision.reduce` → torch dtype in which gradients may be sent."""


def bucket_offsets(
    bucket: Bucket, parameters: Mapping[str, nn.Parameter]
) -> dict[str, tuple[int, int]]:
    """Return the start and end of each of a bucket's parameters in its buffer."""
    found, place = {}, 0
    for name in bucket.names:
        found[name] = (place, place + parameters[name].numel())
        place += parameters[name].numel()
    return found


def bucket_worlds(program: Program) -> list[World]:
    """Return for every bucket the data-parallel ranks over which it is summed."""
    return [program.sums[bucket.names[0]][0] for bucket in program.plan.buckets]


def expert_parameters(program: Program) -> frozenset[str]:
    """Return the names of expert parameters, whose gradients come from other ranks' tokens.

    They count also in a pass that only joins the collectives of other ranks: they may get a
    gradient on this rank alone.
    """
    return frozenset(name for name in program.parameters if program.is_expert(name))


def reduce_dtype(plan: Plan) -> torch.dtype | None:
    """Return the dtype in which gradients are sent; None: the dtype of the buffer."""
    return getattr(torch, REDUCE[plan.sums]) if plan.sums else None


class BucketReducer(HookedReducer):
    """The reducer of `ddp` and, if buckets have cuts, of `zero1`; see `program.Reducer`.

    Attributes:
        buffers: memory of reduce-scatters, one for each that may be in flight; (): all may be, each
            in its own.
        narrow: memory of what they send in `precision.reduce`, as many.
    """

    buffers: Sequence[TransferBuffer] = ()
    narrow: Sequence[TransferBuffer] = ()

    def __init__(self, program: Program, local: Mapping[str, LocalParameter]) -> None:
        parameters, buckets, device = program.parameters, program.plan.buckets, program.world.device
        self.parameters, self.dealt = parameters, expert_parameters(program)
        self.reduce = reduce_dtype(program.plan)
        self.plan = buckets
        self.traffic = program.world.traffic
        self.worlds = bucket_worlds(program)
        self.ranks = [world.rank for world in self.worlds]
        self.flats: list[torch.Tensor] = []
        self.views: dict[str, torch.Tensor] = {}
        self.parts: dict[str, torch.Tensor] = {}
        self.bucket_of: dict[str, int] = {}
        self.local = local
        self.copied = {name for bucket in buckets if bucket.compute for name in bucket.names}
        for number, bucket in enumerate(buckets):
            flat = torch.zeros(bucket.elements, dtype=getattr(torch, bucket.dtype), device=device)
            self.flats.append(flat)
            for name, (start, stop) in bucket_offsets(bucket, parameters).items():
                part, parameter = flat[start:stop], parameters[name]
                # Slices are counted in row order, so sharded buckets are in row order.
                own = part.view_as(parameter) if bucket.cuts else view_like(parameter, part)
                self.views[name] = own
                self.bucket_of[name] = number
                if bucket.cuts:
                    low, high = bucket.cuts[self.ranks[number] : self.ranks[number] + 2]
                    self.parts[name] = flat[max(start, low) : max(min(stop, high), low)]
        self.active = False
        self.armed = False
        self.seen: set[str] = set()
        self.fresh: set[str] = set()
        self.missing: list[int] = []
        self.pending: list[tuple[Pending, torch.Tensor]] = []
        self.summed = 0  # buckets whose sum has arrived, the first ones of `pending`
        self.norms: list[torch.Tensor] = []
        self.hooks = [
            parameter.register_post_accumulate_grad_hook(self._hook(name))
            for name, parameter in parameters.items()
        ]

    def start_step(self, rounds: int) -> None:
        """Zero the buffers and make every gradient a view into them."""
        if self.flats:  # a stage of a pipeline may be frozen
            torch._foreach_zero_(self.flats)
        for name, parameter in self.parameters.items():
            parameter.grad = None if name in self.copied else self.views[name]
        self.active, self.armed = True, False
        self.seen, self.fresh = set(), set()
        self.pending, self.norms, self.summed = [], [], 0

    def prepare_backward(self, last: bool, once: bool = True) -> None:
        """Before the last pass: start to count ready gradients and send full buckets."""
        if last:
            self.armed = True
            self.missing = [len(bucket.names) for bucket in self.plan] + [-1]  # the end

    def end_backward(self, counted: bool) -> None:
        """End a backward pass; `finish` sends the buckets that are not full yet."""
        self.seen |= self.fresh if counted else self.fresh & self.dealt
        self.fresh = set()

    def finish(self) -> None:
        """Send the remaining buckets in order and wait for all; the wait counts as exposed."""
        self.armed = False
        while len(self.pending) < len(self.flats):
            self._send()
        with self.traffic.waiting(len(self.pending) - self.summed):
            while self.summed < len(self.pending):
                self._receive()
        self.active = False
        for name, parameter in self.parameters.items():
            # A gradient that is not the view was never summed: some code replaced it.
            kept = None if name in self.copied else self.views[name]
            if parameter.grad is not kept:
                raise PlanError(
                    f"{name}.grad was replaced during the backward pass (by a hook or by the "
                    f"model): its gradient is not in the buffer that ranks sum; leave .grad alone"
                )
            if name in self.parts:
                parameter.grad = None  # outside of this rank's part the buffer is no sum
        for name, local in self.local.items():
            if name in self.parts:
                local.parameter.grad = self.parts[name].view(local.parameter.shape)
            elif name in self.copied:
                local.parameter.grad = self.views[name]

    def close(self) -> None:
        """Leave the parameters as plain PyTorch has them: no hooks, no views into buffers."""
        for hook in self.hooks:
            hook.remove()
        for name, parameter in self.parameters.items():
            if parameter.grad is self.views[name]:
                parameter.grad = None
        for local in self.local.values():
            local.parameter.grad = None

    def local_norms(self) -> list[torch.Tensor]:
        """Return the norm of each bucket as this rank computed it."""
        return self.norms

    def sums(self) -> list[torch.Tensor]:
        """Return the flat buffers, or this rank's parts of them."""
        return [self._own_part(number) for number in range(len(self.flats))]

    def _own_part(self, number: int) -> torch.Tensor:
        flat, cuts = self.flats[number], self.plan[number].cuts
        if not cuts:
            return flat
        return flat[cuts[self.ranks[number]] : cuts[self.ranks[number] + 1]]

    def _hook(self, name: str) -> Callable[[torch.Tensor], None]:
        def ready(parameter: torch.Tensor) -> None:
            if not self.active:
                return
            self.fresh.add(name)
            if name in self.copied and parameter.grad is not None:
                self.views[name].add_(parameter.grad)
                parameter.grad = None
            if not self.armed:
                return
            bucket, missing = self.bucket_of[name], self.missing
            if missing[bucket] == 0:  # it is full, whether it was sent or waits for its turn
                raise second_gradient_error(name)
            missing[bucket] -= 1
            while missing[bucket] == 0 == missing[len(self.pending)]:
                self._send()

        return ready

    def _send(self) -> None:
        number = len(self.pending)
        flat, cuts = self.flats[number], self.plan[number].cuts
        # Taken before the sum mixes ranks, so that a bad norm points to its rank.
        self.norms.append(torch.linalg.vector_norm(flat))
        while self.buffers and number - self.summed >= len(self.buffers):
            with self.traffic.waiting():
                self._receive()
        sent = self._narrowed(number)
        world, self.traffic.subject = self.worlds[number], number
        if self.buffers:
            buffer = self.buffers[number % len(self.buffers)]
            self.pending.append((world.reduce_scatter(sent, cuts, buffer), sent))
        elif cuts:
            self.pending.append((world.reduce_scatter(sent, cuts), sent))
        else:
            self.pending.append((world.all_reduce(sent, wait=False), sent))

    def _narrowed(self, number: int) -> torch.Tensor:
        """Return a bucket in the dtype in which it is sent."""
        flat = self.flats[number]
        if self.reduce is None or self.reduce == flat.dtype:
            return flat
        if not self.narrow:
            return flat.to(self.reduce)
        buffer = self.narrow[number % len(self.narrow)]
        return buffer.acquire(flat.numel(), self.reduce, flat.device).copy_(flat)

    def _receive(self) -> None:
        """Wait for the sum of the first bucket in flight, and write it to the buffer."""
        number, flat = self.summed, self.flats[self.summed]
        work, sent = self.pending[number]
        if self.plan[number].cuts:
            cast("PendingFlatReduceScatter", work).result(out=self._own_part(number))
            if self.narrow and sent is not flat:
                self.narrow[number % len(self.narrow)].release(sent)
        elif work is not None:
            cast(dist.Work, work).wait()
            if sent is not flat:
                flat.copy_(sent)
        # A reference to a work would keep its process group alive beyond `destroy`.
        self.pending[number] = (None, flat)
        self.summed += 1


def second_gradient_error(name: str) -> PlanError:
    """Return the error for a gradient that changes after its bucket was sent."""
    return PlanError(
        f"{name}: a second gradient arrived after its bucket was sent; the model runs "
        f"backward twice within one micro-batch (checkpointing with use_reentrant=True "
        f"does); use use_reentrant=False"
    )
