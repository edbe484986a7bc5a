"""Connections between islands: several gloo groups of the same members, used in turn.

    exchange k   uses group k mod connections: every island sends bytes to every other island, and
                 receives from each. Several run at a time, so a link stays busy while the next
                 bytes are encoded
    deadline     an exchange that does not end in time is abandoned. A blocked collective cannot
                 be cancelled (`abort` does not free it); but each passes its deadline to gloo,
                 whose thread ends by itself soon after, and then its group can be dropped
    failure      every failure becomes `IslandLost`, and these connections are broken for good

A group is built on the islands' store, beside any default process group. It listens on the local
address from which `host` is reached and on no other, and its members prove themselves once
(`json_messages.py`); gloo encrypts nothing: see `island_rendezvous.py`.

Source: torch.distributed.ProcessGroupGloo
Limits: gloo sends what its receiver has asked for, so an exchange takes a round trip longer than
        its bytes: a pair moves at most connections · THREADS chunks in one. On links with a large
        product of rate and round trip more connections help
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import count as counter
from itertools import product

import torch
import torch.distributed as dist

from shoal.base.errors import BugError
from shoal.fabric._torch import create_gloo_group, post_unreceived_byte, start_uneven_all_to_all
from shoal.fabric.collectives.json_messages import PROOF_BYTES, derive_group_key, pair_mac
from shoal.fabric.islands.heartbeat import HeartbeatThread, IslandLost

THREADS = 2
"""Threads of each group: its number of concurrent exchanges.

More or longer exchanges do not fill a link better, but they end unevenly: an island that is ahead
with one peer then sends to the other peer alone, and all islands queue at that peer's link
(measured: 25 Mbit/s, three islands, 8 exchanges of 256 KiB to each under way 1.17 × the bound, 4 of
128 KiB 1.09 ×).
"""
LEAST_S = 1e-3
CLOSED_S = 0.05
"""A wait below it was none: the connection was closed before."""
LOOK_S = 0.25
"""Seconds to wait for a transfer before a test message checks whether the peer is connected.

