"""Log of the calls that every rank of a run must make, for the watchdog of the ranks.

Some calls need every rank: `run.step`, `run.evaluate`, `run.save`, a forward pass of a model whose
weights are sharded. `if rank == 0: run.model(x)` is a common habit; under fsdp rank 0 then gathers
weights that the others never send. So every rank writes the names of its calls into its page
(wire/watch_page.py), and the watchdog compares them once all ranks stand still
(launch/watch/call_mismatch.py). Without a watchdog (no Linux), torch's own timeout ends the wait.

Rare calls (a save, not a step) first wait for each other at the store, since two different
collectives that meet do not wait, they abort.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import replace
from functools import wraps
from typing import Any, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.compiler import is_compiling

from shoal.base.errors import ConfigError, ShoalError, shorten
from shoal.fabric import World
from shoal.fabric.world import clone_default_store
from shoal.parallel._torch import function_transform
from shoal.parallel.program import Program
from shoal.trainer._torch import pytree
from shoal.wire import phases
from shoal.wire.phases import OF_SHAPES

GATHER_S, WATCHED = 8.0, 75
"""Seconds that ranks wait for each other at the store · repetitions under a watchdog."""
NAMES = "step forward_backward update micro_batches backward total"
OFTEN = frozenset(f"run.{name}" for name in NAMES.split())
"""Calls that begin at once: a step must not wait for the store."""

Item = TypeVar("Item")
_made = itertools.count()
_joined: Counter[str] = Counter()


class WeightView(Protocol):
    """Weights that user code sees otherwise than the run's own calls (`UserWeights`)."""

    def show(self) -> None:
        """Show user code its view of the weights, from here on."""

    def hide(self) -> None:
        """End the view of user code, since a call of the run begins."""


