"""Rendezvous of islands: a small store at one address, which island 0 serves.

    HOST:PORT    island 0 listens there, and on that address only: torch alone would listen on all
                 interfaces of the machine, so the socket is bound before torch gets it
    host/NAME    number of islands, and those that have joined: a second island of the same index,
                 or one with another number of islands, is refused by name

With a token (wire/run_token.py) the store accepts only clients that know it, so it refuses islands
of another run by name. Without one, whoever reaches the port may read and write keys, and a printed
line warns of it. Nothing is encrypted, and gloo groups made over the store send plain numbers. Use
an address that only the islands reach, in a private network or a tunnel (WireGuard, ssh).

Source: torch.distributed.TCPStore, `master_listen_fd`.
"""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from shoal.base.errors import ClusterError, ConfigError
from shoal.fabric.rendezvous.rendezvous_store import is_loopback
from shoal.wire.run_token import TOKEN

BACKLOG = 1024
TRY_S = 0.1
ANY_PORT = 9
"""Arbitrary port for a datagram socket, which sends nothing on connect."""


def join_island_store(
    at: str,
    index: int,
    count: int,
    *,
    deadline_s: float,
    lane: str = "0",
    token: bytes = b"",
    tell: Callable[[str], None] = lambda line: None,
) -> dist.Store:
    """Join the store of all islands; return it once every island has joined this lane.

    Args:
        at: HOST:PORT, the same on every island; HOST is an address of island 0's machine.
        index, count: this island's number, and the number of islands; one island does not use `at`.
        lane: the inner rank whose processes meet; island 0's process of lane "0" serves the store.
        deadline_s: time limit for island 0, and then for the others.
        token: shared secret of the islands; empty: no authentication, and `tell` gets a warning
            line.

    Raises:
        ConfigError: `at` is no address, or the islands' settings differ; ClusterError when island 0
            cannot listen, is not reached, or an island does not join.
    """
    if count == 1:
        return dist.HashStore()
    host, port = parse_address(at)
    hosts = index == 0 and lane == "0"
    listener = _listen(at, host, port) if hosts else None
    if hosts and not token and not is_loopback(host):
        tell(
            f"islands.at = {at}: without a token whoever reaches that port can end this run; "
            f"try: the same {TOKEN} for all islands"
        )
    try:
        if token:
            store = _open_authenticated_store(at, index, listener, token, deadline_s, tell)
        else:
            store = _open_tcp_store(at, index, listener, deadline_s)
        _register_island(store, at, lane, index, count)
        _await(store, at, lane, count, deadline_s)
    except (dist.DistError, RuntimeError) as failure:
        raise ClusterError(
            f"islands.at = {at}: island {index} lost the store of island 0: {failure}"
        ) from failure
    return store


def _open_tcp_store(
    at: str, index: int, listener: socket.socket | None, deadline_s: float
) -> dist.Store:
    """Open the store without authentication."""
    host, port = parse_address(at)
    _wait_for_host(at, host, port, index, deadline_s)
    return dist.TCPStore(
        host,
        port,
        is_master=listener is not None,
        timeout=timedelta(seconds=deadline_s),
        wait_for_workers=False,
        master_listen_fd=None if listener is None else listener.detach(),
    )


def _open_authenticated_store(
    at: str,
    index: int,
    listener: socket.socket | None,
    token: bytes,
    deadline_s: float,
    tell: Callable[[str], None],
) -> dist.Store:
    """Open the store for clients that know the token."""
    from shoal.fabric.rendezvous.authenticated_store import AuthenticatedStore
    from shoal.fabric.rendezvous.store_server import StoreServer

    if listener is not None:
        StoreServer(listener, token, tell)
    try:
        return AuthenticatedStore(*parse_address(at), token, timedelta(seconds=deadline_s))
    except ClusterError as failure:
        raise ClusterError(
            f"islands.at = {at}: island {index} does not reach island 0 there within "
            f"{deadline_s:g} s: {failure}; is island 0 running, with the same {TOKEN}?"
        ) from failure


def parse_address(at: str) -> tuple[str, int]:
    """Return HOST and PORT of an address; an IPv6 host stands in brackets.

    >>> parse_address("10.0.0.1:29400"), parse_address("[fd00::1]:29400")
    (('10.0.0.1', 29400), ('fd00::1', 29400))
    """
    host, _, port = at.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"islands.at = {at}: not HOST:PORT; try: {host or at}:29400")
    return host, int(port)


