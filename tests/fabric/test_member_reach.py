"""Which members reach which: stale messages, one-way connections, and addresses that cannot be bound."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from shoal.base.errors import ClusterError
from shoal.fabric.islands import member_links
from shoal.fabric.islands.island_rendezvous import listen_at
from shoal.fabric.islands.member_links import MemberLinks
from shoal.islands.changing.member_driver import MemberDriver
from shoal.islands.changing.member_waits import ResumeCommand, explain_start
from shoal.islands.changing.session_start import SessionStart
from shoal.islands.membership.committed_turn import FIRST_WITNESS, Seat, start_session
from shoal.islands.membership.island_member import IslandMember
from shoal.islands.membership.session_meeting import ArrivalReport
from shoal.islands.membership.turn_messages import Hello
from shoal.islands.peer_deadline import PeerDeadline


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return f"127.0.0.1:{found.getsockname()[1]}"


def until(ready: Callable[[], Any]) -> None:
    until_s = time.monotonic() + 10.0
    while not ready():
        assert time.monotonic() < until_s, "waited in vain"
        time.sleep(0.01)


@pytest.fixture
def open_links(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., MemberLinks]]:
    """Open the connections of members, and close them at the end."""
    monkeypatch.setattr(member_links, "BEAT_S", 0.05)
    opened: list[MemberLinks] = []

    def make(name: int, addresses: dict[int, str], got: Any = None) -> MemberLinks:
        take = (lambda *message: None) if got is None else (lambda *message: got.append(message[2]))
        links = MemberLinks(name, 7, addresses, b"t", take, lambda *asked: None, lambda line: None)
        opened.append(links)
        return links

    yield make
    for one in opened:
        one.close()


def test_of_an_hour_of_messages_the_last_ones_are_sent(open_links: Any) -> None:
    """A laptop that slept gets no thousands of old messages, a round trip each."""
    addresses, got = {0: free_address(), 1: free_address()}, list[str]()
    links = open_links(0, addresses)
    now_s = time.monotonic()
    for age_s in (3600.0, member_links.STALE_S + 1.0):
        links._lines[1].outbox.put((now_s - age_s, "old"))
    until(links._lines[1].outbox.empty)
    open_links(1, addresses, got)
    links._lines[1].outbox.put((now_s - 3600.0, "old"))
    links.send([1], "new")
    until(lambda: got)
    assert got == ["new"]


def test_a_member_is_unreached_until_it_answers(open_links: Any) -> None:
    addresses = {0: free_address(), 1: free_address()}
    links = open_links(0, addresses)
    assert not links.is_unreached(1), "nobody has tried"
    assert not links.is_unreached(5), "nobody knows it"
    until(lambda: links.is_unreached(1))
    assert links.answering() == set()
    open_links(1, addresses)
    until(lambda: links.answering() == {1})
    assert not links.is_unreached(1)


class OneWay:
    """Connections of island 0: island 3's messages arrive, and island 3 cannot be reached."""

    name = 0
    unreached: tuple[int, ...] = (3,)

    def is_unreached(self, name: int) -> bool:
        return name in self.unreached


def test_who_cannot_be_reached_gets_no_seat() -> None:
    """Behind a router without a forwarded port it would hear of no turn, and delay each round."""
    seats = (Seat(0, 1), Seat(1, 1))
    start = start_session(0, None, seats, 4)
    driver: Any = MemberDriver.__new__(MemberDriver)
    driver.member, driver.links = IslandMember(seats[0], start, (0, 1, 3), 4), OneWay()
    driver._receive(Hello(Seat(3, 1), -1, -1))
    assert driver.member.joiners == {}
    driver.links.unreached = ()
    driver._receive(Hello(Seat(3, 1), -1, -1))
    assert driver.member.joiners == {3: Seat(3, 1)}


class Reached:
    """Connections of island 3: some members answer, some refuse it."""

    name, addresses = 3, {0: "10.0.0.1:29400", 3: "10.0.0.3:29400"}

    def __init__(self, *answering: int, **refusals: str) -> None:
        self._answering = {*answering}
        self._refusals = {int(name[1:]): why for name, why in refusals.items()}

    def answering(self) -> set[int]:
        return self._answering

    def refusals(self) -> dict[int, str]:
        return self._refusals


