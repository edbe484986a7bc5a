"""Worlds of real processes for tests: started once per session, asked many times."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shoal.launch.processes import PrivateStore, can_fork

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent))  # for programs that no pytest runs

from forks import MORE_IMPORTS, shared  # noqa: E402

START_S, CALL_S = 90.0, 120.0
IMPORTS = (
    *("torch._dynamo", "shoal.proof", "torch.fx.experimental.proxy_tensor"),
    *(
        "shoal.trainer.state.run_state",
        "shoal.checkpoint.load.read",
        "shoal.parallel.spmd.model_split",
    ),
    *("torch.distributed.fsdp", "torch.distributed.tensor.experimental"),
)
"""What nearly every member needs: `Optimizer.step` imports the first, a split layer the third."""
OF_MODELS = ("transformers.modeling_utils", "transformers.models.llama.modeling_llama")
"""Where transformers is installed; each of six members would import it for two CPU seconds."""

ENVIRON = {
    "PYTHONPATH": f"{HERE}:{HERE.parent}:{os.environ.get('PYTHONPATH', '')}",
    "OMP_NUM_THREADS": "1",
}
HAS_MODELS = importlib.util.find_spec("transformers") and not os.environ.get("SIM_LIBRARY")
"""On simulated devices no test of these folders has one."""
MORE_IMPORTS += [*IMPORTS, *(OF_MODELS if HAS_MODELS else ())]


class Failed(AssertionError):
    """A check failed or did not answer on some rank."""


class Channel:
    """One member's end of the line: bytes out, lines in."""

    def __init__(self, accepted: socket.socket) -> None:
        self.socket, self.lines = accepted, accepted.makefile("r")

    def fileno(self) -> int:
        """For `select`."""
        return self.socket.fileno()

    def close(self) -> None:
        """The member reads the end of its lines."""
        self.lines.close()
        self.socket.close()


