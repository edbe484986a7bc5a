"""Try a size for `shoal find micro-batch`: `python -m shoal.cli.workers.find_batch_worker FOLDER`.

If memory runs out, the rank writes `memory-RANK` before it dies, so that the search knows the
cause. Its peers then fail because that rank is gone.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

import psutil

from shoal.launch import run_and_exit
from shoal.wire.phases import phase

STEPS = 3
"""Steps per try: the first creates the optimizer state, later ones hold it with activations."""
WORDS = ("out of memory", "allocate memory", "bad_alloc")
"""Error texts for exhausted host memory; a GPU's allocator has its own exception."""


def main() -> int:
    """Train the steps of the folder named on the command line."""
    folder = Path(sys.argv[1])
    with phase("import"):
        from shoal.trainer.jobs.configured_run import open_world_and_source

    asked = json.loads((folder / "request.json").read_text(encoding="utf-8"))
    config, world, source = open_world_and_source(folder)
    try:
        if asked["limit_bytes"]:
            limit_memory(asked["limit_bytes"], world.device)
        _train(config, source, world, asked["layout"])
    except Exception as failure:
        if is_memory_error(failure):
            line = " ".join(str(failure).split())[:160]
            rank = os.environ.get("RANK", "0")
            Path(folder, f"memory-{rank}").write_text(
                line or type(failure).__name__, encoding="utf-8"
            )
        raise
    world.close()
    return 0


def _train(config: Any, source: Any, world: Any, layout: Any) -> None:
    from shoal.config.resolve import make_plan
    from shoal.trainer.jobs.configured_run import open_run

    run = open_run(config, source, world, make_plan(config), layout, total_steps=STEPS)
    loader = run.loader(source.train, collate=source.collate)
    made = 0
    while made < STEPS:
        for batch in loader:
            run.step(batch)
            made += 1
            if made == STEPS:
                break
    run.close()


def limit_memory(limit_bytes: int, device: Any) -> None:
    """Limit the memory of this process: a device's by its allocator, the host's by the kernel.

    Memory that the process has reserved and never touched is not in use, so it is added to the
    limit.
    """
    if device.type != "cpu":
        from shoal.fabric import device as devices

        devices.limit_bytes(device, limit_bytes)
        return
    reserved = int(psutil.Process().memory_info().data - psutil.Process().memory_info().rss)
    most = limit_bytes + max(0, reserved)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def is_memory_error(failure: BaseException) -> bool:
    """Return whether an exception reports that memory ran out, and nothing else.

    >>> is_memory_error(MemoryError()), is_memory_error(ValueError("out of range"))
    (True, False)
    """
    link: BaseException | None = failure
    while link is not None:
        if isinstance(link, MemoryError) or type(link).__name__ == "OutOfMemoryError":
            return True
        if isinstance(link, RuntimeError) and any(word in str(link).lower() for word in WORDS):
            return True
        link = link.__cause__
    return False


if __name__ == "__main__":
    run_and_exit(main)
