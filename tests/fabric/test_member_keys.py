"""Keys of islands: what is on the wire, who is refused, and what a man in the middle may do."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from member_sites import Site, until
from typer.testing import CliRunner

from made_keys import fingerprint, make_keys
from shoal.base.errors import ConfigError
from shoal.base.layouts.changing_members import FIRST_WITNESS
from shoal.base.layouts.island_options import IslandsPolicy
from shoal.base.text.event_sentences import event_text
from shoal.cli.main import app
from shoal.fabric.islands import member_links
from shoal.wire import authenticated_stream, member_keys
from shoal.wire.encrypted_socket import EncryptedSocket
from shoal.wire.member_keys import PublicKey, open_member_keys
from wire_proxy import TAMPERS, Proxy

SECRET = "tokens of a text that nobody shall read"
WEIGHTS = b"".join(f"weight {number:08d} ".encode() for number in range(20_000))
"""340 kB, of which no part of 17 bytes comes twice."""


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the keys of three islands, and one file with the lines of all."""
    folder = tmp_path_factory.mktemp("keys")
    make_keys(folder, 3, "# islands\n")
    return folder


class WeightsSite(Site):
    """A site that gives WEIGHTS to who asks."""

    def provide(self, key: str, offset: int, length: int) -> tuple[int, bytes]:
        return len(WEIGHTS), WEIGHTS[offset : offset + length]


@pytest.fixture
def site(made: Path) -> Iterator[Callable[..., Site]]:
    sites: list[Site] = []

    def make(index: int, *, key: str = "", listed: Path | None = None, plain: bool = False) -> Site:
        sites.append(WeightsSite(index, None if plain else made, listed, key=key))
        return sites[-1]

    yield make
    for one in sites:
        one.close()


@pytest.mark.parametrize("plain", [True, False], ids=["token alone", "keys"])
def test_the_wire_is_readable_only_without_keys(site: Callable[..., Site], plain: bool) -> None:
    first, second = site(0, plain=plain), site(1, plain=plain)
    second.open()
    proxy = Proxy(second.port)
    links = first.open(i1=proxy.address)
    links.send([1], {"text": SECRET})
    assert links.fetch(1, "change/x") == WEIGHTS
    until(lambda: second.came == [{"text": SECRET}])
    proxy.close()
    parts = [SECRET.encode(), *(WEIGHTS[at : at + 17] for at in range(0, len(WEIGHTS), 17_000))]
    assert len(proxy.seen) > len(WEIGHTS)
    assert {part in proxy.seen for part in parts} == {plain}


def test_a_key_that_is_not_allowed_is_refused_and_named_on_both_sides(
    site: Callable[..., Site], made: Path, tmp_path: Path
) -> None:
    two = tmp_path / "two.pub"
    two.write_text("".join((made / f"{index}.key.pub").read_text() for index in range(2)))
    first, stranger = site(0, listed=two), site(2)
    first.open(i2=stranger.address)
    stranger.open(i0=first.address).send([0], "let me in")
    own = fingerprint(made, 2)
    wanted = f"island 2 at 127.0.0.1 was refused: its key {own} is not in {two}"
    until(lambda: any(line.startswith(wanted) for line in first.told))
    assert any("try: if you know it, add the line of its .pub file" in x for x in first.told)
    until(lambda: any("refuses this island's key " + own in line for line in stranger.told))
    (line,) = [line for line in stranger.told if line.startswith("island 0 at 127.0.0.1")]
    file = f"{made / '2.key'}.pub"
    assert f"try: send {file} to the people of island 0, who add the line of {file} to" in line
    assert own in stranger.links.refusals()[0]
    with pytest.raises(PermissionError):
        stranger.links.fetch(0, "change/x")
    assert first.came == []