In one of 130 to 250 kills, gloo closes a connection in the moment in which a transfer is posted to
it. That transfer alone does not fail: it waits for its deadline. Any later transfer on the
connection fails at once (docs/lab-log.md, "A closed connection").
"""


class Deadline:
    """A moment in the future, on this machine's monotonic clock."""

    def __init__(self, deadline_s: float) -> None:
        self.deadline_s, self.began_s = deadline_s, time.monotonic()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the deadline was set."""
        return time.monotonic() - self.began_s

    @property
    def left(self) -> timedelta:
        """Time until the deadline; never zero, which torch takes for no limit."""
        return timedelta(seconds=max(self.deadline_s - self.elapsed_s, LEAST_S))


def _wait_briefly(work: dist.Work, deadline: Deadline) -> bool:
    """Wait briefly; return whether a transfer ended (or failed), or its deadline passed."""
    try:
        work.wait(min(deadline.left, timedelta(seconds=LOOK_S)))
    except RuntimeError:
        return work.is_completed() or deadline.elapsed_s >= deadline.deadline_s
    return True


@dataclass
class PendingLinkExchange:
    """Handle of a pending exchange in a group; `sent` must not change until it is done."""

    work: dist.Work | None
    sent: torch.Tensor
    received: torch.Tensor
    group: dist.ProcessGroupGloo | None = None


class _TransferFailed(Exception):
    """Failure or timeout of a transfer in a group."""


class IslandConnections:
    """Connections of one plane; empty if the plane has one member.

    Attributes:
        members: the connected islands, in order.
        index: this island's index among them.
        sent_bytes: bytes sent to other islands so far, uncompressed messages included.
        received_bytes: bytes received from other islands so far.
    """

    def __init__(
        self,
        store: dist.Store,
        pulse: HeartbeatThread | None,
        members: Sequence[int],
        index: int,
        name: str,
    ) -> None:
        self.store, self.pulse, self.name = store, pulse, name
        self.members, self.index, self.count = tuple(members), index, len(members)
        self.groups: list[dist.ProcessGroupGloo] = []
        self.sent_bytes = self.received_bytes = 0
        self.lost: IslandLost | None = None
        self._turns = counter()

    def open(self, address: str, connections: int, deadline_s: float) -> None:
        """Connect all members; every member must call it.

        Args:
            address: the address of this machine on which the groups listen.
        """
        if self.count == 1:
            return
        with self.deadline_scope("connecting", deadline_s) as deadline:
            for number in range(connections):
                self.groups.append(self._group(f"{self.name}/{number}", address, deadline))
            self._authenticate(deadline)
        if self.index == 0:  # everybody has read the addresses
            for number, member in product(range(connections), range(self.count)):
                self.store.delete_key(f"{self.name}/{number}/0/{member}")
            self.store.delete_key(f"{self.name}/word")

    def _authenticate(self, deadline: Deadline) -> None:
        """Authenticate every member over each connection, by the store's key (json_messages.py).

        Raises:
            IslandLost: a stranger holds a member's connection; the error names that member.
        """
        if self.index == 0:
            self.store.set(f"{self.name}/word", secrets.token_hex(16))
        key = derive_group_key(b"", self.store.get(f"{self.name}/word"))
        others = range(self.count)
        for number in range(len(self.groups)):
            name = f"{self.name}/{number}"
            said = torch.cat([pair_mac(key, name, self.index, other) for other in others])
            sizes = [PROOF_BYTES] * self.count
            heard = self.wait(self.exchange(said, sizes, sizes, deadline), deadline)
            for other, told in zip(others, heard.split(PROOF_BYTES), strict=True):
                if not torch.equal(told, pair_mac(key, name, other, self.index)):
                    raise IslandLost(
                        f"islands: who is connected in the place of island {self.members[other]} "
                        "does not prove to be it: somebody else on this network took it",
                        (self.members[other],),
                        deadline.elapsed_s,
                    )

    def exchange(
        self, packed: torch.Tensor, to: Sequence[int], of: Sequence[int], deadline: Deadline
    ) -> PendingLinkExchange:
        """Start to send every member its part of `packed`, and to receive this member's from all.

        Args:
            packed: [sum(to)] uint8: the bytes for member 0, 1, … in order, the own ones included.
            to, of: number of bytes to each member, and from each.
        """
        if not self.groups:
            return PendingLinkExchange(None, packed, packed)
        received = packed.new_empty(sum(of))
        self.sent_bytes += sum(to) - to[self.index]
        self.received_bytes += sum(of) - of[self.index]
        group = self.groups[next(self._turns) % len(self.groups)]
        try:
            work = start_uneven_all_to_all(
                group, received, packed, of=of, to=to, timeout=deadline.left
            )
        except RuntimeError as failure:
            raise _TransferFailed from failure
        return PendingLinkExchange(work, packed, received, group)

    def exchange_all(
        self, message: torch.Tensor, deadline: Deadline, of: Sequence[int] = ()
    ) -> PendingLinkExchange:
        """Start to send `message` to every member, and to receive theirs.

        Args:
            of: bytes of each member's message; (): as many as this one's.
        """
        size = message.numel()
        copies = message.repeat(self.count)
        return self.exchange(copies, [size] * self.count, of or [size] * self.count, deadline)

    def wait(self, flight: PendingLinkExchange, deadline: Deadline) -> torch.Tensor:
        """Wait for a started exchange, and return the bytes received from all members.

        Args:
            flight: handle that `exchange` returned.

        Returns:
            uint8, concatenated in the order of the members: member 0 first, the own bytes included.

        Raises:
            _TransferFailed: a connection broke, or the deadline passed.
        """
        work, group = flight.work, flight.group
        if work is None or group is None:
            return flight.received
        places = [place for place in range(self.count) if place != self.index]
        try:
            while not _wait_briefly(work, deadline):
                for place in places:
                    post_unreceived_byte(group, place)
                places = self._suspects()
            work.wait(deadline.left)
        except RuntimeError as failure:
            raise _TransferFailed from failure
        return flight.received

    def _suspects(self) -> list[int]:
        """Return the indices of members that missed a beat, whose connections are then tested."""
        missing = self.pulse.suspects(self.members) if self.pulse is not None else ()
        return [place for place, member in enumerate(self.members) if member in missing]

    def stream(
        self,
        steps: int,
        start: Callable[[int], PendingLinkExchange],
        end: Callable[[int, torch.Tensor], None],
        deadline: Deadline,
    ) -> None:
        """Run many exchanges, as many at a time as the groups allow, so that the link stays busy.

        Args:
            steps: number of exchanges.
            start: encodes step k and starts its exchange.
            end: called with k and the received bytes, in order.
        """
        under_way: deque[tuple[int, PendingLinkExchange]] = deque()
        for step in range(steps):
            under_way.append((step, start(step)))
            if len(under_way) > THREADS * len(self.groups):
                done, flight = under_way.popleft()
                end(done, self.wait(flight, deadline))
        for done, flight in under_way:
            end(done, self.wait(flight, deadline))

    @contextmanager
    def deadline_scope(self, what: str, deadline_s: float) -> Iterator[Deadline]:
        """Yield a deadline for work that needs all members; raise failures as `IslandLost`."""
        if self.lost is not None:
            raise self.lost
        if self.pulse is not None:
            self.pulse.begun[self.name] = self.pulse.begun.get(self.name, 0) + 1
        deadline = Deadline(deadline_s)
        try:
            yield deadline
        except _TransferFailed as failure:
            self.lost = self._blame(what, deadline)
            raise self.lost from failure.__cause__

    def close(self) -> None:
        """Drop the groups; their threads end here, not while the interpreter shuts down."""
        self.groups.clear()

    def _blame(self, what: str, deadline: Deadline) -> IslandLost:
        after_s = deadline.elapsed_s
        if self.pulse is None:
            raise BugError(f"{what} of one island failed")
        islands, words = self.pulse.blame(self.members, self.name)
        self.pulse.report_given_up(islands, words)
        named = f"island{'s' * (len(islands) > 1)} {', '.join(map(str, islands))}"
        message = (
            f"islands: {named}: {words}; given up {_describe_wait(after_s, deadline.deadline_s)} "
            f"in {what}; --resume continues from the last merge"
        )
        return IslandLost(message, islands, after_s)

    def _group(self, name: str, address: str, deadline: Deadline) -> dist.ProcessGroupGloo:
        try:
            return create_gloo_group(
                dist.PrefixStore(name, self.store),
                self.index,
                self.count,
                address=address,
                threads=THREADS,
                timeout=deadline.left,
            )
        except RuntimeError as failure:
            raise _TransferFailed from failure


def _describe_wait(after_s: float, deadline_s: float) -> str:
    """Return how long an exchange waited; one that found its connection closed did not wait.

    >>> _describe_wait(0.01, 49.3), _describe_wait(4.0, 49.3)
    ('at once, the connection was closed', 'after 4.0 s of at most 49.3 s')
    """
    if after_s < CLOSED_S:
        return "at once, the connection was closed"
    return f"after {after_s:.1f} s of at most {deadline_s:.1f} s"
