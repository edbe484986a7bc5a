"""Fetches on the connection of the last one: when it is used, and when it is replaced in silence."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from member_sites import Site, until

from made_keys import make_keys
from shoal.fabric.islands import idle_connections, member_links
from shoal.fabric.islands.idle_connections import IdleConnections
from shoal.fabric.islands.member_links import MemberLinks
from shoal.wire import member_keys
from shoal.wire.encrypted_socket import AlteredConnectionError
from wire_proxy import TAMPERS, Proxy

Pair = tuple["Member", "Member", Proxy]
PIECES = {"change/one": b"first" * 5000, "change/two": b"second" * 5000}
LIMIT_S = 10.0


class ForgetfulRouter(Proxy):
    """A router that forgets connections: their bytes arrive nowhere, and nobody closes them."""

    def forget(self) -> None:
        self.forgotten = set(self._open)
        self.arm(TAMPERS["cut"], to_server=True)

    def _tampered(self, source: socket.socket, data: bytes, to_server: bool) -> bytes:
        return b"" if source in self.forgotten else data


class CountingLinks(MemberLinks):
    """Links that count the connections that fetches and beats opened, by address."""

    def __init__(self, *given: Any) -> None:
        self.opened: list[str] = []
        super().__init__(*given)

    def connect(self, name: int, at: str) -> Any:
        self.opened.append(at)
        return super().connect(name, at)


class Member(Site):
    """A site that gives PIECES, and waits first if it is slow."""

    links_type = CountingLinks
    slow: threading.Event | None = None

    def provide(self, key: str, offset: int, length: int) -> tuple[int, bytes] | None:
        if self.slow is not None:
            self.slow.wait(LIMIT_S)
        found = PIECES.get(key)
        return None if found is None else (len(found), found[offset : offset + length])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the keys of two islands, and one file with both lines."""
    folder = tmp_path_factory.mktemp("keys")
    make_keys(folder, 2)
    return folder


@pytest.fixture
def members(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Member]]:
    monkeypatch.setattr(member_keys, "REFRESH_S", 0.05)
    found: list[Member] = []
    yield found
    for one in found:
        one.close()


@pytest.fixture(params=["token alone", "keys"])
def pair(request: pytest.FixtureRequest, members: list[Member], made: Path) -> Iterator[Pair]:
    """Members 0 and 1; no beat passes the proxy, by which member 0 fetches."""
    with_keys = made if request.param == "keys" else None
    members += [Member(0, with_keys), Member(1, with_keys)]
    members[0].open()
    members[1].open()
    proxy = Proxy(members[1].port)
    members[0].links.addresses[1] = proxy.address
    yield members[0], members[1], proxy
    proxy.close()


def test_further_fetches_open_no_connection(pair: Pair) -> None:
    first, _, proxy = pair
    assert first.links.fetch(1, "change/one") == PIECES["change/one"]
    assert first.links.fetch(1, "change/none") is None
    assert first.links.fetch(1, "change/two") == PIECES["change/two"]
    assert first.links.opened == [proxy.address]
    assert len(proxy.from_client) == 1


def test_two_fetches_at_a_time_leave_one_connection(pair: Pair) -> None:
    first, second, proxy = pair
    second.slow = threading.Event()
    found: list[bytes] = []
    both = [
        threading.Thread(target=lambda key=key: found.append(first.links.fetch(1, key)))
        for key in PIECES
    ]
    for one in both:
        one.start()
    until(lambda: len(proxy.from_client) == 2)
    second.slow.set()
    for one in both:
        one.join(LIMIT_S)
    assert sorted(found) == sorted(PIECES.values())
    until(lambda: len(second.links._server.peers) == 1)
    first.links.fetch(1, "change/one")
    assert len(first.links.opened) == 2


def test_a_new_start_of_the_other_side_is_found_in_silence(
    pair: Pair,
) -> None:
    first, second, proxy = pair
    first.links.fetch(1, "change/one")
    second.links.close()
    second.open()
    assert first.links.fetch(1, "change/one") == PIECES["change/one"]
    assert first.links.opened == [proxy.address] * 2
    assert first.told == second.told == []