class Members:
    """`size` processes in one process group, each running `member.py`.

    They are forked from one process that has imported torch, which takes seconds otherwise; in a
    network namespace, with another `program` and where nothing forks safely they are programs.
    """

    program = HERE / "member.py"

    def __init__(self, size: int, log_folder: Path, inside: Sequence[str] = ()) -> None:
        """inside   words before the command of every process, say into a network namespace"""
        self.size = size
        self.store = PrivateStore()
        self.log_paths = [log_folder / f"world-{size}-rank-{rank}.log" for rank in range(size)]
        self.processes: list[Any] = []
        forks = self.program == Members.program and not inside and can_fork()
        with (
            tempfile.TemporaryDirectory(prefix="door-") as folder,
            socket.socket(socket.AF_UNIX) as door,
        ):
            door.bind(f"{folder}/door")
            door.listen(size)
            for rank in range(size):
                env = {
                    **os.environ,
                    **ENVIRON,
                    "SHOAL_STORE": self.store.path,
                    "SHOAL_TEST_DOOR": f"{folder}/door",
                    "RANK": str(rank),
                    "WORLD_SIZE": str(size),
                    "LOCAL_RANK": str(rank),
                    "LOCAL_WORLD_SIZE": str(size),
                    "SHOAL_CACHE": str(
                        log_folder / "cache"
                    ),  # nothing of an earlier session counts
                }
                with self.log_paths[rank].open("w") as log:
                    if forks:
                        command = [sys.executable, "-m", self.program.stem]
                        made: Any = (
                            shared()
                            .ready_server()
                            .fork(command, env, log.fileno(), lambda pid: None)
                        )
                    else:
                        made = subprocess.Popen(
                            [*inside, sys.executable, str(self.program)],
                            stdin=subprocess.DEVNULL,
                            stdout=log,
                            stderr=log,
                            env=env,
                        )
                self.processes.append(made)
            self.channels = self._meet(door)

    def _meet(self, door: socket.socket) -> list[Channel]:
        """The channel of every member, by rank: it says that when it has met the others."""
        until_s = time.monotonic() + START_S
        met: dict[int, Channel] = {}
        silent: list[Channel] = []
        while len(met) < self.size:
            for ready in select.select([door, *silent], [], [], 0.5)[0]:
                if ready is door:
                    silent.append(Channel(door.accept()[0]))
                elif text := ready.lines.readline():
                    met[json.loads(text)["ok"]] = ready
                    silent.remove(ready)
            gone = [r for r, p in enumerate(self.processes) if p.poll() is not None]
            if gone or time.monotonic() > until_s:
                told = "".join(self.log_paths[rank].read_text()[-3000:] for rank in gone)
                raise Failed(f"ranks {sorted(met)} of {self.size} came in {START_S} s; {told}")
        return [met[rank] for rank in range(self.size)]

    def call(self, function: str, *, deadline_s: float = CALL_S, **arguments: Any) -> list[Any]:
        """Run `module:function(world, **arguments)` on every member; answers by rank."""
        self.ask(function, **arguments)
        return self.collect(deadline_s)

    def ask(self, function: str, **arguments: Any) -> None:
        """The first half of `call`: `collect_share` is the second."""
        line = json.dumps({"call": function, "arguments": arguments}) + "\n"
        for channel in self.channels:
            channel.socket.sendall(line.encode())

    def collect(self, deadline_s: float) -> list[Any]:
        """One answer of every member, or Failed with the traceback of the first that has one."""
        until_s = time.monotonic() + deadline_s
        answers: dict[int, Any] = {}
        while len(answers) < self.size:
            waiting = {c: r for r, c in enumerate(self.channels) if r not in answers}
            left_s = until_s - time.monotonic()
            ready = select.select(list(waiting), [], [], max(0.0, left_s))[0]
            if not ready:
                places = [self._stacks(rank) for rank in sorted(waiting.values())]
                self.kill()  # else the next test's deadline would pass in the same world
                said = json.dumps(answers)[:3000]
                raise Failed(
                    f"ranks {sorted(waiting.values())} silent for {deadline_s} s; the others "
                    f"answered {said}\n" + "\n".join(places)
                )
            for channel in ready:
                text = channel.lines.readline()
                rank = waiting[channel]
                if not text:
                    raise Failed(f"rank {rank} ended: {self.log_paths[rank].read_text()[-3000:]}")
                answers[rank] = json.loads(text)
        errors = [f"rank {r}: {a['error']}" for r, a in sorted(answers.items()) if "error" in a]
        if errors:
            raise Failed("\n".join(errors))
        return [answers[rank]["ok"] for rank in range(self.size)]

    def _stacks(self, rank: int) -> str:
        """Where a silent member's threads stand, as faulthandler writes it into its log."""
        log, pid = self.log_paths[rank], self.processes[rank].pid
        before = log.stat().st_size
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR2)
        until_s = time.monotonic() + 5.0
        while log.stat().st_size == before and time.monotonic() < until_s:
            time.sleep(0.05)
        return f"rank {rank}: {log.read_text()[before:][-3000:]}"

    def end(self) -> None:
        """Tell every member to leave, through barrier and destroy; do not wait for it."""
        for channel in self.channels:
            with contextlib.suppress(OSError, ValueError):  # it is gone, or was told already
                channel.socket.sendall(b'{"call": "end"}\n')
                channel.close()

    def kill(self) -> None:
        """End every member at once, whatever it does."""
        for process in self.processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
        for process in self.processes:
            process.wait(20)

    def close(self) -> None:
        """End every member, and wait for it."""
        self.end()
        for process in self.processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                self.kill()
        self.store.close()


class Islands:
    """Several worlds of `size` processes each, which know nothing of each other but an address."""

    def __init__(
        self,
        count: int,
        size: int | Sequence[int],
        log_folder: Path,
        inside: Sequence[Sequence[str]] = (),
    ) -> None:
        """size   of all of them, or of each"""
        self.sizes = [size] * count if isinstance(size, int) else list(size)
        self.size, self.folder, self.inside = max(self.sizes), log_folder, inside
        self.worlds = [self._start(index) for index in range(count)]

    def _start(self, index: int) -> Members:
        folder = self.folder / f"island-{index}"
        folder.mkdir(parents=True, exist_ok=True)
        return Members(self.sizes[index], folder, self.inside[index] if self.inside else ())

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
        found: list[Any] = []
        failed: list[Failed] = []
        for index, world in enumerate(self.worlds):
            try:
                found.append(None if index == ends else world.collect(deadline_s))
            except Failed as failure:  # the others' answers are of this call too
                failed.append(failure)
        if failed:
            raise failed[0]
        if ends >= 0:
            self.worlds[ends].kill()
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
