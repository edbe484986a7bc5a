"""One watch over the ranks of several machines: each machine's own process tells the first one's.

Beside the ranks of every node stands a process (launch/watchdog.py) whose pages they write into.
That of node 0 is the one that watches (hang_watch.py). Every other one tells it what has
changed in its pages, ten times a second, and hears in the answer what there is to do:

    ask    ask its ranks where they are; their answers are in their pages, and with them goes what
           the kernel says of their processes
    say    tell of an event: the node of whose rank it is, and nodes with a disk of their own
    end    end its ranks: the one that hangs at once, the others where their launcher does not
    over   node 0's ranks have come to their end

So the ranks of all nodes are compared as those of one are, and none is blamed because it waits. No
rank takes part: one that is stopped, or holds Python's lock in C, cannot keep its node from being
heard, nor rank 0, whose process may hold the run's own store. The connections are open to the run's
processes alone (authenticated_stream.py), by a token that ranks told each other.

A node that is not heard is told to be away, on either side of a link that carries nothing, if the
ranks that are heard stand still. While it is silent for less than AWAY_S nobody is blamed.
"""

from __future__ import annotations

import base64
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.launch.watch.blamed_rank import AWAY_S, GONE, Hang, Seen, kernel_state
from shoal.launch.watch.call_mismatch import Answers
from shoal.launch.watch.hang_watch import AWAY_PATIENCE_S, EVERY_S, STEP, Watch, Watchable
from shoal.launch.watch.page_reader import PageRead, Told
from shoal.wire.authenticated_server import Peer, SealedServer
from shoal.wire.authenticated_stream import Connection
from shoal.wire.watch_page import (
    ANSWER_AT,
    ANSWERED,
    CALLS_AT,
    CHANGED_S,
    KEPT,
    PAGE_BYTES,
    ROW,
    SLOT_BYTES,
    SLOTS,
    STEPS_AT,
    TEXT_AT,
    UNITS_AT,
)

JOIN_S = 60.0
"""How long a node's watch is waited for."""
REST_S = 10.0
"""How long ranks, and watches, may go on whose peers have ended."""
RANKS_PER_S = 1000.0
"""How often ranks of other nodes are told of, all together: what node 0 reads with little work."""
FRAME_S = 5.0
"""How long the rest of a message may take that has begun to come."""

Piece = tuple[int, int, bytes]
"""(number of a rank on its node, place in its page, bytes)"""


@dataclass(frozen=True)
class Node:
    """The ranks of one machine, and their processes there."""

    ranks: tuple[int, ...]
    pids: tuple[int, ...]
    host: str


@dataclass
class Far:
    """A rank's process on another machine, as its node tells of it."""

    rank: int
    pid: int
    code: int | None = None


def every_s(nodes: Sequence[Node]) -> float:
    """Seconds between two words of a node."""
    return max(EVERY_S, sum(len(node.ranks) for node in nodes) / RANKS_PER_S)


class Mirror(PageRead):
    """The page of a rank of another machine, as it was told last.

    Attributes:
        state: what the kernel said of its process when it was asked last.
        order: hands its node an order.
    """

    def __init__(self, host: str, node: int, order: Callable[[dict[str, Any]], None]) -> None:
        super().__init__(bytearray(PAGE_BYTES), host)
        self.node, self.order = node, order
        self.state: dict[str, str] = {}
        self._changed_s = (0.0, 0.0)  # by its clock, by this machine's

    def ask(self) -> None:
        """Have its node ask it."""
        self._requests += 1
        self.order({"ask": self._requests})

    def patch(self, at: int, raw: bytes, ago_s: float) -> None:
        """Take what its node tells. Errors: ValueError for what lies outside of a page.

        Args:
            ago_s: what its clock is behind this machine's.
        """
        if not 0 <= at <= at + len(raw) <= PAGE_BYTES:
            raise ValueError("outside of the page")
        self.memory[at : at + len(raw)] = raw
        if at == 0:
            (changed_s,) = struct.unpack_from("=d", self.memory, 8 * CHANGED_S)
            if changed_s != self._changed_s[0]:  # as it was told with the change, and no other time
                self._changed_s = (changed_s, changed_s + ago_s)
            struct.pack_into("=d", self.memory, 8 * CHANGED_S, self._changed_s[1])


class Pages:
    """What has changed in a node's pages since it was told last."""

    def __init__(self, pages: Sequence[PageRead]) -> None:
        self.pages = pages
        self._told: list[dict[int, bytes]] = [{} for _ in pages]
        self.asked, self._units_due = 0, False

    def ask(self, number: int) -> None:
        """Ask all ranks, once for each number."""
        if number > self.asked:
            self.asked, self._units_due = number, True
            for page in self.pages:
                page.ask()

    def changed(self) -> list[Piece]:
        """The pieces that differ."""
        found = []
        for local, page in enumerate(self.pages):
            told = self._told[local]
            units = [(UNITS_AT, bytes(page.memory[UNITS_AT:PAGE_BYTES]))] if self._units_due else []
            for at, raw in _pieces(page, told.get(0, b"")) + units:
                if told.get(at) != raw:
                    told[at] = raw
                    found.append((local, at, raw))
        self._units_due = False
        return found


