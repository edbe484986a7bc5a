"""Lines of a terminal as pieces of text with a style, cut and filled to a number of columns."""

from __future__ import annotations

from collections.abc import Iterable

from shoal.base.text.event_sentences import strip_control_characters

Span = tuple[str, str]
"""(text, style)"""
Line = tuple[Span, ...]

SGR = {
    "": "",
    "bold": "1",
    "dim": "2",
    "red": "31",
    "green": "32",
    "yellow": "33",
    "cyan": "36",
    "bold red": "1;31",
    "bold green": "1;32",
    "bold yellow": "1;33",
    "bold cyan": "1;36",
    "data": "30;43",
    "passes": "97;44",
    "sum": "97;45",
    "update": "30;42",
    "hooks": "30;46",
    "other": "30;47",
    "waiting": "2",
    "reverse": "7",
}
"""Style → parameters of the terminal's SGR sequence."""


def cell_width(text: str) -> int:
    """Return the columns of a text; letters of some scripts take two, accents none.

    >>> cell_width("abc"), cell_width("漢")
    (3, 2)
    """
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def cut_text(text: str, width: int) -> str:
    """Return the text in at most `width` columns; a cut one ends with an ellipsis.

    >>> cut_text("alphabet", 5), cut_text("漢漢漢", 5), cut_text("a", 0)
    ('alph…', '漢漢…', '')
    """
    if cell_width(text) <= width:
        return text
    if width <= 0:
        return ""
    kept = text[: width - 1]
    while cell_width(kept) > width - 1:
        kept = kept[:-1]
    return f"{kept}…"


def pad_text(text: str, width: int, *, right: bool = False) -> str:
    """Return the text in exactly `width` columns, cut or filled with blanks.

    >>> pad_text("ab", 4), pad_text("ab", 4, right=True)
    ('ab  ', '  ab')
    """
    text = cut_text(text, width)
    blanks = " " * (width - cell_width(text))
    return blanks + text if right else text + blanks


def clean_text(value: object) -> str:
    r"""Return what a run folder holds as one line without control characters.

    >>> clean_text("a\x1b[2J\nb")
    'a·[2J b'
    """
    return " ".join(strip_control_characters(str(value)).split("\n"))


def cut_line(spans: Iterable[Span], width: int) -> Line:
    """Return the spans that fit into `width` columns; the last one may be cut."""
    found: list[Span] = []
    left = width
    for text, style in spans:
        if left <= 0:
            break
        kept = cut_text(text, left)
        if kept:
            found.append((kept, style))
        left -= cell_width(kept)
        if kept != text:
            break
    return tuple(found)


def fit_spans(spans: Iterable[Span], width: int, gap: str = " · ") -> Line:
    """Return as many whole spans as fit, with gaps between them; the first one may be cut."""
    found: list[Span] = []
    used = 0
    for text, style in spans:
        if not text:
            continue
        more = cell_width(text) + (len(gap) if found else 0)
        if found and used + more > width:
            break
        if found:
            found.append((gap, "dim"))
        found.append((cut_text(text, width), style))
        used += more
    return tuple(found)


def line_text(line: Line) -> str:
    """Return a line without its styles.

    >>> line_text((("step ", ""), ("3", "bold")))
    'step 3'
    """
    return "".join(text for text, _ in line).rstrip()


def encode_line(line: Line, *, colour: bool) -> str:
    """Return a line with the terminal's sequences for its styles."""
    if not colour:
        return "".join(text for text, _ in line)
    pieces = []
    for text, style in line:
        code = SGR.get(style, "")
        pieces.append(f"\x1b[{code}m{text}\x1b[0m" if code else text)
    return "".join(pieces)