def explain(missing: tuple[int, ...], unheard: tuple[tuple[int, int], ...], links: Any) -> str:
    return explain_start(missing, unheard, links)


def test_a_start_names_whose_port_is_closed() -> None:
    """It dials the others, and none of them reaches it; or two others do not reach each other."""
    told = explain((0, 1), (), Reached(0, 1, 2))
    assert told == (
        "islands 0 and 1 can be reached from here, and nothing arrives at 10.0.0.3:29400; try: "
        "forward that TCP port to this machine (router, firewall)"
    )
    assert explain((0, 1), (), Reached(2)) == "", "they are not there"
    assert explain((), ((2, 1),), Reached(1, 2)).startswith("island 2 hears nothing of island 1")


def test_a_start_that_is_refused_says_by_whom() -> None:
    """Also where the others answer: what is refused is what helps."""
    links = Reached(1, i0="island 0 at 10.0.0.1:29400 refuses this island's key 12ab")
    assert explain((0, 1), (), links) == "island 0 at 10.0.0.1:29400 refuses this island's key 12ab"


def test_a_start_waits_for_a_witness_in_the_right_words() -> None:
    told = explain((FIRST_WITNESS,), (), Reached())
    assert told.startswith("it had a seat in the last round")
    assert "shoal islands witness 10.0.0.1:29400,10.0.0.3:29400 --listen" in told


def test_a_start_waits_by_name_for_a_connection_of_two_others() -> None:
    """Nobody is missing, and two of them have not heard each other."""
    told, seats = list[str](), [Seat(name, 1) for name in range(3)]
    driver: Any = MemberDriver(
        IslandMember(seats[0], None, (0, 1, 2), 4),
        type("M", (), {"changes": type("C", (), {})()})(),  # type: ignore[arg-type]
        PeerDeadline(),
        arrival=ArrivalReport(seats[0], None, "w"),
        count=3, wait_s=60.0, resume=ResumeCommand("shoal train --resume runs/x"),
        settings={}, describe=lambda other, name: "",
        provide_state=lambda key, offset, length: None, tell=told.append,
    )  # fmt: skip

    class Links:
        name, addresses = 0, {0: "a:1", 1: "b:1", 2: "c:1"}

        def send(self, names: Any, message: Any) -> None:
            """Nothing to do."""

        def answering(self) -> set[int]:
            return {1, 2}

        def refusals(self) -> dict[int, str]:
            return {}

        def dialers(self) -> dict[int, str]:
            return {}

    driver.links = Links()
    driver.session_start = SessionStart(driver.links, told.append)
    for name, heard in ((1, (0, 1, 2)), (2, (0, 2))):
        heard_seats = tuple(seats[one] for one in heard)
        driver._on_arrival(ArrivalReport(seats[name], None, "w", None, heard_seats))
    driver._waits_since_s -= 11.0
    driver._greet()
    assert driver.awaits == (2,)
    (line,) = told
    assert line.startswith("waits for island 2, at most 60 s; island 2 hears nothing of island 1")


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
def test_behind_a_router_with_ipv6_it_listens_for_both() -> None:
    told = list[str]()
    port = free_address().rpartition(":")[2]
    with listen_at(f"[2001:db8::1]:{port}", told.append) as server:
        for host in ("::1", "127.0.0.1"):
            with socket.create_connection((host, int(port)), timeout=3.0):
                server.accept()[0].close()
    assert "2001:db8::1 is no address of this machine" in told[0]


@pytest.mark.parametrize(
    ("at", "why"),
    [
        ("", "another program has that port, maybe an island that still runs; try: end it, or"),
        ("192.0.2.1:29400", "192.0.2.1 is no address of this machine; try: an address of this"),
        ("no-such-host.invalid:29400", "try: a name that this machine can look up"),
    ],
    ids=["taken", "elsewhere", "no name"],
)
def test_an_address_that_cannot_be_bound_has_its_reason_and_the_way_on(at: str, why: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        asked = at or f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ClusterError) as refused:
            listen_at(asked, None)
    assert f"cannot listen at {asked}: " in str(refused.value)
    assert why in str(refused.value)
