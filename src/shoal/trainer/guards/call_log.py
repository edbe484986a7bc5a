"""Keeps the calls that every rank of a run must make, for who watches the ranks.

Some calls need every rank: `run.step`, `run.evaluate`, `run.save`, a forward pass of a model whose
weights lie in parts. `if rank == 0: run.model(x)` is everybody's habit, and under fsdp rank 0 then
gathers weights that the others never send. So every rank writes the names of its calls into its
page (wire/watch_page.py), and the process that watches compares them once all ranks stand still
(launch/watch/call_mismatch.py). Where nobody watches (no Linux), torch's own deadline ends the
wait.

Calls that are made now and then (a save, not a step) wait for each other at the store first, since
two unlike collectives that meet do not wait, they abort.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import wraps
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch import nn

from shoal.base.errors import ConfigError, short
from shoal.fabric import World
from shoal.fabric.world import meeting_store
from shoal.parallel.program import Program
from shoal.wire import phases

GATHER_S, WATCHED = 8.0, 75
"""So long ranks wait for each other at the store · so often longer where the watch would end it."""
NAMES = "step forward_backward update micro_batches backward total"
OFTEN = frozenset(f"run.{name}" for name in NAMES.split())
"""Calls that begin at once: a step must not wait for a word over the store."""

Item = TypeVar("Item")
_made = itertools.count()
_joined: Counter[str] = Counter()


class Meeting:
    """The calls of one process that all ranks must make.

    Attributes:
        runs: how many use it.
    """

    def __init__(self, world: World, store: dist.Store | None) -> None:
        self.rank, self.size, self.group = world.rank, world.size, id(world.group)
        self.runs = self.joined = self.depth = 0
        self.turn = self._page_key = 0  # calls ever begun by the runs that joined last
        self.in_passes, self._store = False, store
        self._failed: tuple[str, str, Exception] | None = None  # key, call and why
        # A rank may have runs of its own, which the others know nothing of.
        self.ranks = str(list(world.ranks))
        self.key = f"{world.ranks[0]}-{world.size}/{next(_made) if store is not None else 0}"

    @contextmanager
    def at(self, name: str) -> Iterator[None]:
        """A call that every rank must make; what it calls itself is not counted."""
        page = None if self.depth else phases.page
        if not self.depth:
            self.turn += 1
            if page is not None and self.size > 1:
                page.call(self._page_key, self.turn, name.encode())
            # In `finally: run.close()` the error is on its way up.
            if self._failed is not None and (name != "run.close" or sys.exc_info()[1] is None):
                self._check_failed()
        self.depth += 1
        try:
            if self.depth == 1 and name not in OFTEN and not self.in_passes:
                self._gather(name)
            yield
        except Exception as failure:
            if self.depth == 1:
                self._note_failure(name, failure)
            raise
        finally:
            self.depth -= 1
            if page is not None and not self.depth:
                page.returned()

    @contextmanager
    def passes(self, *, alike: bool) -> Iterator[None]:
        """Around a step's passes in a loop of the user's own: calls inside begin at once.

        Args:
            alike: every rank makes the same ones; else some have fewer micro-batches, and what they
                call is not counted.
        """
        self.in_passes = True
        self.depth += not alike
        try:
            yield
        finally:
            self.depth -= not alike
            self.in_passes = False

    def each(self, name: str, items: Generator[Item, None, None]) -> Iterator[Item]:
        """Yield what a generator does; each turn of it is a call that every rank must make."""
        with closing(items):
            while True:
                with self.at(name):
                    try:
                        item = next(items)
                    except StopIteration:
                        return
                yield item

    def _gather(self, name: str) -> None:
        """Wait for the others where words may differ, before collectives, where they may not.

        One that receives another's numbers in the place of its own aborts the process (gloo). After
        some seconds they are on their way, or gone: both is for the collective to find.
        """
        if self._store is None:
            return
        with suppress(RuntimeError, dist.DistError):
            self._await(f"{self.key}/{self.joined}/{self.turn}/{name}", add=1)

    def _await(self, key: str, *, add: int) -> bool:
        """Wait until all ranks have counted up a key of the store, for some seconds."""
        if self._store is None:
            return True
        until_s, pause_s = time.monotonic() + GATHER_S, 0.0002
        here = self._store.add(key, add)
        while (left := here % self.size) and time.monotonic() < until_s:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.05)
            here = self._store.add(key, 0)
        return not left

    def _note_failure(self, name: str, failure: Exception) -> None:
        """A call failed here: it must have failed on every rank by the next one."""
        if self._store is None:
            return
        self._failed = (f"{self.key}/{self.joined}/{self.turn}/failed", name, failure)
        if phases.page is None or phases.page.exit_order is None:  # else peers end already
            with suppress(RuntimeError, dist.DistError):  # the store is gone, and with it a rank
                self._store.add(self._failed[0], 1)

    def _check_failed(self) -> None:
        """Wait until the call that failed here has failed on every rank.

        Who watches ends all where the others wait in it (launch/watch/call_mismatch.py).

        Raises:
            ConfigError: nobody watches, and they have not failed within seconds.
        """
        if self._failed is None:
            return
        (key, name, failure), page = self._failed, phases.page
        why = f"{name} ({type(failure).__name__}: {short(str(failure))})"
        if page is not None:
            page.told = {"caught": why}
        with suppress(RuntimeError, dist.DistError):
            times = WATCHED if page is not None and not page.is_left else 1
            if not any(self._await(key, add=0) for _ in range(times)):
                raise ConfigError(
                    f"rank {self.rank} caught an error of {why} and goes on, and other ranks had "
                    f"none; try: let the error end the process, or catch it on every rank"
                ) from failure
        self._failed = None
        if page is not None:
            page.told = {}

    def agreed(self, what: str) -> bool:
        """Whether every rank says the same, each when it comes here; asked where few would."""
        return self._await(f"{self.key}/{self.joined}/{what}", add=1)

    def join(self) -> None:
        """A run begins: what was called before is over on all ranks alike."""
        self.runs += 1
        self.joined += 1
        self.turn = 0
        _joined[self.ranks] += 1  # no two runs of a process have one name
        self._page_key = zlib.crc32(f"{self.ranks}/{_joined[self.ranks]}".encode())

    def leave(self) -> None:
        """A run was closed; the last one lets go of the store."""
        self.runs -= 1
        if self.runs <= 0:
            self._store = None


_meetings: list[Meeting] = []


def meeting_of(world: World) -> Meeting:
    """The meeting of these processes; one for all runs over them."""
    for one in _meetings:
        if one.runs > 0 and one.group == id(world.group):
            return one
    alone = world.size == 1 or "SHOAL_RUN_FOLDER" in os.environ  # whose own calls are alike
    made = Meeting(world, None if alone else meeting_store())
    _meetings[:] = [one for one in _meetings if one.runs > 0] + [made]
    return made


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
        call = meeting.at("run.model(…)")
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
