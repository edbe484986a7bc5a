"""Names a hang: ranks that make different calls wait for each other for ever, without a word.

Some calls need every rank: `run.step`, `run.evaluate`, `run.save`, a forward pass of a model whose
weights lie in parts. `if rank == 0: run.model(x)` is everybody's habit, and under fsdp rank 0 then
gathers weights that the others never send. So every rank keeps the names of its calls. A thread
looks once a second whether this rank has stood in one call for a while; if so it writes its list to
the store that the processes met at, asks the others for theirs, and compares:

    the lists differ at the same place     one line names both ranks' calls, all end with status 2
    a rank waits in a collective of its    likewise
    own, and this one in one of Shoal's
    a rank is elsewhere                    it may come: a line after 30 s, 60 s, … says where it is

A run that does not wait sends nothing, but for calls that are made now and then (a save, not a
step): there ranks wait for each other at the store first, since two unlike collectives that meet do
not wait, they abort.
"""

from __future__ import annotations

import atexit
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch.distributed as dist
from torch import nn

from shoal.fabric import World
from shoal.fabric.traffic import Traffic
from shoal.fabric.world import meeting_store
from shoal.parallel.program import Program

if TYPE_CHECKING:
    from shoal.trainer.hang import Hang

EVERY_S, PATIENCE_S = 1.0, 2.0
GATHER_S = 8.0
OFTEN = (
    *("run.step", "run.forward_backward", "run.update"),
    *("run.micro_batches", "run.backward", "run.total"),
)
"""Calls that begin at once: a step must not wait for a word over the store."""

KEPT = 64
"""Calls that a rank tells of."""

_made = itertools.count()


class Meeting:
    """The calls of one process that all ranks must make, and the thread that compares them.

    runs   how many use it
    """

    def __init__(self, world: World, store: dist.Store | None) -> None:
        self.rank, self.size = world.rank, world.size
        self.group = id(world.group)
        self.runs = self.joined = 0
        self._traffic: list[Traffic] = []
        self.calls: list[str] = []
        self.turn = 0  # calls ever begun
        self.depth = 0
        self.in_passes = False
        self._store = store
        # A rank may have runs of its own, which the others know nothing of.
        self.key = f"{world.ranks[0]}-{world.size}/{next(_made) if store is not None else 0}"
        self._ended = threading.Event()
        self._asked = 0
        self._progress: tuple[int, ...] = ()
        self._since_s = time.monotonic()
        self._hang: Hang | None = None
        self._thread: threading.Thread | None = None

    @contextmanager
    def at(self, name: str) -> Iterator[None]:
        """A call that every rank must make; what it calls itself is not counted."""
        outermost = not self.depth
        if outermost:
            self.calls = [*self.calls[1 - KEPT :], name]
            self.turn += 1
        self.depth += 1
        try:
            if outermost and name not in OFTEN and not self.in_passes:
                self._gather(name)
            yield
        finally:
            self.depth -= 1

    @contextmanager
    def passes(self, *, alike: bool) -> Iterator[None]:
        """Around a step's passes in a loop of the user's own: calls inside begin at once.

        alike   every rank makes the same ones; else some have fewer micro-batches, and what they
                call is not counted
        """
        self.in_passes = True
        self.depth += not alike
        try:
            yield
        finally:
            self.depth -= not alike
            self.in_passes = False

    def _gather(self, name: str) -> None:
        """Wait for the others where words may differ, before collectives, where they may not.

        One that receives another's numbers in the place of its own aborts the process (gloo). After
        some seconds they are on their way, or gone: both is for the collective to find.
        """
        if self._store is None:
            return
        key, until_s = f"{self.key}/{self.joined}/{self.turn}/{name}", time.monotonic() + GATHER_S
        pause_s = 0.0002
        try:
            here = self._store.add(key, 1)
            while here < self.size and time.monotonic() < until_s:
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, 0.05)
                here = self._store.add(key, 0)
        except (RuntimeError, dist.DistError):
            return

    def agreed(self, what: str) -> bool:
        """Whether every rank says the same, each when it comes here; asked where few would."""
        if self._store is None:
            return True
        key, until_s = f"{self.key}/{self.joined}/{what}", time.monotonic() + GATHER_S
        here = self._store.add(key, 1)
        while here % self.size and time.monotonic() < until_s:
            time.sleep(0.01)
            here = self._store.add(key, 0)
        return here % self.size == 0

    def join(self, world: World) -> None:
        """A run begins: what was called before is over on all ranks alike."""
        self.runs += 1
        self.joined += 1
        self._traffic.append(world.traffic)
        self.calls, self.turn = [], 0
        if self._thread is None and self._store is not None:
            self._thread = threading.Thread(target=self._watch, name="shoal-meeting", daemon=True)
            self._thread.start()

    def leave(self) -> None:
        """A run was closed; after the last one nobody looks any more."""
        self.runs -= 1
        if self.runs <= 0:
            self.stop()

    def stop(self) -> None:
        """End the thread, and wait for it: one in the store would abort the interpreter's exit."""
        self._ended.set()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=5)
        self._store = None

    def _watch(self) -> None:
        every_s = EVERY_S * max(1.0, self.size / 64)
        while not self._ended.wait(every_s):
            try:
                self._look()
            except (RuntimeError, dist.DistError):  # the store is gone, and with it the first rank
                return

    def _look(self) -> None:
        store, now_s = self._store, time.monotonic()
        if store is None:
            return
        progress = (self.turn, self.depth, *(one.calls for one in self._traffic))
        if progress != self._progress:
            self._progress, self._since_s = progress, now_s
        waits = self.depth > 0 and now_s - self._since_s >= PATIENCE_S
        asked = store.add(f"{self.key}/asked", int(waits))
        if asked == self._asked:
            return
        self._asked = asked
        if self._hang is None:
            from shoal.trainer.hang import Hang  # ranks seldom wait for each other

            self._hang = Hang(store, self.rank, self.size, self.key, MODEL)
        mine = {
            "runs": self.joined,
            "turn": self.turn,
            "calls": self.calls,
            "inside": self.depth > 0,
            "stood_s": now_s - self._since_s,
        }
        self._hang.look(mine, waits=waits, now_s=now_s)