class CollectiveCallLog:
    """Log of one process's calls that all ranks must make.

    Attributes:
        views: weights that user code sees otherwise than the calls do.
        runs: number of open runs that use it.
    """

    def __init__(self, world: World, store: dist.Store | None) -> None:
        self.rank, self.size, self.group = world.rank, world.size, id(world.group)
        self.runs = self.joined = self.depth = 0
        self.turn = self._page_key = 0  # calls ever begun by the runs that joined last
        self.in_passes, self._store = False, store
        self.views, self._inside = set[WeightView](), 0
        self._failed: tuple[str, str, Exception] | None = None  # key, call and why
        self._name, self._forms = "", set[tuple[Any, ...]]()
        # A rank may have runs that the other ranks do not have.
        self.ranks = str(list(world.ranks))
        self.key = f"{world.ranks[0]}-{world.size}/{next(_made) if store is not None else 0}"

    def at(self, name: str) -> AbstractContextManager[None]:
        """Return a context for a call that every rank must make; calls inside are not counted."""
        return _OwnCode(self, name)

    def at_once(self, name: str) -> AbstractContextManager[None]:
        """Return a context for a call that every rank must make and that waits for none before.

        Weights stay as user code sees them.
        """
        return _OwnCode(self, name, hides=False)

    def add_view(self, view: WeightView) -> None:
        """Show user code a view from now on; inside of a call, from that call's end."""
        self.views.add(view)
        if not self._inside:  # a proof opens its run inside of the step of another
            view.show()

    def hide_views(self) -> AbstractContextManager[None]:
        """Return a context for code of the run, which sees the weights as torch has them."""
        return _OwnCode(self)

    def move_views(self, depth: int) -> None:
        """Add to the depth of code of the run: views are hidden inside of it, and shown outside."""
        was, self._inside = self._inside, self._inside + depth
        for view in self.views if not (was and self._inside) else ():
            view.hide() if self._inside else view.show()

    def start_call(self, name: str, *, waits: bool) -> Any:
        """Count a call; return the page that shows it, None inside of another call."""
        page = None
        if not self.depth:
            self.turn, self._name, page = self.turn + 1, name, phases.page
            if page is not None and self.size > 1:
                page.record_call_start(self._page_key, self.turn, name.encode())
            # In `finally: run.close()` the error is propagating already.
            if self._failed is not None and (name != "run.close" or sys.exc_info()[1] is None):
                self._check_failed()
            if waits and name not in OFTEN and not self.in_passes:
                self._gather(name)
        self.depth += 1
        return page

    def end_call(self, name: str, page: Any, failure: BaseException | None) -> None:
        """End a call, with its error or None, on the page that `start_call` returned."""
        try:
            if isinstance(failure, Exception) and self.depth == 1:
                self._note_failure(name, failure)
        finally:
            self.depth -= 1
            if page is not None and not self.depth:
                page.record_call_end()

    def record_batch_form(self, batch: Any) -> None:
        """Add the shapes of a batch to the name of the present call, if they are new here.

        Ranks that share the samples of a step send each other tensors of their shapes. Where these
        differ, gloo aborts a process, or ranks wait for each other. The watchdog then finds two
        names for one call.

        Args:
            batch: the user's own.
        """
        plain = batch if type(batch) in (tuple, list) else ()
        if not plain or not all([isinstance(one, torch.Tensor) for one in plain]):
            plain = [one for one in pytree.tree_leaves(batch) if isinstance(one, torch.Tensor)]
        form = tuple([one.shape for one in plain])
        if form in self._forms:
            return
        self._forms.add(form)
        if phases.page is not None and self.depth == 1:
            shapes = ", ".join(str(list(shape)) for shape in form)
            name = f"{self._name}{OF_SHAPES}{shapes}"
            phases.page.rename_call(self.turn, name.encode())

    @contextmanager
    def record_passes(self, *, alike: bool) -> Iterator[None]:
        """Enter a step's passes in a user's own loop: calls inside begin at once.

        Args:
            alike: every rank makes the same calls. Else some ranks have fewer micro-batches, and
                their calls are not counted.
        """
        self.in_passes = True
        self.depth += not alike
        try:
            yield
        finally:
            self.depth -= not alike
            self.in_passes = False

    def record_each(self, name: str, items: Generator[Item, None, None]) -> Iterator[Item]:
        """Yield the items of a generator; each `next` is a call that every rank must make."""
        with closing(items):
            while True:
                with self.at(name):
                    try:
                        item = next(items)
                    except StopIteration:
                        return
                yield item

    def _gather(self, name: str) -> None:
        """Wait for the other ranks where their calls may differ, before any collective.

        A rank that receives another collective's numbers aborts the process (gloo). After some
        seconds the other ranks are on their way, or gone: the collective finds out which.
        """
        if self._store is None:
            return
        with suppress(RuntimeError, dist.DistError):
            self._wait_for_key(f"{self.key}/{self.joined}/{self.turn}/{name}", add=1)

    def _wait_for_key(self, key: str, *, add: int) -> bool:
        """Wait some seconds for all ranks to increment a key of the store; return if all did."""
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
        """Note that a call failed here: it must have failed on every rank by the next call."""
        if self._store is None:
            return
        self._failed = (f"{self.key}/{self.joined}/{self.turn}/failed", name, failure)
        if phases.page is None or phases.page.exit_order is None:  # else all ranks are ending
            with suppress(RuntimeError, dist.DistError):  # the store is gone, so a rank has ended
                self._store.add(self._failed[0], 1)

    def _check_failed(self) -> None:
        """Wait until the call that failed here has failed on every rank.

        If other ranks wait in the call, the watchdog ends all (launch/watch/call_mismatch.py).

        Raises:
            ConfigError: there is no watchdog, and the other ranks have not failed within seconds.
        """
        if self._failed is None:
            return
        (key, name, failure), page = self._failed, phases.page
        why = f"{name} ({type(failure).__name__}: {shorten(str(failure))})"
        if page is not None:
            page.told = {"caught": why}
        with suppress(RuntimeError, dist.DistError):
            times = WATCHED if page is not None and not page.is_closed else 1
            if not any(self._wait_for_key(key, add=0) for _ in range(times)):
                raise ConfigError(
                    f"rank {self.rank} caught an error of {why} and goes on, and other ranks had "
                    f"none; try: let the error end the process, or catch it on every rank"
                ) from failure
        self._failed = None
        if page is not None:
            page.told = {}

    def is_equal_on_ranks(self, what: str) -> bool:
        """Return whether every rank passes the same text, within seconds; for rare questions."""
        return self._wait_for_key(f"{self.key}/{self.joined}/{what}", add=1)

    def open_run(self) -> None:
        """Start the log of a new run: earlier calls have ended on all ranks."""
        self.runs += 1
        self.joined += 1
        self.turn = 0
        _joined[self.ranks] += 1  # unique for each run of a process
        self._page_key = zlib.crc32(f"{self.ranks}/{_joined[self.ranks]}".encode())

    def close_run(self) -> None:
        """Close the log of a run; the last one releases the store."""
        self.runs -= 1
        if self.runs <= 0:
            self._store = None


