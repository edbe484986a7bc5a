"""A key that is taken out while the run lasts: what both sides print, and who counts as dead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from member_sites import Site, until

from made_keys import fingerprint, make_keys
from shoal.base.errors import ClusterError
from shoal.fabric.islands import member_links
from shoal.wire import member_keys


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the keys of two islands, and one file with both lines."""
    folder = tmp_path_factory.mktemp("keys")
    make_keys(folder, 2)
    return folder


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
        site.close()


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
    outer.close()
    inner.close()
