"""Gradients that travel small: int8, low rank, or only the largest; what is left out comes later.

Every rank adds to its gradient g what it left out before, e, sends a short code of the sum, and
keeps the rest: e' = (g + e) − decoded. So over a run the decoded sums add up to the true sums but
for the last e: nothing is lost, only late. Per bucket, with n ranks and M elements:

    int8       each rank gets everybody's codes of its part, adds them up decoded, and gives all
               others a code of the sum, whose own error it keeps as well: 2(n−1)/n · M bytes
               (zero1, zero2, and fsdp unit by unit: the first half only)
    one-bit    the same with signs, and the mean magnitude of every 64: 0.19 M instead of M. The
               first steps of a run, when gradients change most, travel in int8: one-bit:STEPS of
               them, a third of the run's where nobody says
    powersgd   a matrix [m, k] is summed as two thin ones: 2(n−1)/n · r(m + k) numbers instead of
               m · k. Vectors, and matrices that this would not make smaller, travel as they are
    topk       each rank's largest numbers with their places go to all: (n−1) · 8 bytes for each

All ranks decode the same bytes in the same order, so their sums are equal bit for bit. A step that
is skipped leaves no trace: what is kept becomes valid with the update. Numbers that are not finite
are told by the reducer's norms, taken before anything is encoded. What is kept lies in checkpoints,
rank by rank: the same layout goes on with it, bit for bit; another cuts other parts, and is told
that it is lost.

Source: Seide et al. 2014 (one bit, error feedback); Tang et al. 2021 and DeepSpeed's compressed
all-reduce (both ends keep their error); Wang et al. 2023 (ZeRO++, all-to-all of codes); Lin et al.
2018 (top-k); Vogels et al. 2019 (PowerSGD), where a rank keeps its distance from the MEAN of all
ranks: ours keeps what of its own the two matrices do not hold, which has the same sum over ranks
and does not grow with how much ranks differ
Limits: what is kept takes 8 bytes per element of the model on every rank, under fsdp too, and 4
        in checkpoints. It is dropped with the gradient of a parameter that no rank used in the step
        that would have brought it.
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
from shoal.fabric import Traffic, World
from shoal.fabric.compressed.compressed_sums import (
    BIT_BLOCK,
    CODES,
    CodedScatter,
    CodedSum,
    Flight,
    LargestSum,
    ScatteredSum,
    Sender,
    block_starts,
)
from shoal.fabric.compressed.powersgd import LowRankSum, Matrix
from shoal.parallel.data_parallel._torch import scattered_sizes
from shoal.parallel.data_parallel.buckets import places
from shoal.parallel.program import Part, Program, dtype_of

FEEDBACK = "feedback"


def apply(program: Program) -> Program:
    """Put codes between the program's reducer and its world, as the plan says."""
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
    if isinstance(program.reducer, Scatters):
        senders: list[Any] = program.reducer.scatter_by(
            lambda plain, unit: CodedScatter(
                plain, policy.method, program.data, scattered_sizes(unit)
            )
        )
        sums = CompressedSums(program.data, senders, policy)
    elif isinstance(program.reducer, Sends):
        buckets = program.plan.buckets
        senders = [_sender(policy, one, program.parameters, program.data) for one in buckets]
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
        owed=Owed(sums, program),
        on_begin=(*program.on_begin, sums.begin),
        on_update=(*program.on_update, sums.commit),
    )


class CompressedSums:
    """Stands before the world where a reducer sums buckets: the same calls, fewer bytes.

    Attributes:
        policy: how, and in which steps at the start of a run in another code.
        step: that comes.
        length: of the run, as `start_run` gives it: `total_steps`, 0 where nobody said.
    """

    length: Any = None

    def __init__(self, world: World, senders: Sequence[Any], policy: Compression) -> None:
        self.world = world
        self.senders = senders
        self.policy, self.step = policy, 0
        self.sent = 0
        self.flying: list[Flight] = []

    @property
    def rank(self) -> int:
        """This rank's number."""
        return self.world.rank

    @property
    def traffic(self) -> Traffic:
        """The world's own counters."""
        return self.world.traffic

    def all_reduce(self, tensor: torch.Tensor, *, wait: Literal[False]) -> Arriving:
        """Begin to sum the next bucket over all ranks, in place."""
        return Arriving(self._send(tensor), tensor, self._turn)

    def reduce_scatter(self, tensor: torch.Tensor, cuts: Sequence[int]) -> Arriving:
        """Sum the next bucket; this rank gets the elements from cuts[rank] to cuts[rank + 1]."""
        own = tensor[cuts[self.rank] : cuts[self.rank + 1]]
        return Arriving(self._send(tensor), own, self._turn)

    def begin(self) -> None:
        """A step begins with the first bucket."""
        self.sent, self.flying = 0, []
        self.step += 1
        total = self.length.total_steps if self.length else 0
        early = self.policy.early and self.policy.early_of(total)
        for sender in self.senders:
            sender.begin()
            if self.policy.early:
                sender.by("int8" if self.step <= early else self.policy.method)

    def commit(self, uneven: bool) -> None:
        """The step moved the weights: what codes left out of it is valid."""
        for sender in self.senders:
            sender.commit()

    def _send(self, flat: torch.Tensor) -> Flight:
        flight = self.senders[self.sent % len(self.senders)].send(flat)
        self.sent += 1
        self.flying.append(flight)
        return flight

    def _turn(self) -> None:
        # Where there is a second half, nobody waits before all buckets were sent: so every rank
        # begins the second halves in the same order.
        flying, self.flying = self.flying, []
        for flight in flying:
            flight.turn()


