"""Rows of embedding tables on servers: a worker fetches the rows it looks up and sends gradients.

A model looks rows up with `F.embedding` or `F.embedding_bag`, whichever module calls them. On a
worker a table's weight is a placeholder without memory. torch dispatches such calls to it: it
fetches from the servers the rows that it does not have yet in this step, and looks up in those. All
other operations on the weight are refused, since a worker does not have its values.

    worker → server   [ASK, table, n], then n row numbers
    server → worker   its columns of these rows
    worker → server   [END, n of each table], then its columns of the rows' summed gradients, in the
                      order in which they were fetched: row numbers are not sent again

A session is the passes of one step, or an evaluation. Servers answer only inside of one, so no
worker reads rows during the optimizer's step. A row is sent once per session, however often it is
looked up. Each worker has a thread on every server: workers need not keep step.
Source: Li et al. 2014 (a worker pulls the keys that its data touch)
"""

from __future__ import annotations

import copy
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from shoal.base.errors import BugError, ConfigError
from shoal.base.plans.placement import Placement
from shoal.fabric import World
from shoal.fabric.collectives.traffic_counts import SEND, TrafficCounter
from shoal.fabric.exchanges.point_to_point import PointToPoint

ASK, END = 1, 2
UNUSED = -1
"""In an END message: the table got no gradient."""

FORM = frozenset({
    "__get__", "__set__", "__delete__", "size", "dim", "numel", "stride", "element_size",
    "is_floating_point", "is_complex", "is_contiguous", "data_ptr", "detach", "__repr__", "__len__",
    "ndimension", "nelement", "storage_offset", "_has_compatible_shallow_copy_type",
})  # fmt: skip
"""Names of tensor functions that read shape and dtype but no values."""


class RowGradients:
    """Row gradients of one table that a worker sends: [rows] numbers, [rows, width] sums."""

    def __init__(self, rows: torch.Tensor, gradients: torch.Tensor) -> None:
        self.rows, self.gradients = rows, gradients