def _pieces(page: PageRead, told: bytes) -> list[tuple[int, bytes]]:
    """A page in pieces; told  its first one, as it was told last."""
    memory = page.memory
    (length,) = struct.unpack_from("=H", memory, TEXT_AT)
    head = bytes(memory[: min(TEXT_AT + 2 + length, ANSWER_AT)])
    if head == told:
        return []
    pieces = [(0, head)]
    if head[8 * ANSWERED :][:8] != told[8 * ANSWERED :][:8]:
        (length,) = struct.unpack_from("=I", memory, ANSWER_AT)
        pieces.append((ANSWER_AT, bytes(memory[ANSWER_AT : min(ANSWER_AT + 4 + length, CALLS_AT)])))
    for at in range(CALLS_AT, CALLS_AT + SLOTS * SLOT_BYTES, SLOT_BYTES):
        step, length = struct.unpack_from("=qq", memory, at)
        if step > 0:  # of one under way the rest is to come
            pieces.append((at, bytes(memory[at : at + 16 + min(length, SLOT_BYTES - 16)])))
    for at in range(STEPS_AT, STEPS_AT + KEPT * ROW.size, ROW.size):
        row = bytes(memory[at : at + ROW.size])
        if any(row[:8]):
            pieces.append((at, row))
    return pieces


class Hub(SealedServer):
    """Node 0's end of the connections: hears the other nodes and hands out orders.

    Attributes:
        mirrors: by rank, of the other nodes' ranks.
        far: their processes.
        came: nodes that were heard.
        gone: nodes whose process has ended, or its connection.
    """

    def __init__(self, listener: socket.socket, token: bytes, nodes: Sequence[Node]) -> None:
        super().__init__(listener, token)
        self.nodes = nodes
        self.came: set[int] = set()
        self.gone: set[int] = set()
        self._began_s, self._gone_s = time.monotonic(), 0.0
        self._heard_s = dict.fromkeys(range(1, len(nodes)), self._began_s)
        self._orders: dict[int, list[dict[str, Any]]] = {number: [] for number in self._heard_s}
        self._of: dict[Peer, int] = {}
        self.mirrors: dict[int, Mirror] = {}
        self.far: dict[int, Far] = {}
        for number in self._heard_s:
            for rank, pid in zip(nodes[number].ranks, nodes[number].pids, strict=True):
                self.mirrors[rank] = Mirror(nodes[number].host, number, self._to(number))
                self.far[rank] = Far(rank, pid)

    def away_s(self, node: int) -> float:
        """How long a node has not been heard."""
        return time.monotonic() - self._heard_s[node]

    @property
    def ready(self) -> bool:
        """Whether every node is heard of: only then somebody can be blamed."""
        return not self.gone and len(self.came) == len(self._heard_s)

    def lacking(self) -> str:
        """Which watch is given up, in words; "" as long as none is."""
        now_s = time.monotonic()
        if self.gone:  # else all end at about the same time
            missing = self.gone if now_s - self._gone_s > REST_S else set[int]()
        else:
            missing = set(self._heard_s) - self.came if now_s - self._began_s > JOIN_S else set()
        hosts = ", ".join(self.nodes[number].host for number in sorted(missing))
        return f"the watch on {hosts} has {'ended' if self.gone else 'not come'}" if hosts else ""

    def order(self, order: dict[str, Any]) -> None:
        """Give an order to all nodes."""
        for number in self._orders:
            self._to(number)(order)

    def close(self) -> None:
        """Say that node 0's ranks have ended: nobody watches the others from now on."""
        self.order({"over": True})
        self.hand_out(1.0)

    def hand_out(self, within_s: float) -> None:
        """Wait until the orders were fetched."""
        until_s = time.monotonic() + within_s
        while any(self._orders[one] for one in self._orders if one not in self.gone):
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                return
            self.serve(left_s)

    def do(self, peer: Peer, request: Any) -> None:
        """Take what a node tells. Errors: ValueError, KeyError, TypeError, of no node's words."""
        number = request["node"]
        node = self.nodes[number] if number in self._heard_s else None
        if node is None or self._of.setdefault(peer, number) != number:
            raise ValueError("no node of this run")
        self._heard_s[number] = now_s = time.monotonic()
        self.came.add(number)
        ago_s = now_s - float(request["now_s"])
        for local, at, coded in request["pages"]:
            self.mirrors[node.ranks[local]].patch(at, base64.b64decode(coded), ago_s)
        for rank, state in zip(node.ranks, request.get("states", ()), strict=False):
            self.mirrors[rank].state = state
        for local in request["ended"]:
            self.far[node.ranks[local]].code = 0
        orders, self._orders[number] = self._orders[number], []
        self.answer(peer, orders)

    def left(self, peer: Peer) -> None:
        """Hear that a node's process has ended, or its connection."""
        number = self._of.pop(peer, None)
        if number is not None and any(
            self.far[one].code is None for one in self.nodes[number].ranks
        ):
            self._gone_s = self._gone_s or time.monotonic()
            self.gone.add(number)

    def _to(self, number: int) -> Callable[[dict[str, Any]], None]:
        def order(one: dict[str, Any]) -> None:
            waiting = self._orders[number]
            if one not in waiting:  # each of a node's ranks is asked, and it asks all at once
                waiting.append(one)

        return order


