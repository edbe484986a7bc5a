"""Fetches in worker processes: torch's own, which die with their parent, even a killed one.

What fails in a worker is raised in the main process, with the one line and the traceback of there.
Where one dies (a signal, no memory) or hangs, all are made again, and what they had not given is
fetched again: a sample depends on its number alone, so bits and order are the same.
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
"""In the place of a stream position."""
MADE_AGAIN = 2
"""How often workers are made again without a result between."""
LOOK_S = 1.0
"""How often workers are looked at while a result is waited for."""
SILENT_S, SILENCES = 60.0, 20
"""After how long a worker that gives no result is named, at least · times the longest so far."""
HUNG = 10
"""After so many times as long it is killed and made again, if it reads by number."""
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Failure:
    """An error on its way from a worker process: its one line, and the traceback there.

    Attributes:
        transient: a ClusterError, worth a restart; else a UserError.
    """

    line: str
    notes: tuple[str, ...]
    transient: bool = False

    @staticmethod
    def of(error: ShoalError) -> Failure:
        """Pack an error; exceptions themselves lose their notes between processes."""
        notes = tuple(getattr(error, "__notes__", ()))
        return Failure(str(error), notes, isinstance(error, ClusterError))

    def raise_again(self) -> None:
        """Errors: UserError or ClusterError, as it was raised in the worker."""
        kind: type[ShoalError] = ClusterError if self.transient else UserError
        error = kind(self.line)
        for note in self.notes:
            error.add_note(note)
        raise error


class FetcherView(Dataset[Any]):
    """A fetcher as torch's DataLoader wants it: `view[spans]`, failures as values.

    Attributes:
        reads: the stream position that each worker reads now, or NOTHING.
    """

    def __init__(self, fetcher: Fetcher, workers: int) -> None:
        self.fetcher = fetcher
        self.reads = multiprocessing.RawArray("q", [NOTHING] * workers)

    def __getitem__(self, spans: Sequence[Span]) -> Any:
        """Some micro-batches, or the Failure to be raised in the main process."""
        here, fetcher = get_worker_info(), self.fetcher
        if fetcher.mark is None and here is not None:
            fetcher.mark = partial(self.reads.__setitem__, here.id)
        try:
            return fetcher.values(spans)
        except (UserError, ClusterError) as error:
            return Failure.of(error)
        finally:
            if fetcher.mark is not None:
                fetcher.mark(NOTHING)

    def reading(self, worker: int) -> str:
        """What a worker is at, in words; "" where it reads no sample."""
        position = self.reads[worker]
        if position == NOTHING:
            return ""
        (known,) = self.fetcher.own_ids(position, position + 1)
        return f" at sample {known} (position {position})"


def obey_parent(_worker: int = 0) -> None:
    """Live exactly as long as the parent wants: its trainer is who answers signals, and may save.

    Ctrl-C and SIGUSR1 are left to the parent. On Linux so is a SIGTERM to the whole group, while
    one that the parent sends itself ends this process; and the kernel kills it when its parent
    thread ends: else it outlived a killed trainer, holding memory, until its next queue check.
    """
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    if not sys.platform.startswith("linux"):
        return
    # A Python handler is not told who sent a signal; waiting for it is.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_end_when_told, daemon=True).start()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():  # it died before the request
        os._exit(1)


def _end_when_told() -> None:
    """Wait for the parent's own SIGTERM."""
    sender = 0
    while sender != os.getppid():
        sender = signal.sigwaitinfo({signal.SIGTERM}).si_pid
    os._exit(0)


def as_it_is(value: Any) -> Any:
    """Keep torch from converting arrays, so that workers and main process give the same types."""
    return value


def warn(text: str) -> None:
    """Tell through `logging`, for loaders that belong to no run."""
    logging.getLogger("shoal").warning("shoal: %s", text)


class LostWorkerError(Exception):
    """A worker process died, or does not answer; `cure`: what a person may do."""

    def __init__(self, what: str, cure: str) -> None:
        super().__init__(what)
        self.cure = cure


class Crew:
    """The worker processes of one DataLoader, looked at while one of their results is waited for.

    torch tells of a dead worker by a signal handler that raises wherever the main thread is, in the
    middle of a step too; so that handler is taken out, and nothing is raised but by `next`.
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
            collate_fn=as_it_is,
            worker_init_fn=obey_parent,
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
        """The next result. Errors: StopIteration; LostWorkerError"""
        began_s, named = time.monotonic(), False
        while True:
            try:
                result = next(self.results)
                break
            # What a worker sent is fetched from it: that fails where it has died since.
            except (RuntimeError, EOFError, OSError) as error:
                timed_out = "timed out after" in str(error)
                if dead := self._dead(0.0 if timed_out else LOOK_S):
                    what = ", ".join(f"{self._name(place)} {self._how(place)}" for place in dead)
                    raise LostWorkerError(what, OF_MEMORY) from None
                if not timed_out:
                    told = f"data.workers = {len(self.workers)}: {type(error).__name__}: {error}"
                    raise ClusterError(told) from error.with_traceback(None)
                named = self._silent(time.monotonic() - began_s, named)
        self.taken, self.longest_s = self.taken + 1, max(self.longest_s, time.monotonic() - began_s)
        return result

    def end(self) -> None:
        """Stop the workers now.

        Left to the garbage collector (a traceback would hold it), torch's queues are closed first
        and every worker is waited for in vain, 5 s each.
        """
        self.results = None

    def _dead(self, wait_s: float) -> list[int]:
        """Places of workers that have ended; so long for one that is about to is waited."""
        until_s = time.monotonic() + wait_s
        while True:
            dead = [place for place, one in enumerate(self.workers) if not one.is_alive()]
            if dead or time.monotonic() >= until_s:
                return dead
            time.sleep(0.01)

    def _silent(self, waited_s: float, named: bool) -> bool:
        """Name the worker that is waited for, once; gives whether that was done.

        Errors: LostWorkerError where it is given up.
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
    """Take torch's SIGCHLD handler out, which its first DataLoader with workers puts there."""
    if not hasattr(signal, "SIGCHLD") or threading.current_thread() is not threading.main_thread():
        return
    handler = signal.getsignal(signal.SIGCHLD)
    if getattr(handler, "__module__", "") == "torch.utils.data._utils.signal_handling":
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def from_workers(
    dataset: Dataset[Any],
    spans: Iterable[Any] | None,
    workers: int,
    ahead: int,
    tell: Tell = warn,
) -> Generator[Any, None, None]:
    """What `dataset` gives, in order, fetched by `workers` processes, `ahead` results each.

    Args:
        spans: keys for dataset[key]; None for an iterable dataset, which is not begun again.
        tell: hears of workers that are made again, and of those that do not answer.

    Raises:
        those of a Failure among the results · ClusterError if worker processes die or hang again
            and again.
    """
    pending, lost = deque[Any](), 0
    spans = None if spans is None else iter(spans)  # what is taken of it is taken
    keys = None if spans is None else _noted(spans, pending)
    while True:
        crew = Crew(dataset, keys, workers, ahead, tell)
        try:
            while True:
                try:
                    result = crew.next()
                except StopIteration:
                    return
                lost = 0
                if pending:
                    pending.popleft()
                if isinstance(result, Failure):
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
        keys = _noted(chain([*pending], spans), pending)
        pending.clear()


def _noted(keys: Iterable[Any], pending: deque[Any]) -> Iterator[Any]:
    """The same keys; those that were taken are in `pending` until their results have come."""
    for key in keys:
        pending.append(key)
        yield key