def test_a_connection_that_a_router_forgot_costs_a_short_deadline(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of the first connection arrives any more, and nobody closes it."""
    first, second, _ = pair
    router = ForgetfulRouter(second.port)
    first.links.addresses[1] = router.address
    first.links.fetch(1, "change/one")
    router.forget()
    monkeypatch.setattr(member_links, "CONNECT_S", 0.5)
    monkeypatch.setattr(member_links, "ANSWER_S", 600.0)
    found: list[bytes] = []
    again = threading.Thread(
        target=lambda: found.append(first.links.fetch(1, "change/one")), daemon=True
    )
    again.start()
    until(lambda: found == [PIECES["change/one"]])
    assert len(first.links.opened) == 2
    router.close()


def test_a_connection_is_used_neither_late_nor_for_another_address(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, proxy = pair
    first.links.fetch(1, "change/one")
    monkeypatch.setattr(idle_connections, "IDLE_S", 0.0)
    first.links.fetch(1, "change/one")
    assert first.links.opened == [proxy.address] * 2
    monkeypatch.setattr(idle_connections, "IDLE_S", 60.0)
    first.links.addresses[1] = second.address
    first.links.fetch(1, "change/one")
    assert first.links.opened == [proxy.address] * 2 + [second.address]
    until(lambda: len(second.links._server.peers) == 1)


def test_an_interrupted_fetch_leaves_no_connection(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its next piece would be taken for the answer to the next request."""
    first, _, _ = pair
    monkeypatch.setattr(member_links, "PIECE_BYTES", 1000)
    with pytest.raises(InterruptedError):
        first.links.fetch(1, "change/one", lambda: True)
    assert first.links._idle._found == {}
    assert first.links.fetch(1, "change/two") == PIECES["change/two"]


def test_the_end_closes_idle_connections(pair: Pair) -> None:
    first, second, proxy = pair
    first.links.fetch(1, "change/one")
    line = first.links.connect(1, proxy.address)
    first.links.close()
    first.links._idle.put(1, proxy.address, line)  # a fetch that ends later
    until(lambda: not second.links._server.peers)


def test_altered_bytes_on_an_idle_connection_are_reported(
    members: list[Member], made: Path
) -> None:
    first, second = Member(0, made), Member(1, made)
    members += [first, second]
    second.open()
    first.open()
    proxy = Proxy(second.port)
    first.links.addresses[1] = proxy.address
    first.links.fetch(1, "change/one")
    proxy.arm(TAMPERS["altered"], to_server=False)
    with pytest.raises(AlteredConnectionError):
        first.links.fetch(1, "change/one")
    (line,) = first.told
    assert "altered on the way" in line
    assert first.links.fetch(1, "change/one") == PIECES["change/one"]
    assert len(first.links.opened) == 2


def test_a_key_that_is_taken_out_ends_the_idle_connection(
    members: list[Member], made: Path, tmp_path: Path
) -> None:
    """This side's list changes: the connection ends at once, and serves again when it is back."""
    listed, lines = tmp_path / "own.pub", (made / "all.pub").read_text().splitlines(keepends=True)
    listed.write_text("".join(lines))
    first, second = Member(0, made, listed), Member(1, made)
    members += [first, second]
    second.open()
    first.open().addresses[1] = second.address
    first.links.fetch(1, "change/one")
    (peer,) = second.links._server.peers
    listed.write_text(lines[0])
    until(lambda: peer not in second.links._server.peers)
    assert first.links._idle._found == {}
    with pytest.raises(PermissionError):
        first.links.fetch(1, "change/one")
    listed.write_text("".join(lines))
    until(lambda: first.keys is not None and first.keys.count == 2)
    assert first.links.fetch(1, "change/one") == PIECES["change/one"]


def test_the_other_side_takes_this_ones_key_out(
    members: list[Member], made: Path, tmp_path: Path
) -> None:
    listed, lines = tmp_path / "own.pub", (made / "all.pub").read_text().splitlines(keepends=True)
    listed.write_text("".join(lines))
    first, second = Member(0, made), Member(1, made, listed)
    members += [first, second]
    second.open()
    first.open().addresses[1] = second.address
    first.links.fetch(1, "change/one")
    listed.write_text(lines[1])
    until(lambda: not second.links._server.peers)
    with pytest.raises(PermissionError):
        first.links.fetch(1, "change/one")
    assert any("refuses this island's key" in line for line in first.told)


def test_a_fetch_that_ends_after_the_list_changed_leaves_nothing() -> None:
    """Its connection comes after the others were dropped; one too many is closed at once."""
    allowed, closed = [True], list[int]()
    first, second = (SimpleNamespace(close=lambda k=k: closed.append(k)) for k in (1, 2))
    idle = IdleConnections(lambda name, connection: allowed[0])
    for one in (first, second):
        idle.put(1, "a:1", one)  # type: ignore[arg-type]
    assert closed == [2]
    allowed[0] = False
    assert idle.pop(1, "a:1") is None
    assert closed == [2, 1]
