"""Fetches in worker processes: torch's own, which die with their parent, even a killed one.

What fails in a worker is raised in the main process, with the one line and the traceback of there.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from shoal.base.errors import ClusterError, ShoalError, UserError
from shoal.data.fetch import Fetcher, Span

PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Failure:
    """An error on its way from a worker process: its one line, and the traceback there.

    transient   a ClusterError, worth a restart; else a UserError
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
    """A fetcher as torch's DataLoader wants it: `view[spans]`, failures as values."""

    def __init__(self, fetcher: Fetcher) -> None:
        self.fetcher = fetcher

    def __getitem__(self, spans: Sequence[Span]) -> Any:
        """Some micro-batches, or the Failure to be raised in the main process."""
        try:
            return self.fetcher.values(spans)
        except (UserError, ClusterError) as error:
            return Failure.of(error)


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


def from_workers(
    dataset: Dataset[Any], spans: Iterable[Any] | None, workers: int, ahead: int
) -> Generator[Any, None, None]:
    """What `dataset` gives, in order, fetched by `workers` processes, `ahead` results each.

    spans   keys for dataset[key]; None for an iterable dataset
    Errors  those of a Failure among the results · ClusterError if a worker process dies
    """
    loader: DataLoader[Any] = DataLoader(
        dataset,
        batch_size=None,
        sampler=spans,
        num_workers=workers,
        collate_fn=as_it_is,
        worker_init_fn=obey_parent,
        prefetch_factor=ahead,
        generator=torch.Generator(),  # else the DataLoader draws from the model's generator
    )
    results = iter(loader)
    try:
        while True:
            try:
                result = next(results)
            except StopIteration:
                return
            except RuntimeError as error:
                raise ClusterError(
                    f"data.workers = {workers}: {error}; out of memory or shared memory is the "
                    f"usual cause: fewer data.workers, or a smaller train.micro_batch"
                ) from error.with_traceback(None)
            if isinstance(result, Failure):
                result.raise_again()
            yield result
    finally:
        # stops the workers now: left to the garbage collector (a traceback would hold it), torch's
        # queues are closed first and every worker is waited for in vain, 5 s each
        del results
