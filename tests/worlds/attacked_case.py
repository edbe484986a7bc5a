"""Ranks, or islands, in network namespaces of their own, and a stranger in a third who attacks them.

    python attacked_case.py ranks | islands

The stranger is another user too. He begins before rank 1 comes, and goes on while they train: each
attack of the lab log's table, over and over. Prints what the members say, and what he reached, as
JSON; the ranks' sums are right or they say why not. Exit code 77: no network namespaces here.
"""

from __future__ import annotations

import contextlib
import encodings.idna  # noqa: F401  a stranger may not read where it lies
import json
import logging
import os
import resource
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import netns
from shoal.base.errors import ShoalError
from shoal.fabric import start_world
from shoal.fabric import world as worlds
from shoal.fabric.islands.heartbeat import parse_heartbeat
from shoal.fabric.islands.inter_island_group import connect_islands, join_island_store
from stranger import become_nobody

HOST, PORT, TOKEN = "10.77.0.1", 29411, "the token of the run under attack"
LATER_S, ROUNDS, DEADLINE_S, STRANGER = 3.0, 40, 40.0, 2
TRY = timedelta(seconds=0.4)


def torchs() -> Any:
    return dist.TCPStore(HOST, PORT, timeout=TRY, wait_for_workers=False)


def overwritten(store: Any) -> str:
    """Every key that he can list, with 300 bytes of junk: gloo's addresses are among them."""
    for key in store.list_keys():
        store.set(key, "x" * 300)
    return "listed and overwrote keys"


def raw(junk: bytes, times: int) -> str:
    sent = 0
    with socket.create_connection((HOST, PORT), timeout=1) as line:
        for _ in range(times):
            line.sendall(junk)
            sent += len(junk)
    return f"{sent} bytes were taken"


def joined(token: bytes) -> str:
    """As an island of his own would, with what settings he likes; before the rightful one comes."""
    join_island_store(f"{HOST}:{PORT}", 1, 2, deadline_s=0.5, token=token, tell=lambda line: None)
    return "joined"


ATTACKS: dict[str, Callable[[], str]] = {
    "list and overwrite": lambda: overwritten(torchs()),
    "take island 1's place": lambda: f"took it: {torchs().add('meeting/0/1', 1)}",
    "a beat that is none": lambda: str(torchs().set("lane/0/beat/1", b"\xff not json")),
    "a beat that accuses": lambda: str(torchs().set("lane/0/beat/1", '[9, {}, [0], "lies"]')),
    "join without a token": lambda: joined(b""),
    "join with another token": lambda: joined(b"the token of another run"),
    "fill its memory": lambda: raw(bytes(1 << 20), 300),
    "lengths of 2^62": lambda: raw(struct.pack("<Q", 1 << 62), 64),
    "garbage": lambda: raw(os.urandom(4096), 16),
}


def listened() -> bool:
    with socket.socket() as line:
        return line.connect_ex((HOST, PORT)) == 0


def attack(net: netns.Net, until_s: float) -> dict[str, str]:
    """What the attacks reached; the last of each counts, but one that got in counts for good."""
    net.enter(STRANGER)
    become_nobody()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # torch tells each of his tries at length
    with contextlib.suppress(OSError):
        while time.monotonic() < until_s and not listened():
            time.sleep(0.05)
    reached: dict[str, str] = {}
    held: list[socket.socket] = []
    while time.monotonic() < until_s:
        for name, tries in ATTACKS.items():
            try:
                told = tries()
            except (OSError, RuntimeError, dist.DistError, ShoalError) as refused:
                reached.setdefault(name, f"refused: {type(refused).__name__}: {refused}"[:99])
            else:
                reached[name] = told
        with contextlib.suppress(OSError):
            held += [socket.create_connection((HOST, PORT), timeout=1) for _ in range(30)]
        for port in range(30000, 61000, 997):  # gloo's own are anywhere
            with contextlib.suppress(OSError), socket.socket() as line:
                line.settimeout(0.01)
                line.connect((HOST, port))
    return reached


