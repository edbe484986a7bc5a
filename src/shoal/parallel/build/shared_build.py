"""Build a model once per machine: one rank runs the builder, the others map the weights it made.

If ranks keep only parts of a model, they need not all build it: eight ranks of a
machine would draw the same numbers eight times, and hold them eight times for a moment.

    local rank 0   runs the builder in mapped files (mmap_init.py), and sends the others of its
                   machine the position of each tensor; small tensors go into one more file, which
                   it maps as well
    the others     run the builder on the meta device, which makes the modules without numbers, and
                   put the mapped tensors into the objects that it made: ties and references stay
    a checkpoint   whose reader maps its files (safetensors does) is not read for that: the others
                   map a tensor from the checkpoint's file if it is still a view of it
    every rank     maps the files privately: its writes are its own, and unwritten pages are in
                   memory once per machine, in the page cache

Some builders cannot be run so: one that asks a tensor for its value, keeps a tensor that is no
parameter and no buffer, keeps weak references to parameters, or communicates with other ranks.
Every rank then runs the builder for itself, and a notice gives the reason.

Protocol  the files have no names, and are in memory (no disk) if twice as much memory stays free,
          else in TMPDIR. They are opened by the descriptors of the process that made them,
          /proc/PID/fd/N: a killed start leaves nothing. That process closes them when all have
          mapped them
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
from shoal.parallel.build.mmap_init import OpenFiles, mmap_init
from shoal.trace.isolation.collective_ban import forbid_collectives

LEAST_BYTES = 64 * 2**20
"""Smaller models are built by every rank: that takes less time than sending tensor positions."""

FILES = Path("/proc/self/fd")
"""Linux's folder of the open files of this process."""

Build = Callable[[], nn.Module]
Table = dict[str, Any]


def build_once(
    world: World, build: Build, least_bytes: int | None = None
) -> tuple[nn.Module, list[str]]:
    """Build a model on one rank of each machine, and map its weights on the others there.

    Every rank calls it, and returns when all ranks of its machine have the model.

    Args:
        build: runs the builder; on ranks other than local rank 0 under the meta device.
        least_bytes: of weights; smaller models are built by every rank, in mapped files too; None:
            `LEAST_BYTES`.

    Returns:
        (module, lines for the user, the same on all ranks).

    Raises:
        Exception: any error of the builder.
    """
    if world.local_size == 1 or not FILES.exists():
        with mmap_init():
            return build(), []
    made: list[nn.Module] = []
    with _raise_file_limit() as files:

        def first() -> Table | None:
            least = LEAST_BYTES if least_bytes is None else least_bytes
            try:
                with mmap_init(opened=files), _open_without_readahead(), forbid_collectives():
                    made.append(build())
                if _weights_bytes(made[0]) < least:
                    return None
                from shoal.parallel.build.weight_tables import make_weight_table

                return make_weight_table(made[0], files)
            except Exception as failure:  # every rank then runs the builder, and raises its errors
                made.clear()
                files.close()
                return {"why": _error_line(failure)}

        try:
            table = world.run_once_per_machine(first)
            module, why = _module_from_table(table, made, build)
        except Exception:  # so that no rank waits for hours for the one whose builder failed
            world.machine_barrier()
            raise
        world.machine_barrier()
    trim_heap()  # small tensors are in a file now
    return module, _own_build_notice(module, world.gather_json(why), world)


def _open_without_readahead() -> AbstractContextManager[None]:
    """Return `open_without_readahead` if safetensors is imported, else a null context."""
    if "safetensors" not in sys.modules:
        return nullcontext()
    from shoal.parallel.build.checkpoint_files import open_without_readahead

    return open_without_readahead()


@contextmanager
def _raise_file_limit() -> Iterator[OpenFiles]:
    """Raise this process's limit of open files to the hard limit: one file per tensor.

    The files are closed before the old limit holds again. With them open under the old limit one
    descriptor was left for all threads. The rendezvous, which asks its store four times a second,
    and the building rank took it from each other, and the other ranks waited in a collective.
    """
    files, before = OpenFiles(), resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    try:
        yield files
    finally:
        files.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def _module_from_table(
    table: Table | None, made: list[nn.Module], build: Build
) -> tuple[nn.Module, str]:
    """Return (the module of a table, or one built here; the reason if it was built here)."""
    why = "" if table is None else table.get("why", "")
    if table is not None and not why:
        from shoal.parallel.build.weight_tables import build_from_table, map_table

        try:
            if not made:
                return build_from_table(build, table), ""
            map_table(made[0], table)
        except Exception as failure:
            why = _error_line(failure)
    if made:
        return made[0], why
    with mmap_init():
        return build(), why


def _own_build_notice(module: nn.Module, whys: list[str], world: World) -> list[str]:
    """Return a notice on a large model that ranks have built for themselves."""
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


def _error_line(failure: Exception) -> str:
    text = (str(failure).splitlines() or [""])[0]
    return text if isinstance(failure, ShoalError) else f"{type(failure).__name__}: {text}"


def _weights_bytes(module: nn.Module) -> int:
    """Return the bytes of parameters and buffers, each counted once."""
    tensors = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
