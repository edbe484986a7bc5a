"""Tensors of a record: in memory up to a limit, then in a file, read one by one.

A proof of N parameters in float64 keeps 8·N bytes per step; a file of them is read parameter by
parameter, so that memory holds one at a time. The file has no name: it is deleted with its record.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from io import BufferedRandom
from pathlib import Path
from typing import cast

import torch

IN_MEMORY_BYTES = 64 * 2**20
"""Bytes of a record that stay in memory: files of small models would cost more."""

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class _FileRange:
    """Position of a tensor in the file."""

    offset: int
    shape: torch.Size
    dtype: torch.dtype


@dataclass
class TensorSpill:
    """Store of tensors, copied when they are put.

    Attributes:
        folder: of the file; None: the system's for temporary ones.
        held_bytes: in memory.
        file: None while all are in memory.
    """

    folder: Path | None = None
    held_bytes: int = 0
    file: BufferedRandom | None = field(default=None, repr=False)

    def keep(self, named: Iterable[tuple[str, torch.Tensor]]) -> SpilledTensors:
        """Copy tensors, one by one; return them by name, read on demand."""
        kept = SpilledTensors(self)
        for name, tensor in named:
            kept.add(name, tensor)
        return kept

    def store(self, tensor: torch.Tensor) -> torch.Tensor | _FileRange:
        """Copy a tensor; return the handle that `read` takes."""
        size_bytes = tensor.numel() * tensor.element_size()
        if self.file is None and self.held_bytes + size_bytes <= IN_MEMORY_BYTES:
            self.held_bytes += size_bytes
            return tensor.to("cpu", copy=True)
        if self.file is None:
            self.file = tempfile.TemporaryFile(dir=self.folder)  # noqa: SIM115
        place = _FileRange(self.file.seek(0, 2), tensor.shape, tensor.dtype)
        self.file.write(_bytes(tensor.cpu().contiguous()))
        return place

    def read(self, place: torch.Tensor | _FileRange) -> torch.Tensor:
        """Return a stored tensor; one from the file is the caller's own."""
        if isinstance(place, torch.Tensor):
            return place
        file = cast(BufferedRandom, self.file)
        found = torch.empty(place.shape, dtype=place.dtype)
        file.seek(place.offset)
        file.readinto(_bytes(found))
        return found


def _bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the CPU, not copied."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


@dataclass
class SpilledTensors(Mapping[str, torch.Tensor]):
    """Tensors of a store by name, read on demand."""

    shelf: TensorSpill
    places: dict[str, torch.Tensor | _FileRange] = field(default_factory=dict)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Copy one more tensor."""
        self.places[name] = self.shelf.store(tensor.detach())

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.shelf.read(self.places[name])

    def __contains__(self, name: object) -> bool:
        return name in self.places  # Mapping's own would read the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)


@dataclass(frozen=True)
class OverlaidTensors(Mapping[str, torch.Tensor]):
    """Tensors by name, some replaced: `of[name]` unless `instead` has it.

    Attributes:
        names: in their order.
    """

    names: tuple[str, ...]
    of: Tensors
    instead: Tensors

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.instead[name] if name in self.instead else self.of[name]

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


@dataclass(frozen=True)
class ScaledTensors(Mapping[str, torch.Tensor]):
    """Tensors of `of` in float64 times a factor; zeros of its shape where only `like` has one."""

    of: Tensors
    factor: float
    like: Tensors

    def __getitem__(self, name: str) -> torch.Tensor:
        if name in self.of:
            return self.of[name].double() * self.factor
        return torch.zeros_like(self.like[name], dtype=torch.float64)

    def __contains__(self, name: object) -> bool:
        return name in self.of or name in self.like

    def __iter__(self) -> Iterator[str]:
        yield from self.of
        yield from (name for name in self.like if name not in self.of)

    def __len__(self) -> int:
        return sum(1 for _ in self)
