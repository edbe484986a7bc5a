"""Connections between islands: several gloo groups of the same members, used in turn.

    exchange k   goes over group k mod connections: every island has bytes for every other one, and
                 gets what each had for it. Several are under way at a time, so a link stays busy
                 while the next bytes are coded
    deadline     an exchange that does not end in time is left behind. A blocked collective cannot
                 be called back (`abort` does not free it); but each carries its deadline into gloo,
                 whose thread ends by itself soon after, and then its group can be dropped
    failure      whatever goes wrong becomes `IslandLost`, and these connections are broken for good

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
from shoal.fabric._torch import exchange_bytes, gloo_group, knock
from shoal.fabric.collectives.json_messages import PROOF_BYTES, key_of, word
from shoal.fabric.islands.heartbeat import IslandLost, Pulse

THREADS = 2
"""Of each group, and so its exchanges under way at a time.

More of them, or longer ones, do not fill a link better, but end unevenly: who is ahead with one
island then sends to the other alone, past whose link all queue (measured: 25 Mbit/s, three islands,
8 exchanges of 256 KiB to each under way 1.17 × the bound, 4 of 128 KiB 1.09 ×).
"""
LEAST_S = 1e-3
LOOK_S = 0.25
"""How long a transfer is waited for before something is sent to see whether anybody is there.

