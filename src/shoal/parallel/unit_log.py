"""Log the units that this rank gathers and reduces, in order, so that ranks can be compared.

`fully_shard` gathers a unit's parameters when a rank runs it, and reduces its gradients after its
backward pass. No message names its unit: the k-th collective of one rank meets the k-th of the
others. Ranks that run different units in one step compute with mixtures of their weights, and if
sizes are equal nothing fails.

    UnitCalls    the units' collectives over one process group: a checksum, and the names
    UnitLog      those of this rank, for every axis over which units are sent
    logged       wrappers of torch's collectives of one unit: log each collective as it begins
    UnitSequence compare each unit that runs with the one that is expected next

The trainer compares the checksums in the step's all-reduce (`trainer/guards/unit_order.py`). If
ranks wait for each other there is no all-reduce, so the log is in the watch page too
(`launch/watch/unit_mismatch.py`).

Source: torch.distributed.fsdp.fully_shard, which numbers nothing it sends
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from shoal.base.errors import BugError
from shoal.fabric import World
from shoal.fabric.axis_worlds import list_axis_groups
from shoal.parallel._torch import graph_task_id
from shoal.wire.watch_page import UNIT_TEXT

KEPT = 4096
"""Most names that a rank keeps since the last comparison: only the first difference counts."""
FORWARD, BACKWARD, GRADIENTS = "forward pass", "backward pass", "gradients"
ROOT = "the root unit"
"""Name of the unit that holds the parameters outside of all blocks."""
NO_UNIT = -1
"""Number that no unit has: the end of a list of units."""


_made = itertools.count()
"""Counter of this process's runs, which all ranks start in the same order."""


class UnitCalls:
    """Collectives of units over one process group, in the order in which this rank begins them.

    Attributes:
        axis: axis of the layout along which the group's ranks differ.
        ranks: the group's ranks in the run's world.
        key: identifies the group in a watch page: run number, axis number, first rank.
        checksum: CRC-32 over unit and pass of each collective since the last comparison.
        names: the first of them.
        count: number of collectives since the start of the run.
    """

    def __init__(self, axis: str, ranks: Sequence[int], key: int) -> None:
        self.axis, self.ranks, self.key = axis, tuple(ranks), key
        self.checksum = self.count = 0
        self.names: list[str] = []

    def clear(self) -> None:
        """Reset checksum and names, after the ranks have compared them."""
        self.checksum, self.names = 0, []


class UnitLog:
    """Collectives of this rank's units, by axis; the axes are the same on every rank.

    Attributes:
        calls: the log of each axis.
        scatter_of: id of a unit's module → the reduce-scatter of its gradients.
    """

    def __init__(self, world: World) -> None:
        self.world, self._number = world, next(_made)
        self.calls: list[UnitCalls] = []
        self.scatter_of: dict[int, LoggedScatter] = {}

    def add_axis(self, degrees: Mapping[str, int], axis: str) -> UnitCalls:
        """Make the log of this rank's group along an axis; every rank makes the same ones."""
        for ranks in list_axis_groups(degrees, [axis]):
            if self.world.rank in ranks:
                key = self._number << 48 | len(self.calls) << 32 | self.world.ranks[ranks[0]]
                self.calls.append(UnitCalls(axis, ranks, key))
                return self.calls[-1]
        raise BugError(f"rank {self.world.rank} is in no group along {axis}")

    def log_collective(self, calls: UnitCalls, name: str, code: bytes) -> None:
        """Log a unit's collective that begins, also in the watch page if there is one.

        Args:
            calls: the log of its group.
            name: unit and kind of the collective, for messages.
            code: the same as bytes, for the checksum.
        """
        calls.count += 1
        calls.checksum = zlib.crc32(code, calls.checksum)
        if len(calls.names) < KEPT:
            calls.names.append(name)
        if (page := self.world.traffic.page) is not None:
            page.record_unit_collective(calls.key, calls.count, code[-UNIT_TEXT:])

    def clear(self) -> None:
        """Reset all logs after the ranks were compared."""
        for calls in self.calls:
            calls.clear()


