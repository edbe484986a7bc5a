"""Client of the watchdog: watch the ranks of a run from outside, if Shoal's launcher does not.

Under torchrun, srun, Ray and the like, and in a loop of one process, nothing outside of the ranks
knows their progress. So the first rank of each node starts a small process without torch
(launch/watchdog.py). Every rank reports its steps and collectives to it in a page of shared memory,
and answers it with stacks. The watchdogs of several nodes talk to that of node 0
(launch/watch/remote_nodes.py).

A node here is a set of processes with one memory, pid namespace and network: a machine or a
container.
"""

from __future__ import annotations

import atexit
import json
import os
import secrets
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from shoal.base.text.user_frames import OWN_FOLDER
from shoal.fabric import World
from shoal.fabric.rendezvous.rendezvous_store import is_loopback
from shoal.trainer.guards.collective_log import CollectiveRecorder
from shoal.wire import phases
from shoal.wire.stack_dumps import start_stack_thread
from shoal.wire.watch_page import PAGE_VARIABLE, WatchPage, attach_page, supports_watch_pages

LAUNCHERS = {"TORCHELASTIC_RUN_ID", "SLURM_PROCID", "SHOAL_NODE"}
"""Variables of torchrun, srun and Shoal's starter of nodes, whose ranks are watched in any case."""

_kept: list[subprocess.Popen[str]] = []
"""The watchdog that this process started; its stdin closes when this process ends."""


class WatchdogClient:
    """Watch page of this rank, which the watchdog reads; call `leave` when the run is closed.

    Attributes:
        runs: open runs of this process.
    """

    def __init__(self, page: WatchPage) -> None:
        self.page, self.runs = page, 0
        self._fingerprints: CollectiveRecorder | None = None

    def compare_collectives(self, world: World) -> None:
        """Start to record fingerprints of this rank's collectives, to compare ranks."""
        if world.group is not None and self._fingerprints is None:
            self._fingerprints = CollectiveRecorder(self.page, 1)

    @contextmanager
    def pause_comparison(self, world: World) -> Iterator[None]:
        """Record no collectives meanwhile: one rank works alone, and ranks make different calls."""
        recorded, self._fingerprints = self._fingerprints, None
        if recorded is not None:
            recorded.close()
        try:
            yield
        finally:
            if recorded is not None:
                self.compare_collectives(world)

    def close(self) -> None:
        """Count a run as closed; after the last one the watch ends."""
        self.runs -= 1
        if self.runs <= 0:
            self.page.close()
            if self._fingerprints is not None:
                self._fingerprints.close()


_open: list[WatchdogClient] = []
"""The watch of the open runs, if there is one."""


def pause_comparison(world: World) -> AbstractContextManager[None]:
    """Return a context in which the ranks' collectives are not compared, if they are otherwise."""
    return _open[0].pause_comparison(world) if _open else nullcontext()