@pytest.mark.parametrize("how", TAMPERS)
def test_a_changed_record_never_counts_and_the_next_try_does(
    site: Callable[..., Site], how: str
) -> None:
    first, second = site(0), site(1)
    second.open()
    proxy = Proxy(second.port)
    links = first.open(i1=proxy.address)
    links.send([1], 1)
    until(lambda: second.came == [1])
    sent = [1]
    if how in ("altered", "replayed", "cut"):  # a request is one record, and waits for its answer
        proxy.arm(TAMPERS[how], to_server=True)
        links.send([1], 2)
        sent.append(2)
        until(lambda: second.came == sent and proxy.tampered == 1)
    failures, fetched = 0, None
    other = Proxy(second.port)  # no beat passes here
    while fetched is None:
        line = links.connect(1, other.address)
        line.ask(["message", 0, first.address, None], 5.0)  # beyond the handshake
        if not other.tampered:
            other.arm(TAMPERS[how], to_server=False)
        try:
            fetched = fetch_all(line)
        except OSError:
            failures += 1
        line.close()
    assert (fetched, failures, other.tampered) == (WEIGHTS, 1, 1)
    links.send([1], 3)
    until(lambda: second.came == [*sent, 3])
    assert links.gone([(1, 7)]) == set()
    if how == "altered":
        (told,) = [line for line in first.told if "altered on the way" in line]
        assert told.startswith(f"island 1 at {proxy.address}: bytes of it were altered")
        assert [line for line in second.told if line.startswith("island 0 at 127.0.0.1: bytes")]
    proxy.close()
    other.close()


def fetch_all(line: Any) -> bytes:
    size, length, _ = line.ask(["piece", "change/x", 0], 5.0)
    found = line.receive_bytes(length, 5.0)
    assert size == length
    return found


def test_a_recorded_connection_counts_for_nothing_when_it_is_sent_again(
    site: Callable[..., Site],
) -> None:
    first, second = site(0), site(1)
    second.open()
    proxy = Proxy(second.port)
    first.open(i1=proxy.address).send([1], "pay")
    until(lambda: second.came == ["pay"])
    recorded = bytes(proxy.from_client[0])
    with (
        contextlib.suppress(ConnectionError),
        socket.create_connection(("127.0.0.1", second.port), timeout=5.0) as again,
    ):
        again.sendall(recorded)
        while again.recv(1 << 16):  # until it is closed
            pass
    assert first.links.fetch(1, "change/x") == WEIGHTS  # its thread serves on
    assert second.came == ["pay"]
    proxy.close()


