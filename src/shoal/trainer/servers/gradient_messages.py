"""Messages between the workers and the servers of an asynchronous parameter server.

A worker and a server take turns, so no message needs a name:

    server → worker   a head of whole numbers (`WorkOrder`), then its part of the weights
    worker → server   a head of float64 (`GradientMessage`), then its part of the summed gradients
    server 0 → other servers   orders: which worker gets weights, whose gradient to apply, save, end

Server 0 decides and the others follow, so all apply the same gradients in the same order, and their
checkpoint is of one step. A server has one thread per worker, which blocks in its messages and puts
arrivals in a queue for the main thread. A message that fails means that the worker is gone.
"""

from __future__ import annotations

import copy
import queue
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from shoal.fabric import World
from shoal.fabric.collectives.traffic_counts import TrafficCounter
from shoal.fabric.exchanges.point_to_point import PointToPoint
from shoal.parallel.data_parallel.buckets import bucket_offsets
from shoal.parallel.program import Program

Span = tuple[str, int, int, str]
"""A part of a parameter: its name, first and last element in row order, its format."""

WORK, END = 1, 2
GIVE, APPLY, LOST, SAVE, VALIDATE, FINISH = range(1, 7)
"""Orders of server 0, with a worker's rank and up to four numbers."""
ORDER = 6


@dataclass(frozen=True)
class WorkOrder:
    """Order to a worker: the step's number, and its samples' positions in the stream.

    Attributes:
        what: WORK or END, with `number` then the exit code.
    """

    what: int
    number: int = 0
    start: int = 0
    stop: int = 0

    def to_tensor(self) -> torch.Tensor:
        """Return the order as a message."""
        return torch.tensor([self.what, self.number, self.start, self.stop])


HEAD = 9


@dataclass(frozen=True)
class GradientMessage:
    """Head of a worker's gradient message.

    Attributes:
        loss_sum, count, norm: of its samples; the norm of the summed gradient.
        broken, loss_broken: numbers that are not finite.
        moved: a buffer changed in its passes.
        ran, peak_memory_bytes, lost: micro-batches, memory, samples that could not be read.
        used: per parameter, whether it has a gradient.
    """

    loss_sum: float
    count: float
    norm: float
    broken: bool
    loss_broken: bool
    moved: bool
    ran: int
    peak_memory_bytes: int
    lost: int
    used: Sequence[bool]

    def to_tensor(self) -> torch.Tensor:
        """Return the head as a message."""
        numbers = [
            *(self.loss_sum, self.count, self.norm, self.broken, self.loss_broken, self.moved),
            *(self.ran, self.peak_memory_bytes, self.lost, *self.used),
        ]
        return torch.tensor([float(number) for number in numbers], dtype=torch.float64)

    @staticmethod
    def read(told: torch.Tensor) -> GradientMessage:
        """Decode the numbers at the head of a message."""
        loss_sum, count, norm, broken, loss_broken, moved, ran, peak, lost, *used = told.tolist()
        return GradientMessage(
            loss_sum, count, norm, bool(broken), bool(loss_broken), bool(moved), int(ran),
            int(peak), int(lost), [bool(one) for one in used],
        )  # fmt: skip


def list_own_spans(program: Program) -> list[Span]:
    """Return the spans that a server updates: the parts of all buckets between its cuts."""
    found: list[Span] = []
    for bucket in program.plan.buckets:
        low, high = (0, bucket.elements)
        if bucket.cuts:
            low, high = bucket.cuts[program.data.rank : program.data.rank + 2]
        for name, (start, stop) in bucket_offsets(bucket, program.parameters).items():
            first, last = max(start, low), min(stop, high)
            if first < last:
                found.append((name, first - start, last - start, bucket.dtype))
    return found


