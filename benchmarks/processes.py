"""Starts the processes of a measurement, with one thread each, and says what machine they ran on.

Each runs a script with RANK and WORLD_SIZE set, as torchrun would, and meets the others at a file
(those that are not Shoal's at MASTER_PORT); the first that fails ends the others, and everything
has a deadline.
"""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).resolve().parent.parent / "src"


def run_together(arguments: list[str], processes: int, *, deadline_s: float) -> None:
    """Run `python arguments…` in `processes` processes that form one world; raises if one fails."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    with tempfile.NamedTemporaryFile() as store:
        _run_together(arguments, processes, deadline_s, port, store.name)


def _run_together(
    arguments: list[str], processes: int, deadline_s: float, port: str, store: str
) -> None:
    started = []
    for rank in range(processes):
        env = {
            "SHOAL_PROVE": "off",  # steps are measured, not starts
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(processes),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(processes),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "SHOAL_STORE": store,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONPATH": f"{SOURCE}:{os.environ.get('PYTHONPATH', '')}",
        }
        started.append(subprocess.Popen([sys.executable, *arguments], env=env))
    until_s = time.monotonic() + deadline_s
    try:
        while any(p.poll() is None for p in started):
            broken = [r for r, p in enumerate(started) if p.poll() not in (None, 0)]
            if broken:
                raise RuntimeError(f"rank {broken[0]} ended with {started[broken[0]].returncode}")
            if time.monotonic() > until_s:
                raise TimeoutError(f"no end after {deadline_s:.0f} s")
            time.sleep(0.05)
        broken = [r for r, p in enumerate(started) if p.returncode]
        if broken:
            raise RuntimeError(f"rank {broken[0]} ended with {started[broken[0]].returncode}")
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
            process.wait()


def pace_steps(run: Any, step_s: float) -> None:
    """Let each step of a run take some seconds, by a sleep after it, whatever the machine does."""
    step = run.step

    def slowly(batch: Any) -> Any:
        until_s = time.monotonic() + step_s
        result = step(batch)
        time.sleep(max(0.0, until_s - time.monotonic()))
        return result

    run.step = slowly


def machine() -> dict[str, Any]:
    """Processor, cores, load, memory and versions: what a number means nothing without."""
    return {
        "processor": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": list(os.getloadavg()),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {
            name: _version(name)
            for name in ("torch", "accelerate", "lightning", "deepspeed", "numpy")
        },
    }


def _cpu_model() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
