"""Keep buffers that the forward pass changes equal on all ranks: rank 0's values win.

Examples: a moving average of the user's own, spectral norm's vectors, InstanceNorm with running
statistics. Each rank changes its copy by its own micro-batches, and the copies drift apart,
silently. So every rank watches its buffers' version counters, and one flag joins the step's
all-reduce of counts. If some rank changed a buffer, all take rank 0's value after the step, as
torch's DDP does. Such a value depends on the layout, and a notice says so. BatchNorm's buffers are
handled in batch_norm.py.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from shoal.fabric import World
from shoal.parallel._torch import BatchNorm
from shoal.parallel.program import Program


def apply(program: Program) -> Program:
    """Watch the buffers of a program that are not BatchNorm's."""
    homes = [
        (f"{path}.{name}" if path else name, module, name)
        for path, module in program.module.named_modules()
        if not isinstance(module, BatchNorm)
        for name, buffer in module.named_buffers(recurse=False)
        if not buffer.is_meta
    ]
    if not homes:
        return program
    watch = _BufferWatcher(homes, program.replicas, program.notices)
    return replace(
        program,
        on_begin=(*program.on_begin, watch.start_step),
        moved=watch.moved,
        align=watch.broadcast_changed,
    )


def release(program: Program) -> Program:
    """Return the program without this rule: no rank's buffers change those of another."""
    return replace(program, moved=lambda: False, align=lambda skipped: None)


class _BufferWatcher:
    """Watcher of buffers: the tensor and the version counter of each at the start of the step."""

    def __init__(
        self, homes: list[tuple[str, nn.Module, str]], world: World, notices: list[str]
    ) -> None:
        self.homes = homes
        self.world = world
        self.notices = notices
        self.known: list[tuple[torch.Tensor, int]] = []
        self.changing: set[int] = set()
        self.copies: dict[int, torch.Tensor] = {}
        self.told = False

    def start_step(self) -> None:
        """Record each buffer's tensor and version counter, and copy the buffers known to change.

        So `broadcast_changed` finds the buffers that forward passes change. Changes by the user's
        script between steps are equal on all ranks.
        """
        self.known = [(getattr(m, name), _version(m, name)) for _, m, name in self.homes]
        self.copies = {place: self._value(place).clone() for place in self.changing}

    def moved(self) -> bool:
        """Return True if a forward pass on this rank changed a buffer in this step."""
        return bool(self._changed())

    @torch.no_grad()
    def broadcast_changed(self, skipped: bool) -> None:
        """Broadcast rank 0's value of every buffer that changed; after a skipped step, the old one.

        A buffer that changes for the first time in a skipped step has no old value to restore.
        """
        everyone = self.world.gather_json(self._changed())
        places = sorted({place for changed in everyone for place in changed})
        self.changing.update(places)
        for place in places:
            value = self._value(place)
            if skipped and place in self.copies:
                value.copy_(self.copies[place])
            whole = value.detach().contiguous()
            self.world.broadcast(whole)
            value.copy_(whole)
        if places and not self.told and self.world.size > 1:
            self.told = True
            self.notices.append(
                f"{self.homes[places[0]][0]} is changed by the forward pass: rank 0's value is "
                f"kept after every step, so it depends on the layout ({len(places)} such buffers)"
            )

    def _value(self, place: int) -> torch.Tensor:
        _, module, name = self.homes[place]
        return getattr(module, name)

    def _changed(self) -> list[int]:
        return [
            place
            for place, (_, module, name) in enumerate(self.homes)
            if getattr(module, name) is not self.known[place][0]
            or _version(module, name) != self.known[place][1]
        ]


def _version(module: nn.Module, name: str) -> int:
    """Return the version counter of a buffer: how often it was written in place."""
    return int(getattr(module, name)._version)
