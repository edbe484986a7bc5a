"""Trains a model under a limit on the process's own memory, set above what it holds already."""

from __future__ import annotations

import ctypes
import gc
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from shoal.fabric import World
from shoal.models.catalog import build
from shoal.trainer.parallelize import parallelize

SEQUENCE, VOCABULARY, ROWS, MICRO_BATCHES, STEPS = 32, 4096, 1, 2, 3
ARGUMENTS = {"dim": 512, "layers": 12, "heads": 8, "kv_heads": 8, "tied": False}


def data_bytes() -> int:
    """Private writable memory of this process, as RLIMIT_DATA counts it."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status: no VmData")


M_MMAP_THRESHOLD, LEAST_BYTES, MOST_BYTES = -3, 2**16, 2**25
"""mallopt(3): larger blocks are mapped, and so counted; glibc's own threshold ends at the most."""


@contextmanager
def limited(more_bytes: int) -> Iterator[None]:
    """Inside, the process may take so much more memory and no more."""
    gc.collect()
    libc = ctypes.CDLL(None)
    libc.malloc_trim(0)  # what was freed is given back, and no reserve
    # What earlier tests freed is counted already: only small blocks may be taken from it.
    libc.mallopt(M_MMAP_THRESHOLD, LEAST_BYTES)
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (data_bytes() + more_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
        libc.mallopt(M_MMAP_THRESHOLD, MOST_BYTES)


def train(world: World, layout: dict[str, int] | str, more_bytes: int) -> dict[str, Any]:
    """Losses of some steps under the limit, or what went wrong."""
    tokens = torch.randint(
        0, VOCABULARY, (ROWS * MICRO_BATCHES, SEQUENCE), generator=torch.Generator().manual_seed(3)
    )
    held_before = data_bytes()
    run = None
    with limited(more_bytes):
        try:
            run = parallelize(
                lambda: build("llama", ARGUMENTS, vocabulary=VOCABULARY, sequence=SEQUENCE),
                lambda p: torch.optim.AdamW(p, lr=1e-3),
                layout=layout,
                batch=ROWS * MICRO_BATCHES,
                micro_batch=ROWS,
                sample=(tokens, tokens),
                world=world,
            )
            losses = [run.step((tokens, tokens)).loss for _ in range(STEPS)]
        except (RuntimeError, MemoryError) as failure:
            return {"failed": str(failure)[:300]}
        finally:
            for undo in run.program.on_close if run else ():
                undo()
        grown = data_bytes() - held_before
    return {"losses": losses, "parameters": run.plan.parameters, "grown": grown}
