"""Worker processes for fetching: torch's own, which die with their parent, even a killed one.

An error in a worker is raised in the main process, with its line and traceback. If a worker dies (a
signal, no memory) or hangs, all are restarted, and missing results are fetched again. A sample
depends on its number alone, so bits and order are the same.
"""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from shoal.base.errors import ClusterError, ShoalError, UserError
from shoal.data.loading.fetch import Fetcher, Span

PR_SET_PDEATHSIG = 1
NOTHING = -1
"""Marker in place of a stream position."""
MADE_AGAIN = 2
"""Most restarts of the workers without a result between."""
LOOK_S = 1.0
"""Seconds between checks of the workers while a result is awaited."""
SILENT_S, SILENCES = 60.0, 20
"""Seconds until a worker without a result is named, at least · times the longest wait so far."""
HUNG = 10
"""Factor of that time after which it is killed and restarted, if it reads by index."""
Tell = Callable[[str], None]


@dataclass(frozen=True)
class WorkerFailure:
    """An error from a worker process: its one line, and the traceback there.

    Attributes:
        transient: it is a ClusterError, worth a restart; else a UserError.
    """

    line: str
    notes: tuple[str, ...]
    transient: bool = False

    @staticmethod
    def of(error: ShoalError) -> WorkerFailure:
        """Pack an error; exceptions themselves lose their notes between processes."""
        notes = tuple(getattr(error, "__notes__", ()))
        return WorkerFailure(str(error), notes, isinstance(error, ClusterError))

    def raise_again(self) -> None:
        """Raise UserError or ClusterError, as it was raised in the worker."""
        kind: type[ShoalError] = ClusterError if self.transient else UserError
        error = kind(self.line)
        for note in self.notes:
            error.add_note(note)
        raise error


class FetcherView(Dataset[Any]):
    """A fetcher as torch's DataLoader needs it: `view[spans]`, failures as values.

    Attributes:
        reads: stream position that each worker reads now, or NOTHING.
    """

    def __init__(self, fetcher: Fetcher, workers: int) -> None:
        self.fetcher = fetcher
        self.reads = multiprocessing.RawArray("q", [NOTHING] * workers)

    def __getitem__(self, spans: Sequence[Span]) -> Any:
        """Return some micro-batches, or the Failure to be raised in the main process."""
        here, fetcher = get_worker_info(), self.fetcher
        if fetcher.mark is None and here is not None:
            fetcher.mark = partial(self.reads.__setitem__, here.id)
        try:
            return fetcher.values(spans)
        except (UserError, ClusterError) as error:
            return WorkerFailure.of(error)
        finally:
            if fetcher.mark is not None:
                fetcher.mark(NOTHING)

    def reading(self, worker: int) -> str:
        """Return a text on the sample that a worker reads; "" if it reads none."""
        position = self.reads[worker]
        if position == NOTHING:
            return ""
        (known,) = self.fetcher.own_ids(position, position + 1)
        return f" at sample {known} (position {position})"


def follow_parent_signals(_worker: int = 0) -> None:
    """Let a worker ignore signals that the trainer handles, and end with its parent.

    Only the parent handles Ctrl-C and SIGUSR1, and on Linux a SIGTERM to the whole group; a SIGTERM
    from the parent itself ends this process. The kernel kills it when its parent thread ends.
    Otherwise it would outlive a killed trainer, holding memory, until its next queue check.
    """
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    if not sys.platform.startswith("linux"):
        return
    # A Python handler does not get the sender of a signal; sigwaitinfo does.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_end_when_told, daemon=True).start()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():  # it died before the request
        os._exit(1)


def _end_when_told() -> None:
    """Wait for the parent's own SIGTERM, and end."""
    sender = 0
    while sender != os.getppid():
        sender = signal.sigwaitinfo({signal.SIGTERM}).si_pid
    os._exit(0)


def no_convert(value: Any) -> Any:
    """Return a value unchanged: torch must not convert arrays in workers."""
    return value


def warn(text: str) -> None:
    """Log a warning through `logging`, for loaders that belong to no run."""
    logging.getLogger("shoal").warning("shoal: %s", text)


class LostWorkerError(Exception):
    """A dead or unresponsive worker process; `cure`: remedy for the user."""

    def __init__(self, what: str, cure: str) -> None:
        super().__init__(what)
        self.cure = cure


