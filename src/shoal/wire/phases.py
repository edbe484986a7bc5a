"""What a process is busy with, told while it lasts: import, proof, first step, validation 120/299.

Any room says it where the work is done, and nothing happens unless somebody listens:

    with phase("validation", of=299) as told:      phases nest: `proof`, in it `build`
        for batch in batches:
            told.step()

Who listens is set per thread (`listen`), so what runs beside training, a save in the background,
stays silent. A worker keeps the newest state in its folder's `phase.json` (`tell_folder`).
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
FILE_NAME = "phase.json"
EVERY_S = 0.2
"""Progress within a phase is told so often; a new phase at once."""

NOWHERE, DATA, PASSES, SUM, UPDATE, HOOKS, BACKWARD = range(7)  # parts of a step, for the page only


@dataclass
class Phase:
    """One thing that takes time, as a listener is told of it.

    Attributes:
        of: how many steps it takes.
        done: how many are; `of` is 0 where that is not known.
        began_s: seconds since 1970.

    `step(count=1)` adds to `done` and tells the thread's listener, at most every 0.2 s
    """

    name: str
    of: int = 0
    done: int = 0
    began_s: float = field(default_factory=time.time)

    def step(self, count: int = 1) -> None:
        """So much more is done."""
        self.done += count
        if (teller := _TELLER.get()) is not None:
            teller.progressed()


Hear = Callable[[list[Phase]], None]
"""Receives what is going on, the outermost phase first; empty when nothing is."""


class Teller:
    """The phases of one thread that are under way, and who hears of them."""

    def __init__(self, hear: Hear) -> None:
        self.hear = hear
        self.phases: list[Phase] = []
        self.told_s = 0.0

    def changed(self) -> None:
        """A phase began or ended."""
        self.told_s = time.monotonic()
        self.hear(self.phases)

    def progressed(self) -> None:
        """Something was done; told now and then."""
        if time.monotonic() - self.told_s >= EVERY_S:
            self.changed()


_TELLER: ContextVar[Teller | None] = ContextVar("teller", default=None)


def listen(hear: Hear | None) -> None:
    """Have `hear` called with this thread's open phases, outermost first; None: nobody listens.

    As one begins or ends, and every 0.2 s while steps are counted. Who listened before is replaced.
    """
    _TELLER.set(None if hear is None else Teller(hear))


@contextlib.contextmanager
def phase(name: str, of: int = 0) -> Iterator[Phase]:
    """Open a phase until the `with` block ends, and tell this thread's listener, if there is one.

    Args:
        name: one or two words for a person.
        of: how many `step`s it will take; 0 if not known.

    >>> heard = []
    >>> listen(lambda phases: heard.append(" ".join(f"{p.name} {p.done}/{p.of}" for p in phases)))
    >>> with phase("proof", of=2) as told:
    ...     told.done = 1
    ...     with phase("build"):
    ...         pass
    >>> heard
    ['proof 0/2', 'proof 1/2 build 0/0', 'proof 1/2', '']
    >>> listen(None)
    """
    found, teller = Phase(name, of), _TELLER.get()
    if teller is None:
        yield found
        return
    teller.phases.append(found)
    teller.changed()
    try:
        yield found
    finally:
        teller.phases.remove(found)
        teller.changed()


def counting(name: str, of: int, items: Iterable[Item]) -> Iterator[Item]:
    """Yield the items in a phase `name` of `of` steps, a step when the next item is asked for.

    >>> list(counting("copy", 2, "ab"))
    ['a', 'b']
    """
    with phase(name, of) as told:
        for item in items:
            yield item
            told.step()


def tell_folder(folder: Path) -> None:
    """Write this thread's open phases to `folder/phase.json` whenever they change (`listen`).

    The file is replaced whole; what the disk refuses is dropped. Of others, the page listens on.
    """
    from shoal.base.runlog.atomic_files import write_whole
    from shoal.base.runlog.folder_owner import FolderOwner

    owner = FolderOwner(folder)

    def hear(phases: list[Phase]) -> None:
        record = {"time_s": time.time(), "phases": [asdict(one) for one in phases]}
        with contextlib.suppress(OSError):  # it is for readers; a full disk must stop nobody
            write_whole(owner.place() / FILE_NAME, json.dumps(record))
        if page is not None:
            page.hear(phases)

    listen(hear)


page: Any = None  # the watch_page.Page of this process, where somebody watches it


def part(number: int) -> None:
    """A part of a step begins: PASSES, SUM, …; nothing where nobody watches this process."""
    if page is not None:
        page.part(number)


def unlike(*parts: int, always: bool = False) -> None:
    """In these parts of this step ranks have different work: the page compares them with nobody.

    Args:
        always: they do in every step alike: each is compared with itself.
    """
    if page is not None:
        page.unlike(parts, always=always)
