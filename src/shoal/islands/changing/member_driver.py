"""Driver of an island's member: messages, timers and merges for the state machine, in a thread.

    training thread     offer(change) ── wait_for_turn() ── note_saved() / note_healed()
    this thread         IslandMember: events in, actions out; merges; serves changes to the others
    links' threads      messages of other members come in, bytes are fetched

The state machine decides all; this thread only says what happened. Rank 0 of an island has a
driver; `rank_merges.py` merges on all ranks, and `island_ranks.py` gives each turn to all.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from shoal.base.errors import ClusterError, ConfigError, ShoalError
from shoal.fabric.islands.member_links import MemberLinks
from shoal.islands.changing.change_store import KEY
from shoal.islands.changing.grace_windows import GraceWindow
from shoal.islands.changing.lost_members import (
    describe_absent,
    describe_left_out,
    list_unreachable,
)
from shoal.islands.changing.member_waits import (
    UNKNOWN,
    ResumeCommand,
    WaitReport,
    describe_wait,
    explain_shortage,
    explain_start,
)
from shoal.islands.changing.rank_merges import RankMerges
from shoal.islands.changing.session_start import SessionStart
from shoal.islands.changing.turn_records import AppliedTurn, OfferedChange, join_turns
from shoal.islands.membership.committed_turn import CommittedTurn, Seat, is_witness, name_members
from shoal.islands.membership.island_member import IslandMember
from shoal.islands.membership.message_json import decode_message, encode_message
from shoal.islands.membership.session_meeting import (
    ArrivalReport,
    SessionMeeting,
    needs_common_start,
)
from shoal.islands.membership.turn_messages import (
    ALL_VOTE,
    Action,
    Apply,
    Await,
    Hello,
    Merge,
    Message,
    Offer,
    Promise,
    Propose,
    Send,
    Welcome,
)
from shoal.islands.peer_deadline import PeerDeadline

TICK_S, GREET_S, TOLD_S = 0.05, 0.5, 10.0
LOST_S = 2.0
"""Seconds for which a majority must be lost before a member that is no chair reports its wait."""
SESSION_S = 5.0
"""Seconds after an answer of a running session in which no other one is started."""
ASK_S = 5.0
"""Seconds without news after which a member that takes another one's weights asks for the turn."""
STATE = "state/"
REFUSE, DONE, ARRIVAL = "refuse", "done", "arrival"


