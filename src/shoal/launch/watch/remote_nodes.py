"""One watch over the ranks of several machines, whose watchdogs report to the first machine's.

A watchdog (launch/watchdog.py) runs next to the ranks of every node, which write into its pages.
The watchdog of node 0 is the one that watches (hang_watch.py). Every other one sends it the changes
of its pages, ten times a second, and receives orders in the answer:

    ask    ask its ranks for their positions; their answers are in their pages, and the kernel's
           state of their processes is sent with them
    say    report an event: the node of its rank, and nodes with a disk of their own
    end    end its ranks: the one that hangs at once, the others if their launcher does not
    over   node 0's ranks have ended

So the ranks of all nodes are compared as those of one, and none is blamed because it waits. No rank
takes part: a rank that is stopped, or holds the GIL in C, cannot silence its node, nor can rank 0,
whose process may hold the run's own store. The connections are open to the run's processes alone
(authenticated_stream.py), by a token that the ranks exchanged.

The watch reports a silent node as away, on either side of a dead link, if the ranks that it hears
stand still. It blames no rank while a node is silent for less than AWAY_S.
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

from shoal.launch.watch.blamed_rank import AWAY_S, GONE, Hang, RankEvidence, kernel_state
from shoal.launch.watch.call_mismatch import Answers
from shoal.launch.watch.hang_watch import AWAY_PATIENCE_S, EVERY_S, STEP, HangWatch, WatchedProcess
from shoal.launch.watch.page_reader import PageReader, PageSnapshot
from shoal.wire.authenticated_server import AuthenticatedServer, Peer
from shoal.wire.authenticated_stream import AuthenticatedConnection
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
"""Seconds to wait for a node's watchdog."""
REST_S = 10.0
"""Seconds that ranks and watchdogs may continue after their peers ended."""
RANKS_PER_S = 1000.0
"""Reports per second about ranks of other nodes, all together: few enough for node 0."""
FRAME_S = 5.0
"""Seconds that the rest of a message may take after its start."""

Piece = tuple[int, int, bytes]
"""(number of a rank on its node, offset in its page, bytes)"""


@dataclass(frozen=True)
class Node:
    """Ranks of one machine, and their processes there."""

    ranks: tuple[int, ...]
    pids: tuple[int, ...]
    host: str


@dataclass
class RemoteRank:
    """Process of a rank on another machine, as its node reports it."""

    rank: int
    pid: int
    code: int | None = None


def report_interval_s(nodes: Sequence[Node]) -> float:
    """Return the seconds between two reports of a node."""
    return max(EVERY_S, sum(len(node.ranks) for node in nodes) / RANKS_PER_S)


class MirroredPage(PageReader):
    """Copy of the page of a rank on another machine.

    Attributes:
        state: the kernel's state of its process at the last request.
        order: sends its node an order.
    """

    def __init__(self, host: str, node: int, order: Callable[[dict[str, Any]], None]) -> None:
        super().__init__(bytearray(PAGE_BYTES), host)
        self.node, self.order = node, order
        self.state: dict[str, str] = {}
        self._changed_s = (0.0, 0.0)  # by its clock, by this machine's

    def ask(self) -> None:
        """Send the rank's node an order to request the stacks of its ranks."""
        self._requests += 1
        self.order({"ask": self._requests})

    def patch(self, at: int, raw: bytes, ago_s: float) -> None:
        """Copy bytes that the node sent into the page.

        Args:
            ago_s: difference of this machine's clock to the node's.

        Raises:
            ValueError: the bytes lie outside of the page.
        """
        if not 0 <= at <= at + len(raw) <= PAGE_BYTES:
            raise ValueError("outside of the page")
        self.memory[at : at + len(raw)] = raw
        if at == 0:
            (changed_s,) = struct.unpack_from("=d", self.memory, 8 * CHANGED_S)
            if changed_s != self._changed_s[0]:  # the clock difference as of that change
                self._changed_s = (changed_s, changed_s + ago_s)
            struct.pack_into("=d", self.memory, 8 * CHANGED_S, self._changed_s[1])


