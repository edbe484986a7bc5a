"""Keep the optimizer's state on the host, or in files, and step it piece by piece.

    on the host   a piece's state comes to the device, is stepped there, and leaves: three pieces
                  are there at most, one that comes, one that is stepped, one that leaves
                      back     | 0 | 1 | 2 | 3 |
                      compute      | 0 | 1 | 2 | 3 |
                      out              | 0 | 1 | 2 | 3 |
    in files      for a run on the CPU: the state is created in mapped files (mmap_init.py) and
                  stepped in place; the system keeps as much of it in memory as fits

The optimizer steps on the device that computes: any optimizer works, and the same kernels give the
same bits as without offload.
Source: Ren et al. 2021 (ZeRO-Offload), Rajbhandari et al. 2021 (ZeRO-Infinity)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import update_wrapper
from types import MethodType
from typing import Any, Protocol

import torch
from torch import nn

from shoal.base.errors import PlanError
from shoal.forecast.memory.offloaded_bytes import LEAST_BYTES, PIECE_BYTES, cut_pieces
from shoal.parallel.build.mmap_init import LEAST_BYTES as LEAST_IN_FILES_BYTES
from shoal.parallel.build.mmap_init import is_mapped, make_mapped, mmap_init
from shoal.parallel.offload.copy_stream import CopyStream

Piece = list[tuple[int, nn.Parameter]]
"""(number of the parameter group, parameter) pairs."""


class HostParameters(Protocol):
    """Protocol of parameters that wait on the host between steps, as their state does."""

    lane: CopyStream

    def copy_to_device(self, parameter: nn.Parameter) -> list[Any]:
        """Start the copies of a parameter and its gradient to the device; return their events."""

    def copy_to_host(self, parameter: nn.Parameter) -> list[tuple[torch.Tensor, Any]]:
        """Start to copy a stepped parameter to the host: (device tensor, end event) pairs."""


class Stepper(Protocol):
    """Protocol of an object that replaces an optimizer's own step."""

    def step(self) -> None:
        """Step all parameters once."""

    def restore_state(self) -> None:
        """Move the state back to the place where the optimizer itself would keep it."""


def keep_in_files(
    optimizer: torch.optim.Optimizer,
    *,
    piece_bytes: int = PIECE_BYTES,
    least_bytes: int = LEAST_IN_FILES_BYTES,
) -> Callable[[], None]:
    """Keep an optimizer's state in mapped files from its next step on; return the undo.

    Arguments, limits and errors are those of `stream_state`.
    """
    return _replace_step(optimizer, FileStateStepper(optimizer, piece_bytes, least_bytes))


def stream_state(
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    weights: HostParameters | None = None,
    *,
    piece_bytes: int = PIECE_BYTES,
    least_bytes: int = LEAST_BYTES,
) -> Callable[[], None]:
    """Keep an optimizer's state on the host from its next step on; return the undo.

    Hooks on `optimizer.step` run once per piece.

    Args:
        weights: moves its parameters to the device and back, if they wait on the host too.
        piece_bytes: of parameters that are stepped together; three pieces' state is on the device
            at most.
        least_bytes: smaller state stays on the device (biases, step counts).

    Raises:
        PlanError: at the first step, for an optimizer that counts in its groups: with pieces it
            would count several times.
    """
    lane = CopyStream(device) if weights is None else weights.lane  # the step waits for its copies
    stepper = HostStateStepper(optimizer, lane, piece_bytes, least_bytes, weights)
    return _replace_step(optimizer, stepper)


def _replace_step(optimizer: torch.optim.Optimizer, stepper: Stepper) -> Callable[[], None]:
    """Replace an optimizer's step by `stepper`; return the undo."""
    before = optimizer.__dict__.get("step")

    def step(optimizer: torch.optim.Optimizer) -> None:
        stepper.step()

    def undo() -> None:
        del optimizer.__dict__["step"]
        if before is not None:
            optimizer.__dict__["step"] = before
        stepper.restore_state()

    # A bound method with the attributes of the former one: torch's schedulers check for both.
    update_wrapper(step, optimizer.step)
    optimizer.__dict__["step"] = MethodType(step, optimizer)
    return undo