class FlatTensors:
    """Layout of parameter parts in a message: one flat tensor for each number format."""

    def __init__(self, spans: Iterable[Span]) -> None:
        self.spans: list[Span] = [(str(n), int(a), int(b), str(d)) for n, a, b, d in spans]
        sizes: dict[str, int] = {}
        self.at: dict[str, tuple[str, int, int]] = {}
        for name, first, last, dtype in self.spans:
            begin = sizes.get(dtype, 0)
            sizes[dtype] = begin + last - first
            self.at[name] = (dtype, begin, sizes[dtype])
        self.sizes = sizes

    def allocate(self) -> dict[str, torch.Tensor]:
        """Allocate the flat tensors, filled with zeros."""
        return {name: torch.zeros(n, dtype=getattr(torch, name)) for name, n in self.sizes.items()}

    def pack(self, whole: Mapping[str, torch.Tensor | None], into: dict[str, torch.Tensor]) -> None:
        """Copy parts of whole tensors, by name, into the flat tensors; zeros if missing."""
        for name, first, last, _ in self.spans:
            dtype, begin, end = self.at[name]
            tensor = whole.get(name)
            if tensor is None:
                into[dtype][begin:end] = 0
            else:
                into[dtype][begin:end] = tensor.detach().reshape(-1)[first:last]

    def unpack(
        self, arrived: Mapping[str, torch.Tensor], whole: Mapping[str, torch.Tensor]
    ) -> None:
        """Copy the flat tensors into parts of whole tensors."""
        with torch.no_grad():
            for name, first, last, _ in self.spans:
                dtype, begin, end = self.at[name]
                place, part = whole[name], arrived[dtype][begin:end]
                if place.is_contiguous():
                    place.view(-1)[first:last] = part
                else:  # channels_last: memory is not in row order
                    rows = place.reshape(-1).clone()
                    rows[first:last] = part
                    place.copy_(rows.view(place.shape))

    def part(self, arrived: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
        """Return one parameter's part of the flat tensors, flat."""
        dtype, begin, end = self.at[name]
        return arrived[dtype][begin:end]


def make_host_world(world: World) -> World:
    """Return the same world on host memory, if possible, whose waits are not counted."""
    same = copy.copy(world)
    same.device = world.messages
    same.traffic = TrafficCounter(watched=False)
    return same


@dataclass
class Arrival:
    """Entry of the queue: a gradient that arrived, or a worker that is gone.

    Attributes:
        server: that reports it; on the first server a gradient is complete when all have it.
        sent_bytes: with the weights that the worker read before.
    """

    worker: int
    head: GradientMessage | None = None
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    why: str = ""
    sent_bytes: int = 0
    server: int = -1


class WorkerChannel(threading.Thread):
    """Thread of a server for one worker: send weights, receive a gradient, and repeat to the end.

    Attributes:
        give: queues a reading and a parcel of weights for sending.
        tell: called with each gradient that has arrived, or with the loss of the worker.
    """

    def __init__(
        self,
        pairs: PointToPoint,
        worker: int,
        parcel: FlatTensors,
        names: int,
        tell: Callable[[Arrival], None],
    ) -> None:
        super().__init__(name=f"worker {worker}", daemon=True)
        self.pairs, self.worker, self.parcel, self.names = pairs, worker, parcel, names
        self.tell = tell
        self._outbox: queue.Queue[tuple[WorkOrder, dict[str, torch.Tensor]] | None] = queue.Queue()
        self.start()

    def send(self, reading: WorkOrder, weights: dict[str, torch.Tensor]) -> None:
        """Send the worker its order and this server's weights, which must not change."""
        self._outbox.put((reading, weights))

    def close(self) -> None:
        """Wait until everything is sent."""
        self._outbox.put(None)
        self.join()

    def run(self) -> None:
        """Exchange weights and gradients with the worker until the end."""
        try:
            while (given := self._outbox.get()) is not None:
                reading, weights = given
                under_way = [
                    self.pairs.send(reading.to_tensor().to(self.pairs.world.device), self.worker)
                ]
                if reading.what == WORK:
                    under_way += [self.pairs.send(one, self.worker) for one in weights.values()]
                for one in under_way:
                    one.wait()
                if reading.what == WORK:
                    self.tell(self._receive_gradient(sum(one.tensor.nbytes for one in under_way)))
        except RuntimeError as failure:
            self.tell(Arrival(self.worker, why=str(failure).splitlines()[0]))

    def _receive_gradient(self, sent_bytes: int) -> Arrival:
        head = self.pairs.receive((HEAD + self.names,), torch.float64, self.worker)
        room = self.parcel.allocate()
        coming = [
            self.pairs.receive(tuple(one.shape), one.dtype, self.worker) for one in room.values()
        ]
        brought = GradientMessage.read(head.wait())
        gradients = dict(zip(room, [one.wait() for one in coming], strict=True))
        return Arrival(self.worker, brought, gradients, sent_bytes=sent_bytes)


class ServerOrders:
    """Orders of server 0 to the other servers, which receive them with `take`.

    Args:
        hearing: threads of server 0 that listen to the other servers.
    """

    def __init__(
        self, pairs: PointToPoint, servers: Sequence[int], hearing: Sequence[threading.Thread]
    ) -> None:
        self.pairs, self.servers, self.hearing = pairs, servers, hearing

    def send(self, what: int, *numbers: int) -> None:
        """Send an order to all other servers."""
        told = torch.tensor([what, *numbers, *[0] * (ORDER - 1 - len(numbers))])
        told = told.to(self.pairs.world.device)
        for under_way in [self.pairs.send(told, server) for server in self.servers[1:]]:
            under_way.wait()

    def receive(self) -> tuple[int, list[int]]:
        """Wait for the next order; return (what, numbers)."""
        what, *numbers = self.pairs.receive((ORDER,), torch.int64, self.servers[0]).wait().tolist()
        return what, numbers


def make_arrival_handler(
    pairs: PointToPoint, servers: Sequence[int], inbox: queue.Queue[Arrival]
) -> tuple[Callable[[Arrival], None], list[threading.Thread]]:
    """Return a server's handler of arrivals: it queues them, and reports them to the first server.

    So the first server knows when all have a gradient, and orders nothing that one of them lacks.
    The first server itself only queues.

    Returns:
        The handler for each worker's thread, and the first server's threads that listen to the
        others.
    """
    own, lock = pairs.world.rank, threading.Lock()
    if own == servers[0]:
        hearing = [
            threading.Thread(target=_queue_reports, args=(pairs, server, inbox), daemon=True)
            for server in servers[1:]
        ]
        for one in hearing:
            one.start()
        return inbox.put, hearing

    def tell(arrived: Arrival) -> None:
        inbox.put(arrived)
        send_report(pairs, servers[0], arrived.worker, arrived.head is not None, lock)

    return tell, []


def send_report(
    pairs: PointToPoint, first: int, worker: int, well: bool, lock: threading.Lock | None = None
) -> None:
    """Report a worker's gradient, or its loss, to the first server; worker −1: the end."""
    word = torch.tensor([worker, int(well)]).to(pairs.world.device)
    with lock or threading.Lock():
        pairs.send(word, first).wait()


def _queue_reports(pairs: PointToPoint, server: int, inbox: queue.Queue[Arrival]) -> None:
    """Queue the reports of another server until its end."""
    try:
        while True:
            worker, well = pairs.receive((2,), torch.int64, server).wait().tolist()
            if worker < 0:
                return
            inbox.put(Arrival(worker, why="" if well else "another server lost it", server=server))
    except RuntimeError as failure:
        inbox.put(Arrival(-1, why=f"server {server} is gone: {str(failure).splitlines()[0]}"))
