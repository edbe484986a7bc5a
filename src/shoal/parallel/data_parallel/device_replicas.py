"""One process, a replica of the model on each of several devices, as `nn.DataParallel` has them.

    begin    the first device sends its weights and changed buffers to the others
    passes   micro-batch k runs on replica k modulo their number, each replica in its own thread
    finish   the first device receives the others' gradients and adds them, in the replicas' order
    update   the optimizer steps on the first device only, whose memory holds its state

Of P bytes of weights (N − 1)·P leave the first device in a step and as much comes back, without
overlap with the passes. Under `ddp` every process sends 2(N − 1)/N·P, overlapped with its backward
pass. nn.DataParallel cuts a micro-batch in N and averages the mean losses of the pieces. Here
micro-batches stay whole and sums of losses are divided by the count of all targets; weights are
sent once per step, not per forward pass; and the loss is computed on the device of its micro-batch.

Devices' generators are seeded for each replica, BatchNorm's statistics collected over all. A model
that draws from the host's generators, or changes an unmanaged buffer, cannot run in threads: its
replicas run in turn, and pass the buffers on. The first step, which always runs in turn, detects
it. Source: torch.nn.parallel.DataParallel
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import nn

from shoal.base.errors import PlanError
from shoal.base.plans.plan import Plan
from shoal.fabric.collectives.traffic_counts import BROADCAST, SEND
from shoal.fabric.device import is_accelerator
from shoal.parallel._torch import BatchNorm, pytree, version_counter
from shoal.parallel.data_parallel.thread_replicas import (
    LATE,
    AddedGradients,
    has_drawn,
    hook_blocks,
)
from shoal.parallel.program import (
    Pass,
    Program,
    Reducer,
    trainable_parameters,
    whole_local_parameters,
)
from shoal.trace.isolation.module_copies import copy_module

Home = tuple[nn.Module, str]
"""Location of a buffer: a module, and the buffer's name in it."""

PLAIN = (bool, int, float, str)
"""Types of module attributes that replicas copy from the first replica."""


class ReplicaSeeding(Protocol):
    """Protocol of the generator seeding of a replica, as `dropout_rng` makes it."""

    def __call__(self, step: int, index: int) -> AbstractContextManager[None]:
        """Return the context around a micro-batch."""

    def start_step(self) -> None:
        """Start a step: forget the calls of the previous one."""

    def on(self, device: torch.device) -> ReplicaSeeding:
        """Return the seeding for a replica on another device."""

    def set_concurrent(self, others: bool) -> None:
        """Note whether passes of other devices run at the same time."""


def check_replicas(plan: Plan, device: torch.device) -> None:
    """Refuse more replicas than the process sees devices; a CPU takes any number.

    Raises:
        PlanError: too few devices; the text names the nearest legal choice.
    """
    if not is_accelerator(device):
        return
    count, there = plan.layout.threads, torch.accelerator.device_count()
    if count > there:
        nearest = f"layout.threads={there}" if there > 1 else "layout.strategy=single"
        raise PlanError(
            f"layout.threads = {count}: dp has a replica on each of so many devices, and this "
            f"process sees {there}; try: {nearest}"
        )


def apply(program: Program) -> Program:
    """Run a step's passes on a replica per device, and the optimizer on the first device."""
    count, micro_batches = program.plan.layout.threads, program.plan.accumulate
    devices = replica_devices(program.world.device, count)
    replicas = DeviceReplicas(program, devices)
    program.notices.append(
        f"dp: {count} replicas in one process, on {', '.join(map(str, devices))}, for comparison; "
        f"ddp's processes do not share one interpreter, sum gradients during backward, and send "
        f"no weights (docs/how-it-works/compare.md)"
    )
    if 0 < micro_batches < count:
        program.notices.append(
            f"dp: a step has {micro_batches} micro-batch{'es' if micro_batches > 1 else ''} for "
            f"{count} devices, so some do nothing; try: a smaller train.micro_batch"
        )
    return replace(
        program,
        local=whole_local_parameters(program),
        reducer=GatheredGradients(program, replicas),
        run=replicas.run,
        around=(*program.around, replicas.detect_draws),
        on_close=(*program.on_close, replicas.close),
    )


