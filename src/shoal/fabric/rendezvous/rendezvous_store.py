"""Rendezvous of ranks on several machines: a store at MASTER_ADDR:MASTER_PORT, served by rank 0.

    torchrun's own store   used as it is: its boundary is torch's (SECURITY.md). It outlives its
                           workers, so the workers of each round agree on a rendezvous name
    with a token           a store for clients that know it (`authenticated_store.py`)
    without one            torch's TCPStore, and a printed warning

Rank 0 listens on the one address that MASTER_ADDR names; torch alone would listen on all interfaces
of its machine.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from shoal.base.errors import ClusterError
from shoal.fabric.rendezvous.process_info import ProcessInfo
from shoal.wire.run_token import TOKEN

BACKLOG = 1024
LOOK_S = 0.05
"""Seconds between rank 0's checks for ranks that request the rendezvous name."""


def open_store(place: ProcessInfo, timeout: timedelta, tell_after_s: float) -> dist.Store:
    """Open the rendezvous store, served by rank 0; a rank that waits prints so after a while.

    Raises:
        ClusterError: rank 0 cannot listen, or nobody answers; ConfigError for another token than
            rank 0's.
    """
    with _log_if_waiting(place, timeout, tell_after_s):
        return _open_store_unlogged(place, timeout)


@contextmanager
def _log_if_waiting(place: ProcessInfo, timeout: timedelta, tell_after_s: float) -> Iterator[None]:
    """Log once on each machine that this rank waits for rank 0, so that a start is never silent."""
    text = "shoal: rank %d of %d: nobody answers at %s since %.0f s; gives up after %d s"
    values = (place.rank, place.size, place.rendezvous_text, tell_after_s, timeout.total_seconds())
    timer = threading.Timer(tell_after_s, logging.getLogger("shoal").warning, (text, *values))
    timer.daemon = True
    if place.local_rank == 0:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _open_store_unlogged(place: ProcessInfo, timeout: timedelta) -> dist.Store:
    if place.agent_store:
        store = _torchs(place, None, timeout)
        if place.rank == 0 and not is_loopback(place.host):
            logging.getLogger("shoal").warning(
                "shoal: ranks meet at torchrun's store at %s, which asks nobody who he is: whoever "
                "reaches that port can end this run; try: "
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 and %s (docs/start/cluster.md)",
                *(place.rendezvous_text, TOKEN),
            )
        return dist.PrefixStore(agree_on_name(store, place, timeout), store)
    if place.token:
        from shoal.fabric.rendezvous.authenticated_store import AuthenticatedStore
        from shoal.fabric.rendezvous.store_server import StoreServer  # torchrun's worlds have none

        if place.hosts_store:
            StoreServer(_listen(place, quiet=True), place.token)
        return AuthenticatedStore(place.host, place.port, place.token, timeout)
    if place.hosts_store and not is_loopback(place.host):
        logging.getLogger("shoal").warning(
            "shoal: the store at %s has no token: whoever reaches that port can end this run; "
            "try: export %s=$(openssl rand -hex 32) for all of its processes",
            *(place.rendezvous_text, TOKEN),
        )
    return _torchs(place, _listen(place) if place.hosts_store else None, timeout)


def agree_on_name(store: dist.Store, place: ProcessInfo, timeout: timedelta) -> str:
    """Return a rendezvous name made by rank 0, which answers each rank's random request.

    Keys of an earlier round in the store answer no such request, and neither does a rank 0 that has
    ended.

    Raises:
        ClusterError: ranks sent no request in time; the message names them.
    """
    if place.rank:
        word = secrets.token_hex(8)
        store.set(f"asks/{place.rank}", word)
        store.wait([f"told/{word}"], timeout)
        name = store.get(f"told/{word}").decode()
        store.set(f"{name}/came/{place.rank}", "")
        return name
    name, until_s = f"round-{secrets.token_hex(8)}", time.monotonic() + timeout.total_seconds()
    told: dict[int, str] = {}
    away = list(range(1, place.size))
    while away:
        for rank in away:
            key = f"asks/{rank}"
            asked = store.get(key).decode() if store.check([key]) else ""
            if asked != told.get(rank, ""):
                told[rank] = asked  # a restarted rank sends a new request
                store.set(f"told/{asked}", name)
        away = [rank for rank in away if not store.check([f"{name}/came/{rank}"])]
        if away and time.monotonic() > until_s:
            raise ClusterError(
                f"rank{'s' * (len(away) > 1)} {', '.join(map(str, away))} of {place.size} did not "
                f"come to {place.rendezvous_text} within {timeout.total_seconds():g} s "
                f"({place.started_by}); look at what they print"
            )
        time.sleep(LOOK_S if away else 0)
    return name


def _torchs(place: ProcessInfo, listener: socket.socket | None, timeout: timedelta) -> dist.Store:
    return dist.TCPStore(
        place.host,
        place.port,
        place.size,
        is_master=place.hosts_store,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=None if listener is None else listener.detach(),
    )


def _listen(place: ProcessInfo, *, quiet: bool = False) -> socket.socket:
    """Listen on the address of MASTER_ADDR, or on all interfaces if it is none of this machine's.

    Args:
        quiet: do not print which of both.
    """
    why = ""
    try:
        family, _, _, _, address = socket.getaddrinfo(
            place.host, place.port, type=socket.SOCK_STREAM
        )[0]
        if not is_loopback(str(address[0])) or is_loopback(place.host):
            return socket.create_server(address, family=family, backlog=BACKLOG)
        why = f"means {address[0]} here, which other machines do not reach"  # Debian's /etc/hosts
    except OSError as failure:
        if failure.errno != errno.EADDRNOTAVAIL:
            raise ClusterError(
                f"MASTER_ADDR, MASTER_PORT = {place.rendezvous_text}: rank 0 cannot listen there: "
                f"{failure.strerror or failure}; try: another MASTER_PORT"
            ) from failure
        why = "is no address of rank 0's machine"  # a service's address, in front of rank 0
    if not quiet:
        logging.getLogger("shoal").warning(
            "shoal: MASTER_ADDR = %s %s: the store listens on all interfaces; try: the address "
            "of rank 0's machine in digits",
            *(place.host, why),
        )
    try:
        return socket.create_server(("", place.port), backlog=BACKLOG)
    except OSError as failure:
        raise ClusterError(
            f"MASTER_PORT = {place.port}: rank 0 cannot listen there: {failure.strerror}; try: "
            "another MASTER_PORT"
        ) from failure


def is_loopback(host: str) -> bool:
    """Return whether a host name means this machine alone.

    >>> is_loopback("localhost"), is_loopback("127.0.1.1"), is_loopback("node7")
    (True, True, False)
    """
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
