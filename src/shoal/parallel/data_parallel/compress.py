"""Compressed gradients with error feedback: int8, one bit, low rank (PowerSGD) or top-k.

Every rank adds to its gradient g the rest of the step before, e, sends a short code of the sum, and
keeps the new rest: e' = (g + e) − decoded. So over a run the decoded sums add up to the true sums
but for the last e: nothing is lost, only late. Per bucket, with n ranks and M elements:

    int8       each rank gets all ranks' codes of its part, adds them up decoded, and sends all
               others a code of the sum, whose own error it keeps as well: 2(n−1)/n · M bytes
               (zero1, zero2, and fsdp unit by unit: the first half only)
    one-bit    the same with signs, and the mean magnitude of every 64: 0.19 M instead of M. The
               first steps of a run, when gradients change most, use int8: one-bit:STEPS of
               them, by default a third of the run's
    powersgd   a matrix [m, k] is summed as two thin ones: 2(n−1)/n · r(m + k) numbers instead of
               m · k. Vectors, and matrices that this would not make smaller, are sent uncompressed
    topk       each rank's largest numbers with their positions go to all: (n−1) · 8 bytes for each

All ranks decode the same bytes in the same order, so their sums are equal bit for bit. A skipped
step leaves no trace: the rest becomes valid with the update. The reducer's norms, taken before the
encoding, detect numbers that are not finite. The rest is in checkpoints, rank by rank. The same
layout resumes with it, bit for bit; another layout cuts other parts, and a notice says that it is
lost.

Source: Seide et al. 2014 (one bit, error feedback); Tang et al. 2021 and DeepSpeed's compressed
all-reduce (both ends keep their error); Wang et al. 2023 (ZeRO++, all-to-all of codes); Lin et al.
2018 (top-k); Vogels et al. 2019 (PowerSGD), where a rank keeps its distance from the MEAN of all
ranks. Shoal keeps the part of a rank's own gradient that the two matrices do not hold: it has the
same sum over ranks and does not grow with how much ranks differ
Limits: the rest takes 8 bytes per element of the model on every rank, under fsdp too, and 4
        in checkpoints. It is dropped with the gradient of a parameter that no rank used in the next
        step.
        powersgd: equal bits need ranks of one machine type and number of threads
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import nn

from shoal.base.errors import BugError
from shoal.base.layouts.compression import Compression
from shoal.base.plans.plan import Bucket
from shoal.base.plans.tensor_shards import Shard
from shoal.fabric import TrafficCounter, World
from shoal.fabric.collectives.uneven_collectives import TransferBuffer
from shoal.fabric.compressed.compressed_sums import (
    BIT_BLOCK,
    CODES,
    CompressedAllReduce,
    CompressedReduceScatter,
    CompressedSum,
    FsdpCompressedReduceScatter,
    PendingSum,
    TopKAllReduce,
    block_starts,
)
from shoal.fabric.compressed.powersgd import Matrix, PowerSgdAllReduce
from shoal.parallel.data_parallel._torch import scattered_sizes
from shoal.parallel.data_parallel.buckets import bucket_offsets
from shoal.parallel.program import Part, Program, dtype_of

FEEDBACK = "feedback"


def apply(program: Program) -> Program:
    """Put compression between the program's reducer and its world, as the plan says."""
    compress = program.plan.compress
    policy = Compression.parse(compress)
    if policy.method == "none":
        return program
    if program.data.size == 1:
        program.notices.append(
            f"layout.compress = {compress}: one data-parallel rank sends no gradients, so none is "
            f"compressed"
        )
        return program
    if isinstance(program.reducer, ScatteringReducer):
        senders: list[Any] = program.reducer.replace_scatters(
            lambda plain, unit: FsdpCompressedReduceScatter(
                plain, policy.method, program.data, scattered_sizes(unit)
            )
        )
        sums = CompressedSums(program.data, senders, policy)
    elif isinstance(program.reducer, BucketedReducer):
        buckets = program.plan.buckets
        senders = [_make_sender(policy, one, program.parameters, program.data) for one in buckets]
        sums = CompressedSums(program.data, senders, policy)
        program.reducer.worlds = [sums] * len(senders)
    else:
        raise BugError(f"layout.compress met a reducer without buckets: {program.plan.layout}")
    first = "the first third of the run's steps travels in int8; " if policy.early < 0 else ""
    program.notices.append(
        f"layout.compress = {compress}: {first}what one step leaves out is added in the next; "
        f"checkpoints keep it for this layout, and a resume on another starts without it"
    )
    return replace(
        program,
        owed=ErrorFeedbackState(sums, program),
        on_begin=(*program.on_begin, sums.begin),
        on_update=(*program.on_update, sums.commit),
    )