class _OwnCode(AbstractContextManager[None]):
    """Context of code of the run; generators would take twenty calls more in each step.

    Args:
        log: of the process.
        name: of the call that every rank must make; "": it is none.
        hides: the code sees weights as torch has them, and the call may wait for other ranks.
    """

    def __init__(self, log: CollectiveCallLog, name: str = "", *, hides: bool = True) -> None:
        self._log, self._name, self._hides = log, name, hides
        self._page: Any = None

    def __enter__(self) -> None:
        if self._hides:
            self._log.move_views(1)
        try:
            if self._name:
                self._page = self._log.start_call(self._name, waits=self._hides)
        except BaseException:
            if self._hides:
                self._log.move_views(-1)
            raise

    def __exit__(self, kind: Any, failure: BaseException | None, trace: Any) -> None:
        try:
            if self._name:
                self._log.end_call(self._name, self._page, failure)
        finally:
            if self._hides:
                self._log.move_views(-1)


_meetings: list[CollectiveCallLog] = []


def get_call_log(world: World) -> CollectiveCallLog:
    """Return the call log of a group of processes; all runs over them share it."""
    for one in _meetings:
        if one.runs > 0 and one.group == id(world.group):
            return one
    alone = world.size == 1 or "SHOAL_RUN_FOLDER" in os.environ  # its ranks call alike
    made = CollectiveCallLog(world, None if alone else clone_default_store())
    _meetings[:] = [one for one in _meetings if one.runs > 0] + [made]
    return made


Call = TypeVar("Call", bound=Callable[..., Any])


def collective_call(name: str) -> Callable[[Call], Call]:
    """Decorate a method of an object with a `meeting` as a call that every rank must make."""

    def mark(method: Call) -> Call:
        @wraps(method)
        def call(self: Any, *given: Any, **named: Any) -> Any:
            try:
                with self.meeting.at(name):
                    return method(self, *given, **named)
            except ShoalError as error:
                if self.recorder.is_own_loop:
                    from shoal.base.text.argument_names import rename_error  # only for an error

                    rename_error(error)
                raise

        return cast("Call", call)

    return mark


def record_forward_calls(program: Program, meeting: CollectiveCallLog) -> Program:
    """Count the user's own forward passes of a model that needs all ranks."""
    layout, module = program.plan.layout, program.module
    if layout.zero < 3 and max(layout.tp, layout.cp, layout.pp, layout.ep) == 1:
        return program  # this rank's forward pass needs no other rank
    open_calls: list[Any] = []
    has_run = layout.pp == 1

    def enter(_module: nn.Module, _inputs: Any) -> None:
        nonlocal has_run
        if not is_compiling() and function_transform() is not None:
            raise ConfigError(
                f"run.model(…) inside of torch.func: under {layout.text()} a forward pass needs "
                f"other ranks, which vmap and grad do not know; try: a module made before "
                f"shoal.parallelize, and functional_call of it with run.state_dict()"
            )
        has_run = has_run or meeting.depth > 0
        if not has_run:  # later the stages refuse it themselves
            raise ConfigError(
                f"run.model(…): under layout.pp = {layout.pp} this rank has the blocks of one "
                f"stage; try: run.predict(inputs), called on every rank"
            )
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