class PageChanges:
    """Changes in a node's pages since the last report."""

    def __init__(self, pages: Sequence[PageReader]) -> None:
        self.pages = pages
        self._told: list[dict[int, bytes]] = [{} for _ in pages]
        self.asked, self._units_due = 0, False

    def ask(self, number: int) -> None:
        """Ask all ranks, once for each number."""
        if number > self.asked:
            self.asked, self._units_due = number, True
            for page in self.pages:
                page.ask()

    def list_changes(self) -> list[Piece]:
        """Return the pieces that differ from the last report."""
        found = []
        for local, page in enumerate(self.pages):
            told = self._told[local]
            units = [(UNITS_AT, bytes(page.memory[UNITS_AT:PAGE_BYTES]))] if self._units_due else []
            for at, raw in _split_page(page, told.get(0, b"")) + units:
                if told.get(at) != raw:
                    told[at] = raw
                    found.append((local, at, raw))
        self._units_due = False
        return found


def _split_page(page: PageReader, told: bytes) -> list[tuple[int, bytes]]:
    """Return a page in pieces; `told` is its first piece as of the last report."""
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
        if step > 0:  # the rest of a step under way is still to come
            pieces.append((at, bytes(memory[at : at + 16 + min(length, SLOT_BYTES - 16)])))
    for at in range(STEPS_AT, STEPS_AT + KEPT * ROW.size, ROW.size):
        row = bytes(memory[at : at + ROW.size])
        if any(row[:8]):
            pieces.append((at, row))
    return pieces


class WatchdogServer(AuthenticatedServer):
    """Server of node 0's watchdog: receive the reports of the other nodes, and send orders.

    Attributes:
        mirrors: by rank, of the other nodes' ranks.
        far: their processes.
        came: nodes that have reported.
        gone: nodes whose watchdog, or its connection, has ended.
        samples: host and devices of each sample that came, until it is written.
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
        self.samples: list[tuple[str, list[dict[str, Any]]]] = []
        self.mirrors: dict[int, MirroredPage] = {}
        self.far: dict[int, RemoteRank] = {}
        for number in self._heard_s:
            for rank, pid in zip(nodes[number].ranks, nodes[number].pids, strict=True):
                self.mirrors[rank] = MirroredPage(nodes[number].host, number, self._to(number))
                self.far[rank] = RemoteRank(rank, pid)

    def away_s(self, node: int) -> float:
        """Return the seconds since a node's last report."""
        return time.monotonic() - self._heard_s[node]

    @property
    def ready(self) -> bool:
        """Return whether every node reports: only then a rank can be blamed."""
        return not self.gone and len(self.came) == len(self._heard_s)

    def describe_missing(self) -> str:
        """Return a line about watchdogs that are missing; "" if there are none."""
        now_s = time.monotonic()
        if self.gone:  # in a normal end all stop at about the same time
            missing = self.gone if now_s - self._gone_s > REST_S else set[int]()
        else:
            missing = set(self._heard_s) - self.came if now_s - self._began_s > JOIN_S else set()
        hosts = ", ".join(self.nodes[number].host for number in sorted(missing))
        return f"the watch on {hosts} has {'ended' if self.gone else 'not come'}" if hosts else ""

    def order(self, order: dict[str, Any]) -> None:
        """Send an order to all nodes."""
        for number in self._orders:
            self._to(number)(order)

    def close(self) -> None:
        """Report that node 0's ranks have ended, so the others are no longer watched."""
        self.order({"over": True})
        self.flush_orders(1.0)

    def flush_orders(self, within_s: float) -> None:
        """Wait until the nodes have fetched their orders."""
        until_s = time.monotonic() + within_s
        while any(self._orders[one] for one in self._orders if one not in self.gone):
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                return
            self.serve(left_s)

    def handle_request(self, peer: Peer, request: Any) -> None:
        """Copy a node's report into the mirrored pages, and answer with the orders for that node.

        Args:
            peer: the connection, which belongs to one node.
            request: JSON: node, now_s, changed pieces of pages, states and ended ranks.

        Raises:
            ValueError, KeyError, TypeError: the message is no report of a node.
        """
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
        if isinstance(devices := request.get("devices"), list):
            self.samples = [*self.samples[-len(self.nodes) :], (node.host, devices)]
        orders, self._orders[number] = self._orders[number], []
        self.answer(peer, orders)

    def left(self, peer: Peer) -> None:
        """Record that a node's watchdog, or its connection, has ended."""
        number = self._of.pop(peer, None)
        if number is not None and any(
            self.far[one].code is None for one in self.nodes[number].ranks
        ):
            self._gone_s = self._gone_s or time.monotonic()
            self.gone.add(number)

    def _to(self, number: int) -> Callable[[dict[str, Any]], None]:
        def order(one: dict[str, Any]) -> None:
            waiting = self._orders[number]
            if one not in waiting:  # one order asks all ranks of a node
                waiting.append(one)

        return order


