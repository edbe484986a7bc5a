"""Loop of `shoal watch`: read, draw, wait for keys, at a small share of a core.

A refresh follows the last one after REFRESH_S, or later if reading and drawing took more than
CPU_SHARE of that time: a run with very many ranks is shown less often, not at more cost.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from shoal.view.watch.styled_lines import Line
from shoal.view.watch.watch_screen import ScreenOptions, next_view, render_screen
from shoal.view.watch.watch_state import WatchedRun

REFRESH_S = 0.5
LONGEST_S = 10.0
CPU_SHARE = 0.02
KEYS_S = 0.25
"""Longest wait for a key before the terminal's size is read again."""


class WatchTerminal(Protocol):
    """A terminal as the loop needs it."""

    def size(self) -> tuple[int, int]:
        """Return columns and lines."""

    def draw(self, lines: list[Line]) -> None:
        """Draw the lines."""

    def wait_for_keys(self, seconds: float) -> list[str]:
        """Return pressed keys."""


def watch_run(
    read: Callable[[], WatchedRun], screen: WatchTerminal, options: ScreenOptions
) -> None:
    """Show a run until `q` is pressed or the terminal is gone.

    Args:
        read: returns the run's state of the moment.
    """
    state, due_s = WatchedRun(""), 0.0
    while True:
        now_s, began_s = time.monotonic(), time.process_time()
        is_due = now_s >= due_s
        if is_due and not options.paused:
            state = read()
        size = screen.size()
        screen.draw(render_screen(state, *size, options, time.time()))
        cost_s = time.process_time() - began_s
        if is_due:
            due_s = now_s + min(LONGEST_S, max(REFRESH_S, cost_s / CPU_SHARE))
        changed: ScreenOptions | None = options
        while changed is options and time.monotonic() < due_s and screen.size() == size:
            left_s = max(0.0, min(KEYS_S, due_s - time.monotonic()))
            try:
                keys = screen.wait_for_keys(left_s)
            except (EOFError, OSError):
                return
            for key in keys:
                changed = handle_key(key, changed or options, size[1], state)
                if changed is None:
                    return
        options = changed or options


def handle_key(
    key: str, options: ScreenOptions, height: int, state: WatchedRun
) -> ScreenOptions | None:
    """Return the options after a key; None for the key that quits."""
    if key in ("q", "Q", "interrupt"):
        return None
    if key == "tab":
        return next_view(options)
    if key in ("l", "L"):
        return replace(options, log=not options.log)
    if key in ("p", "P", " "):
        return replace(options, paused=not options.paused)
    if key == "?":
        return replace(options, help=not options.help)
    page = max(1, height - 8)
    moves = {"up": -1, "down": 1, "page up": -page, "page down": page, "home": -1 << 30}
    if key in moves:
        return _scroll(options, moves[key], state)
    return options


def _scroll(options: ScreenOptions, rows: int, state: WatchedRun) -> ScreenOptions:
    """Return the options scrolled: down the ranks, or back in time through the events."""
    if options.view == "events":
        rows, most = -rows, len(state.events) - 1
        rows = -options.first if rows > 1 << 20 else rows
    else:
        most = len(state.ranks) - 1
    return replace(options, first=max(0, min(most, options.first + rows)))
