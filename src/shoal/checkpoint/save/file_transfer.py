"""Transfer files between machines that share no disk, in pieces, many pairs of ranks at once.

    wave     transfers that can go together: no rank sends, or receives, two of them at once
    piece    PIECE_BYTES of each transfer of a wave; the memory that this takes is two of them
    round    ROUND_PIECES pieces, after which all ranks exchange their state: so a full disk is
             known soon, and nobody waits in one collective for as long as a file takes

A received file is durable, and not yet verified: the caller checks its hashes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from shoal.checkpoint.agreement.collective_phase import gather_results
from shoal.checkpoint.format.safetensors_file import write_all
from shoal.fabric import World
from shoal.fabric.collectives.link_failures import send_and_receive
from shoal.wire.phases import phase

PIECE_BYTES = 4 << 20
ROUND_PIECES = 64


@dataclass(frozen=True)
class FileTransfer:
    """Transfer of a file from one rank's disk to another's."""

    source: int
    target: int
    name: str
    size_bytes: int


def group_into_waves(parcels: Sequence[FileTransfer]) -> list[list[FileTransfer]]:
    """Group transfers into waves in which no rank sends, or receives, two of them.

    >>> pairs = [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]
    >>> dealt = group_into_waves(
    ...     [FileTransfer(source, target, "file", 1) for source, target in pairs]
    ... )
    >>> [[(one.source, one.target) for one in wave] for wave in dealt]
    [[(0, 1), (1, 0)], [(0, 2), (2, 0)], [(1, 2), (2, 1)]]
    """
    dealt: list[list[FileTransfer]] = []
    left = list(parcels)
    while left:
        sending, hearing, wave, rest = (
            set[int](),
            set[int](),
            list[FileTransfer](),
            list[FileTransfer](),
        )
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


def transfer_files(
    world: World,
    parcels: Sequence[FileTransfer],
    source_of: Callable[[FileTransfer], Path],
    target_of: Callable[[FileTransfer], Path],
) -> None:
    """Transfer files; every rank calls it with the same parcels, and asks for its own paths alone.

    Raises:
        RankFailed: on all ranks, if a disk fails to read or write a file.
        ClusterError: a peer is gone.
    """
    pieces = sum(-(-one.size_bytes // PIECE_BYTES) for one in parcels)
    with phase("fetch", of=pieces) as told:
        for wave in group_into_waves(parcels):
            out = next((one for one in wave if one.source == world.rank), None)
            into = next((one for one in wave if one.target == world.rank), None)
            with contextlib.ExitStack() as files:
                sender = _FileSender(source_of(out) if out else None, files)
                receiver = _FileReceiver(target_of(into) if into else None, files)
                most = max(-(-one.size_bytes // PIECE_BYTES) for one in wave)
                for first in range(0, max(most, 1), ROUND_PIECES):
                    end = min(first + ROUND_PIECES, most)
                    for number in range(first, end):
                        heard = receiver.make_buffer(into, number)
                        send_and_receive(world.group, sender.read_piece(out, number), heard)
                        receiver.write(heard)
                        told.step(sum(_piece_bytes(one, number) > 0 for one in wave))
                    gather_results(world, partial(_check_round, sender, receiver, last=end == most))


def _check_round(sender: _FileSender, receiver: _FileReceiver, *, last: bool) -> None:
    """Raise this rank's read or write error of a round; if `last`, fsync the received file.

    Raises:
        OSError: a read or write failed on this rank in the round.
    """
    sender.check()
    receiver.check(last=last)


def _piece_bytes(parcel: FileTransfer, number: int) -> int:
    """Return the bytes of a transfer's piece."""
    return max(0, min(PIECE_BYTES, parcel.size_bytes - number * PIECE_BYTES))


class _TransferredFile:
    """File of a transfer, opened until `files` closes; None: this rank takes no part."""

    def __init__(self, path: Path | None, flags: int, files: contextlib.ExitStack) -> None:
        self.failure: OSError | None = None
        self._piece = torch.zeros(PIECE_BYTES if path else 0, dtype=torch.uint8)
        self._descriptor = -1
        if path is not None:
            try:
                self._descriptor = os.open(path, flags, 0o644)
                files.callback(os.close, self._descriptor)
            except OSError as failure:
                self.failure = failure


class _FileSender(_TransferredFile):
    """Reader of a file to send; after a failure it sends zeros until the round ends."""

    def __init__(self, path: Path | None, files: contextlib.ExitStack) -> None:
        super().__init__(path, os.O_RDONLY | os.O_NONBLOCK, files)

    def read_piece(
        self, parcel: FileTransfer | None, number: int
    ) -> tuple[int, torch.Tensor] | None:
        """Read a piece: (destination rank, its bytes); None where there is none."""
        length = _piece_bytes(parcel, number) if parcel else 0
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
        """Raise the error of a failed read, if any.

        Raises:
            OSError: a read failed.
        """
        if self.failure is not None:
            raise self.failure


class _FileReceiver(_TransferredFile):
    """Writer of a received file; after a failure it discards pieces until the round ends."""

    def __init__(self, path: Path | None, files: contextlib.ExitStack) -> None:
        super().__init__(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, files)
        self._path = path

    def make_buffer(
        self, parcel: FileTransfer | None, number: int
    ) -> tuple[int, torch.Tensor] | None:
        """Return a buffer for a piece: (source rank, its bytes to come); None where none comes."""
        length = _piece_bytes(parcel, number) if parcel else 0
        return (parcel.source, self._piece[:length]) if parcel and length else None

    def write(self, heard: tuple[int, torch.Tensor] | None) -> None:
        """Append a received piece."""
        if heard is None or self.failure is not None:
            return
        try:
            write_all(self._descriptor, heard[1].numpy().data)
        except OSError as failure:
            failure.filename = failure.filename or str(self._path)
            self.failure = failure

    def check(self, *, last: bool) -> None:
        """Raise a failed write's error; if `last`, fsync the file and drop it from the page cache.

        Args:
            last: True once all pieces were written.

        Raises:
            OSError: a write failed.
        """
        if self.failure is not None:
            raise self.failure
        if last and self._descriptor >= 0:
            os.fsync(self._descriptor)
            if hasattr(os, "posix_fadvise"):  # so that reading back reads the disk
                os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
