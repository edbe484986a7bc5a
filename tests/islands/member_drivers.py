"""A member's driver beside connections that send nothing: they only say who is dead or refuses."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from shoal.islands.changing.member_driver import MemberDriver
from shoal.islands.changing.member_waits import ResumeCommand
from shoal.islands.changing.session_start import SessionStart
from shoal.islands.membership.committed_turn import Seat, start_session
from shoal.islands.membership.island_member import IslandMember
from shoal.islands.membership.session_meeting import ArrivalReport
from shoal.islands.peer_deadline import PeerDeadline


class QuietLinks:
    """Connections to members of which some are dead, refuse this one, or are shut out here."""

    refusing_are_gone = False

    def __init__(self, refusing: Iterable[int] = (), removed: Iterable[int] = ()) -> None:
        self.name, self.addresses = 0, {0: "a:1", 1: "b:1", 2: "c:1"}
        self._refusing, self._removed = {*refusing}, {*removed}
        self.dead: tuple[int, ...] = ()

    def send(self, names: Any, message: Any) -> None:
        """Nothing to do."""

    def refusing(self) -> set[int]:
        return self._refusing

    def refusals(self) -> dict[int, str]:
        return {name: f"island {name} refuses this one" for name in self._refusing}

    def answering(self) -> set[int]:
        return set()

    def dialers(self) -> dict[int, str]:
        return {}

    def is_removed(self, name: int) -> bool:
        return name in self._removed

    def gone(self, seats: Any) -> set[int]:
        return {name for name, _ in seats if name in (*self.dead, *self._removed)}

    def restarted(self, seats: Any) -> set[int]:
        return set()


def make_driver(
    index: int, count: int, links: QuietLinks, *, wait_s: float = 60.0
) -> tuple[MemberDriver, list[str]]:
    """Return the driver of one member of the first turn of a run, and the lines that it tells."""
    seats = tuple(Seat(name, 1) for name in range(count))
    start = start_session(0, None, seats, 4)
    merges: Any = SimpleNamespace(
        changes=SimpleNamespace(),
        notice_lost_ranks=lambda: None,
        inner=SimpleNamespace(size=1),
    )
    told: list[str] = []
    found = MemberDriver(
        IslandMember(seats[index], start, tuple(range(count)), 4),
        merges,
        PeerDeadline(),
        arrival=ArrivalReport(seats[index], start, "w"),
        count=count,
        wait_s=wait_s,
        resume=ResumeCommand("shoal train --resume runs/x"),
        settings={},
        describe=lambda other, name: "",
        provide_state=lambda key, offset, length: None,
        tell=told.append,
    )
    links.name = index
    found.links = links  # type: ignore[assignment]
    found.session_start = SessionStart(found.links, told.append)
    return found, told