class MemberDriver:
    """One process of the protocol; the training thread calls the public methods.

    Args:
        member: this process, with the newest turn on its disk.
        merges: of this island's ranks; this process is rank 0.
        links: opened by `start`, with this driver's callbacks.
        resume: command that goes on with this island's run folder.
        settings: must be equal on all members, by key.
        describe: compares settings with those of another: an error text, "" if they agree.
        provide_state: bytes of this member's saved state by key (`MemberLinks`).
    """

    def __init__(
        self,
        member: IslandMember,
        merges: RankMerges,
        patience: PeerDeadline,
        *,
        arrival: ArrivalReport,
        count: int,
        wait_s: float,
        resume: ResumeCommand,
        settings: dict[str, Any],
        describe: Callable[[dict[str, Any], int], str],
        provide_state: Callable[[str, int, int], tuple[int, bytes] | None],
        tell: Callable[[str], None],
    ) -> None:
        self.member, self.merges, self.patience = member, merges, patience
        self.meeting: SessionMeeting | None = SessionMeeting(arrival, count)
        self._arrival, self._held, self._count = arrival, arrival.held, count
        self.wait_s, self.resume = wait_s, resume
        self.settings, self.describe = settings, describe
        self.provide_state, self.tell = provide_state, tell
        self.is_healthy = True
        self._asked: Merge | None = None
        self._events: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self._turns: queue.SimpleQueue[AppliedTurn | ShoalError] = queue.SimpleQueue()
        self._newest = -1, -1
        self._greeted_s = self._waits_since_s = time.monotonic()
        self.window = GraceWindow(patience, wait_s)
        self.changes = merges.changes
        self.changes.notify = lambda digest: self._events.put(("fetched", digest))
        self._awaits: tuple[int, ...] = ()
        self._first_lost: tuple[int, ...] = ()
        self._named: set[tuple[int, ...]] = set()
        self._lost_since_s = time.monotonic()
        self._seats: tuple[Seat, ...] = ()
        self._welcomed_s = -SESSION_S
        self._done: set[int] = set()
        self._had_seat, self._waits = False, WaitReport(wait_s, tell)
        self._reasons: dict[int, str] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="island-member", daemon=True)

    # the training thread

    def start(self, links: MemberLinks) -> None:
        """Start the thread that runs the members' protocol."""
        self.links = self.changes.links = links
        self.session_start = SessionStart(links, self.tell)
        self._thread.start()

    def wait_for_turn(self, interrupted: Callable[[], bool]) -> AppliedTurn | None:
        """Return the next committed turn, the newest if several came; None if interrupted.

        Raises:
            ClusterError: too few members are left, and `wait_s` has passed; ConfigError: the
                settings differ.
        """
        found: AppliedTurn | None = None
        while found is None or not self._turns.empty():
            try:
                turn = self._turns.get(timeout=TICK_S)
            except queue.Empty:
                if interrupted():
                    return None
                continue
            if isinstance(turn, ShoalError):
                raise turn
            found = turn if found is None else join_turns(found, turn)
        return found

    def has_newer(self, fact: CommittedTurn) -> bool:
        """Return whether the members went on from a turn."""
        return self._newest > (fact.session, fact.turn)

    @property
    def awaits(self) -> tuple[int, ...]:
        """Members without which the others cannot go on; () if they can."""
        return self._awaits or list_unreachable(self.member, self.links)

    def offer(self, fact: CommittedTurn, change: OfferedChange) -> None:
        """Offer this member's change of the turn after `fact`."""
        self._events.put(("offer", fact, change))

    def note_saved(self, fact: CommittedTurn) -> None:
        """Note that a turn is on this member's disk."""
        self._events.put(("saved", fact))

    def note_healed(self, fact: CommittedTurn) -> None:
        """Note that the outer weights are those of a turn, and on disk."""
        self._events.put(("healed", fact))

    def finish(self, within_s: float) -> None:
        """End, once the other members have the last turn too, or `within_s` later."""
        fact = self.member.fact
        names = () if fact is None else fact.names()
        self.links.send(names, [DONE])
        until_s = time.monotonic() + within_s
        while time.monotonic() < until_s and fact is not None:
            gone = self.links.gone(fact.seats)
            if set(names) <= self._done | gone | {self.member.seat.name}:
                break
            time.sleep(TICK_S)
        self.close()

    def close(self) -> None:
        """Stop the thread and close the connections at once."""
        self._ended.set()
        self._thread.join(10.0)
        self.links.close()

    # the links' threads

    def on_message(self, name: int, address: str, message: Any) -> None:
        """Take a message of another member."""
        self._events.put(("message", name, address, message))

    def provide(self, key: str, offset: int, length: int) -> tuple[int, bytes] | None:
        """Return bytes of a change or of the saved state."""
        if key.startswith(KEY):
            return self.changes.provide(key, offset, length)
        return self.provide_state(key, offset, length)

    # this thread

    def _run(self) -> None:
        try:
            while not self._ended.is_set():
                try:
                    event = self._events.get(timeout=TICK_S)
                except queue.Empty:
                    event = ("tick",)
                self._handle(*event)
                self._perform()
                self._watch()
                self._perform()
        except ShoalError as failure:
            self._turns.put(failure)
        except Exception as failure:
            self._turns.put(ClusterError(f"islands: the member's thread failed: {failure!r}"))
            raise
        finally:
            self.merges.end()

    def _handle(self, kind: str, *given: Any) -> None:
        if kind == "message":
            self._on_message(*given)
        elif kind == "offer":
            self._on_offer(*given)
        elif kind in ("saved", "healed"):
            fact = self.member.fact
            if fact is not None and fact.weights == given[0].weights:
                self.is_healthy = self.is_healthy or kind == "healed"
                self.member.saved()
                self._held = fact
                if self.meeting is not None:
                    self.meeting.hold(fact)
                if self._asked is not None:
                    self._merge_if_here()
        elif kind == "fetched":
            self._merge_if_here()

    def _on_message(self, name: int, address: str, message: Any) -> None:
        self.links.learn(name, address)
        with contextlib.suppress(ValueError, TypeError, AttributeError, LookupError):
            kind = message[0]
            if kind == DONE:
                self._done.add(name)
            elif kind == REFUSE:
                raise ConfigError(str(message[1]))
            elif kind == ARRIVAL:
                problem = "" if is_witness(name) else self.describe(message[2], name)
                if problem:
                    self.links.send((name,), [REFUSE, problem])
                else:
                    self._on_arrival(decode_message(message[1]))
            else:
                self._receive(decode_message(message))

    def _receive(self, message: Message) -> None:
        if isinstance(message, Propose | Promise) and message.proposal is not None:
            if not is_witness(message.seat.name):
                self.merges.fetch((message.proposal,), ALL_VOTE)  # a merge will need it
        elif isinstance(message, Offer):
            self.merges.fetch(message.proposals, message.ballot)
        elif isinstance(message, Hello) and self.links.is_unreached(message.seat.name):
            return  # it would get a seat, and hear of no turn; it asks again
        self.member.receive(message)
        if isinstance(message, Welcome):
            self._welcomed_s = time.monotonic()
        elif not isinstance(message, Hello):
            self.window.moved_s = time.monotonic()

    def _on_arrival(self, arrival: ArrivalReport) -> None:
        if self.meeting is None:
            return
        if self.meeting.add(arrival):
            self._report()
        apart = self.meeting.find_unequal_starts()
        newest = self.meeting.newest()
        if apart and (newest is None or not newest.round):
            raise ConfigError(
                f"{name_members(apart)}: the weights before round 1 are not those of island "
                f"{self.member.seat.name}; try: the same model, seed and versions on all islands"
            )
        if not self.session_start.allows(self.meeting):
            return
        lost, fact = self.meeting.find_lost(), self.meeting.begin(self.member)
        if fact is not None and lost is not None:
            self.tell(
                f"round {fact.round} had been merged, and its islands died before a disk had it: "
                f"it is trained again"
            )

    def _on_offer(self, fact: CommittedTurn, change: OfferedChange) -> None:
        if self.member.fact is not fact or not self.is_healthy:
            return  # the others went on meanwhile
        self.member.leaves = self.member.leaves or change.leaves
        self.window.open(change.size_bytes, change.compute_s)
        self.member.trained(*change[:5])

    # actions

    def _perform(self) -> None:
        while self.member.actions:
            actions, self.member.actions = self.member.actions, []
            for action in actions:
                self._perform_one(action)

    def _perform_one(self, action: Action) -> None:
        if isinstance(action, Send):
            self._send(action.to, action.message)
        elif isinstance(action, Merge):
            self._asked = action
            self.merges.fetch(action.proposals, action.ballot)
            self._merge_if_here()
        elif isinstance(action, Apply):
            self._apply(action)
        elif isinstance(action, Await):
            self._note_wait(action.names)

    def _note_wait(self, names: tuple[int, ...]) -> None:
        """Begin to wait for members without which nobody goes on."""
        if not self._awaits:
            self._waits_since_s, self._first_lost = time.monotonic(), names
            self._named.clear()
        if names not in self._named:
            self._named.add(names)
            whom = name_members(names) if names else "more islands"
            self.tell(
                f"{explain_shortage(self.member)}: waits for {whom}, at most {self.wait_s:g} s"
            )
        self._awaits = names or UNKNOWN

    def _send(self, names: tuple[int, ...], message: Any) -> None:
        self.links.send(names, encode_message(message))

    def _merge_if_here(self) -> None:
        """Merge the changes that the member asked for, once all of them are here."""
        asked = self._asked
        if asked is None or not self.is_healthy:
            return
        found = self.merges.merge_if_here(asked)
        if found is None:
            return
        self._asked = None
        self._reasons = found.refused
        fact = self.member.fact
        weights = found.weights if found.divisor or fact is None else fact.weights
        self.member.merged(asked.ballot, weights, tuple(found.refused))

    def _apply(self, action: Apply) -> None:
        """Install a committed turn, and hand it to the training thread."""
        fact, known = action.fact, self._newest
        self._newest = fact.session, fact.turn
        if action.train:
            self.meeting, self._had_seat = None, True
        else:
            self._welcomed_s = time.monotonic()  # others decide turns
        follows = known == (fact.session, fact.turn - 1)
        before, reasons = self._seats if follows else (), self._reasons
        absent = describe_absent(fact, before, reasons, self.links)
        self.window.close(
            self.merges.merge.size_bytes,
            committed=follows and bool(fact.committers) and absent.keys() <= reasons.keys(),
        )
        digest, merged = self.merges.apply(fact.weights if self.is_healthy else None)
        self.is_healthy = self.is_healthy and (
            digest == fact.weights or (fact.round == 0 and not fact.weights)  # or a run's start
        )
        heal = not self.is_healthy
        left_out = describe_left_out(self.member, fact, self._seats, self.links) if heal else ""
        turn = AppliedTurn(fact, merged, heal, action.train, absent, reasons, left_out)
        self._turns.put(turn)
        self._seats = fact.seats
        self._asked, self._awaits, self._reasons = None, (), {}
        if action.train and len(fact.trainers()) < self.member.least:
            self._note_wait(tuple(absent))

    # timers

    def _watch(self) -> None:
        """End the windows that are over."""
        self.merges.notice_lost_ranks()
        if self._asked is not None and self.merges.inner.size > 1:
            self._merge_if_here()  # another rank may have its pieces now
        now_s, member, fact = time.monotonic(), self.member, self.member.fact
        self._note_lost(list_unreachable(member, self.links), now_s)
        if self._awaits and now_s - self._waits_since_s > self.wait_s:
            raise ClusterError(
                describe_wait(
                    *(member, self._awaits, self._first_lost, self.wait_s, self.links, self.resume)
                )
            )
        if (self._awaits and needs_common_start(member, set(self._awaits), self.links)) or (
            fact is not None and self._is_superseded(fact)
        ):
            self._restart_member()
        elif not member.seated or fact is None:
            if now_s - self._greeted_s > GREET_S:
                self._greeted_s = now_s
                self._greet()
        elif not self.is_healthy and now_s - max(self.window.moved_s, self._greeted_s) > ASK_S:
            # It offers no change and so no window ends; a cut may have lost the turn in which the
            # others went on, and then nobody has the weights any more for which it waits.
            self._greeted_s = now_s
            member.greet()
        elif self.window.is_over(member, fact, self.links, waits=bool(self._awaits)):
            self.window.restart()
            member.grace_over()

    def _note_lost(self, names: tuple[int, ...], now_s: float) -> None:
        """Note members that a majority needs and that are dead; also where another one chairs."""
        self.links.refusing_are_gone = bool(names)
        if not names or self.window.offered_s is None:
            self._lost_since_s = now_s
        elif now_s - self._lost_since_s > LOST_S and not self._awaits:
            self._note_wait(names)

    def _is_superseded(self, fact: CommittedTurn) -> bool:
        """Return whether a turn names a start number of this island not below this process's.

        The clock was set back, and the disk that knew the number was emptied.
        """
        known = fact.seat_of(self.member.seat.name)
        if self._had_seat or known is None or known.boot < self.member.seat.boot:
            return False
        self.links.boot = known.boot
        return True

    def _restart_member(self) -> None:
        """Become a process without a seat, as after a restart, and meet the others."""
        self.member = self.member.restarted(self.links.restart(), tuple(self.links.addresses))
        arrival = self._arrival._replace(seat=self.member.seat, held=self._held)
        self.meeting = SessionMeeting(arrival, self._count)
        self.window.offered_s, self._awaits, self._waits_since_s = None, (), time.monotonic()

    def _greet(self) -> None:
        """Ask for a seat in a running session; before one, start it if all are there."""
        is_running = self._is_running()
        running = self.session_start.ask_running(self.meeting)
        if self.meeting is None and not (is_running or self.member.leaves):
            self._restart_member()  # it lost its seat, and then the session ended
        self._report()
        if not self.member.leaves:
            self.member.peers = tuple(self.links.addresses.keys() - {self.member.seat.name})
            self.member.greet()
        if is_running:  # no other session is started
            self._awaits, self._waits_since_s = (), time.monotonic()
        elif self.meeting is not None:
            self._on_arrival(self.meeting.own)
            missing, unheard = self.meeting.missing(), self.meeting.find_unheard()
            self._awaits = missing or running or tuple(sorted({name for name, _ in unheard}))
            if self._awaits and time.monotonic() - self._waits_since_s > TOLD_S:
                why = explain_start(missing, () if missing else unheard, self.links)
                self._waits.report(self._awaits, why)

    def _is_running(self) -> bool:
        return time.monotonic() - self._welcomed_s < SESSION_S

    def _report(self) -> None:
        """Say what this process holds, and whom it has heard."""
        if self.meeting is not None and not self.member.seated:
            self.meeting.know(self.member.fact)
            self.links.send(
                self.meeting.readers(self.links.addresses, is_running=self._is_running()),
                [ARRIVAL, encode_message(self.meeting.own), self.settings],
            )
