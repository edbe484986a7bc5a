"""Offload: what the GPU needs only now and then waits in the host's memory.

    activations   what the backward pass needs leaves while the forward pass goes on, and comes back
                  just before its turn
    optimizer     moments lie on the host; a step brings them in, steps and sends them out, a piece
                  after the other
    parameters    FSDP2's own: shards of weights, gradients and moments lie on the host, the
                  optimizer runs there (`CPUOffloadPolicy`, set where parameters are split)

Host memory is pinned, and copies run on a stream of their own, beside computing. Two rules keep
them right: a copy starts after what was computed so far; and a tensor on the device is let go only
when computing waits for its copy, so that nothing later can get its memory too early.
The optimizer steps on the device and not on the host: any optimizer works, and the same kernels
give the same bits as without offload.
Source: Rhu et al. 2016 (vDNN), Ren et al. 2021 (ZeRO-Offload); the queue of copies that compute
waits for is torchtune's. Limits: written for CUDA and not yet run on a GPU; the logic is tested on
the CPU, whose streams do nothing.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import update_wrapper
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from shoal.base.errors import PlanError
from shoal.base.plan import Plan
from shoal.parallel.program import Program

LEAST_BYTES = 2**20
PIECE_BYTES = 64 * 2**20
AHEAD = 2
"""Tensors whose copies may be under way while computing goes on, in either direction."""


def check_here(plan: Plan, device: torch.device) -> None:
    """Errors: PlanError without a device to offload from."""
    if plan.offload != "none" and device.type == "cpu":
        raise PlanError(
            f"memory.offload = {plan.offload}: this run computes on the CPU, its memory is the "
            f"host's already; nearest: memory.offload=none"
        )


def check(plan: Plan, device: torch.device) -> None:
    """Refuse what cannot be offloaded here, before anything is cut or traced.

    Errors: as `check_here`; PlanError where parameters are not split
    """
    check_here(plan, device)
    layout = plan.layout
    if plan.parks_parameters and layout.zero < 3:
        raise PlanError(
            f"memory.offload = parameters: {layout.strategy} needs whole parameters on every "
            f"device; nearest: layout.strategy=fsdp, or memory.offload=optimizer"
        )


def hand_over(program: Program, optimizer: torch.optim.Optimizer) -> Program:
    """Keep the optimizer's state in the host's memory, if the plan says so."""
    if program.plan.offload != "optimizer":
        return program
    undo = stream_state(optimizer, program.world.device)
    return replace(program, on_close=(*program.on_close, undo))


def apply(program: Program) -> Program:
    """Offload a program's activations; for the other policies see that they can be.

    The optimizer's state is offloaded by `hand_over`, parameters by the technique that splits them.
    Errors   as `check`
    """
    device = program.world.device
    check(program.plan, device)
    if program.plan.offload != "activations":
        return program
    park = Activations(program.module, program.blocks, device)
    return replace(
        program,
        around=(*program.around, park.micro_batch),
        on_close=(*program.on_close, park.close),
    )


class Lane:
    """A stream for copies between a device and pinned host memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.streams = torch.get_device_module(device)
        self.side = self.streams.Stream()

    def send(self, tensor: torch.Tensor, host: torch.Tensor | None = None) -> tuple[Any, Any]:
        """Start a copy to the host, into `host` if given: (host tensor, event of its end)."""
        if host is None:
            host = torch.empty_like(tensor, device="cpu", pin_memory=self.device.type != "cpu")
        return host, self._copy(tensor, host)

    def bring(self, host: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Start a copy to the device: (device tensor, event of its end)."""
        tensor = torch.empty_like(host, device=self.device)
        return tensor, self._copy(host, tensor)

    def wait(self, event: Any) -> None:
        """What is computed from here on comes after that copy; the CPU goes on."""
        self.streams.current_stream(self.device).wait_event(event)

    def finish(self) -> None:
        """The CPU waits until all copies are over."""
        if self.device.type != "cpu":
            self.side.synchronize()

    def _copy(self, source: torch.Tensor, target: torch.Tensor) -> Any:
        # The source must be written, and whoever had the target's memory before must be done.
        self.side.wait_stream(self.streams.current_stream(self.device))
        with self.streams.stream(self.side):
            target.copy_(source, non_blocking=True)
            return self.side.record_event()


class Parked:
    """A saved tensor on the host; for a while, before it leaves and from its turn on, also here.

    key     what makes a second request the same tensor: its place in memory, its count of writes
    place   its number in the micro-batch
    there   the host's copy · tensor  the device's, if it has one · event  end of its last copy
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


def stream_state(
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    *,
    piece_bytes: int = PIECE_BYTES,
    least_bytes: int = LEAST_BYTES,
) -> Callable[[], None]:
    """Keep an optimizer's state on the host from its next step on; gives the way back.

    piece_bytes   of parameters that are stepped together; three pieces' state is on the device at
                  most (one comes, one is stepped, one leaves)
    least_bytes   smaller state stays on the device (biases, step counts)
    Limits        hooks that were hung on `optimizer.step` run once per piece
    Errors        PlanError, at the first step, for an optimizer that counts in its groups: pieces
                  would make it count several times
    """
    before = optimizer.__dict__.get("step")
    state = HostState(optimizer, device, piece_bytes, least_bytes)

    def step(optimizer: torch.optim.Optimizer) -> None:
        state.step()

    def undo() -> None:
        del optimizer.__dict__["step"]
        if before is not None:
            optimizer.__dict__["step"] = before
        state.take_back()

    # A method of the optimizer, with the marks of the former: torch's schedulers look for both.
    update_wrapper(step, optimizer.step)
    optimizer.__dict__["step"] = MethodType(step, optimizer)
    return undo


class HostState:
    """Steps an optimizer piece by piece; between steps its state is on the host."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        piece_bytes: int,
        least_bytes: int,
    ) -> None:
        self.optimizer = optimizer
        self.piece_bytes, self.least_bytes = piece_bytes, least_bytes
        self.lane = Lane(device)
        self.plain_step = optimizer.step
        self.hosts: dict[tuple[int, str], torch.Tensor] = {}

    @torch.no_grad()
    def step(self) -> None:
        """One step of all parameters; returns when their state is on the host."""
        groups = self.optimizer.param_groups
        wholes = [group["params"] for group in groups]
        pieces = self._pieces()
        coming = self._bring(pieces[0]) if pieces else []
        leaving: deque[list[tuple[torch.Tensor, Any]]] = deque()
        try:
            for place, piece in enumerate(pieces):
                for event in coming:
                    self.lane.wait(event)
                coming = self._bring(pieces[place + 1]) if place + 1 < len(pieces) else []
                for group in groups:
                    group["params"] = []
                for number, parameter in piece:
                    groups[number]["params"].append(parameter)
                self._step_piece([group for group in groups if group["params"]])
                leaving.append(self._send(piece))
                if len(leaving) > 1:
                    for _, event in leaving.popleft():
                        self.lane.wait(event)
        finally:
            self.optimizer.param_groups = groups
            for group, whole in zip(groups, wholes, strict=True):
                group["params"] = whole
        for _, event in leaving.pop() if leaving else []:
            self.lane.wait(event)
        # Whoever reads the state next, to save it, reads it with the CPU.
        self.lane.finish()

    def take_back(self) -> None:
        """The state is on the device again."""
        for parameter, key, host in self._large(self.optimizer.state):
            self.optimizer.state[parameter][key] = host.to(self.lane.device)
        self.hosts = {}

    def _step_piece(self, groups: list[dict[str, Any]]) -> None:
        counts = [_numbers(group) for group in groups]
        self.optimizer.param_groups = groups
        self.plain_step()
        for group, before in zip(groups, counts, strict=True):
            for key, value in _numbers(group).items():
                if before.get(key) != value:
                    raise PlanError(
                        f"memory.offload = optimizer: {type(self.optimizer).__name__} counts "
                        f"{key} per group, and its parameters are stepped in pieces; nearest: "
                        f"memory.offload=none, or an optimizer of torch.optim"
                    )

    def _pieces(self) -> list[list[tuple[int, nn.Parameter]]]:
        """Whole parameters with the numbers of their groups, about `piece_bytes` together."""
        pieces: list[list[tuple[int, nn.Parameter]]] = []
        room = 0
        for number, group in enumerate(self.optimizer.param_groups):
            for parameter in group["params"]:
                if room < parameter.nbytes or not pieces:
                    pieces.append([])
                    room = self.piece_bytes
                pieces[-1].append((number, parameter))
                room -= parameter.nbytes
        return pieces

    def _bring(self, piece: list[tuple[int, nn.Parameter]]) -> list[Any]:
        events = []
        for parameter, key, host in self._large(p for _, p in piece):
            if self.hosts.get((id(parameter), key)) is not host:
                continue  # a checkpoint put it here
            self.optimizer.state[parameter][key], event = self.lane.bring(host)
            events.append(event)
        return events

    def _send(self, piece: list[tuple[int, nn.Parameter]]) -> list[tuple[torch.Tensor, Any]]:
        sent = []
        for parameter, key, tensor in self._large(p for _, p in piece):
            place = (id(parameter), key)
            self.hosts[place], event = self.lane.send(tensor, self.hosts.get(place))
            self.optimizer.state[parameter][key] = self.hosts[place]
            sent.append((tensor, event))
        return sent

    def _large(self, parameters: Iterable[Any]) -> list[tuple[Any, str, torch.Tensor]]:
        return [
            (parameter, key, value)
            for parameter in parameters
            for key, value in self.optimizer.state.get(parameter, {}).items()
            if isinstance(value, torch.Tensor) and value.nbytes >= self.least_bytes
        ]


def _numbers(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if isinstance(value, int | float)}
