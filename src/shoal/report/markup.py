"""HTML built from functions: text is escaped, and only `Markup` is inserted as it is.

Run folders are hostile: names, keys, events and paths may hold tags, quotes, terminal escapes or
letters that turn the direction of a line. `tag` escapes every child and attribute that is no
`Markup`, and nothing outside this file makes a `Markup` from data.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

LONGEST_TEXT = 2_000
"""Letters of one text of a run folder that a page shows."""
VOID = frozenset(["br", "col", "hr", "img", "input", "link", "meta", "wbr"])
"""Elements without an end tag."""


class Markup(str):
    """HTML that is inserted without escaping."""

    __slots__ = ()


Child = str | int | float | None | Iterable["Child"]


def clean_text(text: str) -> str:
    r"""Return a text without control, format and surrogate characters, shortened if very long.

    Bidirectional marks are format characters: a name cannot turn the text around it.

    >>> clean_text("a\x00b\x1b[1m\u202ec"), len(clean_text("x" * 9000))
    ('a·b·[1m·c', 2001)
    """
    if len(text) > LONGEST_TEXT:
        text = f"{text[:LONGEST_TEXT]}…"
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        letter if letter in "\n\t" or unicodedata.category(letter)[0] != "C" else "·"
        for letter in text
    )


def markup_of(child: Child) -> Markup:
    """Return a child as HTML: `Markup` as it is, text and numbers escaped, sequences joined.

    >>> markup_of(["<b>", Markup("<i>"), 3, None])
    '&lt;b&gt;<i>3'
    """
    if child is None:
        return Markup("")
    if isinstance(child, Markup):
        return child
    if isinstance(child, str):
        return Markup(escape(clean_text(child)))
    if isinstance(child, (int, float)):
        return Markup(escape(str(child)))
    return Markup("".join(map(markup_of, child)))


def tag(name: str, /, *children: Child, **attributes: Child) -> Markup:
    """Return an element with its children and attributes.

    Args:
        name: of the element; never from data.
        children: text is escaped.
        attributes: `class_` is class, `view_box` and other names with "_" get "-", None is left
            out; camel case stays, as SVG needs it.

    >>> tag("p", "a < b", class_="x", data_key='"')
    '<p class="x" data-key="&quot;">a &lt; b</p>'
    >>> tag("img", src="data:,", alt=None)
    '<img src="data:,">'
    """
    words = [name]
    for key, value in attributes.items():
        if value is not None:
            words.append(f'{key.rstrip("_").replace("_", "-")}="{markup_of(value)}"')
    head = f"<{' '.join(words)}>"
    return Markup(head if name in VOID else f"{head}{markup_of(children)}</{name}>")


def table(
    head: Sequence[Child], rows: Iterable[Sequence[Child]], *, numeric: str = "", caption: str = ""
) -> Markup:
    """Return a table in a box that scrolls sideways on a narrow screen.

    Args:
        head: cells of the first row.
        rows: cells of the others.
        numeric: a letter per column: "n" for numbers, aligned at the right, "w" for long text,
            "e" for some words that may break.
        caption: the line above it.
    """
    kinds = numeric.ljust(len(head))

    def cells(element: str, row: Sequence[Child]) -> Markup:
        scope = "col" if element == "th" else None
        return tag(
            "tr",
            [
                tag(element, cell, class_=kind.strip() or None, scope=scope)
                for cell, kind in zip(row, kinds, strict=False)
            ],
        )

    body = [cells("td", row) for row in rows]
    parts = [tag("thead", cells("th", head)), tag("tbody", body)]
    if caption:
        parts.insert(0, tag("caption", caption))
    return tag("div", tag("table", parts), class_="scroll")


def json_script(name: str, record: Any) -> Markup:
    r"""Return a block of JSON data that no browser runs, whatever text it holds.

    >>> json_script("data", {"a": "</script>"})
    '<script type="application/json" id="data">{"a":"\\u003c/script\\u003e"}</script>'
    """
    text = json.dumps(record, separators=(",", ":"), allow_nan=False)
    for letter in "<>&\u2028\u2029":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return Markup(f'<script type="application/json" id="{name}">{text}</script>')