class LoggedGather:
    """The all-gather of one unit, logged.

    Args:
        inner: the all-gather itself.
        calls: the log of the whole group, and of a part of it if the unit stays sharded over that
            part from forward to backward (`fsdp.reshard`).
    """

    def __init__(self, inner: Any, unit: str, log: UnitLog, calls: Sequence[UnitCalls]) -> None:
        self.inner, self.log, self.allocate = inner, log, inner.allocate
        self.calls = {len(one.ranks): one for one in reversed(calls)}
        self.said = [_name_collective(unit, what) for what in (FORWARD, BACKWARD)]

    def __call__(
        self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False
    ) -> Any:
        """Log the all-gather and run it."""
        self.log.log_collective(self.calls[group.size()], *self.said[graph_task_id() >= 0])
        return self.inner(output_tensor, input_tensor, group, async_op)


class LoggedScatter:
    """The reduce-scatter of one unit's gradients, logged.

    Args:
        calls: the logs of the group, and of its replicas (hsdp), which sum the parts after it.
    """

    def __init__(self, inner: Any, unit: str, log: UnitLog, calls: Sequence[UnitCalls]) -> None:
        self.inner, self.log, self.allocate = inner, log, inner.allocate
        self.calls, self.said = calls, _name_collective(unit, GRADIENTS)

    def set_inner(self, inner: Any) -> None:
        """Replace the inner reduce-scatter from now on."""
        self.inner, self.allocate = inner, inner.allocate

    def __call__(
        self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        """Log the reduce-scatter and run it."""
        for calls in self.calls:
            self.log.log_collective(
                calls, *self.said
            )  # before it waits, so that the watchdog sees it
        return self.inner(output_tensor, input_tensor, group, op, async_op)


class UnitSequence:
    """Sequence of the units of forward passes, on a fast path while they come as expected.

    A subclass decides what a unit means that comes otherwise (`unit_visits.py`).

    Attributes:
        expected: numbers of the units in the order of their visits, then NO_UNIT; NO_UNIT
            alone: nothing is expected, so each visit is the subclass's.
        at: index of the next one.
        is_open: a forward pass of the model is in progress.
        has_gradients: it records gradients.
    """

    def __init__(self) -> None:
        self.expected, self.at = [NO_UNIT], 0
        self.is_open = self.has_gradients = False

    def watch(self, root: nn.Module, units: Sequence[nn.Module]) -> list[RemovableHandle]:
        """Register hooks of the model and its units, which run before those of `fully_shard`.

        Returns:
            The hooks.
        """
        hooks = [
            root.register_forward_pre_hook(self._start, prepend=True),
            root.register_forward_hook(self._end, prepend=True),
        ]
        for number, unit in enumerate(units):
            enter = self._enter(number)
            hooks += [
                unit.register_forward_pre_hook(enter, prepend=True, with_kwargs=True),
                unit.register_forward_hook(self._exit),
            ]
        return hooks

    def start_pass(self) -> None:
        """Begin a pass in which nothing is expected."""

    def enter_unit(self, unit: int, inputs: Any) -> None:
        """Handle a unit that is about to run, and is not the expected one."""

    def exit_unit(self, outputs: Any) -> None:
        """Handle the outputs of a unit in a pass in which nothing is expected."""

    def end_pass(self, outputs: Any) -> Any:
        """Handle the end of a pass in which nothing is expected, or units are left; its outputs."""
        return outputs

    def _start(self, _root: nn.Module, _given: Any) -> None:
        if graph_task_id() < 0:
            self.is_open, self.at, self.has_gradients = True, 0, torch.is_grad_enabled()
            if self.expected[0] == NO_UNIT:
                self.start_pass()

    def _enter(self, number: int) -> Callable[[nn.Module, Any, Any], None]:
        def enter(_unit: nn.Module, given: Any, named: Any) -> None:
            if self.expected[self.at] == number:
                self.at += 1
            elif self.is_open and graph_task_id() < 0:  # else it is recomputed: no visit
                self.enter_unit(number, (given, named))

        return enter

    def _exit(self, _unit: nn.Module, _given: Any, outputs: Any) -> None:
        if self.expected[0] == NO_UNIT and self.is_open and graph_task_id() < 0:
            self.exit_unit(outputs)

    def _end(self, _root: nn.Module, _given: Any, outputs: Any) -> Any:
        if self.is_open and graph_task_id() < 0:
            if self.expected[0] == NO_UNIT or self.expected[self.at] != NO_UNIT:
                outputs = self.end_pass(outputs)
            self.is_open = False
        return outputs


def _name_collective(unit: str, what: str) -> tuple[str, bytes]:
    """Return a call's name, as text and as bytes for checksums and watch pages."""
    name = f"{unit or ROOT} ({what})"
    return name, name.encode()
