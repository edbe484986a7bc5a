"""Sums of tensors' bytes as whole numbers: exact, in whatever order, and others for any one bit.

`fingerprint` is one number for some tensors, for ranks to compare. `Checksums` gives one for each
tensor and is made to be asked in every step: eight bytes at a time, modulo 2**64, over views that
are kept, so that a tensor costs a microsecond and the reading of its bytes. A bit that flips
changes such a sum by a power of two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from shoal.parallel._torch import writes

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Whole numbers as wide as an element."""

LOOKED_AT = 65536
"""Elements of a tensor that are read where nothing says that it was written."""

SURE = 2**52
"""Whole numbers below it survive a sum in float64."""

Memory = tuple[int, int]
"""Where a tensor's memory begins, and its bytes."""

WEIGHT = "weight"
"""What a tensor is that user code may write; all others are an optimizer's, or ours."""

Key = tuple[str, str]
"""What a tensor is (weight, a key of the optimizer's state, average), and of which parameter."""


def here(tensor: Any) -> torch.Tensor:
    """Return the part of a tensor that is on this rank."""
    with torch.no_grad():  # else torch gives the part a history, which takes longer than most looks
        part: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def fingerprint(tensors: Sequence[torch.Tensor], *, whole: bool = False) -> int:
    """A number below 2**52 that other bits would hardly give.

    Args:
        whole: read every element, and not only some tens of thousands of each tensor.
    """
    total = 0
    sums: dict[torch.device, torch.Tensor] = {}
    for place, tensor in enumerate(tensors, start=1):
        part = here(tensor).detach()
        if not part.untyped_storage().nbytes():
            continue  # on the host between its passes, where it is another of them
        flat = part.contiguous().reshape(-1)
        if flat.element_size() in BITS:
            flat = flat.view(BITS[flat.element_size()])
        bits = flat[:: 1 if whole else max(1, flat.numel() // LOOKED_AT)]
        # torch makes a copy of 64 bits per element on the host, and a result that lies between such
        # copies: of parameters that are parked there the heap kept twice their bytes.
        if bits.device.type == "cpu" and bits.element_size() in BITS:
            total += place * int(bits.numpy().sum(dtype=np.int64))
            continue
        if bits.device not in sums:
            sums[bits.device] = torch.zeros(len(tensors), dtype=torch.int64, device=bits.device)
        torch.sum(bits, 0, dtype=torch.int64, out=sums[bits.device][place - 1])
    for some in sums.values():  # a device is waited for once
        total += sum(place * one for place, one in enumerate(some.tolist(), start=1))
    return total % (SURE - 1)  # not by 2**52: that leaves no sign and no exponent of float64


@dataclass
class Sums:
    """Sums of some tensors, those on a device still under way there.

    Attributes:
        host: int64, zeros where a tensor is elsewhere.
        devices: by device: which tensors, and their sums.
    """

    host: Any
    devices: dict[torch.device, tuple[list[int], torch.Tensor]]

    def read(self) -> Any:
        """int64, one per tensor; waits for devices."""
        for places, sums in self.devices.values():
            self.host[places] = sums.cpu().numpy()
        self.devices = {}
        return self.host


@dataclass
class Look:
    """What this rank held when the update of `step` was over.

    Attributes:
        marks: how often each tensor was written by then, and where it lay.
        changed: places of those that are other now, though nobody wrote them; found by
            `Drift.says`.
    """

    step: int
    tensors: dict[Key, torch.Tensor]
    sums: Sums
    marks: list[tuple[int, Memory]]
    now: Any = None
    changed: Sequence[int] = ()


class Checksums:
    """Reads many tensors, again and again: how memory is read that stays in its place is kept."""

    def __init__(self) -> None:
        self._seen: set[Memory] = set()
        self._words: dict[Memory, tuple[Any, Any]] = {}

    def sums(self, tensors: Sequence[torch.Tensor]) -> Sums:
        """One sum per tensor; 0 for one whose memory is given away for now."""
        host = np.zeros(len(tensors), np.int64)
        elsewhere: dict[torch.device, list[int]] = {}
        words, add = self._words, np.add.reduce
        for place, tensor in enumerate(tensors):
            if tensor.device.type != "cpu":
                elsewhere.setdefault(tensor.device, []).append(place)
                continue
            memory = (tensor.data_ptr(), tensor.nbytes)
            if not (memory[0] and memory[1]):
                continue
            eights, rest = words.get(memory) or _words(tensor)
            host[place] = add(eights)
            if rest is not None:
                host[place : place + 1] += int.from_bytes(rest.tobytes(), "little")
        devices = {
            device: (places, _on_device([tensors[place] for place in places]))
            for device, places in elsewhere.items()
        }
        return Sums(host, devices)

    def keep(self, tensors: Sequence[torch.Tensor]) -> None:
        """Keep the views of tensors that lay where they lie the last time too, and no others.

        An optimizer that makes new state in each step would have the old one kept beside it.
        """
        now = {(t.data_ptr(), t.nbytes): t for t in tensors if t.device.type == "cpu"}
        stay = {m: self._words.get(m) or _words(now[m]) for m in now if all(m) and m in self._seen}
        self._seen, self._words = set(now), stay


def _words(tensor: torch.Tensor) -> tuple[Any, Any]:
    """A tensor's bytes on the host: eight at a time, and those that are left, or None."""
    raw = _flat(tensor).view(torch.uint8).numpy()
    whole = len(raw) // 8 * 8
    return raw[:whole].view(np.int64), raw[whole:] if whole < len(raw) else None


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """All elements as they lie in memory; a copy where there are gaps between them."""
    tensor = tensor.detach()
    if not tensor.is_contiguous():
        length = 1
        for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
            if size > 1 and stride != length:
                return tensor.contiguous().reshape(-1)
            length *= size
        return tensor.as_strided((tensor.numel(),), (1,))
    return tensor.reshape(-1)


def _on_device(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """One sum per tensor of a device, there: elements as whole numbers."""
    sums = torch.zeros(len(tensors), dtype=torch.int64, device=tensors[0].device)
    for place, tensor in enumerate(tensors):
        if tensor.numel() and tensor.untyped_storage().nbytes():
            bits = _flat(tensor)
            bits = bits.view(BITS.get(bits.element_size(), torch.uint8))
            torch.sum(bits, 0, dtype=torch.int64, out=sums[place])
    return sums


Marks = Mapping[int, tuple[int, int]]
"""Parameter, by id → its gradient, by id, and how often that was written."""

NO_GRADIENT = (0, 0)
"""The mark of a parameter without one."""


def marks_of(parameters: Sequence[nn.Parameter]) -> dict[int, tuple[int, int]]:
    """Take the marks of some parameters; writes into a DTensor count there, not in its part."""
    return {id(p): _mark(p.grad) for p in parameters}


def changed_since(marks: Marks, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """Return those with a mark whose gradient is another one, was written, or is gone since."""
    return [p for p in parameters if id(p) in marks and _mark(p.grad) != marks[id(p)]]


def _mark(gradient: torch.Tensor | None) -> tuple[int, int]:
    if gradient is None:
        return NO_GRADIENT
    if not hasattr(gradient, "to_local"):
        return id(gradient), writes(gradient)
    return id(gradient), writes(gradient) + writes(here(gradient))


def any_nonzero(parameters: Sequence[nn.Parameter]) -> bool:
    """Read whether some gradient has an element that is not zero; waits for its device."""
    return any(p.grad is not None and bool((here(p.grad) != 0).any()) for p in parameters)


def is_read(step: int) -> bool:
    """Return whether numbers themselves are read before this step: 1, 2, 4, 8, …"""
    return step > 0 and step & (step - 1) == 0