def start_watchdog(
    world: World,
    folder: Path | None,
    environ: Mapping[str, str] = os.environ,
    *,
    own: bool = False,
) -> WatchdogClient | None:
    """Start the watchdogs of a run; every rank calls it once its world exists.

    Args:
        own: the processes run a user's own loop: it is watched under any launcher.

    Returns:
        This rank's watch; None if Shoal's launcher watches the run, or the system has no named
        shared memory. While a run is open, further runs of its ranks share its watch.
    """
    if LAUNCHERS.isdisjoint(environ) and not (own and _has_no_launcher(world)):
        return None
    beside = _open[0] if _open and not _open[0].page.is_closed else None
    may = (
        (phases.page is None or phases.page.is_closed)
        and supports_watch_pages()
        and hasattr(os, "pidfd_open")
    )
    here = {"may": may, "open": beside is not None, "node": _node_identity() if may else ""}
    places = world.gather_json(here)
    if beside is not None and all(place["open"] for place in places):
        if folder is not None and world.is_first:
            _send_message({"further": str(folder.absolute())})
        return _register_run(beside, world)
    if not all(place["may"] for place in places):
        return None
    names = list(dict.fromkeys(place["node"] for place in places))
    members = [[r for r, one in enumerate(places) if one["node"] == name] for name in names]
    number = names.index(here["node"])
    mine = members[number]
    started: dict[str, Any] = {}
    if world.rank == mine[0]:
        hub = world.is_first and len(names) > 1
        started = _start_node_watchdog(len(mine), _list_own_addresses(environ) if hub else [])
    told = world.gather_json(
        {"pid": os.getpid(), "host": os.uname().nodename, **started}
        | ({"token": secrets.token_hex(32)} if world.is_first else {})
    )
    complete = all(told[ranks[0]].get("paths") for ranks in members)
    if not complete or (len(names) > 1 and not told[0].get("at")):
        _send_message({})
        return None
    page = WatchPage.open({PAGE_VARIABLE: told[mine[0]]["paths"][mine.index(world.rank)]})
    if page is None:
        return None
    atexit.register(page.close)  # a process that ends without it was killed
    attach_page(page)
    start_stack_thread(page)
    page.folder = folder
    _open[:] = [WatchdogClient(page)]
    _send_message(
        {
            "folder": str(folder.absolute()) if folder else "",
            "number": number,
            "nodes": [
                {
                    "ranks": ranks,
                    "pids": [told[rank]["pid"] for rank in ranks],
                    "host": told[ranks[0]]["host"],
                }
                for ranks in members
            ],
            "at": told[0].get("at"),
            "token": told[0]["token"],
        }
    )
    return _register_run(_open[0], world)


def _register_run(beside: WatchdogClient, world: World) -> WatchdogClient:
    world.traffic.page = beside.page
    beside.runs += 1
    return beside


def _has_no_launcher(world: World) -> bool:
    """Return whether no known launcher started these processes: a person, Ray or Lightning did.

    At an interactive prompt hours without a step are normal.
    """
    if "TORCHELASTIC_USE_AGENT_STORE" in os.environ:  # torchrun has its LAUNCHERS too
        return False
    return world.size > 1 or not (hasattr(sys, "ps1") or "ipykernel" in sys.modules)


def report_own_disk(world: World) -> None:
    """Report to this node's watchdog that this node writes its events to its own disk."""
    if world.writes_files and not world.is_first:
        _send_message({"keeps": True})


def _node_identity() -> str:
    """Return a key that is equal for processes of one machine, pid and net namespace.

    Such processes reach each other's memory by /proc, and each other by loopback.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return " ".join([boot, *(os.readlink(f"/proc/self/ns/{name}") for name in ("pid", "net"))])
    except OSError:
        return os.uname().nodename


def _list_own_addresses(environ: Mapping[str, str]) -> list[str]:
    """Return addresses at which other ranks reach this machine, and last MASTER_ADDR."""
    return list(
        dict.fromkeys([*_list_connection_addresses(), *filter(None, [environ.get("MASTER_ADDR")])])
    )


def _list_connection_addresses() -> Iterator[str]:
    """Yield this end's addresses of connections that leave this machine."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as one:
                if one.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                here, there = (str(end[0]) for end in (one.getsockname(), one.getpeername()))
        except OSError:  # it listens, has ended, or was closed meanwhile
            continue
        here = here.removeprefix("::ffff:")
        if here != there.removeprefix("::ffff:") and not is_loopback(here):
            yield here


def _start_node_watchdog(count: int, addresses: list[str]) -> dict[str, Any]:
    """Start the watchdog of a node; return the `paths` of its pages, {} if it did not start.

    Args:
        addresses: the watchdog listens for other nodes at the first one that works, and returns it
            as `at`; []: there are no others.
    """
    root = str(Path(OWN_FOLDER).parent)
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    try:
        one = subprocess.Popen(
            [sys.executable, "-m", "shoal.launch.watchdog", str(count), *addresses],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
        _kept[:] = [one]
        found = json.loads(one.stdout.readline()) if one.stdout else {}
    except (OSError, ValueError):
        return {}
    return dict(found)


def _send_message(words: Mapping[str, Any]) -> None:
    """Send a message to the watchdog, if this rank started one."""
    for one in _kept:
        if one.stdin is not None:
            try:
                one.stdin.write(f"{json.dumps(words)}\n")
                one.stdin.flush()
            except OSError:  # the watchdog has ended: the run continues unwatched
                _kept.clear()