class RemoteTable(nn.Parameter):
    """Placeholder of a table's weight on a worker: shape and dtype, no memory.

    Attributes:
        row: the plan's placement of the table.
        lookups: fetches the rows; None: no run is active.
    """

    row: Placement
    lookups: RowFetcher | None

    @staticmethod
    def of(weight: nn.Parameter, row: Placement) -> RemoteTable:
        """Make a placeholder of a weight."""
        hollow = torch.empty_like(weight, device="meta")
        made: RemoteTable = torch.Tensor._make_subclass(RemoteTable, hollow, weight.requires_grad)
        made.row, made.lookups = row, None
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run lookups on fetched rows; allow shape queries; refuse the rest."""
        if func is F.embedding or func is F.embedding_bag:
            return _embed_fetched_rows(func, *args, **(kwargs or {}))
        name = getattr(func, "__name__", str(func))
        if name not in FORM:
            weight = next(one for one in _leaves((args, kwargs)) if isinstance(one, RemoteTable))
            raise ConfigError(
                f"model: {weight.row.name} is used in {name}(…), and its rows are on the parameter "
                f"servers, which answer lookups alone (nn.Embedding, nn.EmbeddingBag, F.embedding, "
                f"F.embedding_bag); try: layout.serves=weights, or the names of other tables"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def _leaves(value: Any) -> list[Any]:
    """Return all leaves of nested tuples, lists and dicts."""
    if isinstance(value, tuple | list):
        return [leaf for one in value for leaf in _leaves(one)]
    if isinstance(value, dict):
        return [leaf for one in value.values() for leaf in _leaves(one)]
    return [value]


def _embed_fetched_rows(
    func: Callable[..., torch.Tensor], ids: torch.Tensor, weight: Any, *given: Any, **options: Any
) -> torch.Tensor:
    """Call `F.embedding` or `F.embedding_bag` on the fetched rows, with renumbered indices."""
    if not isinstance(weight, RemoteTable) or given:
        raise BugError(f"{func.__name__} was handed over in another form than torch's own")
    name, length = weight.row.name, weight.row.shape[0]
    if weight.lookups is None or not weight.lookups.is_open:
        raise ConfigError(
            f"model: {name} is looked up outside of a run's calls, and its rows are on the "
            f"parameter servers, which answer inside of run.step, run.evaluate and run.predict "
            f"only; try: run.predict(inputs), called on every rank"
        )
    wanted, local = torch.unique(ids, return_inverse=True)
    if wanted.numel() and not 0 <= int(wanted[0]) <= int(wanted[-1]) < length:
        raise IndexError(f"index out of range in self: {name} has {length} rows")
    rows = weight.lookups.rows(name, wanted.long())
    padding = options.get("padding_idx")
    if padding is not None:
        at = (wanted == padding % length).nonzero()
        options["padding_idx"] = int(at[0]) if at.numel() else None
    return func(local.to(ids.dtype), rows, **options)


class _FetchedTable:
    """Rows of one table that a worker fetched for a step, and the sums of their gradients.

    ids, rows    in the order in which they came · sorted, order  for finding them
    """

    def __init__(self, number: int, row: Placement, device: torch.device) -> None:
        if row.cut is None:
            raise BugError(f"{row.name} is on servers without a cut")
        self.number, self.row, self.device = number, row, device
        self.spans = [row.cut.spans(part)[0] for part in row.cut.part]
        self.dtype: torch.dtype = getattr(torch, row.dtype)
        self.clear()

    def clear(self) -> None:
        """Drop the rows and sums of the previous step."""
        self.ids = torch.empty(0, dtype=torch.int64, device=self.device)
        self.sorted, self.order = self.ids, self.ids
        self.rows = torch.empty((0, self.row.shape[1]), dtype=self.dtype, device=self.device)
        self.sums = self.rows
        self.used = False

    def missing_ids(self, wanted: torch.Tensor) -> torch.Tensor:
        """Return those of some sorted row numbers that are not fetched yet."""
        if not self.ids.numel():
            return wanted
        near = torch.searchsorted(self.sorted, wanted).clamp_(max=self.sorted.numel() - 1)
        return wanted[self.sorted[near] != wanted]

    def add_rows(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        """Add fetched rows."""
        self.ids, self.rows = torch.cat((self.ids, ids)), torch.cat((self.rows, rows))
        self.sorted, self.order = torch.sort(self.ids)

    def local_indices(self, wanted: torch.Tensor) -> torch.Tensor:
        """Return the local indices of fetched rows."""
        return self.order[torch.searchsorted(self.sorted, wanted)]

    def add_gradients(self, places: torch.Tensor, gradients: torch.Tensor) -> None:
        """Add the gradients of one lookup, in which every local index occurs once."""
        short = self.rows.shape[0] - self.sums.shape[0]
        if short:
            more = self.sums.new_zeros((short, self.sums.shape[1]))
            self.sums = torch.cat((self.sums, more))
        self.sums.index_add_(0, places, gradients.to(self.dtype))
        self.used = True


class RowFetcher:
    """Worker side of table servers: fetches rows in a step, then sends their gradients.

    Attributes:
        is_open: between `start_session` and `end`.
        sent: dtype in which gradients are sent; None: the table's dtype.
    """

    def __init__(
        self,
        pairs: PointToPoint,
        servers: Sequence[int],
        tables: Sequence[Placement],
        device: torch.device,
        sent: torch.dtype | None,
    ) -> None:
        self.pairs, self.servers, self.sent = pairs, servers, sent
        self.held = {row.name: _FetchedTable(n, row, device) for n, row in enumerate(tables)}
        self.is_open = False

    def start_session(self) -> None:
        """Start a step's or evaluation's lookups; the servers answer until `end`."""
        if self.is_open:
            raise ConfigError(
                "run.step, run.evaluate or run.predict was called between the passes of a step, "
                "and parameter servers answer one after the other; try: after run.update()"
            )
        self.is_open = True
        for held in self.held.values():
            held.clear()

    def rows(self, name: str, wanted: torch.Tensor) -> torch.Tensor:
        """Return the rows of some numbers, [n, width], and collect their gradients.

        Args:
            wanted: row numbers, sorted, without duplicates.
        """
        held = self.held[name]
        missing = held.missing_ids(wanted)
        if missing.numel():
            held.add_rows(missing, self._fetch_rows(held, missing))
        places = held.local_indices(wanted)
        rows = held.rows[places]
        if not wanted.numel():  # torch refuses lookups in a table without rows
            rows = held.rows.new_zeros((1, held.rows.shape[1]))
        if torch.is_grad_enabled() and held.row.trains:
            rows.requires_grad_()

            def ready(leaf: torch.Tensor) -> None:
                if leaf.grad is not None:
                    held.add_gradients(places, leaf.grad[: places.numel()])
                    leaf.grad = None

            rows.register_post_accumulate_grad_hook(ready)
        return rows

    def _fetch_rows(self, held: _FetchedTable, ids: torch.Tensor) -> torch.Tensor:
        """Fetch rows from the servers, each of which sends its columns."""
        here = self.pairs.world.device
        numbers = ids.to(device=here, dtype=_row_number_dtype(held.row))
        head = _encode_header(len(self.held), ASK, [held.number, ids.numel()]).to(here)
        sent = [self.pairs.send(one, server) for server in self.servers for one in (head, numbers)]
        coming = [
            self.pairs.receive((ids.numel(), stop - start), held.dtype, server)
            for server, (start, stop) in zip(self.servers, held.spans, strict=True)
        ]
        rows = torch.cat([one.wait() for one in coming], 1)
        for one in sent:
            one.wait()
        return rows.to(held.device)

    def norms(self) -> list[torch.Tensor]:
        """Return the norms of the gradients that this worker computed, by table."""
        return [torch.linalg.vector_norm(held.sums) for held in self.held.values() if held.used]

    def end(self) -> None:
        """End the lookups of a step or evaluation: send the gradients, if any, to the servers."""
        self.is_open = False
        every = list(self.held.values())
        here = self.pairs.world.device
        told = [held.rows.shape[0] if held.used else UNUSED for held in every]
        head = _encode_header(len(every), END, told).to(here)
        under_way = [self.pairs.send(head, server) for server in self.servers]
        for held in every:
            sums = held.sums.to(device=here, dtype=self.sent or held.dtype) if held.used else None
            for server, (start, stop) in zip(self.servers, held.spans, strict=True):
                if sums is not None:
                    under_way.append(self.pairs.send(sums[:, start:stop], server))
        for one in under_way:
            one.wait()


class RowServer:
    """Server side: a thread per worker that sends rows, and receives gradients at the end.

    Args:
        tables: this server's part of each by name, in plan order, as forward passes read them.
    """

    def __init__(
        self,
        pairs: PointToPoint,
        workers: Sequence[int],
        rows: Sequence[Placement],
        tables: Mapping[str, torch.Tensor],
        sent: torch.dtype | None,
    ) -> None:
        self.world = pairs.world
        self._done: queue.Queue[tuple[int, Any]] = queue.Queue()
        self._lines = [_WorkerThread(pairs, one, rows, tables, sent, self._done) for one in workers]

    def open(self) -> None:
        """Let the workers read rows, for one step or evaluation."""
        for line in self._lines:
            line.tokens.put(True)

    def collect_gradients(self) -> list[dict[str, RowGradients]]:
        """Wait until all workers end a step; return each worker's gradients, in rank order.

        Raises:
            RuntimeError: of the backend if a worker is gone.
        """
        found: dict[int, dict[str, RowGradients]] = {}
        with self.world.traffic.waiting():
            while len(found) < len(self._lines):
                worker, brought = self._done.get()
                if isinstance(brought, BaseException):
                    raise brought
                found[worker] = brought
        for line in self._lines:
            sent_bytes = line.traffic.pop_counts()[0].get(SEND, 0)
            self.world.traffic.add_sent(SEND, sent_bytes, "servers")
        return [found[worker] for worker in sorted(found)]

    def close(self) -> None:
        """Stop the threads."""
        for line in self._lines:
            line.tokens.put(False)
        for line in self._lines:
            line.join()


class _WorkerThread(threading.Thread):
    """Thread of a server that answers one worker."""

    def __init__(
        self,
        pairs: PointToPoint,
        worker: int,
        rows: Sequence[Placement],
        tables: Mapping[str, torch.Tensor],
        sent: torch.dtype | None,
        done: queue.Queue[tuple[int, Any]],
    ) -> None:
        super().__init__(name=f"worker {worker}", daemon=True)
        self.traffic = TrafficCounter(
            watched=False
        )  # a waiting thread does not mean a hanging rank
        self.pairs = copy.copy(pairs)
        self.pairs.world = copy.copy(pairs.world)
        self.pairs.world.traffic = self.traffic
        self.worker, self.rows, self.tables, self.sent = worker, rows, tables, sent
        self.done = done
        self.tokens: queue.Queue[bool] = queue.Queue()
        self.start()

    def run(self) -> None:
        """Answer the worker's requests for table rows, until the server closes."""
        while self.tokens.get():
            try:
                self.done.put((self.worker, self._answer_session()))
            except Exception as failure:
                self.done.put((self.worker, failure))
                return

    def _answer_session(self) -> dict[str, RowGradients]:
        asked: list[list[torch.Tensor]] = [[] for _ in self.rows]
        length = len(_encode_header(len(self.rows), END, []))
        while True:
            what, *told = self._receive((length,), torch.int64).tolist()
            if what == END:
                return self._receive_gradients(told, asked)
            number, count = told[:2]
            row = self.rows[number]
            ids = self._receive((count,), _row_number_dtype(row)).long()
            asked[number].append(ids)
            table = self.tables[row.name].detach()
            rows = table.index_select(0, ids.to(table.device)).to(self.pairs.world.device)
            self.pairs.send(rows, self.worker).wait()

    def _receive_gradients(
        self, told: Sequence[int], asked: Sequence[Sequence[torch.Tensor]]
    ) -> dict[str, RowGradients]:
        found = {}
        for row, count, ids in zip(self.rows, told, asked, strict=False):
            if count == UNUSED:
                continue
            table = self.tables[row.name]
            kept = self.sent or getattr(torch, row.dtype)
            sums = self._receive((count, table.shape[1]), kept)
            numbers = torch.cat([sums.new_zeros(0, dtype=torch.int64), *ids])
            found[row.name] = RowGradients(numbers.to(table.device), sums.to(table.device))
        return found

    def _receive(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self.pairs.receive(shape, dtype, self.worker).wait()


def host_message_world(world: World) -> World:
    """Copy a world with the same processes and counters, for messages through host memory."""
    same = copy.copy(world)
    same.device, same.axis = world.messages, "servers"
    return same


def _row_number_dtype(row: Placement) -> torch.dtype:
    """Return the dtype in which row numbers are sent."""
    return torch.int32 if row.shape[0] < 2**31 else torch.int64


def _encode_header(tables: int, what: int, told: Sequence[int]) -> torch.Tensor:
    """Return a message's header, of the same length for all messages."""
    words = [what, *told]
    return torch.tensor(words + [0] * (1 + max(2, tables) - len(words)))
