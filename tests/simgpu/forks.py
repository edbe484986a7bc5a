"""Programs of this folder, forked from one process that has imported torch and what trains.

Each would import for 3 CPU-seconds otherwise. A fork sees what a program sees: its own output and
errors, settings in its environment, its module as `__main__`, and at its end the device's verdict.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from shoal.launch.processes import Forked, ForkServer

HERE = Path(__file__).resolve().parent
START_S = 120.0
IMPORTS = (
    *("torch._dynamo", "torch.fx.experimental.proxy_tensor", "torch.distributed.fsdp"),
    *("shoal.trainer.parallelize", "shoal.parallel.offload", "shoal.proof.quick"),
)


class Forks:
    """Starts programs; it and all of them end with this process, or by `close`."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="forks-"))
        (self.folder / "logs").mkdir()
        path = os.pathsep.join((environ["PYTHONPATH"], str(HERE)))
        self.environ = {**environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        self.server = ForkServer(IMPORTS, self.environ, self.folder)
        self.started = 0

    def start(self, words: Sequence[str], environ: Mapping[str, str]) -> Running:
        """A program of this folder with its arguments; environ: what its own is to differ by."""
        until_s = time.monotonic() + START_S
        while not (self.server.ready or self.server.cannot) and time.monotonic() < until_s:
            self.server.look(1.0)
        log = self.folder / "logs" / "import.log"
        assert self.server.ready, f"{self.server.cannot}: {log.read_text()}"
        self.started += 1
        out, error = (self.folder / f"{self.started}.{end}" for end in ("out", "err"))
        command = [sys.executable, "-m", "as_program", str(out), str(HERE / words[0]), *words[1:]]
        with error.open("wb") as file:
            place = {"RANK": "", **environ}
            forked = self.server.fork(command, place, file.fileno(), lambda pid: None)
        return Running(forked, out, error)

    def run(self, *words: str, **settings: str) -> subprocess.CompletedProcess[str]:
        """The same, waited for."""
        running = self.start(words, settings)
        out, error = running.communicate()
        return subprocess.CompletedProcess(words, running.returncode, out, error)

    def close(self) -> None:
        """End the server and what it started."""
        self.server.close()


class Running:
    """A started program, with what is asked of a `subprocess.Popen`."""

    def __init__(self, forked: Forked, out: Path, error: Path) -> None:
        self.forked, self.out, self.error = forked, out, error
        self.returncode = -1

    def communicate(self, timeout: float = 400.0) -> tuple[str, str]:
        """What it wrote, when it has ended; subprocess.TimeoutExpired where it does not."""
        self.returncode = self.forked.wait(timeout)
        return self.out.read_text(), self.error.read_text()

    def kill(self) -> None:
        """End it if it runs."""
        if self.forked.poll() is None:
            os.kill(self.forked.pid, 9)
