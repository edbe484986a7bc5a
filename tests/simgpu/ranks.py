"""Starts the ranks of a program of this folder, on the CPU or on simulated devices, and hears rank 0."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
DEADLINE_S = 400.0


def on_cpu() -> dict[str, str]:
    """The environment of ranks that have no device."""
    without = {name: value for name, value in os.environ.items() if name != "SIM_LIBRARY"}
    path = os.pathsep.join((str(ROOT / "src"), os.environ.get("PYTHONPATH", "")))
    return {**without, "PYTHONPATH": path}


def alone(words: Sequence[str], environ: Mapping[str, str]) -> subprocess.Popen[str]:
    """A program of this folder in a process of its own."""
    return subprocess.Popen(
        [sys.executable, str(HERE / words[0]), *words[1:]],
        env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def world(
    program: str,
    size: int,
    words: Sequence[str],
    environ: Mapping[str, str],
    start: Callable[..., Any] = alone,
) -> dict[str, Any]:
    """Run a program as `size` ranks; the last line of rank 0, and as `said` what all wrote beside it.

    start    of a rank: `alone`, or `Forks.start`, for which environ is what differs
    Errors   AssertionError with the ranks' last words where one fails
    """
    ranks = started(program, size, words, environ, start)
    try:
        told = [rank.communicate(timeout=DEADLINE_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * size, "\n".join(e[-3000:] for _, e in told)
    answer: dict[str, Any] = json.loads(told[0][0].splitlines()[-1])
    answer["said"] = "".join(e for _, e in told)
    return answer


def started(
    program: str,
    size: int,
    words: Sequence[str],
    environ: Mapping[str, str],
    start: Callable[..., Any],
) -> list[Any]:
    """The ranks of a program, that have begun."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meets = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    sizes = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1"}
    places = ({"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size))
    return [start((program, *words), {**environ, **meets, **sizes, **own}) for own in places]
