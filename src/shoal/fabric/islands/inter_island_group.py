"""Group of one process per island, over which islands exchange bytes and compressed sums.

    store = meet("10.0.0.1:29400", index, count, deadline_s=120)
    plane = connect_islands(store, lane, index, count, connections=2, host="10.0.0.1",
    deadline_s=120) arrived = plane.begin(message, codec, feedback=None, tag="0", deadline_s=60)
    # first half mean = arrived.finish(weights, sum(weights), deadline_s=60)                      #
    second half

Inner rank r of every island is lane r, which has its own group (`InterIslandGroup`), so each rank
exchanges the part that it owns. All members call the same methods in the same order, from one
thread at a time, which need not be the training thread. A plane uses no process group of its
island. Any failure raises `IslandLost`, which names the island to blame; the plane is broken then.

gloo and the store neither encrypt nor authenticate anything: whoever reaches their ports may read
and alter what islands send. They listen on the address that leads to `host` and on no other; use a
private network or a tunnel. Peers' bytes are numbers and lengths, never objects.

Source: `meeting` (store), `pulse` (who is alive), `links` (groups), `halves` (sums)
"""

from __future__ import annotations

import atexit
import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.base.errors import BugError, ClusterError
from shoal.fabric.islands.compressed_all_reduce import CompressedExchange
from shoal.fabric.islands.heartbeat import HeartbeatThread, IslandLost
from shoal.fabric.islands.inter_island_links import IslandConnections
from shoal.fabric.islands.island_rendezvous import join_island_store, local_address

if TYPE_CHECKING:
    from shoal.fabric.compressed.codecs import Codec, ErrorFeedback

__all__ = [
    "CompressedExchange",
    "InterIslandGroup",
    "IslandLost",
    "connect_islands",
    "join_island_store",
]

_planes: weakref.WeakSet[InterIslandGroup] = weakref.WeakSet()


def connect_islands(
    store: dist.Store,
    lane: str,
    index: int,
    count: int,
    *,
    connections: int,
    host: str,
    deadline_s: float,
    tell: Callable[[str], None] = lambda line: None,
) -> InterIslandGroup:
    """Connect this process with the same lane of all other islands; every island must call it.

    Args:
        lane: the rank inside its island.
        store: result of `join_island_store`.
        host: host of the rendezvous address.
        index, count: this island's number, and the number of islands.
        connections: TCP connections to each other island: one alone may not fill a long link.
        deadline_s: time limit for connecting, also for sub-planes (`InterIslandGroup.among`).
        tell: called from another thread with a line on a malformed entry in the store.

    Returns:
        the Plane; without connections if there is one island.

    Raises:
        ClusterError: an island does not connect in time; IslandLost if one fails meanwhile.
    """
    own = dist.PrefixStore(f"lane/{lane}", store)
    address = local_address(host) if count > 1 else ""
    pulse = HeartbeatThread(own, index, count, tell) if count > 1 else None
    links = IslandConnections(own, pulse, range(count), index, "all")
    plane = InterIslandGroup(links, address, connections, deadline_s)
    try:
        if pulse is not None:
            pulse.start(deadline_s)
        links.open(address, connections, deadline_s)
    except ClusterError:
        plane.close()
        raise
    _planes.add(plane)
    return plane