def replica_devices(first: torch.device, count: int) -> list[torch.device]:
    """Return the devices of one process that run replicas, starting with `first`."""
    there = torch.accelerator.device_count()
    return [torch.device(first.type, ((first.index or 0) + k) % there) for k in range(count)]


class DeviceReplicas:
    """The program, its replicas on the other devices, and the threads that run them."""

    def __init__(self, program: Program, devices: Sequence[torch.device]) -> None:
        self.devices, self.blocks = devices, program.blocks
        self.rules = len(program.around)
        self.twins = [_DeviceReplica(program, device) for device in devices[1:]]
        self.modules = [program.module, *(twin.program.module for twin in self.twins)]
        keyed = [program.keyed, *(twin.program.keyed for twin in self.twins)]
        self.keys = [cast("ReplicaSeeding", keys) for keys in keyed]
        self.buffers = [_unmanaged_buffers(module) for module in self.modules]
        self.pool = ThreadPoolExecutor(len(devices))
        self.in_turn = self.looked = False
        self.moving: set[int] = set()
        self.latest = 0

    def run(self, program: Program, passes: Sequence[Pass], reducer: Reducer) -> None:
        """Run all passes; micro-batch k goes to replica k modulo the number of replicas."""
        count, added = len(self.devices), program.around[self.rules :]
        programs = [
            replace(twin.program, around=(*twin.program.around, *added)) for twin in self.twins
        ]
        sums = [torch.zeros(2, dtype=torch.float64, device=one) for one in self.devices[1:]]
        for keys in self.keys[1:]:
            keys.start_step()
        ready = [
            one.on(programs[place % count - 1], sums[place % count - 1]) if place % count else one
            for place, one in enumerate(passes)
        ]
        for first in range(0, len(ready), count):
            group = ready[first : first + count]
            reducer.prepare_backward(first + len(group) == len(ready))
            if self.in_turn or not self.looked:
                for number, one in enumerate(group):
                    self._run_exclusively(number, one)
            else:
                self._run_concurrently(group)
            reducer.end_backward(counted=True)
        self._copy_buffers_to(0)
        self.looked = True
        for one in passes[:1]:
            for own in sums:
                one.sums.add_(own.to(one.sums.device))

    def copy_changes(self) -> int:
        """Copy changed tensors of the first device to all others; return the bytes sent."""
        return sum(twin.copy_changes() for twin in self.twins)

    def close(self) -> None:
        """Stop the threads."""
        self.pool.shutdown()

    @contextmanager
    def detect_draws(self, step: int, index: int) -> Iterator[None]:
        """Check around a pass of the first step whether it drew from the host's generators."""
        before = None if self.looked else _host_state()
        yield
        if before is not None:
            self._note_draws()
            self.in_turn = self.in_turn or before != _host_state()

    def _note_draws(self, *_: object) -> None:
        self.in_turn = self.in_turn or has_drawn(torch.default_generator)

    def _run_exclusively(self, number: int, one: Pass) -> None:
        """Run one replica's pass on its device while the other devices are idle.

        First the buffers that passes change are copied from the replica that ran last. In the first
        step hooks find out whether passes draw from the host's generators or change buffers; then
        `in_turn` makes all later passes exclusive too.

        Args:
            number: index of the replica and its device.
            one: the pass.
        """
        self._copy_buffers_to(number)
        module, before = self.modules[number], self._buffer_versions(number)
        with hook_blocks(module, () if self.looked else self.blocks, self._note_draws):
            self._run_on_device(number, one)
        self.moving.update(self._changed(number, before))
        self.in_turn = self.in_turn or bool(self.moving)

    def _run_concurrently(self, group: Sequence[Pass]) -> None:
        """Run a pass on each replica at the same time.

        Raises:
            PlanError: a pass drew from a host generator or changed a buffer for the first time.
        """
        before = [self._buffer_versions(number) for number in range(len(group))]
        state = torch.default_generator.get_state()
        for keys in self.keys:
            keys.set_concurrent(True)
        try:
            works = [self.pool.submit(self._run_on_device, *one) for one in enumerate(group)]
            wait(works)  # before an error is raised, so that no thread runs on behind it
        finally:
            for keys in self.keys:
                keys.set_concurrent(False)
        for work in works:
            work.result()
        if not torch.equal(state, torch.default_generator.get_state()):
            raise PlanError(LATE)
        for number, looked in enumerate(before):
            for place in self._changed(number, looked):
                raise PlanError(
                    f"layout.strategy = dp: the forward pass changed the buffer "
                    f"{self.buffers[number][place][1]} for the first time after its first step; "
                    f"try: layout.strategy=ddp"
                )

    def _run_on_device(self, number: int, one: Pass) -> None:
        # So that a tensor made on "cuda" without an index is made on the replica's device.
        device = self.devices[number]
        with torch.accelerator.device_index(device.index):
            try:
                one(self.modules[number])
            except RuntimeError as failure:
                if "on the same device" not in str(failure):
                    raise
                raise PlanError(
                    f"layout.strategy = dp: the replica on {device} met a tensor of another "
                    f"device, which the model or the loss keeps without registering it: "
                    f"{str(failure).splitlines()[0]}; try: register_buffer, or "
                    f"layout.strategy=ddp"
                ) from failure

    def _buffer_versions(self, number: int) -> list[tuple[Any, int]]:
        """Return a replica's buffers except BatchNorm's: tensors and version counters."""
        return [_read_buffer(home) for home in self.buffers[number]]

    def _changed(self, number: int, before: list[tuple[Any, int]]) -> list[int]:
        now = self._buffer_versions(number)
        return [
            place
            for place, (was, then) in enumerate(before)
            if now[place][0] is not was or now[place][1] != then
        ]

    def _copy_buffers_to(self, number: int) -> None:
        """Copy the buffers that passes change from the last replica that ran to the next."""
        for place in self.moving if number != self.latest else ():
            ends = self.buffers[self.latest][place], self.buffers[number][place]
            _copy_buffer(*ends, self.devices[number])
        self.latest = number