MODEL = "run.model(…)"
_meetings: list[Meeting] = []


def meeting_of(world: World) -> Meeting:
    """The meeting of these processes; one for all runs over them."""
    for one in _meetings:
        if one.runs > 0 and one.group == id(world.group):
            return one
    alone = world.size == 1 or "SHOAL_RUN_FOLDER" in os.environ  # the supervisor watches those
    made = Meeting(world, None if alone else meeting_store())
    if not alone and not _meetings:
        atexit.register(stop_all)
    _meetings[:] = [one for one in _meetings if one.runs > 0] + [made]
    return made


def stop_all() -> None:
    """For scripts that never close their runs: no thread may live into the interpreter's end."""
    for one in _meetings:
        one.stop()


Call = TypeVar("Call", bound=Callable[..., Any])


def together(name: str) -> Callable[[Call], Call]:
    """Marks a method of something with a `meeting` as a call that every rank must make."""

    def mark(method: Call) -> Call:
        @wraps(method)
        def call(self: Any, *given: Any, **named: Any) -> Any:
            with self.meeting.at(name):
                return method(self, *given, **named)

        return cast("Call", call)

    return mark


def count_forwards(program: Program, meeting: Meeting) -> Program:
    """Count forward passes that the user makes of a model that needs all ranks."""
    layout, module = program.plan.layout, program.module
    if layout.zero < 3 and max(layout.tp, layout.cp, layout.pp, layout.ep) == 1:
        return program  # this rank has all it needs
    open_calls: list[Any] = []

    def enter(_module: nn.Module, _inputs: Any) -> None:
        call = meeting.at(MODEL)
        call.__enter__()
        open_calls.append(call)

    def leave(_module: nn.Module, _inputs: Any, _outputs: Any) -> None:
        if open_calls:
            open_calls.pop().__exit__(None, None, None)

    hooks = [
        module.register_forward_pre_hook(enter, prepend=True),
        module.register_forward_hook(leave, always_call=True),
    ]
    return replace(program, on_close=(*program.on_close, *(hook.remove for hook in hooks)))