def tell_where_it_listens() -> None:
    """Say at which address of this namespace somebody listens at the port, as soon as one does."""

    def look() -> None:
        until_s, found = time.monotonic() + DEADLINE_S, list[str]()
        while time.monotonic() < until_s and not found:
            tables = ("/proc/thread-self/net/tcp", "/proc/thread-self/net/tcp6")
            lines = [row for table in tables for row in Path(table).read_text().splitlines()[1:]]
            rows = [line.split() for line in lines]
            found = [row[1] for row in rows if row[3] == "0A" and row[1].endswith(f":{PORT:04X}")]
            time.sleep(0.01)
        logging.getLogger("shoal").warning("listens at %s", found)

    threading.Thread(target=look, daemon=True).start()


def rank(net: netns.Net, number: int, token: str) -> dict[str, Any]:
    net.enter(number)
    if number == 0:
        tell_where_it_listens()
    if not token:
        worlds.JOIN_TIMEOUT = timedelta(seconds=6)  # the start fails, and need not take minutes
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    place = {"RANK": str(number), "WORLD_SIZE": "2", "MASTER_ADDR": HOST, "MASTER_PORT": str(PORT)}
    world = start_world({**place, "SHOAL_TOKEN": token})
    right = 0
    for _ in range(ROUNDS):
        total = torch.full((1000,), float(number + 1))
        world.all_reduce(total)
        right += bool((total == 3).all())
        time.sleep(0.1)
    told = world.gather_json(number)
    group = dist.new_group([0, 1])
    dist.barrier(group=group)
    world.close()
    return {"right": right, "told": told}


def island(net: netns.Net, number: int, token: str) -> dict[str, Any]:
    net.enter(number)
    if number == 0:
        tell_where_it_listens()
    lines: list[str] = []
    at = f"{HOST}:{PORT}"
    store = join_island_store(
        at, number, 2, deadline_s=DEADLINE_S / 2, token=token.encode(), tell=lines.append
    )
    plane = connect_islands(
        store, "0", number, 2, connections=1, host=HOST, deadline_s=10, tell=lines.append
    )
    right = 0
    for _ in range(ROUNDS):
        told = plane.gather(str(number).encode(), deadline_s=10)
        right += told == [b"0", b"1"]
        time.sleep(0.1)
    beats = [parse_heartbeat(store.get(f"lane/0/beat/{k}"), 2).given_up for k in range(2)]
    plane.close()
    return {"right": right, "told": beats, "lines": lines}


def forked(work: Callable[[], Any]) -> tuple[int, int]:
    """(pid, where its answer is read) of a process that does it."""
    reads, writes = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writes)
        return pid, reads
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shoal").addHandler(handler)
    try:
        answer = work()
    except (ShoalError, RuntimeError) as failure:
        answer = {"failed": f"{type(failure).__name__}: {failure}"}
    if "right" in answer or "failed" in answer:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        answer |= {"heard": heard, "peak_kib": peak}
    os.write(writes, json.dumps(answer).encode())
    os._exit(0)


def main() -> None:
    """Fork all members and the stranger, and print what they say."""
    torch.set_num_threads(1)
    member, token = {"ranks": rank, "islands": island}[sys.argv[1]], sys.argv[2:]
    try:
        net = netns.Net(3)
    except netns.Forbidden as refusal:
        sys.stderr.write(f"{refusal}\n")
        sys.exit(netns.FORBIDDEN)
    with net:
        until_s = time.monotonic() + LATER_S + 0.1 * ROUNDS + 1
        secret = token[0] if token else TOKEN
        started = [forked(lambda: attack(net, until_s)), forked(lambda: member(net, 0, secret))]
        time.sleep(LATER_S)
        started.append(forked(lambda: member(net, 1, secret)))
        answers = [json.loads(os.fdopen(reads).read() or "null") for _, reads in started]
        for pid, _ in started:
            os.waitpid(pid, 0)
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
