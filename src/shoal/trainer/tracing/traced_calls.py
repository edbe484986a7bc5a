"""Record the collectives and messages of a process, from their start to their end.

While a record is open, methods of torch's process groups are replaced, as in the steps that
`guards/collective_log.py` compares. A call is in flight from its start until its work is done. A
group counts its calls, so the same call of all its ranks has the same number.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from shoal.base.runlog.traced_steps import Flight

COLLECTIVES = {
    "all_reduce": ("allreduce", "allreduce_coalesced"),
    "all_gather": (
        "_allgather_base", "all_gather_single", "allgather", "allgather_coalesced",
        "all_gather_single_coalesced", "allgather_into_tensor_coalesced",
    ),
    "reduce_scatter": (
        "_reduce_scatter_base", "reduce_scatter_single", "reduce_scatter",
        "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced",
    ),
    "all_to_all": ("alltoall_base", "all_to_all_single", "alltoall"),
    "broadcast": ("broadcast",),
    "barrier": ("barrier",),
}  # fmt: skip
"""Methods of a process group by their usual names; torch 2.13 has other ones than 2.11."""
NAMES = {method: name for name, methods in COLLECTIVES.items() for method in methods}
MESSAGES = {"send": "send", "recv": "receive"}


class TracedCalls:
    """Record of the calls that this process makes while it is open.

    Args:
        subject: returns what the next call carries.
    """

    def __init__(self, subject: Callable[[], str]) -> None:
        self.flights: list[Flight] = []
        self._subject = subject
        self._numbers: dict[tuple[str, tuple[int, ...]], int] = {}
        self._ranks: dict[str, tuple[int, ...]] = {}
        self._torchs: dict[str, Any] = {}
        self._waited: list[tuple[Any, Flight]] = []

    def open(self) -> None:
        """Start to record."""
        for method in {*NAMES, *MESSAGES} & vars(dist.ProcessGroup).keys():
            # From the class's __dict__: the result of `getattr` would not bind when restored.
            self._torchs[method] = vars(dist.ProcessGroup)[method]
            setattr(dist.ProcessGroup, method, self._make_recorded(method))

    def close(self) -> None:
        """Stop to record, and restore torch's methods."""
        for method, torchs in self._torchs.items():
            setattr(dist.ProcessGroup, method, torchs)
        self._torchs, self._waited = {}, []

    def _make_recorded(self, method: str) -> Callable[..., Any]:
        torchs = getattr(dist.ProcessGroup, method)

        def call(group: dist.ProcessGroup, *given: Any, **named: Any) -> Any:
            flight = self._start_flight(group, method, given)
            work = torchs(group, *given, **named)
            self._note_end(work, flight)
            return work

        return call

    def _start_flight(self, group: Any, method: str, given: tuple[Any, ...]) -> Flight:
        ranks = self._ranks_of(group)
        name = NAMES.get(method) or MESSAGES[method]
        if method in MESSAGES:
            peer = ranks[int(given[1])]
            own = ranks[group.rank()]
            ranks = (own, peer) if method == "send" else (peer, own)
        key = name, ranks
        self._numbers[key] = number = self._numbers.get(key, -1) + 1
        found = Flight(name, ranks, number, _payload_bytes(given), self._subject(), time.time_ns())
        self.flights.append(found)
        return found

    def _note_end(self, work: Any, flight: Flight) -> None:
        """Note the end of a call in the thread that completes it, as its wait may come later.

        Messages of gloo say nothing of their end: a sent one is handed over when the call returns,
        and a received one is here when a wait for it ends.
        """

        def note(_: Any) -> None:
            flight.end_ns = time.time_ns()

        try:
            work.get_future().add_done_callback(note)
        except (RuntimeError, AttributeError):
            if flight.name == "send":
                flight.end_ns = time.time_ns()
            elif work is not None:
                self._waited.append((work, flight))

    def note_wait_end(self) -> None:
        """Note the ends of the messages for which this rank has waited."""
        now_ns = time.time_ns()
        for work, flight in self._waited:
            if work.is_completed():
                flight.end_ns = now_ns
        self._waited = [pair for pair in self._waited if not pair[1].end_ns]

    def _ranks_of(self, group: Any) -> tuple[int, ...]:
        name = group.group_name
        if name not in self._ranks:
            self._ranks[name] = tuple(dist.get_process_group_ranks(group))
        return self._ranks[name]


def _payload_bytes(given: tuple[Any, ...]) -> int:
    """Return the bytes of a call's largest tensor or list of tensors."""
    sizes = [0]
    for one in given:
        tensors = one if isinstance(one, list | tuple) else [one]
        flat = [t for part in tensors for t in (part if isinstance(part, list) else [part])]
        sizes.append(sum(t.numel() * t.element_size() for t in flat if isinstance(t, torch.Tensor)))
    return max(sizes)
