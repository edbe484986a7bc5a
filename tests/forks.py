"""Python programs for tests, forked from one process that has imported torch and what trains.

Each would import for 2 to 4 CPU-seconds otherwise. A fork sees what a program sees: its folder,
words, environment, output and errors, its module as `__main__`, and an end as a program has it
(`as_program.py`). Where a guard is about a new process itself (what it imports, what a start costs,
who dies with whom), or needs another setting of torch's libraries, the test starts a program.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from shoal.launch.processes import ForkedWorker, ForkServer

HERE = Path(__file__).resolve().parent
START_S = 120.0
IMPORTS = (
    *("torch._dynamo", "torch.fx.experimental.proxy_tensor", "torch.distributed.fsdp"),
    *("shoal.trainer.main_job", "shoal.trainer.parallelize", "shoal.proof.start_proof"),
    *("shoal.cli.main", "shoal.cli.start", "shoal.cli.ending", "shoal.cli.islands"),
    *(
        "shoal.trainer.state.run_state",
        "shoal.checkpoint.save.background_save",
        "shoal.checkpoint.load.read",
    ),
)
"""What most programs import, a command's own modules among it."""
os.environ.setdefault("SHOAL_PROVE", "off")  # tests of the quick proof itself ask for it

MORE_IMPORTS: list[str] = []
"""What members of worlds import beside it: `worlds/worlds.py` adds it where a session has worlds."""


@functools.cache
def shared() -> Forks:
    """Start this session's one server: programs, commands and members of worlds are its forks."""
    outside = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    paths = [*filter(None, outside.get("PYTHONPATH", "").split(os.pathsep)), str(HERE / "worlds")]
    made = Forks(
        {**outside, "PYTHONPATH": os.pathsep.join(paths)},
        tuple(dict.fromkeys((*IMPORTS, *MORE_IMPORTS))),
    )
    atexit.register(made.close)
    return made


class Forks:
    """Starts programs; it and all of them end with this process, or by `close`.

    environ    of the server, so of a program for which nothing else is said
    """

    def __init__(self, environ: Mapping[str, str], imports: Sequence[str] = IMPORTS) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="forks-"))
        (self.folder / "logs").mkdir()
        paths = [*filter(None, environ.get("PYTHONPATH", "").split(os.pathsep)), str(HERE)]
        path = {"PYTHONPATH": os.pathsep.join(paths)}
        self.environ = {**environ, **path, "OMP_NUM_THREADS": "1"}
        self.server = ForkServer(imports, self.environ, self.folder)
        self.started = 0

    def start(
        self,
        words: Sequence[str],
        environ: Mapping[str, str] | None = None,
        cwd: Path = HERE,
        *,
        merged: bool = False,
        log: Path | None = None,
    ) -> Running:
        """Start what `python WORD …` would be: a file, `-m` and a module, or `-c` and a text.

        environ    what the program's own is to differ by
        merged     its errors stand in its output, where they were said
        log        a file to which both are added
        """
        server = self.ready_server()
        self.started += 1
        asked, out, error = (
            self.folder / f"{self.started}.{end}" for end in ("asked", "out", "err")
        )
        place = {"RANK": "", **(environ or {})}
        asked.write_text(json.dumps({"cwd": str(cwd), "words": list(map(str, words))}))
        merged, error = merged or log is not None, log or error
        command = [sys.executable, "-m", "as_program", str(asked), "" if merged else str(out)]
        with error.open("ab") as file:
            forked = server.fork(command, place, file.fileno(), lambda pid: None)
        return Running(forked, error if merged else out, error)

    def ready_server(self) -> ForkServer:
        """Wait until all is imported."""
        until_s = time.monotonic() + START_S
        while not (self.server.ready or self.server.cannot) and time.monotonic() < until_s:
            self.server.poll(1.0)
        log = self.folder / "logs" / "import.log"
        assert self.server.ready, f"{self.server.cannot}: {log.read_text()}"
        return self.server

    def run(
        self,
        *words: str,
        cwd: Path = HERE,
        timeout: float = 400.0,
        environ: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """The same, waited for."""
        running = self.start(words, environ, cwd)
        out, error = running.communicate(timeout)
        return subprocess.CompletedProcess(words, running.returncode, out, error)

    def world(
        self,
        size: int,
        *words: str,
        cwd: Path = HERE,
        timeout: float = 400.0,
        environ: Mapping[str, str] | None = None,
        nodes: Sequence[Path] = (),
    ) -> list[subprocess.CompletedProcess[str]]:
        """The same as `size` ranks, told of each other as torchrun tells them, with its store.

        nodes   a folder per rank in which it starts, each rank being a node's only one
        """
        from torch.distributed import TCPStore

        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        meets = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
        }
        ranks = []
        for rank in range(size):
            local, mates = ("0", "1") if nodes else (str(rank), str(size))
            place = {"RANK": str(rank), "WORLD_SIZE": str(size)}
            place |= {"LOCAL_RANK": local, "LOCAL_WORLD_SIZE": mates}
            folder = nodes[rank] if nodes else cwd
            ranks.append(self.start(words, {**meets, **(environ or {}), **place}, folder))
        try:
            told = [rank.communicate(timeout) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        return [
            subprocess.CompletedProcess(words, rank.returncode, *said)
            for rank, said in zip(ranks, told, strict=True)
        ]

    def close(self) -> None:
        """End the server and what it started."""
        self.server.close()
        shutil.rmtree(self.folder, ignore_errors=True)


class Running:
    """A started program, with what is asked of a `subprocess.Popen`."""

    def __init__(self, forked: ForkedWorker, out: Path, error: Path) -> None:
        self.forked, self.out, self.error = forked, out, error
        self.pid, self.returncode = forked.pid, -1

    def poll(self) -> int | None:
        """Its status once it has ended."""
        return self.forked.poll()

    def wait(self, timeout: float = 400.0) -> int:
        """Its status; subprocess.TimeoutExpired where it does not end."""
        self.returncode = self.forked.wait(timeout)
        return self.returncode

    def communicate(self, timeout: float = 400.0) -> tuple[str, str]:
        """What it wrote, when it has ended; subprocess.TimeoutExpired where it does not."""
        self.wait(timeout)
        return self.out.read_text(), self.error.read_text()

    def send_signal(self, number: int) -> None:
        """Send one if it runs."""
        if self.poll() is None:
            with contextlib.suppress(
                ProcessLookupError
            ):  # it may end just here; the server reaps it
                os.kill(self.pid, number)

    def kill(self) -> None:
        """End it if it runs."""
        self.send_signal(signal.SIGKILL)
