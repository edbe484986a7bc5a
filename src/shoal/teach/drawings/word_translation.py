"""Translate the words of a drawing: titles, stories and captions, with their figures kept.

A message of the catalog has `#` for each figure, or list of figures, of the English text:

    "until 42.0 ms"  ──▶  "until #"  ──catalog──▶  "到 # 为止"  ──▶  "到 42.0 ms 为止"

So one message serves every number of ranks. `website/static/words.js` does the same to sliders.
An answer of the planner or of a puzzle has holes for words too:

    {}    words, as many as fit; they are translated in their turn
    {=}   words, as few as fit, which stay as they are: a user's text, code, a key, a path
    #     figures, beside a hole of words

    "your program: line #: {=}"  ──▶  "你的程序，第 # 行：{=}"

Holes of one kind keep their order in a translation. A text without a message stays English.
"""

from __future__ import annotations

import re
from dataclasses import replace
from html import escape, unescape

from shoal.base.plans.timeline import Timeline
from shoal.teach.walks.walk import LOOKS, StepThrough, WalkStep

ONE = r"[A-Za-z_]{0,2}\d+(?:[.,/]\d+)*(?: (?:[KMGT]iB|[kMGT]?B|µs|ms|s|min)\b)?"
FIGURES = re.compile(rf"{ONE}(?:,? {ONE})*")
"""A figure with its name or unit, or several in a row: "l3", "42.0 ms", "4 4 2 2"."""
SHOWN = re.compile(r"(>|aria-label=\")([^<>\"\n]+)(</text>|</title>|\")")
HOLES = {"{}": "(.+)", "{=}": "(.*?)", "#": f"({FIGURES.pattern})"}
"""Holes of a message with words, and what fits into each."""
HOLE = re.compile("|".join(map(re.escape, HOLES)))
CHECKED = "checked: "
"""Words that a drawing puts before a walk's check."""


class WordTranslation:
    """A catalog of messages, applied to texts, walks, timelines and SVG.

    Args:
        messages: English with holes → the translation, with as many holes of each kind.
    """

    def __init__(self, messages: dict[str, str]) -> None:
        self.messages = messages
        self._templates = [
            (_template(english), HOLE.findall(english), translation)
            for english, translation in messages.items()
            if "{}" in english or "{=}" in english
        ]

    def text(self, english: str) -> str:
        """Return a text translated, or as it is.

        >>> WordTranslation({"until #": "到 # 为止"}).text("until 42.0 ms")
        '到 42.0 ms 为止'
        """
        found = self.messages.get(message_key(english))
        if not found:
            return self._fill_template(english)
        figures = iter(FIGURES.findall(english))
        return re.sub("#", lambda _: next(figures, ""), found)

    def _fill_template(self, english: str) -> str:
        """Return a text by the first message with words that fits it, or as it is.

        >>> WordTranslation({"{}, recompute {}": "{}，重计算 {}"}).text("fsdp, recompute full")
        'fsdp，重计算 full'
        >>> WordTranslation({"{=}: line #: {}": "{=}，第 # 行：{}"}).text("mine: line 3: a: b")
        'mine，第 3 行：a: b'
        """
        for template, holes, translation in self._templates:
            if found := template.fullmatch(english):
                return self._fill(translation, holes, found.groups())
        return english

    def _fill(self, translation: str, holes: list[str], found: tuple[str, ...]) -> str:
        """Return a translation with the words found in the holes of its English."""
        words: dict[str, list[str]] = {hole: [] for hole in HOLES}
        for hole, fits in zip(holes, found, strict=True):
            words[hole].append(self.text(fits) if hole == "{}" else fits)
        return HOLE.sub(lambda hole: words[hole[0]].pop(0), translation)

    def walk(self, walk: StepThrough) -> StepThrough:
        """Return a step-through with all its sentences translated."""
        return replace(
            walk,
            title=self.text(walk.title),
            story=tuple(self.text(one) for one in walk.story),
            rows=tuple(self.text(one) for one in walk.rows),
            columns=tuple(self.text(one) for one in walk.columns),
            steps=tuple(self._step(step) for step in walk.steps),
            checked=self.text(walk.checked),
            looks={name: self.text(says) for name, says in {**LOOKS, **walk.looks}.items()},
            timeline=self.timeline(walk.timeline) if walk.timeline else None,
        )

    def _step(self, step: WalkStep) -> WalkStep:
        happens = tuple(self.text(one) for one in step.happens)
        return replace(
            step, title=self.text(step.title), happens=happens, note=self.text(step.note)
        )

    def timeline(self, timeline: Timeline) -> Timeline:
        """Return a timeline with its title and facts translated."""
        facts = {self.text(name): self.text(figure) for name, figure in timeline.facts.items()}
        return replace(timeline, title=self.text(timeline.title), facts=facts)

    def svg(self, drawn: str) -> str:
        """Return a drawing with the remaining words translated: rows, legends, tooltips."""

        def translate(found: re.Match[str]) -> str:
            english = unescape(found[2])
            if english.startswith(CHECKED):
                # Its sentence is translated with the walk; the prefix is the drawing's own.
                before = self.messages.get(CHECKED.strip(), CHECKED)
                words = before + english.removeprefix(CHECKED)
            else:
                words = self.text(english)
            return found[1] + escape(words) + found[3]

        return SHOWN.sub(translate, drawn)


def _template(english: str) -> re.Pattern[str]:
    """Return the pattern of the texts that a message with holes fits."""
    parts = re.split(f"({HOLE.pattern})", english)
    return re.compile("".join(HOLES.get(part) or re.escape(part) for part in parts))


def message_key(english: str) -> str:
    """Return a text with `#` for its figures, as catalogs have it.

    >>> message_key("tokens per expert 4 4 2 2, mean 3")
    'tokens per expert #, mean #'
    """
    return FIGURES.sub("#", english)


def walk_texts(walk: StepThrough) -> list[str]:
    """Return every text of a step-through that a drawing of it shows."""
    steps = [one for step in walk.steps for one in (step.title, *step.happens, step.note)]
    looks = {**LOOKS, **walk.looks}.values()
    found = [walk.title, *walk.story, *walk.rows, *walk.columns, *steps, walk.checked, *looks]
    return found + (timeline_texts(walk.timeline) if walk.timeline else [])


def timeline_texts(timeline: Timeline) -> list[str]:
    """Return the title and the facts of a timeline."""
    return [timeline.title, *timeline.facts, *timeline.facts.values()]


def svg_texts(drawn: str) -> list[str]:
    """Return every text that a drawing shows, lines of paragraphs one by one."""
    return [unescape(found[2]) for found in SHOWN.finditer(drawn)]
