"""Keeps which collectives a rank makes in some steps, for somebody who compares them over ranks.

Ranks whose collectives come in another order, or from other lines, add up what does not belong
together, and where shapes are equal nothing fails. So in a run's first steps and in every 50th a
rank keeps its calls in its page (wire/watch_page.py); the launcher compares
(launch/watch/collective_mismatch.py), so that nothing is sent for it. Outside of those steps
torch's methods are as torch made them.

    GROUP ∥ NAME ∥ SHAPE AND FORMAT ∥ LINE     one line of text per call, ∥ being a tab

All collectives that Python calls are seen, a user's own among them, whichever way they were
imported; not messages from one rank to another, not what compiled code calls, and not those of
other Python threads than the training one. A device's backward pass runs on a thread of torch's
own, for which the training thread waits, so its calls come in their place.
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
from shoal.wire.watch_page import Page

FIRST, EVERY = 10, 50
"""Steps after a start that are kept · and every so many."""
CALLERS = 3
ALIKE = {
    "allreduce": "all_reduce",
    "_allgather_base": "all_gather",
    "_reduce_scatter_base": "reduce_scatter",
}
"""Methods of a process group whose tensors have one shape on all ranks, by their usual names."""
ANY_SHAPE = {
    "allgather": "all_gather",
    "alltoall_base": "all_to_all",
    "alltoall": "all_to_all",
    "reduce_scatter": "reduce_scatter",
    "barrier": "barrier",
}
ROOTED = {"broadcast": "broadcast", "reduce": "reduce", "gather": "gather", "scatter": "scatter"}
"""Of one rank and the others, who may well call them at different lines."""


class Fingerprints:
    """Keeps the calls of this process's training thread in its page; made by that thread.

    Args:
        step: the one that begins.

    They are kept under the step's number, or the next one that is free: a step that is taken again,
    or that of another run of this process, is not compared with the one before.
    """

    def __init__(self, page: Page, step: int) -> None:
        self.page = page
        self.steps, self._step = 0, step
        self._thread = threading.get_ident()
        self._lines: list[str] = []
        self._slot = 0
        self._torchs: dict[str, Any] = {}
        self._groups: dict[str, str] = {}
        page.on_step = self._stepped
        self._begin()

    def _stepped(self, step: int) -> None:
        """A step is done: hand over its calls, and see whether the next one's are kept."""
        step = max(step, self._step)
        if self._torchs:
            self._end()
            self._keep(step)
            self._slot += 1
        self.steps, self._step = self.steps + 1, step + 1
        if self.steps < FIRST or self._step % EVERY == 0:
            self._begin()

    def close(self) -> None:
        """Keep no more: torch's methods are as torch made them."""
        self.page.on_step = lambda step: None
        self._end()

    def _keep(self, step: int) -> None:
        self.page.keep_calls(self._slot, step, "\n".join(self._lines).encode())

    def _begin(self) -> None:
        self._lines = []
        for method in (*ALIKE, *ANY_SHAPE, *ROOTED):
            # As it stands in the class: what `getattr` gives would not bind when it is put back.
            self._torchs[method] = vars(dist.ProcessGroup)[method]
            setattr(dist.ProcessGroup, method, self._kept(method))

    def _end(self) -> None:
        for method, torchs in self._torchs.items():
            setattr(dist.ProcessGroup, method, torchs)
        self._torchs = {}

    def _kept(self, method: str) -> Callable[..., Any]:
        torchs = getattr(dist.ProcessGroup, method)
        name = {**ALIKE, **ANY_SHAPE, **ROOTED}[method]

        def call(group: dist.ProcessGroup, *given: Any, **named: Any) -> Any:
            done = torchs(group, *given, **named)  # first: one that is refused was not made
            if threading.get_ident() == self._thread or not _by_python():
                form = form_of(given) if method in ALIKE or method == "broadcast" else ""
                where = "" if method in ROOTED else called_at(sys._getframe(1))
                self._lines.append(f"{self._name(group)}\t{name}\t{form}\t{where}")
                self._keep(-self._step)  # who aborts in this step hands over nothing
            return done

        return call

    def _name(self, group: dist.ProcessGroup) -> str:
        name = group.group_name
        if name not in self._groups:
            ranks = dist.get_process_group_ranks(group)
            self._groups[name] = f"{name}:{','.join(map(str, ranks))}"
        return self._groups[name]


def _by_python() -> bool:
    """Whether Python started this thread: for others it makes up a name."""
    return not threading.current_thread().name.startswith("Dummy-")


def form_of(given: tuple[Any, ...]) -> str:
    """Shapes and formats of the last tensors that a call was given, its own where it gathers.

    >>> form_of(([torch.zeros(2, 3)], "options"))
    '2×3 float32'
    """
    for one in reversed(given):
        own = one[-1] if isinstance(one, list | tuple) and one else one
        if isinstance(own, torch.Tensor):
            return f"{'×'.join(map(str, own.shape)) or 'one'} {str(own.dtype).rpartition('.')[2]}"
    return ""


def called_at(frame: FrameType | None) -> str:
    """Where a collective is called, outside of torch and fabric/: FILE:LINE, or Shoal's own line.

    After a user's, up to `CALLERS` lines that led to it follow: helpers are called from many.
    """
    found: list[str] = []
    while frame is not None and len(found) < CALLERS:
        file = frame.f_code.co_filename
        own = file.startswith(OWN_FOLDER)
        if own and not file.startswith(f"{OWN_FOLDER}/fabric/"):
            return " from ".join(found) or f"{file.removeprefix(f'{OWN_FOLDER}/')}:{frame.f_lineno}"
        if not own and "/torch/" not in file and not file.startswith("<"):
            found.append(f"{file}:{frame.f_lineno}")
        frame = frame.f_back
    return " from ".join(found)
