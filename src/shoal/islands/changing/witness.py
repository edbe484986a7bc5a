"""Witness: a voter of islands that come and go, without weights, data or a disk.

    greet       every island: it gets a seat in the next turn
    vote        as all islands voted, and in ballots of those that are left
    end         an island has ended the run

With two islands and a witness, one island and the witness are a majority: the run goes on when the
other one dies. The witness trains nothing, so it runs on any machine that both reach.
"""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable
from typing import Any

from shoal.fabric.islands.member_links import MemberLinks
from shoal.islands.changing.member_driver import ARRIVAL, DONE, REFUSE
from shoal.islands.membership.committed_turn import CommittedTurn, Seat, name_members
from shoal.islands.membership.island_member import IslandMember
from shoal.islands.membership.message_json import decode_message, encode_message
from shoal.islands.membership.turn_messages import Apply, Send
from shoal.islands.membership.witness_seat import WitnessSeat

TICK_S, GREET_S = 0.1, 0.5
WINDOW_S = 10.0
"""Seconds without a turn after which the witness decides one, if no island can: all restarted."""


GIVE_UP_S = 60.0
"""Seconds after which it gives up its seat: the islands may have lost the turn that it knows."""


class Witness:
    """One witness process; `run` returns at the end of the run.

    Args:
        seat: its name and the number of its start.
        peers: names of the islands.
        tell: called with a line on each change of the members.
    """

    def __init__(self, seat: Seat, peers: tuple[int, ...], tell: Callable[[str], None]) -> None:
        self.member = IslandMember(seat, None, peers, 0)
        self.tell = tell
        self._events: queue.SimpleQueue[tuple[int, str, Any]] = queue.SimpleQueue()
        self._done: set[int] = set()
        self.seat = WitnessSeat()
        self._moved_s = self._greeted_s = self._applied_s = time.monotonic()
        self._told: tuple[int, ...] = ()

    def on_message(self, name: int, address: str, message: Any) -> None:
        """Take a message of an island; called in other threads."""
        self._events.put((name, address, message))

    def provide(self, key: str, offset: int, length: int) -> tuple[int, bytes] | None:
        """Return None: a witness holds nothing."""

    def run(self, links: MemberLinks, stops: Callable[[], bool]) -> bool:
        """Vote until the run ends; return False if `stops` returned true before."""
        self.links = links
        while not stops():
            with contextlib.suppress(queue.Empty):
                self._receive(*self._events.get(timeout=TICK_S))
            self._perform()
            self._watch()
            self._perform()
            if self._has_ended():
                return True
        return False

    def _receive(self, name: int, address: str, message: Any) -> None:
        self.links.learn(name, address)
        with contextlib.suppress(ValueError, TypeError, AttributeError, LookupError):
            if message[0] == DONE:
                self._done.add(name)
                self.links.send((name,), [DONE])
            elif message[0] == ARRIVAL:
                if self.seat.add(decode_message(message[1])) and not self.member.seated:
                    self._greeted_s = 0.0  # the islands learn at once that it was heard
            elif message[0] != REFUSE:
                self.member.receive(decode_message(message))

    def _perform(self) -> None:
        while self.member.actions:
            actions, self.member.actions = self.member.actions, []
            for action in actions:
                if isinstance(action, Send):
                    self.links.send(action.to, encode_message(action.message))
                elif isinstance(action, Apply):
                    self._apply(action.fact, is_seated=action.train)

    def _apply(self, fact: CommittedTurn, *, is_seated: bool) -> None:
        self._moved_s = self._applied_s = time.monotonic()
        self.seat.note_turn(fact, is_seated=is_seated)
        self.member.saved()
        # In a turn that it decides itself, each island gets as many samples as before.
        dealt = [sum(span.samples for span in spans) for spans in fact.dealt]
        self.member.samples = max(dealt, default=0) or self.member.samples
        if is_seated:
            self.member.trained("", 0, 0)
        if fact.names() != self._told:
            self._told = fact.names()
            self.tell(f"round {fact.round}: {name_members(fact.names())} decide the next one")

    def _watch(self) -> None:
        """Ask for a seat, or decide a turn that no island can decide."""
        member, now_s = self.member, time.monotonic()
        fact = member.fact
        is_late = now_s - self._applied_s > GIVE_UP_S
        if fact is not None and self.seat.must_restart(member, is_late=is_late):
            self._restart(fact)
        elif fact is None or not member.seated:
            if now_s - self._greeted_s > GREET_S:
                self._greet()
        elif now_s - self._greeted_s > self._greet_after_s(fact):
            self._greet()  # new processes do not know this one's address
        elif now_s - self._moved_s > WINDOW_S and self.seat.may_decide(member):
            self._moved_s = now_s
            member.grace_over()

    def _greet_after_s(self, fact: CommittedTurn) -> float:
        """Return the seconds after which a witness with a seat asks for the newest turn.

        Nobody tells it that the others went on without it, if it was cut off then.
        """
        return GREET_S if self.links.restarted(fact.seats) else WINDOW_S

    def _greet(self) -> None:
        """Ask for a seat in a running session; before one, say that this witness is there."""
        self._greeted_s = time.monotonic()
        self.member.peers = tuple(self.links.addresses.keys() - {self.member.seat.name})
        self.member.greet()
        if not self.member.seated:
            report = self.seat.report(self.member)
            self.links.send(self.member.peers, [ARRIVAL, encode_message(report), {}])

    def _restart(self, fact: CommittedTurn) -> None:
        known = fact.seat_of(self.member.seat.name)
        self.links.boot = max(self.member.seat.boot, 0 if known is None else known.boot)
        self.member = self.member.restarted(self.links.restart(), self.member.peers)

    def _has_ended(self) -> bool:
        """Return whether an island has ended the run, and all others have it or are dead."""
        fact = self.member.fact
        if fact is None or not self._done:
            return False
        return set(fact.trainers()) <= self._done | self.links.gone(fact.seats)
