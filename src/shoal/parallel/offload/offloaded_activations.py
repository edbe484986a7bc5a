"""Offload saved tensors to the host during forward, and prefetch them before backward needs them.

Source: Rhu et al. 2016 (vDNN); the queue of copies that compute waits for is torchtune's
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from shoal.parallel.offload.copy_stream import CopyStream

LEAST_BYTES = 2**20
"""Smaller tensors stay on the device: a copy each would cost more than their memory."""

AHEAD = 2
"""Most copies in flight while compute goes on, in either direction."""


class OffloadedTensor:
    """A saved tensor on the host; also on the device before it leaves and after it was prefetched.

    Attributes:
        key: identifies the tensor if it is saved again: its memory and its version counter.
        place: its number in the micro-batch.
        there: the host's copy.
        tensor: the device's copy, if there is one.
        event: end of its last copy.
    """

    def __init__(
        self, key: tuple[Any, ...], place: int, tensor: torch.Tensor, lane: CopyStream
    ) -> None:
        self.key, self.place = key, place
        self.tensor: torch.Tensor | None = tensor
        self.there, self.event = lane.copy_to_host(tensor)


class ActivationOffload:
    """Saved-tensor hooks that move activations to the host in the forward pass.

    Not moved: weights, which stay on the device anyway, and tensors smaller than `least_bytes` or
    larger than their storage (an expanded tensor).
    """

    def __init__(
        self,
        module: nn.Module,
        blocks: Iterable[str],
        device: torch.device,
        least_bytes: int = LEAST_BYTES,
    ) -> None:
        self.lane, self.least_bytes = CopyStream(device), least_bytes
        self.active = False
        self.weights: set[int] = set()
        self.leaving: deque[OffloadedTensor] = deque()
        self.returning: set[OffloadedTensor] = set()
        self.parked: list[weakref.ref[OffloadedTensor]] = []
        # Also at blocks, since FSDP2 gathers a block's parameters again, and frees them soon after.
        self.hooks = [
            part.register_forward_pre_hook(self._note_weights)
            for part in (module, *map(module.get_submodule, blocks))
        ]

    def __deepcopy__(self, known: object) -> ActivationOffload:
        return self  # fsdp copies the module to the meta device, and streams cannot be copied

    @contextmanager
    def micro_batch(self, step: int, index: int) -> Iterator[None]:
        """Install the hooks around a forward and backward pass."""
        self.active = True
        try:
            with saved_tensors_hooks(self.offload, self.fetch):
                yield
        finally:
            self.active = False
            for parked in (*self.leaving, *self.returning):
                self.lane.wait(parked.event)
                parked.tensor = None  # without a backward pass the graph would keep it alive
            self.leaving.clear()
            self.returning.clear()
            self.parked, self.weights = [], set()

    def close(self) -> None:
        """Remove the hooks from the module."""
        for hook in self.hooks:
            hook.remove()

    def offload(self, tensor: torch.Tensor) -> torch.Tensor | OffloadedTensor:
        """Start a tensor's copy to the host; compute waits for all but the last few copies."""
        if type(tensor) is not torch.Tensor or tensor.device != self.lane.device:
            return tensor
        if tensor.layout != torch.strided or tensor.nbytes < self.least_bytes:
            return tensor
        memory = tensor.untyped_storage()
        if memory.data_ptr() in self.weights or tensor.nbytes > memory.nbytes():
            return tensor
        place = (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        key = (memory.data_ptr(), *place, tensor._version)
        for parked in self.leaving:
            # Three projections save one input. Its memory is not freed yet, so the key is unique.
            if parked.key == key:
                return parked
        parked = OffloadedTensor(key, len(self.parked), tensor, self.lane)
        self.parked.append(weakref.ref(parked))
        self.leaving.append(parked)
        if len(self.leaving) > AHEAD:
            # Without this wait compute would run ahead of the copies and free nothing.
            gone = self.leaving.popleft()
            self.lane.wait(gone.event)
            gone.tensor = None
        return parked

    def fetch(self, saved: torch.Tensor | OffloadedTensor) -> torch.Tensor:
        """Return the tensor on the device; prefetch those that were parked before it."""
        if isinstance(saved, torch.Tensor):
            return saved
        tensor = self._prefetch(saved)
        self.lane.wait(saved.event)
        self.returning.discard(saved)
        if saved in self.leaving:
            self.leaving.remove(saved)
        for reference in self.parked[max(0, saved.place - AHEAD) : saved.place]:
            parked = reference()
            if parked is not None:
                self._prefetch(parked)
        return tensor

    def _prefetch(self, parked: OffloadedTensor) -> torch.Tensor:
        if parked.tensor is None:
            parked.tensor, parked.event = self.lane.copy_to_device(parked.there)
            self.returning.add(parked)
        return parked.tensor

    def _note_weights(self, part: nn.Module, inputs: object) -> None:
        if self.active:
            for tensor in (*part.parameters(), *part.buffers()):
                if not hasattr(tensor, "to_local"):  # a DTensor: its weights are not gathered yet
                    self.weights.add(tensor.untyped_storage().data_ptr())
