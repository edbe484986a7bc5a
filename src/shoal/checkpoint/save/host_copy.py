"""Copy this rank's share of a run into host memory that every save uses again.

Training waits only for this copy, so it must cost no more than the bytes: one allocation, kept,
whose pages are in place after the first save. It is pinned where tensors come from a GPU, so that
the copy is queued on the training stream, before the next step's kernels, without a wait.

Limits: the memory stays taken between saves: a rank's share of weights and optimizer state.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from shoal.checkpoint.agreement.rank_pieces import HeldSlice
from shoal.fabric.device import first_accelerator, pin_host_memory, record_event

ALIGN_BYTES = 64
"""Alignment of each block: right for any dtype, and no cache line is shared."""

Kind = tuple[torch.dtype, torch.Size]


class HostCopy:
    """Host memory of one save at a time: `take` overwrites the previous copy."""

    def __init__(self) -> None:
        self._flat = torch.empty(0, dtype=torch.uint8)
        self._kinds: list[Kind] = []
        self._slots: list[torch.Tensor] = []
        self._flat_slots: list[torch.Tensor] = []
        self._queued: Any = None  # an event of the device that was copied from
        self._unpin: weakref.finalize | None = None

    def copy_blocks(self, blocks: Sequence[HeldSlice]) -> list[HeldSlice]:
        """Copy the blocks' data to host memory, flat; on a GPU the copy is only queued.

        After this returns, the sources may change. The data may be read after `arrived`.
        """
        sources = [block.data for block in blocks]
        self._arrange(sources)
        self.again(sources)
        return [b.with_data(slot) for b, slot in zip(blocks, self._flat_slots, strict=True)]

    def again(self, sources: Sequence[torch.Tensor]) -> bool:
        """Copy tensors over those of the newest `take`; return False if shapes or dtypes differ."""
        if self._kinds != [(source.dtype, source.shape) for source in sources]:
            return False
        if sources:
            with torch.no_grad():
                torch._foreach_copy_(self._slots, list(sources), non_blocking=True)
        device = first_accelerator(sources)
        if device is not None:
            self._queued = record_event(device)
        return True

    def wait_until_copied(self) -> None:
        """Wait until the copies that `take` queued are complete; any thread may call it."""
        if self._queued is not None:
            self._queued.synchronize()
            self._queued = None

    def free(self) -> None:
        """Free the memory."""
        self._kinds, self._slots, self._flat_slots = [], [], []
        self._release()

    def _arrange(self, sources: Sequence[torch.Tensor]) -> None:
        """Assign each source its offset; memory that is large enough is used again."""
        self._kinds, self._slots, self._flat_slots = [], [], []
        starts = [0]
        for source in sources:
            starts.append(starts[-1] + -(-source.nbytes // ALIGN_BYTES) * ALIGN_BYTES)
        if starts[-1] > self._flat.numel():
            self._release()
            self._flat = torch.empty(starts[-1], dtype=torch.uint8)
            device = first_accelerator(sources)
            if device is not None:
                self._unpin = pin_host_memory(self._flat, device, self)
        for start, source in zip(starts, sources, strict=False):
            flat = self._flat[start : start + source.nbytes].view(source.dtype)
            self._kinds.append((source.dtype, source.shape))
            self._slots.append(flat.view(source.shape))
            self._flat_slots.append(flat)

    def _release(self) -> None:
        if self._unpin is not None:
            self._unpin()
            self._unpin = None
        self._flat = torch.empty(0, dtype=torch.uint8)