class WorkerPool:
    """Worker processes of one DataLoader, monitored while a result is awaited.

    torch reports a dead worker by a signal handler that raises wherever the main thread is, even in
    the middle of a step. So that handler is removed, and only `next` raises.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        keys: Iterable[Any] | None,
        workers: int,
        ahead: int,
        tell: Tell,
    ) -> None:
        loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_size=None,
            sampler=keys,
            num_workers=workers,
            collate_fn=no_convert,
            worker_init_fn=follow_parent_signals,
            prefetch_factor=ahead,
            timeout=LOOK_S,
            generator=torch.Generator(),  # else the DataLoader draws from the model's generator
        )
        before = set(multiprocessing.active_children())
        self.dataset = dataset
        self.results: Any = iter(loader)
        _quiet_child_signal()
        own = set(multiprocessing.active_children()) - before
        self.workers = sorted(own, key=lambda one: int(one.name.rpartition("-")[2]))
        self.tell, self.taken, self.longest_s = tell, 0, 0.0

    def next(self) -> Any:
        """Return the next result; raises StopIteration or LostWorkerError."""
        began_s, named = time.monotonic(), False
        while True:
            try:
                result = next(self.results)
                break
            # A result is fetched from its worker: that fails if the worker has died since.
            except (RuntimeError, EOFError, OSError) as error:
                timed_out = "timed out after" in str(error)
                if dead := self._find_dead(0.0 if timed_out else LOOK_S):
                    what = ", ".join(f"{self._name(place)} {self._how(place)}" for place in dead)
                    raise LostWorkerError(what, OF_MEMORY) from None
                if not timed_out:
                    told = f"data.workers = {len(self.workers)}: {type(error).__name__}: {error}"
                    raise ClusterError(told) from error.with_traceback(None)
                named = self._report_silent(time.monotonic() - began_s, named)
        self.taken, self.longest_s = self.taken + 1, max(self.longest_s, time.monotonic() - began_s)
        return result

    def end(self) -> None:
        """Stop the workers now.

        If the garbage collector stopped them (a traceback may hold the pool), torch would close its
        queues first and wait 5 s for each worker in vain.
        """
        self.results = None

    def _find_dead(self, wait_s: float) -> list[int]:
        """Return the indices of ended workers, after waiting `wait_s` for one that is ending."""
        until_s = time.monotonic() + wait_s
        while True:
            dead = [place for place, one in enumerate(self.workers) if not one.is_alive()]
            if dead or time.monotonic() >= until_s:
                return dead
            time.sleep(0.01)

    def _report_silent(self, waited_s: float, named: bool) -> bool:
        """Name the worker whose result is awaited, once; return whether it was named.

        Raises a LostWorkerError if the worker is given up.
        """
        patience_s = max(SILENT_S, SILENCES * self.longest_s)
        if waited_s < patience_s:
            return False
        place = self.taken % len(self.workers)  # they take keys in turn
        what = f"{self._name(place)} has not answered for {waited_s:.0f} s"
        if waited_s > HUNG * patience_s and isinstance(self.dataset, FetcherView):
            self.workers[place].kill()
            raise LostWorkerError(f"{what} and is killed", "see what that sample waits for")
        if not named:
            self.tell(f"data.workers = {len(self.workers)}: {what}")
        return True

    def _name(self, place: int) -> str:
        where = self.dataset.reading(place) if isinstance(self.dataset, FetcherView) else ""
        return f"loader worker {place} (pid {self.workers[place].pid}){where}"

    def _how(self, place: int) -> str:
        code = self.workers[place].exitcode or 0
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"


OF_MEMORY = (
    "out of memory or shared memory is the usual cause: fewer data.workers, or a smaller "
    "train.micro_batch"
)


def _quiet_child_signal() -> None:
    """Remove the SIGCHLD handler that torch's first DataLoader with workers installs."""
    if not hasattr(signal, "SIGCHLD") or threading.current_thread() is not threading.main_thread():
        return
    handler = signal.getsignal(signal.SIGCHLD)
    if getattr(handler, "__module__", "") == "torch.utils.data._utils.signal_handling":
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def fetch_in_workers(
    dataset: Dataset[Any],
    spans: Iterable[Any] | None,
    workers: int,
    ahead: int,
    tell: Tell = warn,
) -> Generator[Any, None, None]:
    """Yield the results of `dataset` in order, from `workers` processes, `ahead` results each.

    Args:
        spans: keys for dataset[key]; None for an iterable dataset, which is not restarted.
        tell: called with a line on restarted or unresponsive workers.

    Raises:
        UserError: a Failure among the results.
        ClusterError: a Failure among the results, or worker processes die or hang repeatedly.
    """
    pending, lost = deque[Any](), 0
    spans = None if spans is None else iter(spans)  # a restart must not repeat consumed spans
    keys = None if spans is None else _track_pending(spans, pending)
    while True:
        crew = WorkerPool(dataset, keys, workers, ahead, tell)
        try:
            while True:
                try:
                    result = crew.next()
                except StopIteration:
                    return
                lost = 0
                if pending:
                    pending.popleft()
                if isinstance(result, WorkerFailure):
                    result.raise_again()
                yield result
        except LostWorkerError as gone:
            lost += 1
            told = f"data.workers = {workers}: {gone}"
            if spans is None or lost > MADE_AGAIN:
                raise ClusterError(f"{told}; {gone.cure}") from None
            tell(f"{told}; they are made again, and what they had not given is fetched again")
        finally:
            crew.end()
        keys = _track_pending(chain([*pending], spans), pending)
        pending.clear()


def _track_pending(keys: Iterable[Any], pending: deque[Any]) -> Iterator[Any]:
    """Yield the same keys; keep consumed keys in `pending` until their results arrive."""
    for key in keys:
        pending.append(key)
        yield key
