"""Text of the user's data for a terminal: escaped, and wrapped by columns with its colours."""

from __future__ import annotations

import unicodedata

PLAIN = "\x1b[0m"
"""End of a colour."""
LETTERS = {"\t": "\\t", "\r": "\\r", "\\": "\\\\"}
"""Escapes of their own names."""


def escape_text(text: str, *, keep_breaks: bool = False) -> str:
    r"""Return text with control and format characters as escapes.

    Args:
        text: of the user's data.
        keep_breaks: a line break stays, behind ↵.

    >>> escape_text("a\x1b[1m\u202eb\n"), escape_text("a\n", keep_breaks=True)
    ('a\\x1b[1m\\u202eb\\n', 'a↵\n')
    """
    return "".join(map(_escape_breaks if keep_breaks else _escape_letter, text))


def _escape_breaks(letter: str) -> str:
    return "↵\n" if letter == "\n" else _escape_letter(letter)


def _escape_letter(letter: str) -> str:
    if letter in LETTERS:
        return LETTERS[letter]
    if letter == "\n":
        return "\\n"
    if unicodedata.category(letter)[0] != "C" and letter not in "\u2028\u2029":
        return letter
    number = ord(letter)
    return f"\\x{number:02x}" if number < 256 else f"\\u{number:04x}"


def cell_width(letter: str) -> int:
    """Return the columns that a letter takes in a terminal.

    >>> cell_width("a"), cell_width("漢"), cell_width("\u0301")
    (1, 2, 0)
    """
    if unicodedata.combining(letter):
        return 0
    return 2 if unicodedata.east_asian_width(letter) in "WF" else 1


class TextWrapper:
    """Wrapper of painted text to the width of a terminal, letter by letter.

    Args:
        first, other: what stands before the first line and the others.
        width: columns of the terminal.
    """

    def __init__(self, first: str, other: str, width: int) -> None:
        self.prefix, self.other = first, other
        self.room = max(8, width - len(first) - 1)
        self.lines: list[str] = []
        self.line: list[str] = []
        self.used = 0

    def add(self, text: str, paint: str = "", *, by_words: bool = False) -> None:
        """Append text, in a colour; `by_words`: words that are shorter than a line stay whole."""
        open_paint = False
        for at, letter in enumerate(text):
            wide = 0 if letter == "\n" else cell_width(letter)
            ahead = wide
            if by_words and letter == " ":
                ahead = 1 + len(text[at + 1 :].partition(" ")[0])
            if self.used + ahead > self.room:
                self._break(open_paint)
                open_paint = False
            if letter == "\n":
                self._break(open_paint)
                open_paint = False
                continue
            if paint and not open_paint:
                self.line.append(paint)
                open_paint = True
            self.line.append(letter)
            self.used += wide
        if open_paint:
            self.line.append(PLAIN)

    def finish(self) -> list[str]:
        """Return the lines."""
        if self.line or not self.lines:
            self._break(False)
        return self.lines

    def _break(self, painted: bool) -> None:
        self.lines.append(self.prefix + "".join(self.line) + (PLAIN if painted else ""))
        self.prefix, self.line, self.used = self.other, [], 0