class MultiNodeWatch(HangWatch):
    """Watch over the pages of other nodes' ranks in addition to its own."""

    hub: WatchdogServer | None = None

    def add_nodes(self, hub: WatchdogServer) -> None:
        """Add the other nodes' pages, before the first reading."""
        self.hub = hub
        own = dict(zip(hub.nodes[0].ranks, self.pages, strict=True))
        both: dict[int, PageReader] = {**own, **hub.mirrors}
        self.pages = [both[rank] for rank in sorted(both)]

    def record_devices(self) -> None:
        """Write the devices of all machines, as far as samples have come."""
        super().record_devices()
        if self.hub is not None:
            samples, self.hub.samples = self.hub.samples, []
            for host, devices in samples:
                self.devices.append_sample(host, devices)

    def collect_evidence(
        self, worker: WatchedProcess, told: PageSnapshot, answers: Answers
    ) -> RankEvidence:
        """Return the evidence about a rank of any node."""
        page = self.pages[worker.rank]
        if self.hub is None or not isinstance(page, MirroredPage):
            return super().collect_evidence(worker, told, answers)
        away_s = self.hub.away_s(page.node)
        answer = answers[worker.rank]
        return RankEvidence(worker.rank, worker.pid, told, answer, page.state, page.host, away_s)


class NodeReporter:
    """Client of another node's watchdog: report its ranks to node 0, and follow its orders.

    Attributes:
        number: of this node.
        ranks: its processes.
        say: reports an event of an order.
        sample: devices of this machine, until they are reported.
        over: node 0 watches no more.
    """

    def __init__(
        self,
        connection: AuthenticatedConnection,
        number: int,
        nodes: Sequence[Node],
        pages: Sequence[PageReader],
        ranks: Sequence[WatchedProcess],
        say: Callable[[dict[str, Any]], None],
    ) -> None:
        self.connection, self.number, self.nodes = connection, number, nodes
        self.pages, self.ranks, self.say = PageChanges(pages), ranks, say
        self.every_s = report_interval_s(nodes)
        self.heard_s = self._changed_s = time.monotonic()
        self._said_s, self._waits, self._asked = 0.0, False, False
        self.over = False
        self.sample: list[dict[str, Any]] | None = None
        self._away: Hang | None = None
        self._changes: list[PageSnapshot] = []

    def turn(self) -> Hang | None:
        """Send a report and receive orders; return the hang for which this node's ranks must end.

        Raises:
            OSError: node 0's watchdog has ended.
        """
        now_s = time.monotonic()
        if not self._waits and now_s - self._said_s >= self.every_s:
            self.connection.send(self._make_report(), FRAME_S)
            self._said_s, self._waits = now_s, True
        if select.select([self.connection.connection], [], [], self.every_s / 2)[0]:
            orders = self.connection.receive(FRAME_S)
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
        return self._check_silence()

    def close(self) -> None:
        """Report that the ranks have ended."""
        try:
            if self._waits:
                self.connection.receive(1.0)
            self.connection.ask(self._make_report(), 1.0)
        except OSError:  # node 0 has ended before
            pass
        self.connection.connection.close()

    def _make_report(self) -> dict[str, Any]:
        pages = [
            (local, at, base64.b64encode(raw).decode())
            for local, at, raw in self.pages.list_changes()
        ]
        ended = [local for local, rank in enumerate(self.ranks) if rank.code is not None]
        words = {"node": self.number, "now_s": time.monotonic(), "pages": pages, "ended": ended}
        if self.sample is not None:
            words["devices"], self.sample = self.sample, None
        if self._asked:
            self._asked = False
            words["states"] = [kernel_state(rank.pid) for rank in self.ranks]
        return words

    def _check_silence(self) -> Hang | None:
        """Handle a silence of node 0: report it as away if this node's ranks stand still too."""
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
