"""Another user takes a rank's place in a gloo connection while ranks connect.

    python hijack_case.py proof | no-proof

forks two ranks, of which rank 0 connects a second later, and a stranger who connects to each port
that is opened meanwhile and says the small numbers by which gloo tells connections apart; what he is
sent he sends back. Which of two ranks waits for the other's connection depends on their ports: where
it is rank 0, he comes too late. So it is tried until he is in, TRIES times at most; prints what the
ranks say in each try, as JSON. All of it in a network namespace of its own: on the machine's loopback
he would take the places of ranks of other tests too, and did. Exit code 77: no namespaces here.
"""

from __future__ import annotations

import contextlib
import encodings.idna  # noqa: F401  a stranger may not read where it lies
import json
import os
import socket
import struct
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import netns
from shoal.base.errors import ShoalError
from shoal.fabric import start_world
from shoal.fabric import world as worlds
from shoal.fabric.collectives import json_messages
from shoal.launch.processes import PrivateStore
from stranger import become_nobody

LATER_S, PROOF_S, ALL_S, TRIES = 0.5, 3.0, 15.0, 12


def ports() -> set[int]:
    """Ports of this machine at which somebody listens, as everybody may read."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {int(row[1].split(":")[1], 16) for row in rows if row[3] == "0A"}


def attack(before: set[int]) -> None:
    become_nobody()
    until_s, held = time.monotonic() + ALL_S, []
    while time.monotonic() < until_s:
        for port in ports() - before:
            before.add(port)
            for number in range(8):
                with contextlib.suppress(OSError):
                    made = socket.create_connection(("127.0.0.1", port), timeout=1)
                    made.sendall(struct.pack("<q", number))
                    made.setblocking(False)
                    held.append(made)
        for one in held:
            with contextlib.suppress(OSError):
                one.send(one.recv(4096))


def rank(number: int, store: PrivateStore, proven: bool) -> dict[str, Any]:
    json_messages.PROOF_S = PROOF_S
    worlds.COLLECTIVE_TIMEOUT = timedelta(seconds=PROOF_S)
    if not proven:
        worlds.authenticate_peers = lambda *_: None  # type: ignore[assignment]
    join = dist.init_process_group
    if number == 0:
        dist.init_process_group = lambda *a, **k: (time.sleep(LATER_S), join(*a, **k))  # type: ignore
    place = {"RANK": number, "WORLD_SIZE": 2, "LOCAL_RANK": number, "LOCAL_WORLD_SIZE": 2}
    began_s = time.monotonic()
    try:
        world = start_world({**{k: str(v) for k, v in place.items()}, "SHOAL_STORE": store.path})
        total = torch.ones(3)
        world.all_reduce(total)
        said = f"sum {total.tolist()}"
    except (ShoalError, RuntimeError) as failure:
        said = f"{type(failure).__name__}: {failure}"
    return {"said": said, "after_s": round(time.monotonic() - began_s, 1)}


def main() -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        net = netns.Net(1)
    except netns.Forbidden as refusal:
        sys.stderr.write(f"{refusal}\n")
        sys.exit(netns.FORBIDDEN)
    tries: list[Any] = []
    with net:
        net.enter(0)
        while len(tries) < TRIES and (not tries or all("sum" in one["said"] for one in tries[-1])):
            tries.append(tried())
    print(json.dumps(tries))


def tried() -> list[dict[str, Any]]:
    """Fork all three; gives what the two ranks say."""
    store, before = PrivateStore(), ports()
    attacker = os.fork()
    if attacker == 0:
        attack(before)
        os._exit(0)
    pipes, pids = [], []
    for number in range(2):
        reads, writes = os.pipe()
        pid = os.fork()
        if pid == 0:
            told = rank(number, store, sys.argv[1] == "proof")
            os.write(writes, json.dumps(told).encode())
            os._exit(0)
        os.close(writes)
        pipes.append(reads)
        pids.append(pid)
    answers = [json.loads(os.fdopen(pipe).read()) for pipe in pipes]
    os.kill(attacker, 9)
    for pid in (*pids, attacker):
        os.waitpid(pid, 0)
    store.close()
    return answers


if __name__ == "__main__":
    main()