class InterIslandGroup:
    """The same inner rank (lane) of all islands, as a group seen by one of its processes.

    Members call the same methods in the same order; any failure is IslandLost, and the plane is
    broken then. Made by `connect_islands`.

    Attributes:
        index, count: this island's index among the members, and the number of members.
        sent_bytes, received_bytes: payload sent to and received from other islands so far,
            sub-planes included.

    gather(message, *, deadline_s)   return every member's bytes, in order, on every member
    begin(flat, codec, *, feedback, tag, deadline_s)   first half of a compressed sum: an Arrived,
                    whose `finish(weights, divisor, deadline_s=…)` is the second
    among(indices)  the plane of some members · close()  end the connections
    """

    def __init__(
        self, links: IslandConnections, address: str, connections: int, deadline_s: float
    ) -> None:
        self.links, self.address = links, address
        self.connections, self.deadline_s = connections, deadline_s
        self.index, self.count = links.index, links.count
        self._parts: dict[tuple[int, ...], InterIslandGroup] = {}

    @property
    def sent_bytes(self) -> int:
        """Payload sent to other islands so far; see the class."""
        return self.links.sent_bytes + sum(part.sent_bytes for part in self._parts.values())

    @property
    def received_bytes(self) -> int:
        """Payload received from other islands so far; see the class."""
        return self.links.received_bytes + sum(p.received_bytes for p in self._parts.values())

    def gather(self, message: bytes, *, deadline_s: float) -> list[bytes]:
        """All-gather every member's message, in their order; for small messages.

        Raises:
            IslandLost: an island failed or did not answer in time.
        """
        own = torch.frombuffer(bytearray(message), dtype=torch.uint8) if message else _nothing()
        size = torch.tensor([own.numel()]).view(torch.uint8)
        with self.links.deadline_scope("a gathering", deadline_s) as deadline:
            told = self.links.wait(self.links.exchange_all(size, deadline), deadline)
            sizes = told.view(torch.int64).tolist()
            flight = self.links.exchange_all(own, deadline, sizes)
            received = self.links.wait(flight, deadline)
        return [part.numpy().tobytes() for part in received.split(sizes)]

    def start_compressed_all_reduce(
        self,
        flat: Tensor,
        codec: Codec,
        *,
        feedback: ErrorFeedback | None,
        tag: str,
        deadline_s: float,
    ) -> CompressedExchange:
        """Run the first half of a sum: send each island the encoded part that it sums.

        Args:
            flat: [elements] in the codec's dtype, on the CPU, contiguous; as many on each island;
                not modified.
            feedback: keeps encoding errors: of messages under TAG/OWNER/CHUNK, of sums under
                TAG/sum/CHUNK.

        Raises:
            IslandLost: an island failed; BugError for numbers of another dtype.
        """
        return self.start_exchange_of_messages(
            [flat], (), flat.numel(), codec, feedback=feedback, tag=tag, deadline_s=deadline_s
        )

    def start_exchange_of_messages(
        self,
        flats: Sequence[Tensor],
        senders: Sequence[Sequence[int]],
        elements: int,
        codec: Codec,
        *,
        feedback: ErrorFeedback | None,
        tag: str,
        deadline_s: float,
    ) -> CompressedExchange:
        """Run the first half of a sum of messages; an island may send none, one or several.

        Args:
            flats: this island's messages, each as `flat` of `start_compressed_all_reduce`.
            senders: by island, the senders of its messages, the same on every island; (): each
                island sends one of its own. Encoding errors of messages are then kept under
                TAG.SENDER/OWNER/CHUNK.
            elements: numbers of a message.

        Raises:
            IslandLost: an island failed; BugError for numbers of another dtype.
        """
        for flat in flats:
            if flat.dtype != codec.dtype or flat.shape != (elements,) or not flat.is_contiguous():
                raise BugError(
                    f"exchange {tag}: {flat.dtype} {tuple(flat.shape)} for codec {codec.name} of "
                    f"{codec.dtype}; a flat tensor of that is needed"
                )
        arrived = CompressedExchange(self.links, codec, feedback, tag, elements, senders)
        with self.links.deadline_scope("the first half of an exchange", deadline_s) as deadline:
            arrived.run_first_half(flats, deadline)
        return arrived

    def subgroup(self, indices: tuple[int, ...]) -> InterIslandGroup:
        """Return the plane of some members, all of which must call it; the result is cached.

        Args:
            indices: ascending indices in this plane, this island's among them.

        Raises:
            IslandLost: one of them does not connect in time.
        """
        if self.index not in indices or list(indices) != sorted(set(indices)):
            raise BugError(f"island {self.index} asks for a plane among {indices}")
        if len(indices) == self.count:
            return self
        if indices not in self._parts:
            members = [self.links.members[place] for place in indices]
            name = "among-" + "-".join(map(str, members))
            links = IslandConnections(
                self.links.store, self.links.pulse, members, indices.index(self.index), name
            )
            links.open(self.address, self.connections, self.deadline_s)
            self._parts[indices] = InterIslandGroup(
                links, self.address, self.connections, self.deadline_s
            )
        return self._parts[indices]

    def close(self) -> None:
        """Close the connections; other islands that wait for this one fail at once."""
        for part in self._parts.values():
            part.links.close()
        self.links.close()
        if self.links.pulse is not None:
            self.links.pulse.close()


def _nothing() -> Tensor:
    return torch.empty(0, dtype=torch.uint8)


@atexit.register
def _leave_at_exit() -> None:
    """Close all planes at exit: gloo's threads must end before the interpreter does."""
    for plane in list(_planes):
        with contextlib.suppress(Exception):
            plane.close()
