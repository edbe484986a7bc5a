"""Starter of the ranks of one node of several, if no scheduler does it: Kubernetes, ssh.

    python -m shoal.launch.node --nodes 2 --node 0 --processes 8 [--stdin] [--alive FILE] -- WORDS

Every rank is WORDS with RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE set; MASTER_ADDR,
MASTER_PORT and SHOAL_TOKEN are this process's own. It forwards SIGTERM, SIGINT and SIGUSR1, so
ranks save and stop. When one ends with another status than 0 the others get SIGTERM, and SIGKILL
after `--grace` seconds; the status is that of the first that failed. None outlives this process.

    --stdin   the first input line is SHOAL_TOKEN, and the end of the input is SIGTERM: so ssh
              passes on a token that no list of processes shows, and ranks end with its connection
    --alive   is touched every second, for a probe
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from shoal.launch.processes import make_parent_death_hook

LOOK_S = 0.1
ENDS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


def main(words: Sequence[str] | None = None) -> int:
    """Start the ranks, wait for them, and return the status of the node."""
    asked = _parse_arguments(words)
    if asked.stdin:
        os.environ["SHOAL_TOKEN"] = sys.stdin.readline().strip()
    told: list[int] = []
    for number in ENDS:
        signal.signal(number, lambda got, _frame: told.append(got))
    first = asked.node * asked.processes
    size = asked.nodes * asked.processes
    ranks = []
    for local in range(asked.processes):
        place = {"RANK": first + local, "WORLD_SIZE": size, "LOCAL_RANK": local}
        place |= {"LOCAL_WORLD_SIZE": asked.processes, "SHOAL_NODE": asked.node}
        environ = {**os.environ, **{key: str(value) for key, value in place.items()}}
        ranks.append(
            subprocess.Popen(
                asked.command,
                env=environ,
                stdin=subprocess.DEVNULL,
                preexec_fn=make_parent_death_hook(os.getpid()),
            )
        )
    if asked.stdin:
        threading.Thread(target=_await_stdin_end, args=(told,), daemon=True).start()
    return _wait_for_ranks(ranks, told, asked.grace, asked.alive)


def _parse_arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m shoal.launch.node")
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--node", type=int, required=True)
    parser.add_argument("--processes", type=int, required=True)
    parser.add_argument("--grace", type=float, default=60.0)
    parser.add_argument("--stdin", action="store_true")
    parser.add_argument("--alive", type=Path)
    parser.add_argument("command", nargs="+")
    return parser.parse_args(words)


def _await_stdin_end(told: list[int]) -> None:
    sys.stdin.read()
    told.append(signal.SIGTERM)


def _wait_for_ranks(
    ranks: list[subprocess.Popen[bytes]], told: list[int], grace_s: float, alive: Path | None
) -> int:
    status, until_s, heard = 0, float("inf"), 0
    while any(rank.poll() is None for rank in ranks):
        if alive is not None:
            alive.touch()
        failed = next((code for rank in ranks if (code := rank.poll())), 0)
        if failed and not status:
            status = failed
            told.append(signal.SIGTERM)
        for number in told[heard:]:
            heard += 1
            until_s = min(until_s, time.monotonic() + grace_s)
            for rank in ranks:
                if rank.poll() is None:
                    rank.send_signal(number)
        if time.monotonic() > until_s:
            for rank in ranks:
                rank.kill()
        time.sleep(LOOK_S)
    status = status or next((rank.returncode for rank in ranks if rank.returncode), 0)
    return 128 - status if status < 0 else status


if __name__ == "__main__":
    sys.exit(main())
