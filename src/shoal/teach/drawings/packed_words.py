"""Words and facts in lines of a given width, for drawings on a terminal and as SVG."""

from __future__ import annotations

from collections.abc import Sequence


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
        if lines and len(lines[-1]) + len(between) + len(word) <= width:
            lines[-1] += between + word
        else:
            lines.append(word)
    return lines
