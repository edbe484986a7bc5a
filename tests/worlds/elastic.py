"""Two torchrun agents, each on a node of its own, and their rendezvous in a third place.

A node is a network namespace (netns.py) in which no server is asked for names: one that cannot be
reached is waited for, ten seconds for each.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from forks import Running, shared
from netns import Net

HERE = Path(__file__).parent
PORT = 29400
STORE = (
    "import sys, time, torch.distributed as d\n"
    f"store = d.TCPStore(sys.argv[1], {PORT}, is_master=True, wait_for_workers=False)\n"
    "time.sleep(1e4)\n"
)


class Nodes:
    """A rendezvous, and agents that come and go; `close` leaves nothing.

    own     a folder of which each node sees one of its own, `disk(node)`; None: all share all
    least   how many nodes the run begins with
    """

    def __init__(
        self,
        folder: Path,
        command: list[str],
        own: Path | None = None,
        least: int = 1,
        **environment: str,
    ) -> None:
        self.net, self.least = Net(3), least
        self.folder, self.command, self.own = folder, command, own
        if own is not None:
            own.mkdir()
        self.agents: dict[int, Running] = {}
        self.hosts = folder / "hosts"
        names = [f"{address} node{number}" for number, address in enumerate(self.net.addresses)]
        self.hosts.write_text("\n".join(["127.0.0.1 localhost", *names, ""]))
        (folder / "no-server").touch()
        self.environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "eth0",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            **environment,
        }
        self.store = self._start(2, "-c", STORE, self.net.addresses[2])

    def start(self, node: int) -> None:
        """Start an agent, which starts one worker."""
        timing = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"
        self.agents[node] = self._start(
            *(node, "-m", "torch.distributed.run", f"--nnodes={self.least}:2"),
            *("--nproc-per-node=1", "--max-restarts=3", "--rdzv-backend=c10d", "--rdzv-id=job"),
            *(f"--rdzv-endpoint={self.net.addresses[2]}:{PORT}", "--monitor-interval=0.1"),
            *("--local-addr", self.net.addresses[node], f"--rdzv-conf=is_host=false,{timing}"),
            *self.command,
        )

    def kill(self, node: int) -> list[int]:
        """Kill an agent and all that it started; gives their process ids."""
        processes = [self.agents[node].pid, *children(self.agents[node].pid)]
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self.agents[node].wait()
        return processes

    def said(self, node: int) -> str:
        """What an agent and its workers printed, from its first start on."""
        return (self.folder / f"node{node}.log").read_text()

    def disk(self, node: int) -> Path:
        """What a node sees as `own`."""
        path = self.folder / f"disk{node}"
        path.mkdir(exist_ok=True)
        return path

    def close(self) -> None:
        """End everything."""
        for node, agent in self.agents.items():
            if agent.poll() is None:
                self.kill(node)
        self.store.kill()
        self.store.wait()
        self.net.close()

    def __enter__(self) -> Nodes:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, node: int, *words: str) -> Running:
        own = {"/etc/hosts": self.hosts, "/etc/resolv.conf": self.folder / "no-server"}
        if self.own is not None:
            own[str(self.own)] = self.disk(node)
        place = {
            "net": self.net.path(node),
            "mounts": {path: str(one) for path, one in own.items()},
        }
        environ = {**self.environment, "SHOAL_TEST_NODE": json.dumps(place)}
        return shared().start(words, environ, self.folder, log=self.folder / f"node{node}.log")


def children(process: int) -> list[int]:
    """The ids of all that a process started, and they, and so on."""
    found = []
    for task in Path(f"/proc/{process}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, task.read_text().split()):
                found += [child, *children(child)]
    return found


def wait_for(what: Callable[[], Any], limit_s: float, told: Callable[[], str]) -> None:
    """Wait until something is so; fails the test with what `told` says."""
    until_s = time.monotonic() + limit_s
    while not what():
        assert time.monotonic() < until_s, told()
        time.sleep(0.1)


def rounds(logs: Path) -> list[dict[str, Any]]:
    """What elastic_loop.py's processes wrote, in the order in which they began."""
    found = []
    for path in sorted(logs.glob("*.jsonl"), key=lambda one: float(one.name.split("-")[0])):
        lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
        if lines:
            steps = [line for line in lines if "step" in line]
            found.append({**lines[0], "steps": steps, "done": "done" in lines[-1]})
    return found
