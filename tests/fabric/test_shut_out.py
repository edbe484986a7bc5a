"""A key that is taken out while the run lasts: what both sides print, and who counts as dead."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.base.errors import ClusterError
from shoal.cli.island_key import make_key
from shoal.fabric.islands import member_links
from shoal.fabric.islands.member_links import MemberLinks
from shoal.wire import member_keys
from shoal.wire.member_keys import MemberKeys


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the keys of two islands, and one file with both lines."""
    folder = tmp_path_factory.mktemp("keys")
    lines = [make_key(folder / f"{index}.key", f"host-{index}").line for index in range(2)]
    (folder / "all.pub").write_text("\n".join(lines) + "\n")
    return folder


class Site:
    """One island's connections, with the lines that it told."""

    def __init__(self, index: int, made: Path, listed: Path | None = None) -> None:
        self.index, self.told = index, list[str]()
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"
        files = [listed or made / "all.pub"]
        self.keys = MemberKeys(index, made / f"{index}.key", files, self.told.append)
        self.links: Any = None

    def open(self, at: str = "", *, plain: bool = False, **others: str) -> MemberLinks:
        """Connect to others: i1="127.0.0.1:29400"."""
        known = {int(name[1:]): address for name, address in others.items()}
        self.links = MemberLinks(
            self.index,
            7,
            {self.index: at or self.address, **known},
            b"token",
            lambda *message: None,
            lambda key, offset, length: (1, b"w"),
            self.told.append,
            None if plain else self.keys,
        )
        return self.links


def until(ready: Callable[[], Any], within_s: float = 10.0) -> None:
    until_s = time.monotonic() + within_s
    while not ready():
        assert time.monotonic() < until_s, "waited in vain"
        time.sleep(0.01)


def fingerprint(made: Path, index: int) -> str:
    return (made / f"{index}.key.pub").read_text().split()[1]


@pytest.fixture
def pair(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[bool], tuple[Site, Site, Path]]]:
    """Make islands 0 and 1 that are connected, with island 0's own list of keys."""
    monkeypatch.setattr(member_keys, "REFRESH_S", 0.05)
    monkeypatch.setattr(member_links, "BEAT_S", 0.05)
    sites: list[Site] = []

    def make(listed_first: bool) -> tuple[Site, Site, Path]:
        listed = tmp_path / "own.pub"
        lines = (made / "all.pub").read_text().splitlines(keepends=True)
        listed.write_text("".join(lines if listed_first else lines[:1]))
        sites.extend((Site(0, made, listed), Site(1, made)))
        sites[0].open(i1=sites[1].address)
        sites[1].open(i0=sites[0].address)
        return sites[0], sites[1], listed

    yield make
    for site in sites:
        if site.links is not None:
            site.links.close()


def refusals(site: Site) -> list[str]:
    return [line for line in site.told if line.startswith("island ")]


def test_a_shut_out_is_one_line_on_each_side_and_no_death(
    pair: Callable[[bool], tuple[Site, Site, Path]], made: Path
) -> None:
    first, second, listed = pair(True)
    until(lambda: second.keys.known_to == {0} and first.keys.known_to == {1})
    key = fingerprint(made, 1)
    text = listed.read_text()
    listed.write_text("".join(line for line in text.splitlines(True) if key not in line))
    until(lambda: second.links.refusing() == {0} and refusals(first))
    for _ in range(6):  # the beats go on, in both directions
        first.links.send([1], "x")
        second.links.send([0], "y")
        until(
            lambda: second.links._lines[0].outbox.empty() and first.links._lines[1].outbox.empty()
        )
    (line,) = refusals(first)
    assert line.startswith("island 1 at 127.0.0.1")
    assert f"is shut out: its key {key} was taken out of {listed}" in line
    assert "add the line" not in line
    (line,) = refusals(second)
    assert f"took this island's key {key} out of its list" in line
    assert "try: ask the people of island 0" in line
    assert second.links.gone([(0, 7)]) == set(), "the island that refuses it lives"
    assert first.links.gone([(1, 7)]) == {1}


def test_a_key_that_was_never_listed_is_one_line_with_its_fingerprint(
    pair: Callable[[bool], tuple[Site, Site, Path]], made: Path
) -> None:
    first, second, _ = pair(False)
    until(lambda: refusals(first) and refusals(second))
    first.links.send([1], "x")
    second.links.send([0], "y")
    until(lambda: first.links._nameless.total() > member_links.NAMELESS_TRIES)
    (line,) = refusals(first)
    assert f"was refused: its key {fingerprint(made, 1)} is not in" in line
    (line,) = refusals(second)
    assert "refuses this island's key" in line


ELSEWHERE = "192.0.2.1"
"""An address of documentation (RFC 5737), which no machine has."""


def test_behind_a_router_it_listens_at_all_interfaces_if_there_are_keys(made: Path) -> None:
    inner, outer = Site(0, made), Site(1, made)
    at = f"{ELSEWHERE}:{inner.port}"
    with pytest.raises(ClusterError, match=f"cannot listen at {at}"):
        inner.open(at, plain=True)
    inner.open(at)
    assert outer.open(i0=inner.address).fetch(0, "change/x") == b"w"
    (line,) = [line for line in inner.told if line.startswith("islands.at")]
    assert f"{ELSEWHERE} is no address of this machine" in line
    assert f"forward port {inner.port}" in line
    outer.links.close()
    inner.links.close()
