"""PowerSGD: sum a matrix over ranks as the product of two thin matrices.

With M the sum over ranks of the matrices Mᵣ [m, k], and Q [k, r] where the last step ended:

    P = Σ Mᵣ·Q   all-reduce of m · r numbers     made orthonormal, the same on every rank
    Q = Σ Mᵣᵀ·P  all-reduce of k · r numbers     the sum that all ranks use is P·Qᵀ

This is one step of power iteration: over steps P·Qᵀ becomes the best rank-r approximation of the
sum. A rank keeps its residual Mᵣ − P·(Mᵣᵀ·P)ᵀ. All matrices of a bucket share the two all-reduces;
the first one also carries the vectors, uncompressed.

Source: Vogels et al. 2019 (PowerSGD), algorithms 1 and 2; the orthonormal basis by Householder's QR
instead of Gram and Schmidt, since it also completes a basis that zeros leave without directions
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from shoal.fabric.compressed.compressed_sums import PendingSum, Residual, ResidualCompressedSum
from shoal.fabric.world import World

FIRST_SEED = 0x5A0A1
"""Seed of the initial Q, the same on all ranks."""


@dataclass(frozen=True)
class Matrix:
    """Elements start … stop − 1 of a flat tensor, summed as a matrix [rows, columns].

    Attributes:
        stride: stride of the matrix in memory, in elements.

    `of(flat)` returns the matrix as a view, `rank(asked)` its possible rank, and
    `is_worthwhile(asked)` whether its two thin matrices of that rank are smaller than it.
    """

    start: int
    stop: int
    rows: int
    columns: int
    stride: tuple[int, int]

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the matrix [rows, columns] as a view of the flat tensor."""
        part = flat[self.start : self.stop]
        return part.as_strided((self.rows, self.columns), self.stride)

    def rank(self, asked: int) -> int:
        """Return the rank of the approximation: `asked`, or the most that the matrix has."""
        return min(asked, self.rows, self.columns)

    def is_worthwhile(self, asked: int) -> bool:
        """Return whether the two thin matrices have fewer elements than this matrix.

        >>> (
        ...     Matrix(0, 64, 8, 8, (8, 1)).is_worthwhile(3),
        ...     Matrix(0, 64, 8, 8, (8, 1)).is_worthwhile(4),
        ... )
        (True, False)
        """
        return self.rank(asked) * (self.rows + self.columns) < self.rows * self.columns


class PowerSgdAllReduce(ResidualCompressedSum):
    """Sender of a PowerSGD all-reduce: sums of matrices as products of two thin matrices.

    Args:
        elements, dtype, world: size, dtype and ranks of the sum.
        rank: most columns of the thin matrices.
        matrices: parts of [elements]; those whose thin matrices are smaller are sent as two thin
            ones, and all other elements uncompressed.

    Returns:
        the same sum on every rank. After `commit`, a rank adds its approximation error to its next
        message.
    """

    def __init__(
        self,
        elements: int,
        dtype: torch.dtype,
        world: World,
        matrices: Sequence[Matrix],
        rank: int,
    ) -> None:
        self.world, self.dtype = world, dtype
        self.matrices = [one for one in matrices if one.is_worthwhile(rank)]
        self.ranks = [one.rank(rank) for one in self.matrices]
        self.left = Residual(elements, dtype, world.device)
        self.rests = {"left": self.left}
        self.whole = _unmatched_ranges(elements, self.matrices)
        generator = torch.Generator().manual_seed(FIRST_SEED)
        total = sum(r * one.columns for one, r in zip(self.matrices, self.ranks, strict=True))
        first = torch.randn(total, generator=generator, dtype=torch.float64)
        self.start = first.to(device=world.device, dtype=dtype)
        self.next_start: torch.Tensor | None = None

    def send(self, flat: torch.Tensor) -> PendingSum:
        """Sum the first thin matrices and the uncompressed elements."""
        numbers = self.left.add(flat)
        message = [
            (matrix.of(numbers) @ q).reshape(-1)
            for matrix, q in zip(self.matrices, self.columns_of(self.start), strict=True)
        ]
        for start, stop in self.whole:
            message.append(numbers[start:stop].clone())
            numbers[start:stop] = 0
        first = torch.cat(message) if message else numbers.new_empty(0)
        return _PendingPowerSgdAllReduce(self, first, self.world.all_reduce(first, wait=False))

    def begin(self) -> None:
        """Start a step, and discard the residuals and the start of an uncommitted one."""
        super().begin()
        self.next_start = None

    def commit(self) -> None:
        """Commit the step: its residuals, and the start of the next power iteration."""
        super().commit()
        if self.next_start is not None:
            self.start, self.next_start = self.next_start, None

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the residuals and the start of the next power iteration, by name; not copies."""
        return {**super().state_dict(), "start": self.start}

    def load_state_dict(self, kept: Mapping[str, torch.Tensor]) -> None:
        """Load the state that `state_dict` returned."""
        super().load_state_dict(kept)
        self.start, self.next_start = kept["start"].to(self.start, copy=True), None

    def columns_of(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the Q [columns, rank] of every matrix, as views of one flat tensor."""
        sizes = [r * one.columns for one, r in zip(self.matrices, self.ranks, strict=True)]
        parts = flat.split(sizes) if sizes else ()
        return [p.view(-1, r) for p, r in zip(parts, self.ranks, strict=True)]


class _PendingPowerSgdAllReduce:
    def __init__(
        self, sender: PowerSgdAllReduce, first: torch.Tensor, work: dist.Work | None
    ) -> None:
        self.sender, self.first, self.work = sender, first, work
        self.bases: list[torch.Tensor] = []
        self.second = first[:0]

    def turn(self) -> None:
        """Sum the second thin matrices, using the basis that all ranks share."""
        sender = self.sender
        if self.work is not None:
            self.work.wait()
        own, place = [], 0
        for matrix, rank in zip(sender.matrices, sender.ranks, strict=True):
            thin = self.first[place : place + matrix.rows * rank].view(matrix.rows, rank)
            place += matrix.rows * rank
            basis = torch.linalg.qr(thin).Q
            left = matrix.of(sender.left.coming)
            q = left.T @ basis
            left.addmm_(basis, q.T, alpha=-1)
            self.bases.append(basis)
            own.append(q.reshape(-1))
        self.first = self.first[place:]
        self.second = torch.cat(own) if own else self.first[:0]
        self.work = sender.world.all_reduce(self.second, wait=False) if own else None

    def result(self, out: torch.Tensor) -> None:
        """Multiply the thin matrices, and copy the uncompressed elements to their offsets."""
        sender = self.sender
        if self.work is not None:
            self.work.wait()
        sender.next_start = self.second
        total = out if out.dtype == sender.dtype else torch.empty_like(sender.left.coming)
        thin = sender.columns_of(self.second)
        for matrix, basis, q in zip(sender.matrices, self.bases, thin, strict=True):
            torch.mm(basis, q.T, out=matrix.of(total))
        place = 0
        for start, stop in sender.whole:
            total[start:stop] = self.first[place : place + stop - start]
            place += stop - start
        if total is not out:
            out.copy_(total)


def _unmatched_ranges(elements: int, matrices: Sequence[Matrix]) -> list[tuple[int, int]]:
    """Return the ranges of elements that belong to no matrix."""
    edges = [0]
    for matrix in sorted(matrices, key=lambda one: one.start):
        edges += [matrix.start, matrix.stop]
    edges.append(elements)
    pairs = zip(edges[::2], edges[1::2], strict=True)
    return [(start, stop) for start, stop in pairs if start < stop]
