"""Buffers that the forward pass changes and no rule covers stay equal on all ranks: rank 0's win.

A moving average of the user's own, spectral norm's vectors, InstanceNorm with running statistics:
each rank changes its copy by its own micro-batches, and the copies drift apart, silently. So every
rank watches its buffers' version counters, one flag travels with the step's tally, and where some
rank changed a buffer, all take rank 0's value after the step, as torch's DDP does. Such a value
depends on the layout, and one line says so. BatchNorm has a rule of its own and is not here.
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
    watch = _Watch(homes, program.replicas, program.notices)
    return replace(
        program,
        on_begin=(*program.on_begin, watch.begin),
        moved=watch.moved,
        align=watch.align,
    )


class _Watch:
    """Remembers which tensor every buffer was, and how often it had been written to."""

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

    def begin(self) -> None:
        """Look before the step; what is changed between steps, every rank's script changes."""
        self.known = [(getattr(m, name), _version(m, name)) for _, m, name in self.homes]
        self.copies = {place: self._value(place).clone() for place in self.changing}

    def moved(self) -> bool:
        """Whether this rank's forward passes changed a buffer."""
        return bool(self._changed())

    @torch.no_grad()
    def align(self, skipped: bool) -> None:
        """Every rank takes rank 0's value of what changed on any rank; on a skip, the old value.

        What changes for the first time in a step that is skipped has no old value to go back to.
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
        tensor: torch.Tensor = getattr(module, name)
        return tensor

    def _changed(self) -> list[int]:
        return [
            place
            for place, (_, module, name) in enumerate(self.homes)
            if getattr(module, name) is not self.known[place][0]
            or _version(module, name) != self.known[place][1]
        ]


def _version(module: nn.Module, name: str) -> int:
    """How often a buffer was written in place, as autograd counts it."""
    return int(getattr(module, name)._version)