class OptimizerPieces:
    """An optimizer whose parameters can be stepped a few at a time."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, piece_bytes: int, least_bytes: int
    ) -> None:
        self.optimizer = optimizer
        self.piece_bytes, self.least_bytes = piece_bytes, least_bytes
        self.plain_step = optimizer.step

    def __iter__(self) -> Iterator[Piece]:
        """Yield whole parameters, about `piece_bytes` at a time, in the order of their groups."""
        every = [(n, p) for n, g in enumerate(self.optimizer.param_groups) for p in g["params"]]
        for piece in cut_pieces([p.nbytes for _, p in every], self.piece_bytes):
            yield every[piece]

    def step(self, piece: Piece) -> None:
        """Step the parameters of one piece and no others.

        Raises:
            PlanError: the step changed a count that all parameters share.
        """
        every = self.optimizer.param_groups
        wholes = [group["params"] for group in every]
        try:
            for number, group in enumerate(every):
                group["params"] = [parameter for n, parameter in piece if n == number]
            groups = [group for group in every if group["params"]]
            counts = [_numeric_options(group) for group in groups]
            self.optimizer.param_groups = groups
            self.plain_step()
            for group, before in zip(groups, counts, strict=True):
                self._refuse_counts(group, before)
        finally:
            self.optimizer.param_groups = every
            for group, whole in zip(every, wholes, strict=True):
                group["params"] = whole

    def offloaded_state(self, piece: Piece) -> list[tuple[nn.Parameter, str, torch.Tensor]]:
        """Return the state tensors of a piece that do not stay on the device."""
        return [
            (parameter, key, value)
            for _, parameter in piece
            for key, value in self.optimizer.state.get(parameter, {}).items()
            if isinstance(value, torch.Tensor) and value.nbytes >= self.least_bytes
        ]

    def _refuse_counts(self, group: dict[str, Any], before: dict[str, Any]) -> None:
        for key, value in _numeric_options(group).items():
            if before.get(key) != value:
                raise PlanError(
                    f"memory.offload = optimizer: {type(self.optimizer).__name__} counts {key} per "
                    f"group, and its parameters are stepped in pieces; try: "
                    f"memory.offload=none, or an optimizer of torch.optim"
                )


class FileStateStepper:
    """Stepper of an optimizer on the CPU, piece by piece, with its state in mapped files."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, piece_bytes: int, least_bytes: int
    ) -> None:
        self.pieces = OptimizerPieces(optimizer, piece_bytes, least_bytes)

    @torch.no_grad()
    def step(self) -> None:
        """Step all parameters once; their state is in files afterwards."""
        state = self.pieces.optimizer.state
        for piece in list(self.pieces):
            if all(state.get(p) for _, p in piece if p.grad is not None):
                self.pieces.step(piece)
            else:  # the step that creates the state
                with mmap_init(self.pieces.least_bytes):
                    self.pieces.step(piece)
            # Some optimizers replace their state in every step, and a checkpoint loads new tensors.
            for parameter, key, value in self.pieces.offloaded_state(piece):
                if value.device.type == "cpu" and not is_mapped(value):
                    state[parameter][key] = make_mapped(value).copy_(value)

    def restore_state(self) -> None:
        """Leave the state in its files, which are freed with their tensors."""


class HostStateStepper:
    """Stepper of an optimizer on the device, piece by piece, with its state on the host."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        lane: CopyStream,
        piece_bytes: int,
        least_bytes: int,
        weights: HostParameters | None = None,
    ) -> None:
        self.lane, self.weights = lane, weights
        self.pieces = OptimizerPieces(optimizer, piece_bytes, least_bytes)
        self.hosts: dict[tuple[int, str], torch.Tensor] = {}

    @property
    def state(self) -> Any:
        """Return the optimizer's state, which a load or a run replaces by another dict."""
        return self.pieces.optimizer.state

    @torch.no_grad()
    def step(self) -> None:
        """Step all parameters once; return when their state is on the host."""
        pieces = list(self.pieces)
        coming = deque(self._load_piece(piece) for piece in pieces[:AHEAD])
        leaving: deque[list[tuple[torch.Tensor, Any]]] = deque()
        for place, piece in enumerate(pieces):
            for event in coming.popleft():
                self.lane.wait(event)
            self.pieces.step(piece)
            leaving.append(self._send(piece))
            if len(leaving) > 1:
                self._free_piece(leaving.popleft())
            if place + AHEAD < len(pieces):
                # Only after the piece that left has freed its memory.
                coming.append(self._load_piece(pieces[place + AHEAD]))
        while leaving:
            self._free_piece(leaving.popleft())
        # The CPU may read the state next, to save it.
        self.lane.finish()

    def restore_state(self) -> None:
        """Move the state to the parameters' device; leave it on the host if it does not fit."""
        large = [found for piece in self.pieces for found in self.pieces.offloaded_state(piece)]
        try:
            here = [host.to(parameter.device) for parameter, _, host in large]
        except torch.OutOfMemoryError:  # it was offloaded because it does not fit
            here = [host for _, _, host in large]
        for (parameter, key, _), tensor in zip(large, here, strict=True):
            self.state[parameter][key] = tensor
        self.hosts = {}

    def _load_piece(self, piece: Piece) -> list[Any]:
        events = []
        if self.weights is not None:
            for _, parameter in piece:
                events += self.weights.copy_to_device(parameter)
        self._move_loaded(piece)
        for parameter, key, host in self.pieces.offloaded_state(piece):
            if host.device == self.lane.device and self.hosts.get((id(parameter), key)) is not host:
                continue  # a checkpoint loaded it on the device
            self.state[parameter][key], event = self.lane.copy_to_device(host)
            events.append(event)
        return events

    def _move_loaded(self, piece: Piece) -> None:
        """Move small state that a checkpoint loaded on the host to the device."""
        for number, parameter in piece if self.weights is not None else ():
            group = self.pieces.optimizer.param_groups[number]
            # torch counts steps on the host, unless its kernels read the count.
            stays = () if group.get("fused") or group.get("capturable") else ("step",)
            for key, value in self.state.get(parameter, {}).items():
                small = isinstance(value, torch.Tensor) and value.nbytes < self.pieces.least_bytes
                if small and key not in stays:
                    self.state[parameter][key] = value.to(self.lane.device)

    def _send(self, piece: Piece) -> list[tuple[torch.Tensor, Any]]:
        sent = []
        for parameter, key, tensor in self.pieces.offloaded_state(piece):
            place = (id(parameter), key)
            self.hosts[place], event = self.lane.copy_to_host(tensor, self.hosts.get(place))
            self.state[parameter][key] = self.hosts[place]
            sent.append((tensor, event))
        if self.weights is not None:
            for _, parameter in piece:
                sent += self.weights.copy_to_host(parameter)
        return sent

    def _free_piece(self, sent: list[tuple[torch.Tensor, Any]]) -> None:
        for _, event in sent:
            self.lane.wait(event)
        sent.clear()


AHEAD = 2
"""Pieces on the device or on their way there while another one leaves."""


def _numeric_options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if isinstance(value, int | float)}