class CompressedSums:
    """Replacement of the world for a reducer's sums of buckets: the same calls, fewer bytes.

    Attributes:
        policy: the method, and the number of first steps in another code.
        step: number of the next step.
        length: of the run, as `start_run` gives it: `total_steps`, 0 if the user set none.
    """

    length: Any = None

    def __init__(self, world: World, senders: Sequence[Any], policy: Compression) -> None:
        self.world = world
        self.senders = senders
        self.policy, self.step = policy, 0
        self.sent = 0
        self.flying: list[PendingSum] = []

    @property
    def rank(self) -> int:
        """Return this rank's number."""
        return self.world.rank

    @property
    def traffic(self) -> TrafficCounter:
        """Return the traffic counters of the world."""
        return self.world.traffic

    def all_reduce(self, tensor: torch.Tensor, *, wait: Literal[False]) -> PendingCompressedSum:
        """Begin to sum the next bucket over all ranks, in place."""
        return PendingCompressedSum(self._send(tensor), tensor, self._send_second_halves)

    def reduce_scatter(
        self, tensor: torch.Tensor, cuts: Sequence[int], buffer: TransferBuffer | None = None
    ) -> PendingCompressedSum:
        """Sum the next bucket; this rank gets elements cuts[rank] to cuts[rank + 1].

        Args:
            tensor: flat; it may change when this returns.
            cuts: boundaries of the ranks' parts.
            buffer: unused: codes have memory of their own.
        """
        own = tensor[cuts[self.rank] : cuts[self.rank + 1]]
        return PendingCompressedSum(self._send(tensor), own, self._send_second_halves)

    def begin(self) -> None:
        """Start a step with the first bucket; the first steps of one-bit use int8."""
        self.sent, self.flying = 0, []
        self.step += 1
        total = self.length.total_steps if self.length else 0
        early = self.policy.early and self.policy.warmup_steps(total)
        for sender in self.senders:
            sender.begin()
            if self.policy.early:
                sender.by("int8" if self.step <= early else self.policy.method)

    def commit(self, uneven: bool) -> None:
        """Commit the residuals of all buckets, after the optimizer has stepped."""
        for sender in self.senders:
            sender.commit()

    def _send(self, flat: torch.Tensor) -> PendingSum:
        flight = self.senders[self.sent % len(self.senders)].send(flat)
        self.sent += 1
        self.flying.append(flight)
        return flight

    def _send_second_halves(self) -> None:
        # If there is a second half, no rank waits before all buckets were sent. So every rank
        # begins the second halves in the same order.
        flying, self.flying = self.flying, []
        for flight in flying:
            flight.turn()


class ErrorFeedbackState:
    """Error feedback of gradient compression, for checkpoints.

    Attributes:
        dropped: a line if a checkpoint held error feedback of another layout or code, else "".
    """

    def __init__(self, sums: CompressedSums, program: Program) -> None:
        self.sums, self.senders, self.dropped = sums, sums.senders, ""
        self.own = f"{FEEDBACK}.{program.world.rank}."
        plan = program.plan
        # Buckets differ by stage, and all ranks share one record: `load` compares their sizes.
        # Error feedback of one-bit does not depend on the number of first steps in int8.
        method = sums.policy.method
        code = method if method == "one-bit" else plan.compress
        self.whose = {"layout": plan.layout.text(), "compress": code}

    def parts(self) -> dict[str, Part]:
        """Return the error feedback by its name in a checkpoint, each tensor whole on this rank."""
        found = {}
        for place, sender in enumerate(self.senders):
            for key, tensor in sender.state_dict().items():
                name = f"{self.own}{place}.{key}"
                found[name] = (tensor, Shard.whole(name, tuple(tensor.shape), dtype_of(tensor)))
        return found

    def record(self) -> dict[str, Any]:
        """Return the layout and code that the error feedback belongs to, the same on every rank."""
        return {FEEDBACK: self.whose}

    def list_wanted_shards(self, manifest: Any) -> list[Shard]:
        """List a checkpoint's shards of this rank's error feedback; [] for another layout."""
        if manifest.record.get(FEEDBACK) != self.whose:
            return []
        return [
            Shard.whole(name, tuple(stored.shape), stored.dtype)
            for name, stored in manifest.tensors.items()
            if name.startswith(self.own)
        ]

    def load(self, tensors: Mapping[str, torch.Tensor], record: Mapping[str, Any]) -> None:
        """Load the error feedback; if it does not fit, reset it to zero and set `dropped`."""
        self.sums.step, fits = int(record.get("step", 0)), True
        for place, sender in enumerate(self.senders):
            begins = f"{self.own}{place}."
            mine = {n.removeprefix(begins): t for n, t in tensors.items() if n.startswith(begins)}
            now = sender.state_dict()
            if now and {name: one.shape for name, one in mine.items()} != {
                name: one.shape for name, one in now.items()
            }:
                fits, mine = fits and not mine, sender.nothing()
            if now or mine:
                sender.load_state_dict(mine)
        kept, self.dropped = record.get(FEEDBACK), ""
        if kept is not None and (kept != self.whose or not fits):
            what = ", ".join(
                f"{key} was {kept.get(key)}, is {value}"
                for key, value in self.whose.items()
                if kept.get(key) != value
            )
            self.dropped = (
                f"layout.compress = {self.whose['compress']}: what codes left out of earlier steps "
                f"is lost, once: {what or 'gradients travel in other buckets'}"
            )


