"""Split a Markdown page into messages for translators, and join a translated page again.

A message is a heading, a paragraph, an item of a list, a cell of a table, an indented drawing, the
title of a widget, or a comment of a program. The rest of programs, and console blocks, stay as they are. In a message
`{1}` stands for the first `{value}` role, so a new figure does not make a translation old.

    page ── split_page ──▶ [text, Message, text, …] ── join_page(catalog) ──▶ translated page
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

ROLE = re.compile(r"\{value\}`[^`]+`")
PLACE = re.compile(r"\{(\d+)(?::([^}]*))?\}")
"""Place of a figure in a message; `{1:小时}` gives it another unit, `{1:}` none."""
SHOWN = re.compile(r"(\{value\}`[-−\d.,e]+)[^<]*(<)")
WORD = re.compile(r"[A-Za-z]{2,}")
CODE = re.compile(r"`[^`]*`")
TARGET = re.compile(r"\]\([^)]*\)")
TITLE = re.compile(r'(.*data-title=")([^"]*)(".*)', re.DOTALL)
ITEM = re.compile(r"( *(?:[-*]|\d+\.) +)(.*)", re.DOTALL)
CONSOLE = "```console"
COMMENT = re.compile(r"((?:.*\s)?# )(.+)(\n)")
"""A line of a program that ends in a comment."""
CELL = re.compile(r"(?<!\\)\|")


@dataclass(frozen=True)
class Message:
    """One text to translate.

    Attributes:
        text: the msgid: one line, but for indented drawings; figures are {1}, {2}, ….
        roles: the `{value}` roles that the figures stand for, in order.
        line: where it begins in the page, from 1.
    """

    text: str
    roles: tuple[str, ...]
    line: int

    def fill(self, translated: str) -> str:
        """Return a translation with the roles in the places of {1}, {2}, ….

        >>> make_message("{value}`2 units <a#b>` are", 1).fill("{1:}个")
        '{value}`2 <a#b>`个'
        """

        def role(found: re.Match[str]) -> str:
            whole = self.roles[int(found[1]) - 1]
            if found[2] is None:
                return whole
            return SHOWN.sub(lambda one: " ".join(filter(None, (one[1], found[2], one[2]))), whole)

        return PLACE.sub(role, translated)


def make_message(text: str, line: int) -> Message:
    """Return the message of a text.

    >>> make_message("takes {value}`3 s <a#b>` here", 1).text
    'takes {1} here'
    """
    roles: list[str] = []

    def place(found: re.Match[str]) -> str:
        roles.append(found[0])
        return f"{{{len(roles)}}}"

    return Message(ROLE.sub(place, text), tuple(roles), line)


def has_words(text: str) -> bool:
    """Return whether a text holds words besides code, figures and addresses.

    >>> has_words("`a = b` {1} 3.5"), has_words("rank 0")
    (False, True)
    """
    return WORD.search(TARGET.sub("]", CODE.sub("", PLACE.sub("", text)))) is not None


def split_page(text: str) -> list[str | Message]:
    r"""Return a page as texts to copy and messages to translate; joined they are the page.

    >>> [
    ...     part if isinstance(part, str) else part.text
    ...     for part in split_page("# A title\n\nTwo\nlines.\n")
    ... ]
    ['# ', 'A title', '\n', '\n', 'Two lines.', '\n']
    """
    lines = text.splitlines(keepends=True)
    parts: list[str | Message] = []
    at = 0
    while at < len(lines):
        size, found = _block(lines, at)
        parts += found
        at += size
    return parts


def _block(lines: list[str], at: int) -> tuple[int, list[str | Message]]:
    """Return the block that begins at a line: how many lines, and its parts."""
    line = lines[at]
    if line.startswith("```"):
        size = next((n for n in range(1, len(lines) - at) if lines[at + n].startswith("```")), 0)
        return size + 1, list(_program(lines[at : at + size + 1], at + 1))
    if not line.strip() or line.startswith(":::"):
        return 1, [line]
    if line.startswith("    "):
        return _drawing(lines, at)
    if line.startswith("|"):
        return 1, list(_row(line, at + 1))
    if title := TITLE.fullmatch(line):
        return 1, [title[1], make_message(title[2], at + 1), title[3]]
    if line.startswith("<"):
        return 1, [line]
    if line.startswith("#"):
        marks, _, words = line.partition(" ")
        return 1, [f"{marks} ", make_message(words.rstrip("\n"), at + 1), "\n"]
    return _paragraph(lines, at)


def _program(lines: list[str], number: int) -> Iterator[str | Message]:
    """Yield a fenced block: its comments are messages, unless it shows a terminal."""
    for place, line in enumerate(lines, number):
        comment = None if lines[0].startswith(CONSOLE) else COMMENT.fullmatch(line)
        if comment and has_words(comment[2]):
            yield from (comment[1], make_message(comment[2], place), comment[3])
        else:
            yield line


def _drawing(lines: list[str], at: int) -> tuple[int, list[str | Message]]:
    size = 1
    for place in range(at + 1, len(lines)):
        if lines[place].startswith("    "):
            size = place - at + 1
        elif lines[place].strip():
            break
    text = "".join(lines[at : at + size])
    return size, [make_message(text.rstrip("\n"), at + 1), "\n"] if has_words(text) else [text]


def _row(line: str, number: int) -> Iterator[str | Message]:
    """Yield the cells of a row of a table; a cell without words is copied."""
    cells = CELL.split(line.rstrip("\n"))
    for place, cell in enumerate(cells):
        words = cell.strip()
        message = make_message(words, number)
        if has_words(message.text):
            before, after = cell.split(words, 1)
            yield from (before, message, after)
        else:
            yield cell
        yield "|" if place < len(cells) - 1 else "\n"


def _starts_block(line: str) -> bool:
    return (
        not line.strip() or line.startswith(("```", ":::", "|", "#", "<")) or bool(ITEM.match(line))
    )


def _paragraph(lines: list[str], at: int) -> tuple[int, list[str | Message]]:
    """Return a paragraph, or one item of a list with its other lines."""
    size = 1
    while at + size < len(lines) and not _starts_block(lines[at + size]):
        size += 1
    item = ITEM.match(lines[at])
    marker = item[1] if item else ""
    text = " ".join("".join(lines[at : at + size])[len(marker) :].split())
    message = make_message(text, at + 1)
    return size, [marker, message if has_words(message.text) else text, "\n"]


def join_page(parts: list[str | Message], translate: Callable[[Message], str]) -> str:
    """Return the page of parts, each message translated."""
    return "".join(part if isinstance(part, str) else part.fill(translate(part)) for part in parts)
