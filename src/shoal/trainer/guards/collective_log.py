"""Log of a rank's collectives in some steps, so that the launcher can compare the ranks.

Ranks that call collectives in different orders, or from different lines, sum unrelated tensors; if
the shapes agree, nothing fails. So in a run's first steps and in every 50th step each rank writes
its calls to its watch page (wire/watch_page.py). The launcher compares the pages
(launch/watch/collective_mismatch.py), so the log sends nothing. Outside of those steps torch's
methods are unpatched.

    GROUP ∥ NAME ∥ SHAPE AND FORMAT ∥ LINE     one line of text per call, ∥ being a tab

The log contains all collectives called from Python, including a user's own, however they were
imported. It omits point-to-point messages, calls by compiled code, and calls in Python threads
other than the training thread. A device's backward pass runs on a thread of torch, for which the
training thread waits, so its calls are logged in order.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from shoal.base.text.user_frames import OWN_FOLDER
from shoal.wire.watch_page import WatchPage

FIRST, EVERY = 10, 50
"""Steps after a start whose calls are logged · and the period of logged steps after them."""
CALLERS = 3
FSDP = "/torch/distributed/fsdp/"
ALIKE = {
    "allreduce": "all_reduce",
    "_allgather_base": "all_gather",
    "_reduce_scatter_base": "reduce_scatter",
    "all_gather_single": "all_gather",
    "reduce_scatter_single": "reduce_scatter",
    "allreduce_coalesced": "all_reduce",
}
"""Process group methods whose tensors have one shape on all ranks, by their usual names.

Names with `single` are those of torch 2.13 and later; each version has some of all of them.
"""
ANY_SHAPE = {
    "allgather": "all_gather",
    "alltoall_base": "all_to_all",
    "all_to_all_single": "all_to_all",
    "allgather_coalesced": "all_gather",
    "all_gather_single_coalesced": "all_gather",
    "reduce_scatter_single_coalesced": "reduce_scatter",
    "alltoall": "all_to_all",
    "reduce_scatter": "reduce_scatter",
    "barrier": "barrier",
}
ROOTED = {"broadcast": "broadcast", "reduce": "reduce", "gather": "gather", "scatter": "scatter"}
"""Collectives with a root; root and others may call them at different lines."""


class CollectiveRecorder:
    """Log of this process's collectives in its watch page; the training thread creates it.

    Args:
        step: the step that starts now.

    The calls are stored under the step's number, or under the next free number. So a repeated step,
    or a step of another run in this process, is not compared with the earlier one.
    """

    def __init__(self, page: WatchPage, step: int) -> None:
        self.page = page
        self.steps, self._step = 0, step
        self._thread = threading.get_ident()
        self._lines: list[str] = []
        self._slot = 0
        self._torchs: dict[str, Any] = {}
        self._groups: dict[str, str] = {}
        page.on_step = self._finish_step
        self._begin()

    def _finish_step(self, step: int) -> None:
        """Publish the finished step's calls, and decide whether to log the next step's."""
        step = max(step, self._step)
        if self._torchs:
            self._end()
            self._write_calls(step)
            self._slot += 1
        self.steps, self._step = self.steps + 1, step + 1
        if self.steps < FIRST or self._step % EVERY == 0:
            self._begin()

    def close(self) -> None:
        """Stop logging and restore torch's methods."""
        self.page.on_step = lambda step: None
        self._end()

    def _write_calls(self, step: int) -> None:
        self.page.write_calls(self._slot, step, "\n".join(self._lines).encode())

    def _begin(self) -> None:
        self._lines = []
        known = vars(dist.ProcessGroup)
        for method in filter(known.__contains__, (*ALIKE, *ANY_SHAPE, *ROOTED)):
            # From the class's __dict__: the result of `getattr` would not bind when restored.
            self._torchs[method] = known[method]
            setattr(dist.ProcessGroup, method, self._is_logged(method))

    def _end(self) -> None:
        for method, torchs in self._torchs.items():
            setattr(dist.ProcessGroup, method, torchs)
        self._torchs = {}

    def _is_logged(self, method: str) -> Callable[..., Any]:
        torchs = getattr(dist.ProcessGroup, method)
        name = {**ALIKE, **ANY_SHAPE, **ROOTED}[method]

        def call(group: dist.ProcessGroup, *given: Any, **named: Any) -> Any:
            done = torchs(group, *given, **named)  # first: one that is refused was not made
            if threading.get_ident() == self._thread or not _is_python_thread():
                form = (
                    shapes_and_dtypes_text(given)
                    if method in ALIKE or method == "broadcast"
                    else ""
                )
                where = "" if method in ROOTED else collective_caller(sys._getframe(1))
                self._lines.append(f"{self._name(group)}\t{name}\t{form}\t{where}")
                self._write_calls(
                    -self._step
                )  # a rank that aborts in this step publishes nothing else
            return done

        return call

    def _name(self, group: dist.ProcessGroup) -> str:
        name = group.group_name
        if name not in self._groups:
            ranks = dist.get_process_group_ranks(group)
            self._groups[name] = f"{name}:{','.join(map(str, ranks))}"
        return self._groups[name]


INTERCEPTOR = f"{OWN_FOLDER}/trainer/guards/_torch.py"
"""File through which calls of user code go to torch's functions (`intercept_collectives`)."""


def _is_python_thread() -> bool:
    """Return whether Python started this thread; for other threads Python invents a name."""
    return not threading.current_thread().name.startswith("Dummy-")


def shapes_and_dtypes_text(given: tuple[Any, ...]) -> str:
    """Return shapes and dtypes of a call's last tensors; for a list, those of its last tensor.

    >>> shapes_and_dtypes_text(([torch.zeros(2, 3)], "options"))
    '2×3 float32'
    """
    for one in reversed(given):
        own = one[-1] if isinstance(one, list | tuple) and one else one
        if isinstance(own, torch.Tensor):
            return f"{'×'.join(map(str, own.shape)) or 'one'} {str(own.dtype).rpartition('.')[2]}"
    return ""


def collective_caller(frame: FrameType | None) -> str:
    """Return the FILE:LINE that called a collective, outside of torch and fabric/ if there is one.

    Without such a line, return Shoal's own. After a user's line, up to `CALLERS` lines of its
    callers follow, since a helper has many callers. Calls of torch's FSDP have none: a rank that
    skips a unit joins its gather from another line of the model.
    """
    found: list[str] = []
    while frame is not None and len(found) < CALLERS:
        file = frame.f_code.co_filename
        own = file.startswith(OWN_FOLDER)
        if own and not file.startswith((f"{OWN_FOLDER}/fabric/", INTERCEPTOR)):
            return " from ".join(found) or f"{file.removeprefix(f'{OWN_FOLDER}/')}:{frame.f_lineno}"
        if FSDP in file:
            return ""
        if not own and "/torch/" not in file and not file.startswith("<"):
            found.append(f"{file}:{frame.f_lineno}")
        frame = frame.f_back
    return " from ".join(found)