@runtime_checkable
class BucketedReducer(Protocol):
    """Protocol of a reducer that passes whole buckets to their worlds, in the plan's order."""

    worlds: Sequence[World | CompressedSums]


@runtime_checkable
class ScatteringReducer(Protocol):
    """Protocol of a reducer whose units reduce-scatter by themselves, each by its own callable."""

    def replace_scatters(self, make: Callable[[Any, nn.Module], Any]) -> list[Any]:
        """Replace each unit's reduce-scatter by `make(plain, unit)`; return all in order."""


@dataclass
class PendingCompressedSum:
    """A pending compressed sum, with the interface that reducers wait on.

    Attributes:
        target: the tensor that receives the sum.
        turn: sends the second half of every bucket.
    """

    flight: PendingSum
    target: torch.Tensor
    turn: Callable[[], None]

    def wait(self) -> None:
        """Wait until `target` holds the sum."""
        self.result(self.target)

    def result(self, out: torch.Tensor) -> torch.Tensor:
        """Wait until `out` holds the sum, and return it."""
        self.turn()
        self.flight.result(out)
        return out


def _make_sender(
    policy: Compression, bucket: Bucket, parameters: Mapping[str, nn.Parameter], world: World
) -> CompressedSum:
    wide = torch.float64 if bucket.dtype == "float64" else torch.float32
    if policy.method == "topk":
        return TopKAllReduce(bucket.elements, wide, world, policy.share)
    if policy.method == "powersgd":
        matrices = _matrices(bucket, parameters)
        return PowerSgdAllReduce(bucket.elements, wide, world, matrices, policy.rank)
    codec = CODES[policy.method](wide)
    if bucket.cuts:
        starts = _code_block_starts(bucket, bucket.cuts, parameters)
        return CompressedReduceScatter(bucket.cuts, codec, world, starts)
    part = -(-bucket.elements // world.size)
    cuts = [part * rank for rank in range(world.size + 1)]
    return CompressedAllReduce(
        bucket.elements, codec, world, _code_block_starts(bucket, cuts, parameters)
    )


def _code_block_starts(
    bucket: Bucket, cuts: Sequence[int], parameters: Mapping[str, nn.Parameter]
) -> list[list[int]]:
    """Return the positions in every part of a bucket where code blocks begin, so none spans rows.

    Blocks are counted from the start of a parameter, also if a part holds only its end.
    """
    found = []
    for begin, end in pairwise(cuts):
        sizes = []
        for first, last in bucket_offsets(bucket, parameters).values():
            if first < begin < last:
                head = min((first - begin) % BIT_BLOCK, last - begin)
                sizes += [head, min(last, end) - begin - head]
            elif begin <= first < end:
                sizes.append(min(last, end) - first)
        found.append(block_starts(sizes))
    return found


def _matrices(bucket: Bucket, parameters: Mapping[str, nn.Parameter]) -> list[Matrix]:
    """Return every parameter of two dims or more as a matrix: its first dim by all others."""
    found = []
    for name, (start, stop) in bucket_offsets(bucket, parameters).items():
        parameter = parameters[name]
        if parameter.ndim < 2 or not parameter.numel():
            continue
        rows = parameter.shape[0]
        columns = parameter.numel() // rows
        stride = (columns, 1)
        # As in the reducer's buffers: the parameter's own order if that has no gaps.
        if parameter.ndim == 2 and parameter.stride() == (1, rows):
            stride = (1, rows)
        found.append(Matrix(start, stop, rows, columns, stride))
    return found