class _DeviceReplica:
    """A replica of the program on another device, and the tensors it copies from the first."""

    def __init__(self, program: Program, device: torch.device) -> None:
        own, self.device = program.world.device, device
        keys = cast("ReplicaSeeding", program.keyed).on(device)
        # deepcopy memo for the module, the contexts around a micro-batch, the batch preparation.
        known: dict[int, Any] = {id(program.notices): program.notices}
        known |= {id(program.keyed): keys, id(own): device}
        for tensor in (*program.module.parameters(), *program.module.buffers()):
            twin = tensor.detach().to(device)
            if isinstance(tensor, nn.Parameter):
                twin = nn.Parameter(twin, requires_grad=tensor.requires_grad)
            known[id(tensor)] = twin
        try:
            module = copy_module(program.module, known)
        except Exception as failure:
            raise PlanError(
                f"layout.strategy = dp: the model cannot be copied to another device: {failure}; "
                f"try: layout.strategy=ddp"
            ) from failure
        _move_attributes(module, own, device)
        self.program = replace(
            program,
            module=module,
            parameters=trainable_parameters(module),
            keyed=keys,
            around=copy.deepcopy(program.around, known),
            prepare=copy.deepcopy(program.prepare, known),
        )
        self.parts = list(zip(program.module.modules(), module.modules(), strict=True))
        there = dict(module.named_parameters())
        self.weights = [(one, there[name]) for name, one in program.parameters.items()]
        self.frozen = [(one, there[name]) for name, one in program.frozen.items()]
        self.written = [version_counter(one) for one, _ in self.frozen]
        self.homes = [
            ((ours, name), (theirs, name)) for ours, theirs in self.parts for name in ours._buffers
        ]
        self.known = [_read_buffer(ours) for ours, _ in self.homes]

    @torch.no_grad()
    def copy_changes(self) -> int:
        """Copy the weights, and the other tensors that changed; return the bytes received."""
        for ours, theirs in self.parts:
            _copy_attributes(vars(ours), vars(theirs))
        came: list[torch.Tensor] = []
        for one, twin in self.weights:
            twin.requires_grad_(one.requires_grad)
            twin.copy_(one, non_blocking=True)
            came.append(one)
        for place, (one, twin) in enumerate(self.frozen):
            if self.written[place] != version_counter(one):
                self.written[place] = version_counter(one)
                twin.copy_(one, non_blocking=True)
                came.append(one)
        for place, (home, twin_home) in enumerate(self.homes):
            value, times = _read_buffer(home)
            if value is not self.known[place][0] or times != self.known[place][1]:
                self.known[place] = value, times
                _copy_buffer(home, twin_home, self.device)
                came += [value] if value is not None else []
        return sum(one.numel() * one.element_size() for one in came)