def test_a_key_that_is_taken_out_is_gone_and_may_come_back(
    site: Callable[..., Site], made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(member_keys, "REFRESH_S", 0.05)
    listed = tmp_path / "all.pub"
    lines = (made / "all.pub").read_text().splitlines(keepends=True)
    listed.write_text("".join(lines))
    first, second = site(0, listed=listed), site(1)
    links = first.open(i1=second.address)
    second.open(i0=first.address).send([0], 1)
    until(lambda: first.came == [1])
    line = second.links.connect(0, first.address)
    assert fetch_all(line) == WEIGHTS
    listed.write_text("".join(lines[:2]) + "shoal-island 00 damaged\n")
    until(lambda: any("a damaged line" in line for line in first.told))
    assert any("the keys stay as they were" in line for line in first.told)
    listed.write_text("".join([*lines[:2], *lines[3:]]))
    until(lambda: links.gone([(1, 7)]) == {1})
    out = f"islands.keys = {listed}: {fingerprint(made, 1)} (host-1) is taken out"
    assert out in first.told
    with pytest.raises(ConnectionError):  # a connection of before
        fetch_all(line)
    second.links.send([0], 2)
    links.send([1], "to a key that was taken out")
    until(lambda: any("took this island's key" in line for line in second.told))
    until(lambda: any("island 1 at" in line and "is shut out" in line for line in first.told))
    assert (first.came, second.came) == ([1], [])
    listed.write_text("".join(lines))
    until(lambda: links.gone([(1, 7)]) == set())
    second.links.send([0], 3)
    until(lambda: 3 in first.came)
    assert 2 not in first.came


def test_two_islands_with_one_key_are_refused_on_both_sides(site: Callable[..., Site]) -> None:
    first, second, third = site(0), site(1), site(2, key="1.key")
    first.open()
    second.open(i0=first.address).send([0], 1)
    until(lambda: first.came == [1])
    third.open(i0=first.address, i1=second.address).send([0, 1], 2)
    until(lambda: any("island 1 and island 2 have the same key" in line for line in first.told))
    until(lambda: any("island 1 and island 2 have the same key" in line for line in third.told))
    until(lambda: any("have the same key" in line for line in second.told))
    assert (first.came, second.came) == ([1], [])


def test_two_processes_with_one_number_are_refused(site: Callable[..., Site]) -> None:
    first, second, double = site(0), site(1), site(1, key="2.key")
    first.open()
    second.open(i0=first.address).send([0], 1)
    until(lambda: first.came == [1])
    double.open(i0=first.address).send([0], 2)
    until(lambda: any("two keys are island 1" in line for line in first.told))
    until(lambda: any("two keys are island 1" in line for line in double.told))
    assert any("on every other island; else another islands.index" in line for line in first.told)
    assert first.came == [1]


def test_a_silent_connection_costs_nothing(
    site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server's greeting waits for the handshake; it does not try again and again meanwhile."""
    first, sends = site(0), []
    first.open()
    send = EncryptedSocket.send
    monkeypatch.setattr(EncryptedSocket, "send", lambda *a: sends.append(a) or send(*a))
    with socket.create_connection(("127.0.0.1", first.port)):
        until(lambda: sends)
        time.sleep(0.5)
    assert len(sends) <= 2


def test_an_island_without_keys_is_named_by_the_one_that_has_them(
    site: Callable[..., Site],
) -> None:
    first, bare = site(0), site(1, plain=True)
    bare.open()
    first.open(i1=bare.address).send([1], 1)
    until(lambda: any(f"island 1 at {bare.address} has no key" in line for line in first.told))
    until(lambda: any("it encrypts (islands.key)" in line for line in bare.told))
    assert bare.came == []


def test_an_island_without_keys_is_told_that_it_is_refused(
    site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both sides wait for the other one's greeting first; nobody dials the newcomer."""
    monkeypatch.setattr(authenticated_stream, "HELLO_S", 0.3)
    first, bare = site(0), site(1, plain=True)
    first.open()
    bare.open(i0=first.address).send([0], 1)
    until(lambda: bare.links.refusals())
    (line,) = [line for line in bare.told if "has no key" in line]
    assert line.startswith(f"island 0 at {first.address} refuses this island, which has no key: ")
    assert "try: shoal islands key island.key, and send island.key.pub to the people of" in line
    until(lambda: any(line.startswith("island 1 at 127.0.0.1 has no key") for line in first.told))
    assert bare.links.gone([(0, 7)]) == set(), "the island that refuses it lives"
    assert first.came == []


def test_islands_without_keys_are_no_refusal(
    site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that is silent for long: whether it encrypts is asked of it alone."""
    monkeypatch.setattr(authenticated_stream, "HELLO_S", 0.1)
    bare = site(1, plain=True)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        links = bare.open(i0=f"127.0.0.1:{silent.getsockname()[1]}")
        until(lambda: links._unheard.total() >= member_links.UNHEARD_TRIES)
        until(lambda: links.is_unreached(0))
        assert links.refusals() == {}
    second = site(0, plain=True)
    second.open()
    links.learn(0, second.address)
    links.send([0], 1)
    until(lambda: second.came == [1])


def test_a_witness_is_called_a_witness(site: Callable[..., Site], tmp_path: Path) -> None:
    """Its number is no island's."""
    made = site(0).keys._path.parent
    two = tmp_path / "two.pub"
    two.write_text("".join((made / f"{index}.key.pub").read_text() for index in range(2)))
    first, third = site(0, listed=two), site(FIRST_WITNESS, key="2.key")
    first.open(**{f"i{FIRST_WITNESS}": third.address})
    third.open(i0=first.address).send([0], 1)
    until(lambda: any(line.startswith("the witness at 127.0.0.1") for line in first.told))
    double = site(FIRST_WITNESS, key="1.key")
    second = site(1)
    second.open(i0=first.address).send([0], 1)
    until(lambda: first.came)
    double.open(i0=first.address).send([0], 2)
    same = "island 1 and the witness have the same key"
    until(lambda: any(same in line for line in first.told))
    assert not [line for line in first.told if str(FIRST_WITNESS) in line]


def damaged(folder: Path) -> None:
    text = (folder / "0.key").read_text()
    (folder / "0.key").write_text(text[:60] + "AAAA" + text[64:])


def swapped(folder: Path) -> None:
    own, other = ((folder / f"{k}.key").read_text().partition("-----BEGIN CERT") for k in (0, 1))
    (folder / "0.key").write_text("".join([own[0], *other[1:]]))


def write(name: str, text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(text) and None


FILES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no own key": (lambda f: (f / "0.key").unlink(), "/0.key: no such file; try: shoal islands key"),
    "others may read it": (lambda f: (f / "0.key").chmod(0o640), "(mode 640, owner {uid}); try: chmod 600"),
    "damaged": (damaged, "0.key: the file is damaged ("),
    "of another": (swapped, "0.key: the file is damaged ("),
    "empty": (write("0.key", ""), "no private key and certificate of an island; try: shoal islands key"),
    "the public one": (
        lambda f: (f / "0.key").write_bytes((f / "1.key.pub").read_bytes()),
        "0.key: a public line; try: ",
    ),
    "no list": (lambda f: (f / "all.pub").unlink(), "all.pub: no such file; try: the public lines of all"),
    "an empty list": (write("all.pub", "# none\n"), "all.pub: no key in it; try: the public lines"),
    "no line of an island": (
        write("all.pub", "ssh-ed25519 AAAA me\n"),
        "line 1: no public line of an island: 'ssh-ed25519 AAAA me'; try: the line of the .pub file",
    ),
    "a damaged line": (
        lambda f: (f / "all.pub").write_text((f / "all.pub").read_text().replace("MII", "MIJ", 1)),
        "line 2: a damaged line: its key is not the one of fingerprint",
    ),
    "a private key in the list": (
        lambda f: (f / "all.pub").write_bytes((f / "1.key").read_bytes()),
        "line 1: a private key, which must not leave its machine; try: the file beside it",
    ),
    "twice": (
        lambda f: (f / "all.pub").write_text((f / "all.pub").read_text() * 2),
        "stands there twice, or in",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", FILES)
def test_a_wrong_file_is_one_line(made: Path, tmp_path: Path, what: str) -> None:
    for path in made.iterdir():
        copy = tmp_path / path.name
        copy.write_bytes(path.read_bytes())
        copy.chmod(0o600)
    change, said = FILES[what]
    assert open_member_keys(str(tmp_path / "{index}.key"), str(tmp_path / "all.pub"), 0, print)
    change(tmp_path)
    with pytest.raises(ConfigError) as refused:
        open_member_keys(str(tmp_path / "{index}.key"), str(tmp_path / "all.pub"), 0, print)
    text = str(refused.value)
    assert said.format(uid=os.geteuid()) in text
    assert text.startswith(f"islands.key{'s' * ('all.pub' in text)} = {tmp_path}")
    assert "\n" not in text
    assert "try: " in text


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"key": "a", "keys": "b"}, "try: islands.least=2, or a private network and no key"),
        ({"key": "a", "keys": "b", "least": 2}, "try: islands.key=keys/{index}.key"),
    ],
)
def test_settings_that_do_not_fit_are_refused(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        IslandsPolicy("diloco", count=2, **asked).resolved()
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("key", "keys", "said"),
    [
        (
            "a",
            "",
            "islands.key = a: and no islands.keys, so nobody may join; try: islands.keys=FILE",
        ),
        (
            "",
            "a",
            "islands.keys = a: and no islands.key, so nothing would be encrypted; try: `shoal",
        ),
    ],
)
def test_one_setting_without_the_other_is_refused(key: str, keys: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        open_member_keys(key, keys, 0, print)
    assert str(refused.value).startswith(said)


def test_the_command_makes_a_pair_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "new" / "my.key"
    made = CliRunner().invoke(app, ["islands", "key", str(file), "--label", "site\none"])
    assert made.exit_code == 0, made.output
    line = file.with_name("my.key.pub").read_text().strip()
    assert line in made.stdout
    assert line.endswith(" site one")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    shown = CliRunner().invoke(app, ["islands", "key", str(file), "--show", "--label", "site one"])
    assert shown.stdout.strip() == line
    again = CliRunner().invoke(app, ["islands", "key", str(file)])
    assert "exists, and a key that others may know is not overwritten" in str(again.exception)
    found = member_keys.parse_public_lines(line, "here")
    assert found == [PublicKey(found[0].certificate, "site one")]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    lacking = CliRunner().invoke(app, ["islands", "key", str(tmp_path / "other.key")])
    assert "try: pip install 'shoal[keys]'" in str(lacking.exception)
    assert not (tmp_path / "other.key").exists()


def test_the_event_says_whether_connections_are_encrypted() -> None:
    met = {"event": "islands_met", "count": 3, "at": "10.0.0.1:29400"}
    assert "their connections are encrypted" in str(event_text({**met, "encrypted": True}))
    assert "is not encrypted" in str(event_text({**met, "encrypted": False}))
