"""The store of several machines: who does not know the token reads, writes and stops nothing."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist

import stranger
from shoal.base.errors import ClusterError, ConfigError
from shoal.fabric._torch import clone_store_connection
from shoal.fabric.rendezvous.authenticated_store import AuthenticatedStore
from shoal.fabric.rendezvous.store_server import StoreServer
from shoal.wire import authenticated_stream
from shoal.wire.authenticated_stream import (
    HELLO,
    MOST_BYTES,
    NONCE,
    AuthenticatedStream,
    create_streams,
    mac,
)

TOKEN = b"a token of this test's own"
SHORT = timedelta(seconds=2)


class Served:
    """A store of this process, and what it told of strangers."""

    def __init__(self) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = listener.getsockname()[1]
        self.told: list[str] = []
        StoreServer(listener, TOKEN, self.told.append)

    def line(self) -> str:
        """The first line, which a thread of the server tells a moment later."""
        until_s = time.monotonic() + 10
        while not self.told and time.monotonic() < until_s:
            time.sleep(0.01)
        return self.told[0]

    def client(self, token: bytes = TOKEN, timeout: timedelta = SHORT) -> AuthenticatedStore:
        return AuthenticatedStore("127.0.0.1", self.port, token, timeout)

    def stranger(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=5)


@pytest.fixture
def served() -> Iterator[Served]:
    made = Served()
    yield made
    made.client().set("still", "here")  # whatever a test did to it


def test_it_is_a_store_of_torchs(served: Served) -> None:
    """Each method, called as torch's C++ does: over a PrefixStore."""
    one, other = (dist.PrefixStore("p", served.client()) for _ in range(2))
    one.set("text", "some")
    one.set("bytes", b"\x00\xff")
    assert other.get("text") == b"some"
    assert other.multi_get(["text", "bytes"]) == [b"some", b"\x00\xff"]
    assert one.add("n", 3) == 3
    assert other.add("n", -1) == 2
    assert other.get("n") == b"2"
    assert one.compare_set("c", "", "first") == b"first"
    assert other.compare_set("c", "", "second") == b"first"
    assert other.compare_set("c", "first", "second") == b"second"
    assert one.check(["c", "n"])
    assert not one.check(["c", "missing"])
    assert other.delete_key("c")
    assert not other.delete_key("c")
    assert clone_store_connection(one).get("text") == b"some"
    assert not served.told


def test_a_wait_ends_when_the_last_key_comes_or_its_time_is_over(served: Served) -> None:
    store = served.client()
    with pytest.raises(dist.DistStoreError, match="wait timeout"):
        store.wait(["a", "b"], timedelta(seconds=0.1))
    done: list[bytes] = []

    def ask() -> None:
        store.wait(["a", "b"])
        done.extend(store.multi_get(["a", "b"]))

    thread = threading.Thread(target=ask)
    thread.start()
    store.set("b", "2")  # this thread is not held up by the other's wait
    time.sleep(0.05)
    assert not done
    store.set("a", "1")
    thread.join(5)
    assert done == [b"1", b"2"]


def test_another_token_is_refused_by_name_on_both_sides(served: Served) -> None:
    with pytest.raises(ConfigError, match="another token than this process: it is another run's"):
        served.client(b"the token of another run")
    assert "refused at the store of this run: it does not know the token" in served.line()
    with contextlib.suppress(ConfigError):
        served.client(b"the token of another run")
    assert len(served.told) == 1, "one line, not one for each"


def test_who_took_the_servers_port_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that does not know the token, one of torch's, and one that says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def pretend() -> None:
            peer, _ = listener.accept()
            peer.sendall(HELLO + os.urandom(NONCE))
            peer.recv(64)
            peer.sendall(os.urandom(32))

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(ConfigError, match="another token than this process"):
            AuthenticatedStore("127.0.0.1", listener.getsockname()[1], TOKEN, SHORT)
        thread.join()
    monkeypatch.setattr(authenticated_stream, "HELLO_S", 0.5)
    torchs = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for port in (torchs.port, 1):
        began_s = time.monotonic()
        with pytest.raises(ClusterError, match="nobody who knows the token answers at 127.0.0.1"):
            AuthenticatedStore("127.0.0.1", port, TOKEN, SHORT)
        assert time.monotonic() - began_s < 9


def test_a_strangers_torch_store_gets_nothing(served: Served) -> None:
    """The tries of faults_measured.md, with torch's own client: list, read, overwrite, delete."""
    served.client().set("address/0", "where rank 0 is")
    with pytest.raises((RuntimeError, dist.DistError)):
        dist.TCPStore("127.0.0.1", served.port, timeout=SHORT, wait_for_workers=False)
    assert served.client().get("address/0") == b"where rank 0 is"