class Owed:
    """What codes left out until now, on its way to checkpoints and back; `Owed(sums, program)`.

    Attributes:
        dropped: a line where a checkpoint held some that belongs to another layout or code, else
            "".
    """

    def __init__(self, sums: CompressedSums, program: Program) -> None:
        self.sums, self.senders, self.dropped = sums, sums.senders, ""
        self.own = f"{FEEDBACK}.{program.world.rank}."
        plan = program.plan
        # Buckets are a stage's own, and the record is one for all: their sizes are compared below.
        # What is left fits whenever one bit begins.
        method = sums.policy.method
        code = method if method == "one-bit" else plan.compress
        self.whose = {"layout": plan.layout.text(), "compress": code}

    def parts(self) -> dict[str, Part]:
        """What is left, by its name in a checkpoint, each tensor whole on this rank."""
        found = {}
        for place, sender in enumerate(self.senders):
            for key, tensor in sender.kept().items():
                name = f"{self.own}{place}.{key}"
                found[name] = (tensor, Shard.whole(name, tuple(tensor.shape), dtype_of(tensor)))
        return found

    def record(self) -> dict[str, Any]:
        """Whose it is: the same on every rank."""
        return {FEEDBACK: self.whose}

    def wanted(self, manifest: Any) -> list[Shard]:
        """This rank's of a checkpoint's, if they fit."""
        if manifest.record.get(FEEDBACK) != self.whose:
            return []
        return [
            Shard.whole(name, tuple(stored.shape), stored.dtype)
            for name, stored in manifest.tensors.items()
            if name.startswith(self.own)
        ]

    def load(self, tensors: Mapping[str, torch.Tensor], record: Mapping[str, Any]) -> None:
        """Take it back; where it does not fit, nothing is owed, and `dropped` says so."""
        self.sums.step, fits = int(record.get("step", 0)), True
        for place, sender in enumerate(self.senders):
            begins = f"{self.own}{place}."
            mine = {n.removeprefix(begins): t for n, t in tensors.items() if n.startswith(begins)}
            now = sender.kept()
            if now and {name: one.shape for name, one in mine.items()} != {
                name: one.shape for name, one in now.items()
            }:
                fits, mine = fits and not mine, sender.nothing()
            if now or mine:
                sender.take(mine)
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
class Sends(Protocol):
    """A reducer that hands whole buckets to their worlds, always in the plan's order."""

    worlds: Sequence[World | CompressedSums]


@runtime_checkable
class Scatters(Protocol):
    """A reducer whose units reduce-scatter by themselves, each by what `make` gives for it."""

    def scatter_by(self, make: Callable[[Any, nn.Module], Any]) -> list[Any]:
        """Give every unit one of its own, of the plain one and the unit; all, in units' order."""


@dataclass
class Arriving:
    """A sum under way, as reducers wait for it.

    Attributes:
        target: where the sum belongs.
        turn: sends the second half of every bucket.
    """

    flight: Flight
    target: torch.Tensor
    turn: Callable[[], None]

    def wait(self) -> None:
        """Until `target` holds the sum."""
        self.result(self.target)

    def result(self, out: torch.Tensor) -> torch.Tensor:
        """Until `out` holds the sum."""
        self.turn()
        self.flight.result(out)
        return out


def _sender(
    policy: Compression, bucket: Bucket, parameters: Mapping[str, nn.Parameter], world: World
) -> Sender:
    wide = torch.float64 if bucket.dtype == "float64" else torch.float32
    if policy.method == "topk":
        return LargestSum(bucket.elements, wide, world, policy.share)
    if policy.method == "powersgd":
        matrices = _matrices(bucket, parameters)
        return LowRankSum(bucket.elements, wide, world, matrices, policy.rank)
    codec = CODES[policy.method](wide)
    if bucket.cuts:
        starts = _starts(bucket, bucket.cuts, parameters)
        return ScatteredSum(bucket.cuts, codec, world, starts)
    part = -(-bucket.elements // world.size)
    cuts = [part * rank for rank in range(world.size + 1)]
    return CodedSum(bucket.elements, codec, world, _starts(bucket, cuts, parameters))


def _starts(
    bucket: Bucket, cuts: Sequence[int], parameters: Mapping[str, nn.Parameter]
) -> list[list[int]]:
    """Of every part of a bucket the places where blocks begin anew, so that they stay in one row.

    Blocks are counted from where a parameter begins, also one of which a part holds the end.
    """
    found = []
    for begin, end in pairwise(cuts):
        sizes = []
        for first, last in places(bucket, parameters).values():
            if first < begin < last:
                head = min((first - begin) % BIT_BLOCK, last - begin)
                sizes += [head, min(last, end) - begin - head]
            elif begin <= first < end:
                sizes.append(min(last, end) - first)
        found.append(block_starts(sizes))
    return found


def _matrices(bucket: Bucket, parameters: Mapping[str, nn.Parameter]) -> list[Matrix]:
    """Every parameter of two dims or more: its first dim against all others."""
    found = []
    for name, (start, stop) in places(bucket, parameters).items():
        parameter = parameters[name]
        if parameter.ndim < 2 or not parameter.numel():
            continue
        rows = parameter.shape[0]
        columns = parameter.numel() // rows
        stride = (columns, 1)
        # As the reducer's buffers have it: in the parameter's own order if that has no gaps.
        if parameter.ndim == 2 and parameter.stride() == (1, rows):
            stride = (1, rows)
        found.append(Matrix(start, stop, rows, columns, stride))
    return found
