"""Carries files between machines that share no disk, in pieces, many pairs of them at once.

    wave     parcels that can go together: nobody sends two of them at once, or hears two
    piece    PIECE_BYTES of each parcel of a wave; the memory that this takes is two of them
    round    ROUND_PIECES pieces, after which all ranks say whether they are well: so a full disk
             is known soon, and nobody waits in one collective for as long as a file takes

What has come is durable, and not yet believed: who carries checks it against its hashes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from shoal.checkpoint.agreement.collective_phase import exchange
from shoal.checkpoint.format.safetensors_file import write_all
from shoal.fabric import World
from shoal.fabric.collectives.link_failures import swap
from shoal.wire.phases import phase

PIECE_BYTES = 4 << 20
ROUND_PIECES = 64


@dataclass(frozen=True)
class Parcel:
    """A file that goes from one rank's disk to another's."""

    source: int
    target: int
    name: str
    size_bytes: int


def waves(parcels: Sequence[Parcel]) -> list[list[Parcel]]:
    """Deal parcels into waves, each of which nobody sends two of, or hears two.

    >>> pairs = [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]
    >>> dealt = waves([Parcel(source, target, "file", 1) for source, target in pairs])
    >>> [[(one.source, one.target) for one in wave] for wave in dealt]
    [[(0, 1), (1, 0)], [(0, 2), (2, 0)], [(1, 2), (2, 1)]]
    """
    dealt: list[list[Parcel]] = []
    left = list(parcels)
    while left:
        sending, hearing, wave, rest = set[int](), set[int](), list[Parcel](), list[Parcel]()
        for one in left:
            if one.source in sending or one.target in hearing:
                rest.append(one)
                continue
            wave.append(one)
            sending.add(one.source)
            hearing.add(one.target)
        dealt.append(wave)
        left = rest
    return dealt


def carry(
    world: World,
    parcels: Sequence[Parcel],
    source_of: Callable[[Parcel], Path],
    target_of: Callable[[Parcel], Path],
) -> None:
    """Carry files; every rank calls it with the same parcels, and asks for its own paths alone.

    Raises:
        RankFailed, on all ranks, for a disk that does not give a file whole or take it;
            ClusterError where a peer is gone.
    """
    pieces = sum(-(-one.size_bytes // PIECE_BYTES) for one in parcels)
    with phase("fetch", of=pieces) as told:
        for wave in waves(parcels):
            out = next((one for one in wave if one.source == world.rank), None)
            into = next((one for one in wave if one.target == world.rank), None)
            with contextlib.ExitStack() as files:
                sender = _Sender(source_of(out) if out else None, files)
                receiver = _Receiver(target_of(into) if into else None, files)
                most = max(-(-one.size_bytes // PIECE_BYTES) for one in wave)
                for first in range(0, max(most, 1), ROUND_PIECES):
                    end = min(first + ROUND_PIECES, most)
                    for number in range(first, end):
                        heard = receiver.room(into, number)
                        swap(world.group, sender.piece(out, number), heard)
                        receiver.write(heard)
                        told.step(sum(_length(one, number) > 0 for one in wave))
                    exchange(world, partial(_well, sender, receiver, last=end == most))


def _well(sender: _Sender, receiver: _Receiver, *, last: bool) -> None:
    """Errors: OSError for what went wrong on this rank in a round."""
    sender.check()
    receiver.check(last=last)


def _length(parcel: Parcel, number: int) -> int:
    """Bytes of a parcel's piece."""
    return max(0, min(PIECE_BYTES, parcel.size_bytes - number * PIECE_BYTES))


class _Sender:
    """Reads a file; after a failure it sends zeros, until the round's end says what happened."""

    def __init__(self, path: Path | None, files: contextlib.ExitStack) -> None:
        self.failure: OSError | None = None
        self._piece = torch.zeros(PIECE_BYTES if path else 0, dtype=torch.uint8)
        self._descriptor = -1
        if path is not None:
            try:
                self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
                files.callback(os.close, self._descriptor)
            except OSError as failure:
                self.failure = failure

    def piece(self, parcel: Parcel | None, number: int) -> tuple[int, torch.Tensor] | None:
        """Read a piece: (for whom, its bytes); None where there is none."""
        length = _length(parcel, number) if parcel else 0
        if parcel is None or not length:
            return None
        piece = self._piece[:length]
        done, room = 0, piece.numpy().data
        try:
            while done < length and self.failure is None:
                got = os.preadv(self._descriptor, [room[done:]], number * PIECE_BYTES + done)
                if got == 0:
                    raise OSError(0, "was cut short while it was read")
                done += got
        except OSError as failure:
            self.failure = failure
        return parcel.target, piece

    def check(self) -> None:
        """Errors: OSError for what went wrong."""
        if self.failure is not None:
            raise self.failure


class _Receiver:
    """Writes a file; after a failure it takes no more, until the round's end says what happened."""

    def __init__(self, path: Path | None, files: contextlib.ExitStack) -> None:
        self.failure: OSError | None = None
        self._path = path
        self._piece = torch.empty(PIECE_BYTES if path else 0, dtype=torch.uint8)
        self._descriptor = -1
        if path is not None:
            try:
                self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
                files.callback(os.close, self._descriptor)
            except OSError as failure:
                self.failure = failure

    def room(self, parcel: Parcel | None, number: int) -> tuple[int, torch.Tensor] | None:
        """Give room for a piece: (of whom, its bytes to come); None where none comes."""
        length = _length(parcel, number) if parcel else 0
        return (parcel.source, self._piece[:length]) if parcel and length else None

    def write(self, heard: tuple[int, torch.Tensor] | None) -> None:
        """Append a piece that came."""
        if heard is None or self.failure is not None:
            return
        try:
            write_all(self._descriptor, heard[1].numpy().data)
        except OSError as failure:
            failure.filename = failure.filename or str(self._path)
            self.failure = failure

    def check(self, *, last: bool) -> None:
        """Make it durable at the end. Errors: OSError for what went wrong."""
        if self.failure is not None:
            raise self.failure
        if last and self._descriptor >= 0:
            os.fsync(self._descriptor)
            if hasattr(os, "posix_fadvise"):  # so that reading back reads the disk
                os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
