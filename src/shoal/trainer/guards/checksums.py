"""Checksums of tensors: exact sums of their bytes as integers, in any order; one bit changes them.

`fingerprint` is one number for some tensors, which ranks compare. `ChecksumReader` computes one for
each tensor in every step: eight bytes at a time, modulo 2**64. It keeps views of the tensors, so
that a tensor costs a microsecond and the reading of its bytes. A bit that flips changes such a sum
by a power of two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from shoal.parallel._torch import version_counter

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtypes by element width in bytes."""

LOOKED_AT = 65536
"""Elements that `fingerprint` reads of a tensor that was not marked as written."""

SURE = 2**52
"""Bound of integers that a sum in float64 represents exactly."""

Memory = tuple[int, int]
"""Address of a tensor's memory, and its bytes."""

WEIGHT = "weight"
"""Kind of tensors that user code may write; all others belong to the optimizer or to Shoal."""

Key = tuple[str, str]
"""Kind of a tensor (weight, a key of the optimizer's state, average), and its parameter's name."""


def local_part(tensor: Any) -> torch.Tensor:
    """Return the part of a tensor that is on this rank."""
    with torch.no_grad():  # else torch records autograd history, which is slower than most checks
        part: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def fingerprint(tensors: Sequence[torch.Tensor], *, whole: bool = False) -> int:
    """Return a checksum below 2**52 of some tensors; other bits very rarely have the same one.

    Args:
        tensors: the tensors, in the same order on all ranks that compare.
        whole: read every element, and not only some tens of thousands of each tensor.
    """
    total = 0
    sums: dict[torch.device, torch.Tensor] = {}
    for place, tensor in enumerate(tensors, start=1):
        part = local_part(tensor).detach()
        if not part.untyped_storage().nbytes():
            continue  # offloaded between its passes: the host copy is another of these tensors
        flat = part.contiguous().reshape(-1)
        if flat.element_size() in BITS:
            flat = flat.view(BITS[flat.element_size()])
        bits = flat[:: 1 if whole else max(1, flat.numel() // LOOKED_AT)]
        # On the host torch copies to 64 bits per element, and its result lies among such copies.
        # So the heap kept twice the bytes of offloaded parameters.
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
class ChecksumValues:
    """Checksums of some tensors, those of a device not yet copied to the host.

    Attributes:
        host: int64, zeros for tensors on a device.
        devices: by device: which tensors, and their sums.
    """

    host: Any
    devices: dict[torch.device, tuple[list[int], torch.Tensor]]

    def read(self) -> Any:
        """Return the checksums as int64, one per tensor; wait for devices."""
        for places, sums in self.devices.values():
            self.host[places] = sums.cpu().numpy()
        self.devices = {}
        return self.host


@dataclass
class ChecksumSnapshot:
    """Checksums of this rank's tensors after the update of `step`.

    Attributes:
        step: the step.
        tensors: the tensors, by kind and parameter.
        sums: their checksums.
        marks: write counter, address and bytes of each tensor at that time.
        now: the checksums of a later look at the same tensors.
        changed: indices of tensors whose bytes changed without a write; set by
            `CorruptionCheck._compare`.
    """

    step: int
    tensors: dict[Key, torch.Tensor]
    sums: ChecksumValues
    marks: list[tuple[int, Memory]]
    now: Any = None
    changed: Sequence[int] = ()


class ChecksumReader:
    """Reader of checksums of many tensors; it caches views of memory that stays at its address."""

    def __init__(self) -> None:
        self._seen: set[Memory] = set()
        self._words: dict[Memory, tuple[Any, Any]] = {}

    def sums(self, tensors: Sequence[torch.Tensor]) -> ChecksumValues:
        """Return one checksum per tensor; 0 for a tensor whose memory is released for now."""
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
            eights, rest = words.get(memory) or _byte_views(tensor)
            host[place] = add(eights)
            if rest is not None:
                host[place : place + 1] += int.from_bytes(rest.tobytes(), "little")
        devices = {
            device: (places, _sum_on_device([tensors[place] for place in places]))
            for device, places in elsewhere.items()
        }
        return ChecksumValues(host, devices)

    def keep(self, tensors: Sequence[torch.Tensor]) -> None:
        """Keep the views of tensors that have the same address as last time, and no others.

        Otherwise, for an optimizer that makes new state in each step, the views would keep the old
        state.
        """
        now = {(t.data_ptr(), t.nbytes): t for t in tensors if t.device.type == "cpu"}
        stay = {
            m: self._words.get(m) or _byte_views(now[m]) for m in now if all(m) and m in self._seen
        }
        self._seen, self._words = set(now), stay


def _byte_views(tensor: torch.Tensor) -> tuple[Any, Any]:
    """Return a tensor's bytes on the host: eight at a time, and the rest or None."""
    raw = _flatten_memory(tensor).view(torch.uint8).numpy()
    whole = len(raw) // 8 * 8
    return raw[:whole].view(np.int64), raw[whole:] if whole < len(raw) else None


def _flatten_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return all elements as they lie in memory; a copy if there are gaps between them."""
    tensor = tensor.detach()
    if not tensor.is_contiguous():
        length = 1
        for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
            if size > 1 and stride != length:
                return tensor.contiguous().reshape(-1)
            length *= size
        return tensor.as_strided((tensor.numel(),), (1,))
    return tensor.reshape(-1)


def _sum_on_device(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return one sum per tensor of a device, on the device, of elements as integers."""
    sums = torch.zeros(len(tensors), dtype=torch.int64, device=tensors[0].device)
    for place, tensor in enumerate(tensors):
        if tensor.numel() and tensor.untyped_storage().nbytes():
            bits = _flatten_memory(tensor)
            bits = bits.view(BITS.get(bits.element_size(), torch.uint8))
            torch.sum(bits, 0, dtype=torch.int64, out=sums[place])
    return sums


Marks = Mapping[int, tuple[int, int]]
"""Parameter, by id → id of its gradient, and the gradient's write counter."""

NO_GRADIENT = (0, 0)
"""Mark of a parameter without a gradient."""


def read_gradient_marks(parameters: Sequence[nn.Parameter]) -> dict[int, tuple[int, int]]:
    """Return the marks of some parameters; writes into a DTensor count there, not in its part."""
    read = version_counter  # of a plain gradient here: the call of a function would take longer
    return {
        id(p): (id(g), read(g)) if type(g := p.grad) is torch.Tensor else _gradient_mark(g)
        for p in parameters
    }


def list_changed_gradients(marks: Marks, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """Return parameters with a mark whose gradient was replaced, written or removed since then."""
    now = read_gradient_marks(parameters)
    changed = () if now == marks else parameters
    return [p for p in changed if marks.get(id(p), now[id(p)]) != now[id(p)]]


def _gradient_mark(gradient: torch.Tensor | None) -> tuple[int, int]:
    if gradient is None:
        return NO_GRADIENT
    if not hasattr(gradient, "to_local"):
        return id(gradient), version_counter(gradient)
    return id(gradient), version_counter(gradient) + version_counter(local_part(gradient))


def has_nonzero_gradient(parameters: Sequence[nn.Parameter]) -> bool:
    """Return whether some gradient has a nonzero element; wait for its device."""
    return any(p.grad is not None and bool((local_part(p.grad) != 0).any()) for p in parameters)


def is_value_check_step(step: int) -> bool:
    """Return whether the check before this step reads values: in steps 1, 2, 4, 8 and so on."""
    return step > 0 and step & (step - 1) == 0
