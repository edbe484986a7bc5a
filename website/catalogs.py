"""Read and write gettext catalogs (.po): the part of the format that translations of pages need.

    #: docs/learn/ranks.md:3            where the message stands
    #, fuzzy                            its English has changed since it was translated
    #| msgid "One process per device"   the English that was translated
    msgid "One process per GPU"
    msgstr "每块 GPU 一个进程"

Other programs (msgfmt, Poedit, babel) read and write the same files. This one needs no package, so
`make test` reads them without the environment of `make docs`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path

HEADER = (
    "Project-Id-Version: shoal\nLanguage: {language}\nMIME-Version: 1.0\n"
    "Content-Type: text/plain; charset=UTF-8\nContent-Transfer-Encoding: 8bit\n"
)
QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"')
ESCAPES = {"\\n": "\n", '\\"': '"', "\\\\": "\\", "\\t": "\t"}
NEAR = 0.6
"""Likeness from which an old translation is offered for a changed message."""


@dataclass(frozen=True)
class CatalogEntry:
    """One message and its translation.

    Attributes:
        source: English, as `page_messages.split_page` or a program gives it.
        translation: "" if there is none.
        place: file and line of the message.
        previous: the English that was translated; "" if it has not changed since.
    """

    source: str
    translation: str = ""
    place: str = ""
    previous: str = ""

    @property
    def is_current(self) -> bool:
        """Return whether the translation is one of this English."""
        return bool(self.translation) and not self.previous


def read_catalog(path: Path) -> dict[str, CatalogEntry]:
    """Return the entries of a file by their English; none if there is no such file."""
    if not path.exists():
        return {}
    found: dict[str, CatalogEntry] = {}
    for block in re.split(r"\n\s*\n", path.read_text(encoding="utf-8")):
        fields: dict[str, str] = {}
        name, place = "", ""
        for line in block.splitlines():
            words = line.removeprefix("#| ")
            if line.startswith("#: "):
                place = line[3:]
            if start := re.match(r"(msgid|msgstr) ", words):
                name = ("previous " if line.startswith("#| ") else "") + start[1]
            if name and (quoted := QUOTED.search(words)):
                fields[name] = fields.get(name, "") + _unescape(quoted[1])
        if source := fields.get("msgid"):
            previous = fields.get("previous msgid", "")
            if not previous and re.search(r"^#,.*\bfuzzy\b", block, re.MULTILINE):
                previous = source
            found[source] = CatalogEntry(source, fields.get("msgstr", ""), place, previous)
    return found


def write_catalog(path: Path, entries: list[CatalogEntry], language: str) -> None:
    """Write a catalog in the order of its page."""
    blocks = [f'msgid ""\nmsgstr {_quote(HEADER.format(language=language))}']
    for one in entries:
        lines = [f"#: {one.place}"] if one.place else []
        if one.previous:
            lines += ["#, fuzzy", *(f"#| {row}" for row in _field("msgid", one.previous))]
        lines += [*_field("msgid", one.source), *_field("msgstr", one.translation)]
        blocks.append("\n".join(lines))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n\n".join(blocks) + "\n", encoding="utf-8")


def merge_messages(messages: dict[str, str], old: dict[str, CatalogEntry]) -> list[CatalogEntry]:
    """Return the entries of today's messages, with the translations that an old catalog has.

    A message whose English has changed keeps the translation of the nearest old one, marked as
    fuzzy, until a translator has looked at it.

    Args:
        messages: English → its place.

    >>> old = {"Use one GPU.": CatalogEntry("Use one GPU.", "用一块 GPU。")}
    >>> [(one.translation, one.previous) for one in merge_messages({"Use two GPUs.": ""}, old)]
    [('用一块 GPU。', 'Use one GPU.')]
    """
    unused = [source for source in old if source not in messages and old[source].translation]
    entries = []
    for source, place in messages.items():
        if source in old:
            entries.append(replace(old[source], place=place))
        elif near := get_close_matches(source, unused, 1, NEAR):
            known = old[near[0]]
            entries.append(CatalogEntry(source, known.translation, place, known.source))
        else:
            entries.append(CatalogEntry(source, "", place))
    return entries


def _field(name: str, text: str) -> list[str]:
    return f"{name} {_quote(text)}".split("\n")


def _quote(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\t", "\\t")
    if "\n" not in escaped:
        return f'"{escaped}"'
    rows = escaped.split("\n")
    shown = [f'"{row}\\n"' for row in rows[:-1]] + ([f'"{rows[-1]}"'] if rows[-1] else [])
    return "\n".join(['""', *shown])


def _unescape(text: str) -> str:
    return re.sub(r"\\.", lambda found: ESCAPES.get(found[0], found[0]), text)