class GatheredGradients(AddedGradients):
    """Reducer that adds the gradients of all replicas on the first device, in order."""

    def __init__(self, program: Program, replicas: DeviceReplicas) -> None:
        super().__init__(program.parameters, replicas.modules[1:])
        self.follow: Callable[[], int] = replicas.copy_changes
        self.traffic = program.world.traffic

    def start_step(self, rounds: int) -> None:
        """Drop all gradients and send the first device's weights to the replicas."""
        super().start_step(rounds)
        self.traffic.add_sent(BROADCAST, self.follow(), "threads")

    def finish(self) -> None:
        """Receive the replicas' gradients and add them to the first device's."""
        gradients = [p.grad for one in self.replicas for p in one.values() if p.grad is not None]
        size = sum(one.numel() * one.element_size() for one in gradients)
        del gradients  # so that each is freed once it was added
        self.traffic.add_sent(SEND, size, "threads")
        super().finish()


def _unmanaged_buffers(module: nn.Module) -> list[Home]:
    """Return the locations of a module's buffers, except those of BatchNorm layers."""
    parts = (part for part in module.modules() if not isinstance(part, BatchNorm))
    return [(part, name) for part in parts for name in part._buffers]


def _read_buffer(home: Home) -> tuple[torch.Tensor | None, int]:
    """Return (the buffer at a location, its version counter)."""
    value = home[0]._buffers[home[1]]
    return value, -1 if value is None else version_counter(value)


@torch.no_grad()
def _copy_buffer(source: Home, target: Home, device: torch.device) -> None:
    """Copy a buffer to another device, in place if the target has the same shape."""
    value, there = source[0]._buffers[source[1]], target[0]._buffers[target[1]]
    if value is not None and there is not None and value.shape == there.shape:
        there.copy_(value, non_blocking=True)
        return
    target[0]._buffers[target[1]] = None if value is None else value.to(device)


def _copy_attributes(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Copy plain attributes of a module, such as `training`, from the first replica."""
    for name, value in ours.items():
        if isinstance(value, PLAIN) and theirs.get(name) is not value:
            theirs[name] = value


def _move_attributes(module: nn.Module, first: torch.device, device: torch.device) -> None:
    """Move the unregistered tensors of a module's copy to its device."""

    def moved(leaf: Any) -> Any:
        lost = isinstance(leaf, torch.Tensor) and leaf.device == first
        return leaf.detach().to(device) if lost else leaf

    for part in module.modules():
        for name, value in vars(part).items():
            if not name.startswith("_") or isinstance(value, torch.Tensor):
                leaves = pytree.tree_leaves(value)
                if any(isinstance(one, torch.Tensor) and one.device == first for one in leaves):
                    part.__dict__[name] = pytree.tree_map(moved, value)


def _host_state() -> tuple[Any, ...]:
    """Return the states of Python's and numpy's generators."""
    kind, keys, *rest = np.random.get_state()
    return random.getstate(), kind, bytes(keys), tuple(rest)  # type: ignore[arg-type]  # legacy
