"""Offload: tensors that are needed only at times wait in the host's memory, or in files.

    activations   saved tensors leave during the forward pass, and come back
                  just before the backward pass uses them (offloaded_activations.py)
    optimizer     its state waits; a step goes through it piece by piece
                  (optimizer_state.py)
    parameters    weights, gradients and state wait. On one device: blocks come for their passes, a
                  step is streamed (parameters.py). Under fsdp by FSDP2's `CPUOffloadPolicy`, set
                  where parameters are sharded: the optimizer runs on the host

`memory.offload_to` sets the place. A run that computes on the CPU has everything on the host
already, and a notice says so. In files its states may be larger than the memory: all allocations
of the layout, and every gradient, are then in mapped files (mmap_init.py).
Copies run on streams of their own, overlapped with compute (copy_stream.py).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import torch
from torch import nn

from shoal.base.errors import PlanError
from shoal.base.plans.plan import Plan
from shoal.forecast.memory.offloaded_bytes import piece_bytes
from shoal.machine.process_memory import trim_heap
from shoal.parallel.build.mmap_init import LEAST_BYTES, is_mapped, make_mapped, mmap_init
from shoal.parallel.offload.offloaded_activations import ActivationOffload
from shoal.parallel.offload.optimizer_state import keep_in_files, stream_state
from shoal.parallel.program import Program

M_MMAP_THRESHOLD = -3
"""The constant of glibc's malloc.h."""


def check_here(plan: Plan, device: torch.device) -> None:
    """Refuse offload settings that this kind of device cannot run under any layout.

    Raises:
        PlanError: files without a policy that puts anything there, or on an accelerator.
    """
    if not plan.states_in_files:
        return
    if plan.offload in ("none", "activations"):
        raise PlanError(
            f"memory.offload_to = files: with memory.offload = {plan.offload} there is nothing to "
            f"put there; try: memory.offload=optimizer, or memory.offload_to=host"
        )
    if device.type != "cpu":
        raise PlanError(
            f"memory.offload_to = files: states in files are stepped by the CPU, and this run "
            f"computes on {device.type}; try: memory.offload_to=host"
        )


def check(plan: Plan, device: torch.device) -> None:
    """Refuse offload settings that cannot run here, before anything is cut or traced.

    Raises:
        PlanError: as `check_here`; also if the layout does not shard the offloaded parameters.
    """
    check_here(plan, device)
    layout = plan.layout
    if layout.threads > 1 and device.type != "cpu" and plan.offload == "activations":
        raise PlanError(
            "memory.offload = activations: waits on one device's streams, and layout.strategy = dp "
            "has several in one process; try: layout.strategy=ddp"
        )
    on_device = plan.offloads_parameters and device.type != "cpu"
    if on_device and not streams_parameters(plan, device) and layout.zero < 3:
        raise PlanError(
            f"memory.offload = parameters: {layout.strategy} needs whole parameters on every "
            f"device; try: layout.strategy=fsdp, or memory.offload=optimizer"
        )


def apply(program: Program) -> Program:
    """Offload a program's activations; for the other policies check that they are possible.

    The optimizer's state is offloaded by `hand_over`, parameters by the technique that shards them.

    Raises:
        PlanError: as `check`.
    """
    plan, device = program.plan, program.world.device
    check(plan, device)
    if plan.states_in_files:
        _return_large_blocks()
        return program
    if device.type == "cpu":
        if plan.offload != "none":
            program.notices.append(
                f"memory.offload = {plan.offload}: this run computes on the CPU, so it is in the "
                f"host's memory already; memory.offload_to=files keeps states in files"
            )
        return program
    if plan.offload != "activations":
        return program
    park = ActivationOffload(program.module, program.blocks, device)
    return replace(
        program,
        around=(*program.around, park.micro_batch),
        on_close=(*program.on_close, park.close),
    )


def streams_parameters(plan: Plan, device: torch.device) -> bool:
    """Return whether one device trains a model that waits on the host."""
    alone = plan.layout.processes == plan.layout.threads == 1
    return plan.offloads_parameters and alone and device.type != "cpu"


def hand_over(program: Program, optimizer: torch.optim.Optimizer) -> Program:
    """Offload the optimizer's state to the host or to files, and gradients to files, as planned."""
    plan, device = program.plan, program.world.device
    streamed = plan.offload == "optimizer" or streams_parameters(plan, device)
    if plan.states_in_files:
        undo = keep_in_files(optimizer)
        if plan.offloads_parameters:
            hooks = [
                local.parameter.register_post_accumulate_grad_hook(_keep_gradient_in_file())
                for local in program.local.values()
            ]
            undo = _call_all(undo, *(hook.remove for hook in hooks))
    elif streamed and device.type != "cpu":
        module = torch.get_device_module(device)
        size_bytes = piece_bytes(module.get_device_properties(device).total_memory)
        weights = getattr(program.reducer, "weights", None) if plan.offloads_parameters else None
        undo = stream_state(optimizer, device, weights, piece_bytes=size_bytes)
    else:
        return program
    return replace(program, on_close=(*program.on_close, undo))


@contextmanager
def allocating(program: Program) -> Iterator[None]:
    """Put a layout's allocations for parameters into files, if the plan builds in files.

    A context manager. Under zero 3 only rows are kept, and fsdp.py puts them into files.
    """
    plan = program.plan
    if not plan.builds_in_files or plan.layout.zero == 3:
        yield
        return
    for parameter in (*program.parameters.values(), *program.frozen.values()):
        if type(parameter.data) is torch.Tensor and not is_mapped(parameter):
            parameter.data = make_mapped(parameter).copy_(parameter.detach())
    with mmap_init():
        yield


def _keep_gradient_in_file() -> Callable[[nn.Parameter], None]:
    """Return a hook that moves one parameter's gradient to a file, reused in all steps."""
    kept: list[torch.Tensor] = []

    def move(parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        if gradient is None or gradient.nbytes < LEAST_BYTES or is_mapped(gradient):
            return
        if not kept:
            kept.append(make_mapped(gradient))
        parameter.grad = kept[0].copy_(gradient)

    return move


def _return_large_blocks() -> None:
    """Make the C heap return blocks of `LEAST_BYTES` and more to the system when they are freed.

    Each such block then costs a system call and new pages. With states in files, 180 of 405 MiB of
    a process were blocks of freed gradients.

    References:
        mallopt(3): M_MMAP_THRESHOLD, which no longer grows once it is set.
    """
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LEAST_BYTES)
    trim_heap()


def _call_all(*calls: Callable[[], None]) -> Callable[[], None]:
    def every() -> None:
        for call in calls:
            call()

    return every
