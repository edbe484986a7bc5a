"""Start of a session by a process without any turn: it looks for a run that goes on first.

A disk may have been emptied, while islands that joined since train on. They dial this island at its
old address; it asks them for a seat, and begins no run beside theirs.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from shoal.base.layouts.changing_members import name_member
from shoal.fabric.islands.member_links import MemberLinks
from shoal.islands.membership.session_meeting import SessionMeeting

LISTEN_S = 4.0
"""Seconds for which a process listens before it begins a run alone.

Longer than a try of a running member to connect, and its beat.
"""


class SessionStart:
    """Search for a running session, since the links of this process are open.

    Args:
        tell: called with one line if a run goes on that this process was not given.
    """

    def __init__(self, links: MemberLinks, tell: Callable[[str], None]) -> None:
        self.links, self._tell = links, tell
        self._given, self._told = {*links.addresses}, False
        self.opened_s = time.monotonic()

    def allows(self, meeting: SessionMeeting) -> bool:
        """Return whether a session may start: a new run only if no other one is known to go on."""
        if meeting.newest() is not None:
            return True
        is_alone = {*meeting.expected()} == {meeting.own.seat.name}
        return not (is_alone and self._is_early()) and not self._find_running(meeting)

    def ask_running(self, meeting: SessionMeeting | None) -> tuple[int, ...]:
        """Learn the addresses of islands whose run goes on, to ask them; return their names."""
        if meeting is None or meeting.newest() is not None:
            return ()
        found = self._find_running(meeting)
        for name, address in found.items():
            self.links.learn(name, address)
        if found and not self._is_early() and not self._told:
            self._told = True
            whom = " and ".join(f"{name_member(name)} at {at}" for name, at in found.items())
            self._tell(
                f"{whom} runs already, and dials this island, which has no round on its disk: it "
                f"takes part in that run; for a run of its own: another port in islands.at"
            )
        return tuple(sorted(found))

    def _is_early(self) -> bool:
        return time.monotonic() - self.opened_s < LISTEN_S

    def _find_running(self, meeting: SessionMeeting) -> dict[int, str]:
        """Return members that dial this one, wait for no start, and are none that it was given."""
        return {
            name: at
            for name, at in self.links.dialers().items()
            if name not in self._given and name not in meeting.arrivals
        }