class NodesWatch(Watch):
    """A watch that has the pages of other nodes' ranks beside those of its own."""

    hub: Hub | None = None

    def join(self, hub: Hub) -> None:
        """Take the other nodes' pages, before the first look."""
        self.hub = hub
        own = dict(zip(hub.nodes[0].ranks, self.pages, strict=True))
        both: dict[int, PageRead] = {**own, **hub.mirrors}
        self.pages = [both[rank] for rank in sorted(both)]

    def seen(self, worker: Watchable, told: Told, answers: Answers) -> Seen:
        """What is known of a rank, of whichever node."""
        page = self.pages[worker.rank]
        if self.hub is None or not isinstance(page, Mirror):
            return super().seen(worker, told, answers)
        away_s = self.hub.away_s(page.node)
        answer = answers[worker.rank]
        return Seen(worker.rank, worker.pid, told, answer, page.state, page.host, away_s)


class Follower:
    """Another node's end: tells node 0 of its ranks, and does what it hears.

    Attributes:
        number: of this node.
        ranks: its processes.
        say: tells of an event, as an order says it.
        over: node 0 watches no more.
    """

    def __init__(
        self,
        connection: Connection,
        number: int,
        nodes: Sequence[Node],
        pages: Sequence[PageRead],
        ranks: Sequence[Watchable],
        say: Callable[[dict[str, Any]], None],
    ) -> None:
        self.connection, self.number, self.nodes = connection, number, nodes
        self.pages, self.ranks, self.say = Pages(pages), ranks, say
        self.every_s = every_s(nodes)
        self.heard_s = self._changed_s = time.monotonic()
        self._said_s, self._waits, self._asked = 0.0, False, False
        self.over = False
        self._away: Hang | None = None
        self._changes: list[Told] = []

    def turn(self) -> Hang | None:
        """Tell and hear; the hang for which this node's ranks are to be ended, if any.

        Raises:
            OSError: where node 0's process has ended.
        """
        now_s = time.monotonic()
        if not self._waits and now_s - self._said_s >= self.every_s:
            self.connection.say(self._words(), FRAME_S)
            self._said_s, self._waits = now_s, True
        if select.select([self.connection.connection], [], [], self.every_s / 2)[0]:
            orders = self.connection.hear(FRAME_S)
            self._waits, self.heard_s, self._away = False, time.monotonic(), None
            for order in orders:
                if "ask" in order:
                    self.pages.ask(order["ask"])
                    self._asked = True
                if "say" in order:
                    self.say(order)
                self.over |= "over" in order
                if "end" in order:
                    return Hang(**order["end"])
            return None
        return self._silence()

    def close(self) -> None:
        """Say that the ranks have ended."""
        try:
            if self._waits:
                self.connection.hear(1.0)
            self.connection.ask(self._words(), 1.0)
        except OSError:  # node 0 has ended before
            pass
        self.connection.connection.close()

    def _words(self) -> dict[str, Any]:
        pages = [
            (local, at, base64.b64encode(raw).decode()) for local, at, raw in self.pages.changed()
        ]
        ended = [local for local, rank in enumerate(self.ranks) if rank.code is not None]
        words = {"node": self.number, "now_s": time.monotonic(), "pages": pages, "ended": ended}
        if self._asked:
            self._asked = False
            words["states"] = [kernel_state(rank.pid) for rank in self.ranks]
        return words

    def _silence(self) -> Hang | None:
        """Nothing was heard: tell of node 0, if this node's ranks stand still since then."""
        now_s = time.monotonic()
        told = [page.read() for page in self.pages.pages]
        if told != self._changes:
            self._changes, self._changed_s = told, now_s
        away_s = now_s - max(self.heard_s, self._changed_s)
        if away_s < AWAY_S or not any(one.live for one in told):
            return None
        first = self.nodes[0]
        if self._away is None:
            self._away = Hang(
                first.ranks[0], first.pids[0], first.host, "its machine", "", GONE, STEP, AWAY_S,
                certain=False, away=True,
            )  # fmt: skip
            fields = {"rank": first.ranks[0], "host": first.host, "pid": first.pids[0]}
            fields |= {"phase": self._away.phase, "why": GONE, "collective": "", "stacks": ""}
            fields |= {"waited_s": round(away_s, 2), "deadline_s": AWAY_S}
            fields["ends_in_s"] = AWAY_PATIENCE_S
            self.say({"say": "hang", "fields": fields, "own": True})
        return self._away if away_s > AWAY_S + AWAY_PATIENCE_S else None