In one of 130 to 250 kills gloo closes a connection in the moment in which a transfer is posted to
it, and that transfer alone is not told: it waits for its deadline. Whatever is posted there later
fails at once (docs/lab-log.md, "A closed connection").
"""


class Deadline:
    """A moment in the future, by the monotonic clock of this machine."""

    def __init__(self, deadline_s: float) -> None:
        self.deadline_s, self.began_s = deadline_s, time.monotonic()

    @property
    def passed_s(self) -> float:
        """Seconds since it was set."""
        return time.monotonic() - self.began_s

    @property
    def left(self) -> timedelta:
        """Time until then; never zero, which torch takes for no limit at all."""
        return timedelta(seconds=max(self.deadline_s - self.passed_s, LEAST_S))


def _ends(work: dist.Work, deadline: Deadline) -> bool:
    """Wait a little; whether a transfer came to its end, well or not, or its deadline did."""
    try:
        work.wait(min(deadline.left, timedelta(seconds=LOOK_S)))
    except RuntimeError:
        return work.is_completed() or deadline.passed_s >= deadline.deadline_s
    return True


@dataclass
class Flight:
    """An exchange under way in a group; `sent` must not change until it is done."""

    work: dist.Work | None
    sent: torch.Tensor
    received: torch.Tensor
    group: dist.ProcessGroupGloo | None = None


class _Failed(Exception):
    """A group says that a transfer failed, or has not said anything in time."""


class Links:
    """The connections of one plane, or of none if it has one member.

    Attributes:
        members: the islands that they join, in order.
        index: this one's place among them.
        sent_bytes: handed to the groups for other islands so far; what is told, not coded, too.
        received_bytes: got from them.
    """

    def __init__(
        self,
        store: dist.Store,
        pulse: Pulse | None,
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
        """Connect all members; every one of them calls it.

        Args:
            address: of this machine, where the groups listen.
        """
        if self.count == 1:
            return
        with self.watched("connecting", deadline_s) as deadline:
            for number in range(connections):
                self.groups.append(self._group(f"{self.name}/{number}", address, deadline))
            self._prove(deadline)
        if self.index == 0:  # everybody has read the addresses
            for number, member in product(range(connections), range(self.count)):
                self.store.delete_key(f"{self.name}/{number}/0/{member}")
            self.store.delete_key(f"{self.name}/word")

    def _prove(self, deadline: Deadline) -> None:
        """Have every member show over each connection that it was at the store (json_messages.py).

        Raises:
            IslandLost naming the one whose place somebody else has.
        """
        if self.index == 0:
            self.store.set(f"{self.name}/word", secrets.token_hex(16))
        key = key_of(b"", self.store.get(f"{self.name}/word"))
        others = range(self.count)
        for number in range(len(self.groups)):
            name = f"{self.name}/{number}"
            said = torch.cat([word(key, name, self.index, other) for other in others])
            sizes = [PROOF_BYTES] * self.count
            heard = self.wait(self.exchange(said, sizes, sizes, deadline), deadline)
            for other, told in zip(others, heard.split(PROOF_BYTES), strict=True):
                if not torch.equal(told, word(key, name, other, self.index)):
                    raise IslandLost(
                        f"islands: who is connected in the place of island {self.members[other]} "
                        "does not prove to be it: somebody else on this network took it",
                        (self.members[other],),
                        deadline.passed_s,
                    )

    def exchange(
        self, packed: torch.Tensor, to: Sequence[int], of: Sequence[int], deadline: Deadline
    ) -> Flight:
        """Begin to give every member its bytes.

        Args:
            packed: [sum(to)] uint8: the bytes for member 0, 1, … one after another, its own
                included.
            to, of: how many bytes go to each member, and come from each.
        """
        if not self.groups:
            return Flight(None, packed, packed)
        received = packed.new_empty(sum(of))
        self.sent_bytes += sum(to) - to[self.index]
        self.received_bytes += sum(of) - of[self.index]
        group = self.groups[next(self._turns) % len(self.groups)]
        try:
            work = exchange_bytes(group, received, packed, of=of, to=to, timeout=deadline.left)
        except RuntimeError as failure:
            raise _Failed from failure
        return Flight(work, packed, received, group)

    def exchange_all(
        self, message: torch.Tensor, deadline: Deadline, of: Sequence[int] = ()
    ) -> Flight:
        """Begin to give every member the same bytes; `of` if theirs are not as many."""
        size = message.numel()
        copies = message.repeat(self.count)
        return self.exchange(copies, [size] * self.count, of or [size] * self.count, deadline)

    def wait(self, flight: Flight, deadline: Deadline) -> torch.Tensor:
        """What the members had for this one: [sum(of)] uint8, in their order."""
        work, group = flight.work, flight.group
        if work is None or group is None:
            return flight.received
        places = [place for place in range(self.count) if place != self.index]
        try:
            while not _ends(work, deadline):
                for place in places:
                    knock(group, place)
                places = self._silent()
            work.wait(deadline.left)
        except RuntimeError as failure:
            raise _Failed from failure
        return flight.received

    def _silent(self) -> list[int]:
        """Places of members that missed a beat: whether their connections are closed is asked."""
        missing = self.pulse.missing(self.members) if self.pulse is not None else ()
        return [place for place, member in enumerate(self.members) if member in missing]

    def stream(
        self,
        steps: int,
        start: Callable[[int], Flight],
        end: Callable[[int, torch.Tensor], None],
        deadline: Deadline,
    ) -> None:
        """Many exchanges, as many under way as the groups can carry: the line never empties.

        Args:
            start: codes step k and begins its exchange.
            end: is given what came of it, in order.
        """
        under_way: deque[tuple[int, Flight]] = deque()
        for step in range(steps):
            under_way.append((step, start(step)))
            if len(under_way) > THREADS * len(self.groups):
                done, flight = under_way.popleft()
                end(done, self.wait(flight, deadline))
        for done, flight in under_way:
            end(done, self.wait(flight, deadline))

    @contextmanager
    def watched(self, what: str, deadline_s: float) -> Iterator[Deadline]:
        """Work that needs all members: gives its deadline, and makes failures `IslandLost`."""
        if self.lost is not None:
            raise self.lost
        if self.pulse is not None:
            self.pulse.begun[self.name] = self.pulse.begun.get(self.name, 0) + 1
        deadline = Deadline(deadline_s)
        try:
            yield deadline
        except _Failed as failure:
            self.lost = self._blame(what, deadline)
            raise self.lost from failure.__cause__

    def close(self) -> None:
        """Drop the groups; their threads end here, and not while the interpreter is torn down."""
        self.groups.clear()

    def _blame(self, what: str, deadline: Deadline) -> IslandLost:
        after_s = deadline.passed_s
        if self.pulse is None:
            raise BugError(f"{what} of one island failed")
        islands, words = self.pulse.blame(self.members, self.name)
        self.pulse.give_up(islands, words)
        named = f"island{'s' * (len(islands) > 1)} {', '.join(map(str, islands))}"
        message = (
            f"islands: {named}: {words}; given up after {after_s:.1f} s of at most "
            f"{deadline.deadline_s:g} s in {what}; --resume continues with the same or another "
            "number of islands"
        )
        return IslandLost(message, islands, after_s)

    def _group(self, name: str, address: str, deadline: Deadline) -> dist.ProcessGroupGloo:
        try:
            return gloo_group(
                dist.PrefixStore(name, self.store),
                self.index,
                self.count,
                address=address,
                threads=THREADS,
                timeout=deadline.left,
            )
        except RuntimeError as failure:
            raise _Failed from failure
