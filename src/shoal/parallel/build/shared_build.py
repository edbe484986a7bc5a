"""Builds a model once per machine: one rank runs the builder, the others map the weights it made.

Where ranks will keep parts of a model only, none has to make all of it for itself: eight ranks of a
machine would draw the same numbers eight times, and hold them eight times for a moment.

    local rank 0   runs the builder in mapped files (mmap_init.py), and tells the others of its
                   machine where each tensor lies; small tensors go into one more file, which it
                   maps as well
    the others     run the builder on the meta device, which makes the modules without numbers, and
                   put the mapped tensors into the objects that it made: ties and references stay
    a checkpoint   whose reader maps its files (safetensors does) is not read at all for that: where
                   a tensor still lies in such a file, the others map it from there
    every rank     maps the files privately: what it writes is its own, and pages that nobody writes
                   are there once per machine, in the page cache

A builder that asks a tensor for its value, keeps a tensor that is no parameter and no buffer, keeps
weak references to parameters, or talks to other ranks cannot be run so: every rank then runs it for
itself, and a line says why.

Protocol  the files have no names, and lie on no disk where twice as much memory stays free, else
          where TMPDIR says. They are opened by the descriptors of the process that made them,
          /proc/PID/fd/N: a killed start leaves nothing. It closes them when all have mapped them
Bits      a plain build's: the builder draws from the same generator in the same order, once
Limits    Linux; ranks of one machine that do not see each other's processes build for themselves
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from torch import nn

from shoal.base.errors import ShoalError
from shoal.fabric import World
from shoal.machine.process_memory import trim_heap
from shoal.parallel.build.mmap_init import Opened, mmap_init
from shoal.trace.isolation.collective_ban import alone

LEAST_BYTES = 64 * 2**20
"""Smaller models are built by every rank: that takes less time than telling where tensors lie."""

FILES = Path("/proc/self/fd")
"""Where Linux shows a process's files."""

Build = Callable[[], nn.Module]
Table = dict[str, Any]


def build_once(
    world: World, build: Build, least_bytes: int | None = None
) -> tuple[nn.Module, list[str]]:
    """Build a model on one rank of each machine, and map its weights on the others there.

    Every rank calls it, and leaves it when all ranks of its machine have the model.

    Args:
        build: runs the builder; on ranks other than local rank 0 under the meta device.
        least_bytes: of weights; smaller models are built by every rank, in mapped files too; None:
            `LEAST_BYTES`.

    Returns:
        (module, lines for the user, the same on all ranks).

    Raises:
        whatever the builder raises.
    """
    if world.local_size == 1 or not FILES.exists():
        with mmap_init():
            return build(), []
    made: list[nn.Module] = []
    with _many_files() as files:

        def first() -> Table | None:
            least = LEAST_BYTES if least_bytes is None else least_bytes
            try:
                with mmap_init(opened=files), _unread(), alone():
                    made.append(build())
                if _weights_bytes(made[0]) < least:
                    return None
                from shoal.parallel.build.weight_tables import table_of

                return table_of(made[0], files)
            except Exception as failure:  # the builder's own errors come again, on every rank
                made.clear()
                files.close()
                return {"why": _line(failure)}

        try:
            table = world.told_on_machine(first)
            module, why = _made_of(table, made, build)
        except Exception:  # nobody waits for hours for the rank that a builder failed on
            world.machine_barrier()
            raise
        world.machine_barrier()
    trim_heap()  # small tensors lie in a file now
    return module, _said(module, world.gather_json(why), world)


def _unread() -> AbstractContextManager[None]:
    """Inside, files of safetensors are opened unread, where a builder could know any."""
    if "safetensors" not in sys.modules:
        return nullcontext()
    from shoal.parallel.build.checkpoint_files import opened_unread

    return opened_unread()


@contextmanager
def _many_files() -> Iterator[Opened]:
    """Inside, this process may open as many files as the system lets it have: one per tensor.

    The files are closed before the old limit holds again. With them open and the old limit, one
    descriptor was left for all threads: a run's meeting, which asks its store four times a second,
    and the rank that builds took it from each other, and the other ranks waited in a collective.
    """
    files, before = Opened(), resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    try:
        yield files
    finally:
        files.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def _made_of(table: Table | None, made: list[nn.Module], build: Build) -> tuple[nn.Module, str]:
    """(the module of a table, or built here where that cannot be; why it cannot)."""
    why = "" if table is None else table.get("why", "")
    if table is not None and not why:
        from shoal.parallel.build.weight_tables import put_in, without_data

        try:
            if not made:
                return without_data(build, table), ""
            put_in(made[0], table)
        except Exception as failure:
            why = _line(failure)
    if made:
        return made[0], why
    with mmap_init():
        return build(), why


def _said(module: nn.Module, whys: list[str], world: World) -> list[str]:
    """The line on a large model that ranks have built for themselves."""
    why = next((why for why in whys if why), "")
    if not why:
        return []
    from shoal.base.text.units import bytes_text

    size_bytes = sum(p.numel() * p.element_size() for p in module.parameters())
    return [
        f"model: {len([w for w in whys if w])} of {world.size} processes build all of it for "
        f"themselves, {bytes_text(size_bytes)} each, instead of sharing what one of their machine "
        f"builds: {why}"
    ]


def _line(failure: Exception) -> str:
    text = (str(failure).splitlines() or [""])[0]
    return text if isinstance(failure, ShoalError) else f"{type(failure).__name__}: {text}"


def _weights_bytes(module: nn.Module) -> int:
    """Of parameters and buffers, each once."""
    tensors = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
