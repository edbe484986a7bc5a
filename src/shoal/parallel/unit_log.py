"""Log the units that this rank gathers and reduces, in order, so that ranks can be compared.

`fully_shard` gathers a unit's parameters when a rank runs it, and reduces its gradients after its
backward pass. No message says of which unit it is: the k-th collective of one rank meets the k-th
of the others. Ranks that run different units in one step compute with mixtures of their weights,
and where sizes are equal nothing fails.

    UnitCalls    the units' collectives over one process group: a checksum, and the names
    UnitLog      this rank's, for every axis over which units travel
    logged       around torch's collectives of one unit: adds them to the log as they begin

The trainer compares the checksums in the step's all-reduce (`trainer/guards/unit_order.py`). Where
ranks wait for each other there is none, so the log stands in the watch page too
(`launch/watch/unit_mismatch.py`).

Source: torch.distributed.fsdp.fully_shard, which numbers nothing it sends
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from shoal.base.errors import BugError
from shoal.fabric import World
from shoal.fabric.axis_worlds import members
from shoal.parallel._torch import in_backward
from shoal.wire.watch_page import UNIT_TEXT

KEPT = 4096
"""Names since the last comparison that a rank keeps: the first difference is what counts."""
FORWARD, BACKWARD, GRADIENTS = "forward pass", "backward pass", "gradients"
ROOT = "the root unit"
"""Name of the unit that holds what is in no block."""


_made = itertools.count()
"""Runs of this process, which all ranks make in one order."""


class UnitCalls:
    """Collectives of units over one process group, in the order in which this rank begins them.

    Attributes:
        axis: of the layout, along which the group's ranks differ.
        ranks: of the group, in the run's world.
        key: of the group among all that a watch sees: of the run, the axis, the first rank.
        checksum: of unit and pass of each collective since the last comparison.
        names: the first of them.
        count: how many there were, ever.
    """

    def __init__(self, axis: str, ranks: Sequence[int], key: int) -> None:
        self.axis, self.ranks, self.key = axis, tuple(ranks), key
        self.checksum = self.count = 0
        self.names: list[str] = []

    def add(self, name: str, code: bytes) -> None:
        """A collective begins."""
        self.count += 1
        self.checksum = zlib.crc32(code, self.checksum)
        if len(self.names) < KEPT:
            self.names.append(name)

    def clear(self) -> None:
        """The ranks were compared."""
        self.checksum, self.names = 0, []


class UnitLog:
    """The collectives of this rank's units, by axis; the axes are the same on every rank.

    Attributes:
        calls: along each axis.
        scatter_of: by the id of a unit's module, what reduces its gradients.
    """

    def __init__(self, world: World) -> None:
        self.world, self._number = world, next(_made)
        self.calls: list[UnitCalls] = []
        self.scatter_of: dict[int, LoggedScatter] = {}

    def along(self, degrees: Mapping[str, int], axis: str) -> UnitCalls:
        """Return the calls over this rank's group along an axis; every rank asks for the same."""
        for ranks in members(degrees, [axis]):
            if self.world.rank in ranks:
                key = self._number << 48 | len(self.calls) << 32 | self.world.ranks[ranks[0]]
                self.calls.append(UnitCalls(axis, ranks, key))
                return self.calls[-1]
        raise BugError(f"rank {self.world.rank} is in no group along {axis}")

    def begin(self, calls: UnitCalls, name: str, code: bytes) -> None:
        """A collective of a unit begins: into the log, and into the page of who is watched."""
        calls.add(name, code)
        if (page := self.world.traffic.page) is not None:
            page.unit(calls.key, calls.count, code[-UNIT_TEXT:])

    def clear(self) -> None:
        """All ranks were compared."""
        for calls in self.calls:
            calls.clear()


class LoggedGather:
    """The all-gather of one unit, logged.

    Args:
        inner: what gathers.
        calls: over the whole group, and over a part of it, where a unit lies cut over that part
            from forward to backward (`fsdp.reshard`).
    """

    def __init__(self, inner: Any, unit: str, log: UnitLog, calls: Sequence[UnitCalls]) -> None:
        self.inner, self.log, self.allocate = inner, log, inner.allocate
        self.calls = {len(one.ranks): one for one in reversed(calls)}
        self.said = [_named(unit, what) for what in (FORWARD, BACKWARD)]

    def __call__(
        self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False
    ) -> Any:
        """Log it and run it."""
        self.log.begin(self.calls[group.size()], *self.said[in_backward()])
        return self.inner(output_tensor, input_tensor, group, async_op)


class LoggedScatter:
    """The reduce-scatter of one unit's gradients, logged.

    Args:
        calls: over the group, and over its replicas (hsdp), which sum the parts after it.
    """

    def __init__(self, inner: Any, unit: str, log: UnitLog, calls: Sequence[UnitCalls]) -> None:
        self.inner, self.log, self.allocate = inner, log, inner.allocate
        self.calls, self.said = calls, _named(unit, GRADIENTS)

    def send_by(self, inner: Any) -> None:
        """Send by something else from now on."""
        self.inner, self.allocate = inner, inner.allocate

    def __call__(
        self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        """Log it and run it."""
        for calls in self.calls:
            self.log.begin(calls, *self.said)  # before it waits: a watch sees in what
        return self.inner(output_tensor, input_tensor, group, op, async_op)


def _named(unit: str, what: str) -> tuple[str, bytes]:
    """A call's name, and the same as bytes, for checksums and pages."""
    name = f"{unit or ROOT} ({what})"
    return name, name.encode()
