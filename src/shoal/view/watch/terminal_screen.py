"""A terminal as a screen: its lines are drawn where they changed, and its keys are read.

The screen is the terminal's second one (`smcup` of xterm and its kin), so the lines before the
command come back. Whatever ends the `with` block, an exception or a signal, the terminal is as it
was before.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

from shoal.base.text.terminal_encoding import READABLE
from shoal.view.watch.styled_lines import Line, encode_line

ENTER = "\x1b[?1049h\x1b[?25l\x1b[?7l\x1b[2J"
LEAVE = "\x1b[?7h\x1b[?25h\x1b[?1049l"
KEY_NAMES = {
    "\x1b[A": "up", "\x1b[B": "down", "\x1bOA": "up", "\x1bOB": "down", "\x1b[5~": "page up",
    "\x1b[6~": "page down", "\x1b[H": "home", "\x1b[1~": "home", "\x1bOH": "home", "\t": "tab",
    "\x03": "interrupt", "\x1b[C": "tab", "\x1bOC": "tab",
}  # fmt: skip


class TerminalScreen:
    """Use as a context manager; then `draw` lines and wait for `keys`.

    Args:
        output: a terminal.
        keyboard: file descriptor of a terminal, or None: no keys.
        colour: whether styles are drawn.
    """

    def __init__(self, output: Any, keyboard: int | None, *, colour: bool) -> None:
        self.number, self.keyboard, self.colour = output.fileno(), keyboard, colour
        self.encoding = output.encoding or "utf-8"
        self._drawn: list[str] = []
        self._size = (0, 0)
        self._mode: list[Any] | None = None
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> TerminalScreen:
        for one in (signal.SIGTERM, signal.SIGHUP):
            self._handlers[one] = signal.signal(one, _exit_by_signal)
        self._handlers[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, self._suspend)
        self._enter()
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()
        for one, handler in self._handlers.items():
            signal.signal(one, handler)

    def _enter(self) -> None:
        if self.keyboard is not None:
            self._mode = termios.tcgetattr(self.keyboard)
            tty.setcbreak(self.keyboard)
        self._drawn = []
        self._write(ENTER)

    def _restore(self) -> None:
        with contextlib.suppress(OSError):
            self._write(LEAVE)
        if self.keyboard is not None and self._mode is not None:
            with contextlib.suppress(termios.error):
                termios.tcsetattr(self.keyboard, termios.TCSADRAIN, self._mode)

    def _suspend(self, number: int, _: FrameType | None) -> None:
        """Give the terminal back for Ctrl-Z, and draw it anew when the command goes on."""
        self._restore()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        signal.signal(number, self._suspend)  # from here on after SIGCONT
        self._enter()

    def size(self) -> tuple[int, int]:
        """Return columns and lines."""
        try:
            found = os.get_terminal_size(self.number)
        except OSError:
            return 80, 24
        return max(1, found.columns), max(1, found.lines)

    def draw(self, lines: Sequence[Line]) -> None:
        """Draw the lines that differ from the drawn ones; all of them after a change of size."""
        size = self.size()
        pieces = []
        if size != self._size:
            self._size, self._drawn = size, []
            pieces.append("\x1b[2J")
        fresh = [encode_line(line, colour=self.colour) for line in lines[: size[1]]]
        before = self._drawn + [""] * (len(fresh) - len(self._drawn))
        for place, (new, old) in enumerate(zip(fresh, before, strict=False)):
            if new != old:
                pieces.append(f"\x1b[{place + 1};1H\x1b[2K{new}")
        self._drawn = fresh
        if pieces:
            self._write("".join(pieces))

    def wait_for_keys(self, seconds: float) -> list[str]:
        """Return the keys that are pressed within some seconds, as soon as there are any."""
        if self.keyboard is None:
            time.sleep(seconds)
            return []
        ready, _, _ = select.select([self.keyboard], [], [], seconds)
        if not ready:
            return []
        data = os.read(self.keyboard, 256)
        if not data:  # the terminal is gone
            raise EOFError
        return list(_split_keys(data.decode("utf-8", "replace")))

    def _write(self, text: str) -> None:
        data = memoryview(text.encode(self.encoding, READABLE))
        while data:
            data = data[os.write(self.number, data) :]


def _split_keys(text: str) -> Iterator[str]:
    while text:
        name = next((code for code in KEY_NAMES if text.startswith(code)), text[0])
        yield KEY_NAMES.get(name, name)
        text = text[len(name) :]


def _exit_by_signal(number: int, _: FrameType | None) -> None:
    sys.exit(128 + number)
