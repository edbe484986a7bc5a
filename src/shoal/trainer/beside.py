"""Has the ranks of a run watched from outside where Shoal's launcher is not there to do it.

Under torchrun, or srun on one machine, nobody outside of the ranks knows what they do. So rank 0
starts a small process without torch (cli/beside.py); every rank tells it, in a page of memory,
of its steps and collectives, and answers it with stacks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from shoal.base import phases
from shoal.base.frames import OWN_FOLDER
from shoal.base.stacks import answer_for_stacks
from shoal.base.watch_page import PAGE_VARIABLE, Page, can_watch, tell_page
from shoal.fabric import World

_kept: list[subprocess.Popen[str]] = []
"""Its input ends when this process does."""


def watch_from_outside(
    world: World, folder: Path | None, environ: Mapping[str, str] = os.environ
) -> Callable[[], None] | None:
    """Start the watch of a run; every rank calls it once its world is there.

    Gives   what ends it; None where nobody watches: this process has a page already, ranks are on
            several machines, or the system has no memory that two processes reach by a name
    """
    alone = environ.get("LOCAL_WORLD_SIZE", environ.get("SLURM_NTASKS")) == str(world.size)
    may = phases.page is None and alone and can_watch() and hasattr(os, "pidfd_open")
    paths = _start(world.size) if may and world.is_first else []
    told = world.gather_json({"pid": os.getpid(), "may": may, "paths": paths})
    paths = told[0]["paths"]
    if not (paths and all(one["may"] for one in told)):
        return None
    page = Page.open({PAGE_VARIABLE: paths[world.rank]})
    if page is None:
        return None
    tell_page(page)
    answer_for_stacks(page)
    world.traffic.page = page
    if _kept:
        asked = {"folder": str(folder.absolute()) if folder else "", "pids": []}
        asked["pids"] = [one["pid"] for one in told]
        _say(json.dumps(asked))
    return page.leave


def _start(count: int) -> list[str]:
    """Start it; the paths of the pages that it made, none where it did not start."""
    root = str(Path(OWN_FOLDER).parent)
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    try:
        one = subprocess.Popen(
            [sys.executable, "-m", "shoal.cli.beside", str(count)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
        _kept[:] = [one]
        found = json.loads(one.stdout.readline()) if one.stdout else []
    except (OSError, ValueError):
        return []
    return [str(path) for path in found]


def _say(line: str) -> None:
    (one,) = _kept
    if one.stdin is not None:
        try:
            one.stdin.write(f"{line}\n")
            one.stdin.flush()
        except OSError:  # it has ended: the run goes on unwatched
            _kept.clear()