BAD = {
    "nothing": b"",
    "zeros": bytes(64),
    "random": os.urandom(4096),
    "a length of 2^62": struct.pack("!Q", 1 << 62) * 16,
    "torch's own words": b"\x00\x00\x00\x00init/" * 20,
    "an old greeting": os.urandom(NONCE) + mac(TOKEN, b"client", bytes(NONCE), bytes(NONCE)),
}


@pytest.mark.parametrize("what", BAD)
def test_garbage_ends_the_strangers_connection_alone(
    served: Served, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(authenticated_stream, "HELLO_S", 0.3)
    known = served.client()
    with served.stranger() as line:
        line.sendall(BAD[what])
        line.settimeout(8)
        with contextlib.suppress(ConnectionError):
            while line.recv(4096):
                pass  # until it hangs up
    known.set("k", "v")
    assert known.get("k") == b"v"


def test_what_a_stranger_sends_is_not_kept(served: Served) -> None:
    """Junk ends after 64 bytes; a known peer's frame has a limit as well."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sent = 0
    with served.stranger() as line, contextlib.suppress(OSError):
        line.settimeout(2)
        for _ in range(300):
            sent += line.send(bytes(1 << 20))
    assert sent < 64 << 20  # what the kernel's buffers took before it hung up
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 << 10
    with pytest.raises(Exception, match="at most"):
        served.client().set("k", bytes(MOST_BYTES))


def test_half_open_connections_are_let_go_and_hold_nobody_up(served: Served) -> None:
    known = served.client()
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as held:
        for _ in range(min(300, limit // 4)):
            held.enter_context(served.stranger())
        began_s = time.monotonic()
        served.client().set("new", "comer")
        assert known.get("new") == b"comer"
        assert time.monotonic() - began_s < 2


def greeted(served: Served) -> tuple[socket.socket, AuthenticatedStream]:
    """A connection of one who knows the token, and what seals his frames."""
    line = served.stranger()
    hello = line.recv(len(HELLO) + NONCE, socket.MSG_WAITALL)
    theirs, mine = hello[len(HELLO) :], os.urandom(NONCE)
    line.sendall(mine + mac(TOKEN, b"client", theirs, mine))
    line.recv(32, socket.MSG_WAITALL)
    return line, create_streams(TOKEN, theirs, mine)[0]


ALTERED: dict[str, Callable[[bytes], bytes]] = {
    "said again": lambda frame: frame + frame,
    "one bit flipped": lambda frame: frame[:-1] + bytes([frame[-1] ^ 1]),
    "its proof cut off": lambda frame: frame[:4] + bytes(16) + frame[20:],
}


@pytest.mark.parametrize("how", ALTERED)
def test_a_frame_that_was_altered_ends_the_connection(served: Served, how: str) -> None:
    known = served.client()
    line, says = greeted(served)
    with line:
        line.sendall(ALTERED[how](says.encode_frame(["add", "count", 1])))
        while line.recv(4096):
            pass
    assert known.add("count", 0) == (1 if how == "said again" else 0)
    assert "a frame that the other side did not send" in served.line()


def test_one_who_speaks_for_another_connection_is_not_heard(served: Served) -> None:
    """A captured stream, played again on a connection of one's own, has other random words."""
    first, says = greeted(served)
    frame = says.encode_frame(["set", "k", "djE="])
    first.close()
    with served.stranger() as line:
        hello = line.recv(len(HELLO) + NONCE, socket.MSG_WAITALL)
        captured = os.urandom(NONCE)
        line.sendall(captured + mac(TOKEN, b"client", bytes(NONCE), captured) + frame)
        line.settimeout(5)
        with contextlib.suppress(ConnectionError):
            while line.recv(4096):
                pass
    assert hello
    assert not served.client().check(["k"])


def test_a_known_peers_nonsense_is_his_own_loss(served: Served) -> None:
    for request in (["steal", "k"], {"set": 1}, ["set", 1, 2], ["set", "k"], 7, None):
        line, says = greeted(served)
        with line:
            line.sendall(says.encode_frame(request))
            while line.recv(4096):
                pass
    assert "no request" in served.line()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forks another user")
def test_another_user_of_the_machine_is_a_stranger(served: Served) -> None:
    stranger.needed("another user at the store of several machines")
    served.client().set("secret", "kept")

    def tries() -> list[str]:
        said = []
        with socket.create_connection(("127.0.0.1", served.port), timeout=5) as line:
            line.recv(len(HELLO) + NONCE, socket.MSG_WAITALL)
            line.sendall(os.urandom(64))
            said.append(line.recv(32, socket.MSG_WAITALL).hex())
            said.append(line.recv(32).hex())
        return said

    assert stranger.as_nobody(tries) == ["00" * 32, ""]
