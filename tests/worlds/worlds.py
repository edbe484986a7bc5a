"""Worlds of real processes for tests: started once per session, asked many times."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
START_S, CALL_S = 90.0, 120.0


class Failed(AssertionError):
    """A check failed or did not answer on some rank."""


class Members:
    """`size` processes in one process group, each running `member.py`."""

    program = HERE / "member.py"

    def __init__(self, size: int, log_folder: Path, inside: Sequence[str] = ()) -> None:
        """inside   words before the command of every process, say into a network namespace"""
        self.size = size
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        self.log_paths = [log_folder / f"world-{size}-rank-{rank}.log" for rank in range(size)]
        self.processes = []
        for rank in range(size):
            env = {
                **os.environ,
                "SHOAL_STORE_PORT": str(listener.getsockname()[1]),
                "SHOAL_STORE_FD": str(listener.fileno()),
                "RANK": str(rank),
                "WORLD_SIZE": str(size),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(size),
                "PYTHONPATH": f"{HERE}:{os.environ.get('PYTHONPATH', '')}",
                "OMP_NUM_THREADS": "1",
                "SHOAL_CACHE": str(log_folder / "cache"),  # nothing of an earlier session counts
            }
            self.processes.append(
                subprocess.Popen(
                    [*inside, sys.executable, str(self.program)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self.log_paths[rank].open("w"),
                    env=env,
                    pass_fds=[listener.fileno()] if rank == 0 else [],
                    text=True,
                )
            )
        listener.close()
        self.collect(START_S)

    def call(self, function: str, *, deadline_s: float = CALL_S, **arguments: Any) -> list[Any]:
        """Run `module:function(world, **arguments)` on every member; answers by rank."""
        self.ask(function, **arguments)
        return self.collect(deadline_s)

    def ask(self, function: str, **arguments: Any) -> None:
        """The first half of `call`: `collect` is the second."""
        line = json.dumps({"call": function, "arguments": arguments}) + "\n"
        for process in self.processes:
            process.stdin.write(line)
            process.stdin.flush()

    def collect(self, deadline_s: float) -> list[Any]:
        """One answer of every member, or Failed with the traceback of the first that has one."""
        until_s = time.monotonic() + deadline_s
        answers: dict[int, Any] = {}
        while len(answers) < self.size:
            waiting = {p.stdout: r for r, p in enumerate(self.processes) if r not in answers}
            left_s = until_s - time.monotonic()
            ready = select.select(list(waiting), [], [], max(0.0, left_s))[0]
            if not ready:
                errors = [a["error"] for a in answers.values() if "error" in a]
                raise Failed(f"ranks {sorted(waiting.values())} silent for {deadline_s} s {errors}")
            for stream in ready:
                text = stream.readline()
                rank = waiting[stream]
                if not text:
                    raise Failed(f"rank {rank} ended: {self.log_paths[rank].read_text()[-3000:]}")
                answers[rank] = json.loads(text)
        errors = [f"rank {r}: {a['error']}" for r, a in sorted(answers.items()) if "error" in a]
        if errors:
            raise Failed("\n".join(errors))
        return [answers[rank]["ok"] for rank in range(self.size)]

    def end(self) -> None:
        """Tell every member to leave, through barrier and destroy; do not wait for it."""
        for process in self.processes:
            with contextlib.suppress(OSError, ValueError):  # it is gone, or was told already
                process.stdin.write('{"call": "end"}\n')
                process.stdin.close()

    def close(self) -> None:
        """End every member, and wait for it."""
        self.end()
        for process in self.processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class Islands:
    """Several worlds of `size` processes each, which know nothing of each other but an address."""

    def __init__(
        self, count: int, size: int, log_folder: Path, inside: Sequence[Sequence[str]] = ()
    ) -> None:
        self.size, self.folder, self.inside = size, log_folder, inside
        self.worlds = [self._start(index) for index in range(count)]

    def _start(self, index: int) -> Members:
        folder = self.folder / f"island-{index}"
        folder.mkdir(parents=True, exist_ok=True)
        return Members(self.size, folder, self.inside[index] if self.inside else ())

    def call(
        self,
        function: str,
        *,
        deadline_s: float = CALL_S,
        ends: int = -1,
        host: str = "127.0.0.1",
        **arguments: Any,
    ) -> list[Any]:
        """Run `module:function(world, index=…, count=…, at=…, **arguments)` on all; answers of each
        island's ranks, by island. Island `ends` is not waited for but killed after the others."""
        for index, world in enumerate(self.worlds):
            if any(process.poll() is not None for process in world.processes):
                self.worlds[index] = self._start(index)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            at = f"{host}:{free.getsockname()[1]}"
        count = len(self.worlds)
        for index, world in enumerate(self.worlds):
            world.ask(function, index=index, count=count, at=at, **arguments)
        found = [
            None if index == ends else world.collect(deadline_s)
            for index, world in enumerate(self.worlds)
        ]
        if ends >= 0:
            for process in self.worlds[ends].processes:
                process.kill()
                process.wait()
        return found

    def close(self) -> None:
        """End all of them."""
        close_all(self.worlds)


def close_all(worlds: Sequence[Members]) -> None:
    """End them together: a process that imported torch takes a second to leave."""
    for world in worlds:
        world.end()
    for world in worlds:
        world.close()
