"""What the backward pass needs waits on the host: it leaves early, and comes back before its turn.

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

from shoal.parallel.offload.copy_stream import Lane

LEAST_BYTES = 2**20
"""Smaller tensors stay: a copy each would cost more than they take."""

AHEAD = 2
"""Tensors whose copies may be under way while computing goes on, in either direction."""


class Parked:
    """A saved tensor on the host; for a while, before it leaves and from its turn on, also here.

    Attributes:
        key: what makes a second request the same tensor: its place in memory, its count of writes.
        place: its number in the micro-batch.
        there: the host's copy.
        tensor: the device's, if it has one.
        event: end of its last copy.
    """

    def __init__(self, key: tuple[Any, ...], place: int, tensor: torch.Tensor, lane: Lane) -> None:
        self.key, self.place = key, place
        self.tensor: torch.Tensor | None = tensor
        self.there, self.event = lane.send(tensor)


class Activations:
    """Parks what autograd saves in the forward pass.

    Left where they are: weights, which stay on the device anyway, and what is smaller than
    `least_bytes` or larger than the memory it lies in (an expanded tensor).
    """

    def __init__(
        self,
        module: nn.Module,
        blocks: Iterable[str],
        device: torch.device,
        least_bytes: int = LEAST_BYTES,
    ) -> None:
        self.lane, self.least_bytes = Lane(device), least_bytes
        self.active = False
        self.weights: set[int] = set()
        self.leaving: deque[Parked] = deque()
        self.returning: set[Parked] = set()
        self.parked: list[weakref.ref[Parked]] = []
        # Also at blocks, since FSDP2 gathers a block's parameters anew, and frees them soon after.
        self.hooks = [
            part.register_forward_pre_hook(self._note_weights)
            for part in (module, *map(module.get_submodule, blocks))
        ]

    @contextmanager
    def micro_batch(self, step: int, index: int) -> Iterator[None]:
        """Around a forward and backward pass."""
        self.active = True
        try:
            with saved_tensors_hooks(self.park, self.fetch):
                yield
        finally:
            self.active = False
            for parked in (*self.leaving, *self.returning):
                self.lane.wait(parked.event)
                parked.tensor = None  # a result holds the graph that holds it, if none went back
            self.leaving.clear()
            self.returning.clear()
            self.parked, self.weights = [], set()

    def close(self) -> None:
        """Leave the module as it was."""
        for hook in self.hooks:
            hook.remove()

    def park(self, tensor: torch.Tensor) -> torch.Tensor | Parked:
        """Start a tensor's copy to the host; compute waits for the copy before the last few."""
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
            # Three projections save one input. What still leaves is here, so its key is no other's.
            if parked.key == key:
                return parked
        parked = Parked(key, len(self.parked), tensor, self.lane)
        self.parked.append(weakref.ref(parked))
        self.leaving.append(parked)
        if len(self.leaving) > AHEAD:
            # Without this wait computing would run ahead of its copies and free nothing.
            gone = self.leaving.popleft()
            self.lane.wait(gone.event)
            gone.tensor = None
        return parked

    def fetch(self, saved: torch.Tensor | Parked) -> torch.Tensor:
        """The tensor on the device; those that were parked before it start on their way back."""
        if isinstance(saved, torch.Tensor):
            return saved
        tensor = self._start_back(saved)
        self.lane.wait(saved.event)
        self.returning.discard(saved)
        if saved in self.leaving:
            self.leaving.remove(saved)
        for reference in self.parked[max(0, saved.place - AHEAD) : saved.place]:
            parked = reference()
            if parked is not None:
                self._start_back(parked)
        return tensor

    def _start_back(self, parked: Parked) -> torch.Tensor:
        if parked.tensor is None:
            parked.tensor, parked.event = self.lane.bring(parked.there)
            self.returning.add(parked)
        return parked.tensor

    def _note_weights(self, part: nn.Module, inputs: object) -> None:
        if self.active:
            for tensor in (*part.parameters(), *part.buffers()):
                if not hasattr(tensor, "to_local"):  # a DTensor: its weights are not gathered yet
                    self.weights.add(tensor.untyped_storage().data_ptr())
