"""Phases of a process, reported while they last: import, proof, first step, validation 120/299.

Any package opens a phase around its work; without a listener it has no effect:

    with phase("validation", of=299) as told:      phases nest: `proof`, in it `build`
        for batch in batches:
            told.step()

Listeners are per thread (`set_phase_listener`), so background work (a save) reports nothing. A
worker writes the newest state to `phase.json` in its folder (`write_phases_to_folder`).
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

Item = TypeVar("Item")
OF_SHAPES = " of "
"""Between the name of a call and the shapes of its batch, where they were new."""
FILE_NAME = "phase.json"
EVERY_S = 0.2
"""Seconds between reports of progress within a phase; a new phase is reported at once."""

NOWHERE, DATA, PASSES, SUM, UPDATE, HOOKS, BACKWARD = range(7)  # parts of a step, for the page only


@dataclass
class Phase:
    """One phase of work, as listeners receive it.

    Attributes:
        of: number of steps; 0 if not known.
        done: finished steps.
        began_s: start, in seconds since 1970.

    `step(count=1)` adds to `done` and notifies the thread's listener, at most every 0.2 s.
    """

    name: str
    of: int = 0
    done: int = 0
    began_s: float = field(default_factory=time.time)

    def step(self, count: int = 1) -> None:
        """Add finished steps and notify the listener."""
        self.done += count
        if (teller := _TELLER.get()) is not None:
            teller.notify_progress()


Hear = Callable[[list[Phase]], None]
"""Listener: called with the open phases, outermost first; empty if there is none."""


class PhaseReporter:
    """The open phases of one thread, and its listener."""

    def __init__(self, hear: Hear) -> None:
        self.hear = hear
        self.phases: list[Phase] = []
        self.told_s = 0.0

    def notify_change(self) -> None:
        """Notify the listener that a phase started or ended."""
        self.told_s = time.monotonic()
        self.hear(self.phases)

    def notify_progress(self) -> None:
        """Notify the listener of progress, at a limited rate."""
        if time.monotonic() - self.told_s >= EVERY_S:
            self.notify_change()


_TELLER: ContextVar[PhaseReporter | None] = ContextVar("teller", default=None)


def set_phase_listener(hear: Hear | None) -> None:
    """Set the listener of this thread's open phases, outermost first; None: no listener.

    It is called when a phase starts or ends, and every 0.2 s while steps are counted. It replaces
    the earlier listener.
    """
    _TELLER.set(None if hear is None else PhaseReporter(hear))


@contextlib.contextmanager
def phase(name: str, of: int = 0) -> Iterator[Phase]:
    """Open a phase until the `with` block ends, and notify this thread's listener, if any.

    Args:
        name: one or two words for a person.
        of: number of `step`s that it will take; 0 if not known.

    >>> heard = []
    >>> set_phase_listener(
    ...     lambda phases: heard.append(" ".join(f"{p.name} {p.done}/{p.of}" for p in phases))
    ... )
    >>> with phase("proof", of=2) as told:
    ...     told.done = 1
    ...     with phase("build"):
    ...         pass
    >>> heard
    ['proof 0/2', 'proof 1/2 build 0/0', 'proof 1/2', '']
    >>> set_phase_listener(None)
    """
    found, teller = Phase(name, of), _TELLER.get()
    if teller is None:
        yield found
        return
    teller.phases.append(found)
    teller.notify_change()
    try:
        yield found
    finally:
        teller.phases.remove(found)
        teller.notify_change()


def iter_with_progress(name: str, of: int, items: Iterable[Item]) -> Iterator[Item]:
    """Yield items in a phase of `of` steps; each request for the next item counts one step.

    >>> list(iter_with_progress("copy", 2, "ab"))
    ['a', 'b']
    """
    with phase(name, of) as told:
        for item in items:
            yield item
            told.step()


def write_phases_to_folder(folder: Path) -> None:
    """Write this thread's open phases to `folder/phase.json` whenever they change.

    Each write replaces the file atomically; disk errors are ignored. An existing watch page stays a
    listener.
    """
    from shoal.base.runlog.atomic_files import write_atomically
    from shoal.base.runlog.folder_owner import FolderOwner

    owner = FolderOwner(folder)

    def hear(phases: list[Phase]) -> None:
        record = {"time_s": time.time(), "phases": [asdict(one) for one in phases]}
        with contextlib.suppress(OSError):  # it is for readers; a full disk must stop nobody
            write_atomically(owner.current_path() / FILE_NAME, json.dumps(record))
        if page is not None:
            page.record_phases(phases)

    set_phase_listener(hear)


page: Any = None  # the watch_page.Page of this process, if the launcher made one


def record_step_part(number: int) -> None:
    """Report to the watch page that part `number` of a step starts (PASSES, SUM, …)."""
    if page is not None:
        page.record_part(number)


def mark_unequal_parts(*parts: int, always: bool = False) -> None:
    """Exclude these parts of this step from comparison: ranks have different work in them.

    Args:
        always: ranks differ in every step in the same way, so each rank is compared with itself.
    """
    if page is not None:
        page.record_unequal_parts(parts, always=always)
