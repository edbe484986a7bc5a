"""Runs one check on worlds inside a fresh network namespace, where loopback carries nothing else.

    python in_namespace.py module:function '[[size, {arguments}], …]'

prints what rank 0 answered, one JSON list. torch is imported once and the members are forked before
it has any thread. Exit code 77 says that this machine forbids namespaces; the reason is on stderr.
"""

from __future__ import annotations

import ctypes
import fcntl
import importlib
import json
import multiprocessing
import os
import socket
import struct
import sys
import time
from collections.abc import Callable
from itertools import groupby
from typing import Any

import torch

from netns import FORBIDDEN
from shoal.fabric import start_world
from shoal.launch.processes import PrivateStore

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1
DEADLINE_S = 120.0

Check = Callable[..., Any]


def enter_namespace() -> None:
    """A network namespace of our own; without privilege, inside a user namespace of our own."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET) and libc.unshare(CLONE_NEWUSER | CLONE_NEWNET):
        raise PermissionError(f"unshare: {os.strerror(ctypes.get_errno())}")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        request = struct.pack("16sh14x", b"lo", 0)
        flags = struct.unpack("16sh14x", fcntl.ioctl(handle, SIOCGIFFLAGS, request))[1]
        fcntl.ioctl(handle, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | IFF_UP))


def member(
    rank: int,
    size: int,
    store: str,
    check: Check,
    calls: list[dict[str, Any]],
    answers: Any,
) -> None:
    """One process of a world; rank 0 sends back what every call gave."""
    torch.set_num_threads(1)
    world = start_world(
        {
            "SHOAL_STORE": store,
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(size),
        }
    )
    results = [check(world, **arguments) for arguments in calls]
    world.close()
    if rank == 0:
        answers.send(results)


def run_world(size: int, check: Check, calls: list[dict[str, Any]]) -> list[Any]:
    """Rank 0's answers to the calls in a world of that size."""
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    store = PrivateStore()
    members = [
        fork.Process(target=member, args=(rank, size, store.path, check, calls, sender))
        for rank in range(size)
    ]
    for process in members:
        process.start()
    until_s = time.monotonic() + DEADLINE_S
    try:
        for process in members:
            process.join(max(0.0, until_s - time.monotonic()))
        codes = [process.exitcode for process in members]
        if any(codes) or None in codes:
            raise RuntimeError(f"world of {size}: exit codes {codes} (None: silent)")
    finally:
        for process in members:
            process.kill()
        store.close()
    return receiver.recv()


def main() -> None:
    function, requests = sys.argv[1], json.loads(sys.argv[2])
    try:
        enter_namespace()
    except OSError as refusal:
        sys.stderr.write(f"{refusal}\n")
        sys.exit(FORBIDDEN)
    module, name = function.split(":")
    check = getattr(importlib.import_module(module), name)  # what it imports, members inherit
    answers = []
    for size, group in groupby(requests, key=lambda request: request[0]):
        answers += run_world(size, check, [arguments for _, arguments in group])
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