def listen_at(at: str, tell: Callable[[str], None] | None) -> socket.socket:
    """Return the listening socket of an address.

    The others may know this machine by the address of its router, which it cannot bind. Then all
    interfaces of the machine count.

    Args:
        tell: called with a line if all interfaces count; None: without keys only `at` counts.

    Raises:
        ClusterError: this process cannot listen there.
    """
    host, port = parse_address(at)
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        try:
            return socket.create_server(address, family=family, backlog=BACKLOG)
        except OSError as failure:
            if failure.errno != errno.EADDRNOTAVAIL or tell is None:
                raise
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else family
        found = socket.create_server(
            ("", port), family=family, backlog=BACKLOG, dualstack_ipv6=both
        )
        tell(
            f"islands.at: {host} is no address of this machine, so it listens at port {port} of "
            f"all its interfaces; the router must forward port {port} to it"
        )
        return found
    except OSError as failure:
        raise ClusterError(_explain_deaf(at, failure)) from failure


def _explain_deaf(at: str, failure: OSError) -> str:
    """Return why a process cannot listen at its address, and the way on."""
    host, port = parse_address(at)
    other = f"[{host}]" if ":" in host else host
    why, near = failure.strerror, "an address of this machine (ip addr), and a free port"
    if failure.errno == errno.EADDRINUSE:
        why = "another program has that port, maybe an island that still runs"
        near = f"end it, or {other}:{port + 1} in islands.at of this island alone"
    elif failure.errno == errno.EACCES:
        near = f"a port above 1023, as {other}:29400"
    elif isinstance(failure, socket.gaierror):
        near = f"a name that this machine can look up, or its address, as 10.0.0.1:{port}"
    elif failure.errno == errno.EADDRNOTAVAIL:
        why = f"{host} is no address of this machine"
        near += "; behind a router: islands.key and islands.keys"
    return f"islands.at: this island cannot listen at {at}: {why}; try: {near}"


def local_address(host: str) -> str:
    """Return this machine's numeric address on the route to `host`.

    Args:
        host: as in HOST:PORT; an IPv6 address may stand in brackets.

    Raises:
        ClusterError: no route leads there.

    >>> local_address("127.0.0.1")
    '127.0.0.1'
    """
    host = host.removeprefix("[").removesuffix("]")
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, ANY_PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as failure:
        raise ClusterError(f"islands.at: no route to {host}: {failure.strerror}") from failure


def _listen(at: str, host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address, family=family, backlog=BACKLOG)
    except OSError as failure:
        raise ClusterError(
            f"islands.at = {at}: island 0 cannot listen there: {failure.strerror}; it must be a "
            "free port on an address of island 0's own machine"
        ) from failure


def _wait_for_host(at: str, host: str, port: int, index: int, deadline_s: float) -> None:
    """Wait until island 0 listens; torch would wait too, but would print each try."""
    until_s = time.monotonic() + deadline_s
    while True:
        try:
            with socket.create_connection((host, port), timeout=deadline_s):
                return
        except OSError as failure:
            if time.monotonic() > until_s:
                raise ClusterError(
                    f"islands.at = {at}: island {index} does not reach island 0 there within "
                    f"{deadline_s:g} s: {failure}; is island 0 running, and does its machine "
                    "accept connections to this port?"
                ) from failure
        time.sleep(TRY_S)


def _register_island(store: dist.Store, at: str, lane: str, index: int, count: int) -> None:
    """Register this island in the store; the module lists the refused cases."""
    if index == 0:  # its settings count, not those of the first island to join
        store.set("meeting/count", str(count))
    agreed = int(store.get("meeting/count"))
    if agreed != count:
        raise ConfigError(
            f"islands.count = {count} on island {index}: the islands at {at} are {agreed}; "
            f"try: islands.count={agreed}"
        )
    if store.add(f"meeting/{lane}/{index}", 1) > 1:
        raise ConfigError(
            f"islands.index = {index}: another island with this index has joined at {at}; every "
            f"island needs its own of 0 … {count - 1}"
        )


def _await(store: dist.Store, at: str, lane: str, count: int, deadline_s: float) -> None:
    keys = [f"meeting/{lane}/{index}" for index in range(count)]
    until_s = time.monotonic() + deadline_s
    while away := [str(index) for index, key in enumerate(keys) if not store.check([key])]:
        if time.monotonic() > until_s:
            raise ClusterError(
                f"islands.at = {at}: island{'s' * (len(away) > 1)} {', '.join(away)} of {count} "
                f"did not come within {deadline_s:g} s"
            )
        time.sleep(TRY_S)
