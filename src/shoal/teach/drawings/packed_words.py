"""Words and facts in lines of a given width, for drawings on a terminal and as SVG."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

WIDE = re.compile(
    r"[\u1100-\u115f\u2e80-\ua4cf\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe6f\uff00-\uff60]"
)
"""Letters of Chinese, Japanese and Korean texts, and their punctuation."""
WIDE_LETTERS = 2
"""Width of such a letter in latin letters: one em, of which prose in latin letters takes a half."""
CLOSING = r"\u201d\u3001\u3002\u300b\uff01\uff09\uff0c\uff1a\uff1b\uff1f"
"""Punctuation that begins no line."""
UNBROKEN = re.compile(rf" *(?:{WIDE.pattern}|[^\s\u2e80-\ua4cf\uff00-\uff60]+)[{CLOSING}]*")


def count_letters(text: str) -> int:
    """Return the width of a text in latin letters.

    >>> count_letters("rank 0"), count_letters("激活")
    (6, 4)
    """
    return len(text) + len(WIDE.findall(text)) * (WIDE_LETTERS - 1)


def wrap_words(text: str, width: int) -> list[str]:
    """Return a text in lines of a width; a Chinese text breaks between any two letters.

    >>> wrap_words("one two", 5), wrap_words("前向传播。", 6)
    (['one', 'two'], ['前向传', '播。'])
    """
    if not WIDE.search(text):
        return textwrap.wrap(text, width)
    lines = [""]
    for word in UNBROKEN.findall(text):
        if lines[-1] and count_letters(lines[-1] + word) > width:
            lines.append(word.lstrip())
        else:
            lines[-1] += word
    return lines


def facts_lines(facts: dict[str, str], width: int) -> list[str]:
    """Return name and figure of every fact, as many on a line as fit.

    >>> facts_lines({"makespan": "33 s", "bubble": "9 s"}, 100)
    ['makespan 33 s · bubble 9 s']
    """
    return pack_words([f"{name} {figure}" for name, figure in facts.items()], " · ", width)


def pack_words(words: Sequence[str], between: str, width: int) -> list[str]:
    """Join words, as many on a line as fit.

    >>> pack_words(["0 → 1", "1 → 2", "2 → 0"], " · ", 14)
    ['0 → 1 · 1 → 2', '2 → 0']
    """
    lines: list[str] = []
    for word in words:
        if lines and count_letters(lines[-1] + between + word) <= width:
            lines[-1] += between + word
        else:
            lines.append(word)
    return lines
