"""Write the Chinese pages from their English pages and catalogs of messages (gettext).

    python website/translated_pages.py update    # new and changed messages into the catalogs
    python website/translated_pages.py write     # docs/zh, README.zh-CN.md and their drawings

    docs/learn/ranks.md ─┬─ website/locale/zh_CN/LC_MESSAGES/learn/ranks.po ─▶ docs/zh/learn/ranks.md
    website/static/*.js ─┴─ widgets.po, exercises.po, drawings.po, answers.po ─▶ the site's messages.js

A changed English message is marked fuzzy by `update`; a test fails until it is translated again.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import page_messages
from answer_texts import ANSWERS
from catalogs import CatalogEntry, merge_messages, read_catalog, write_catalog

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT / "src") not in sys.path:
    sys.path.append(str(ROOT / "src"))

from shoal.base.errors import PlanError  # noqa: E402
from shoal.base.plans.timeline import Timeline  # noqa: E402
from shoal.teach.browser import WALKS  # noqa: E402
from shoal.teach.drawings.timeline_svg import timeline_svg  # noqa: E402
from shoal.teach.drawings.walk_svg import walk_svg  # noqa: E402
from shoal.teach.drawings.word_translation import (  # noqa: E402
    CHECKED,
    WordTranslation,
    message_key,
    svg_texts,
    timeline_texts,
    walk_texts,
)
from shoal.teach.exercises.answers import all_exercises  # noqa: E402
from shoal.teach.walks.pipelines_walk import (  # noqa: E402
    PipelineCase,
    compare_afab_1f1b,
    pipeline,
)
from shoal.teach.walks.walk import StepThrough  # noqa: E402

LANGUAGE, FOLDER = "zh_CN", ROOT / "docs" / "zh"
LOCALE = Path(__file__).with_name("locale") / LANGUAGE / "LC_MESSAGES"
LESSONS = (
    "ranks", "ddp", "targets", "sharding", "pipelines", "inside-layers", "precision", "failures",
    "diloco", "planning", "proving", "puzzles", "glossary",
)  # fmt: skip
"""Pages in Chinese."""
PAGES = {
    "README": ("README.md", "README.zh-CN.md"),
    **{f"learn/{name}": (f"docs/learn/{name}.md", f"docs/zh/learn/{name}.md")
       for name in ("README", *LESSONS)},
}  # fmt: skip
"""Name of a catalog → (its English page, the translated page)."""
DRAWN = ("ddp", "zero", "fsdp", "tp", "cp", "ep", "local_steps")
"""Walks in the drawings of these pages, as committed in docs/drawings."""
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble", "zbv", "dualpipe")
COUNTS = ((4, 8), (2, 4), (4, 2), (4, 1), (1, 8), (1, 1))
"""Ranks and micro-batches of schedules: usual ones, few micro-batches, one of either."""
SCRIPTS = ("static/learn.js", "static/python.js", "learn_extension.py", "page_values.py")
SWITCH = ("[中文](README.zh-CN.md)", "[English](README.md)")
"""The README's link to the other language, in English and in Chinese."""
LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
CODES = re.compile(r"(?<=`), (?=`)")
"""Between two pieces of code: a list of them. A cell of code alone is no message."""
TITLES = re.compile(r"(?<=[\u4e00-\u9fff]); ")
"""After the title of a timeline, where a drawing has several."""
FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
CALL = re.compile(r"""\b(?:t|say)\((["'`])(.*?)\1""")
HOLE = re.compile(r"\$\{(?:[^{}]|\{[^{}]*\})*\}")


class Catalog(NamedTuple):
    """A file of messages, and the messages that it must have: English → place."""

    path: Path
    messages: dict[str, str]


@cache
def all_catalogs() -> dict[str, Catalog]:
    """Return every catalog by its name."""
    found = {
        name: Catalog(LOCALE / f"{name}.po", page_texts(page)) for name, (page, _) in PAGES.items()
    }
    for name, texts in (
        ("exercises", exercise_texts()),
        ("drawings", drawing_texts()),
        ("widgets", widget_texts()),
        ("answers", ((text, "website/answer_texts.py") for text in ANSWERS)),
    ):
        found[name] = Catalog(LOCALE / f"{name}.po", dict(texts))
    return found


def page_texts(page: str) -> dict[str, str]:
    """Return the messages of a page, each with its file and line."""
    text = (ROOT / page).read_text(encoding="utf-8")
    parts = page_messages.split_page(text)
    found: dict[str, str] = {}
    for one in parts:
        if not isinstance(one, str):
            found.setdefault(one.text, f"{page}:{one.line}")
    return found


def exercise_texts() -> Iterator[tuple[str, str]]:
    """Yield hints, reasons and units of the exercises on these pages; questions are in the pages."""
    for one in all_exercises().values():
        if one.page in LESSONS:
            texts = (one.because, *one.hints, *(why for _, why in one.mistakes), one.unit)
            yield from ((text, f"exercise {one.name}") for text in (*texts, *one.choices) if text)


def drawing_texts() -> Iterator[tuple[str, str]]:
    """Yield the keys of all texts in walks and schedules, as a page can draw them."""
    for name in DRAWN:
        for ranks in (4, 2, 8):
            walk = make_walk(name, ranks)
            yield from _keys(walk_texts(walk), f"shoal simulate {name}")
            blank = WordTranslation(dict.fromkeys(map(message_key, walk_texts(walk)), "-"))
            yield from _keys(svg_texts(walk_svg(blank.walk(walk))), f"drawing of {name}")
    for name in SCHEDULES:
        for ranks, micro in COUNTS:
            with contextlib.suppress(PlanError):  # not every schedule allows few micro-batches
                line = pipeline(name, PipelineCase(ranks=ranks, micro_batches=micro))
                yield from _schedule_texts(name, line)


def _schedule_texts(name: str, line: Timeline) -> Iterator[tuple[str, str]]:
    """Yield the keys of all texts in the drawing of a schedule."""
    yield from _keys(timeline_texts(line), f"shoal simulate {name}")
    blank = WordTranslation(dict.fromkeys(map(message_key, timeline_texts(line)), "-"))
    yield from _keys(svg_texts(timeline_svg([blank.timeline(line)])), f"drawing of {name}")


def _keys(texts: list[str], place: str) -> Iterator[tuple[str, str]]:
    for text in texts:
        if text.startswith(CHECKED):
            yield CHECKED.strip(), place
        elif page_messages.has_words(key := message_key(text)):
            yield key, place


def widget_texts() -> Iterator[tuple[str, str]]:
    """Yield the keys of all texts that the site's scripts show: the arguments of `t(…)` and `say(…)`."""
    for name in SCRIPTS:
        code = (ROOT / "website" / name).read_text(encoding="utf-8")
        for found in CALL.finditer(code):
            yield message_key(HOLE.sub("0", found[2])), f"website/{name}"


def make_walk(name: str, ranks: int = 4) -> StepThrough:
    """Return the step-through of a name."""
    module = importlib.import_module(f"shoal.teach.walks.{WALKS[name]}_walk")
    walk: StepThrough = getattr(module, name)(ranks=ranks)
    return walk


@cache
def translations(name: str) -> dict[str, str]:
    """Return the current translations of a catalog: English → Chinese."""
    entries = read_catalog(all_catalogs()[name].path)
    return {source: one.translation for source, one in entries.items() if one.is_current}


def exercise_words(page: str) -> dict[str, str]:
    """Return the translations that the exercises of a page need: question, hints, the form."""
    return {**translations("widgets"), **translations("exercises"), **translations(f"learn/{page}")}


def translate_values(record: dict[str, Any], words: dict[str, str]) -> dict[str, Any]:
    """Return an exercise's record with every text translated; an answer keeps its number.

    >>> translate_values({"text": "3 h", "hints": ["Ranks start at 0."]}, {"h": "小时"})
    {'text': '3 小时', 'hints': ['Ranks start at 0.']}
    """

    def translate(value: Any) -> Any:
        if isinstance(value, list):
            return [translate(one) for one in value]
        if not isinstance(value, str):
            return value
        number, _, unit = value.rpartition(" ")
        if value not in words and re.fullmatch(r"[-\d.,e+]+", number):
            return f"{number} {words.get(unit, unit)}"
        return words.get(value, value)

    return {name: value if name == "name" else translate(value) for name, value in record.items()}


def drawing_words() -> WordTranslation:
    """Return the translation of drawings."""
    return WordTranslation(translations("drawings"))


def browser_messages() -> dict[str, str]:
    """Return what the site's scripts and the simulator in a page need."""
    return {**translations("answers"), **translations("drawings"), **translations("widgets")}


def translate_page(name: str) -> str:
    """Return a page in Chinese; messages without a translation stay English."""
    page, target = PAGES[name]
    known = translations(name)
    text = (ROOT / page).read_text(encoding="utf-8")
    parts = page_messages.split_page(text)
    joined = page_messages.join_page(parts, lambda one: known.get(one.text, one.text))
    pieces = FENCE.split(joined)
    here = (ROOT / page).parent, (ROOT / target).parent
    pieces[::2] = [
        CODES.sub("、", LINK.sub(lambda found: _move_link(found, *here), one))
        for one in pieces[::2]
    ]
    moved = "".join(pieces).replace(*SWITCH)
    if name == "README":
        return moved
    back = os.path.relpath(ROOT / page, (ROOT / target).parent)
    return f"{moved.rstrip()}\n\n[English]({back})\n"


def _move_link(found: re.Match[str], old: Path, new: Path) -> str:
    """Return a link of the English page, from where the translated page lies."""
    target = found[2]
    if "://" in target or target == "README.zh-CN.md":
        return found[0]
    path = Path(os.path.normpath(old / target)).relative_to(ROOT)
    moved = {page: there for page, there in PAGES.values() if page != "README.md"}
    there = moved.get(str(path), str(path))
    if path.parent == Path("docs/drawings") and path.stem.replace("-", "_") in drawings_by_stem():
        there = f"docs/zh/drawings/{path.name}"
    return f"{found[1]}{os.path.relpath(ROOT / there, new)}{found[3]}"


def drawings_by_stem() -> set[str]:
    """Return the names of the drawings that these pages show."""
    return {*DRAWN, "afab_vs_1f1b"}


def draw(stem: str, words: WordTranslation) -> str:
    """Return one drawing as SVG, with its words translated."""
    if stem == "afab_vs_1f1b":
        lines = compare_afab_1f1b(PipelineCase(ranks=4, micro_batches=8))[0]
        drawn = words.svg(timeline_svg([words.timeline(line) for line in lines]))
        return TITLES.sub("\uff1b", drawn)
    return words.svg(walk_svg(words.walk(make_walk(stem))))


def written_files() -> Iterator[tuple[Path, str]]:
    """Yield every file that `write` makes, with its text."""
    for name, (_, target) in PAGES.items():
        yield ROOT / target, translate_page(name)
    for stem in sorted(drawings_by_stem()):
        yield FOLDER / "drawings" / f"{stem.replace('_', '-')}.svg", draw(stem, drawing_words())


def find_old_messages() -> list[str]:
    """Return one line for each message that has no current translation, or is no longer there."""
    problems = []
    for name, catalog in all_catalogs().items():
        entries = read_catalog(catalog.path)
        for source, place in catalog.messages.items():
            if not entries.get(source, CatalogEntry(source)).is_current:
                problems.append(f"{name}: {place}: {source!r} has no current translation")
        problems += [
            f"{name}: {one!r} is no longer there" for one in entries.keys() - catalog.messages
        ]
    return problems


def update() -> None:
    """Bring all catalogs to today's messages."""
    for catalog in all_catalogs().values():
        entries = merge_messages(catalog.messages, read_catalog(catalog.path))
        write_catalog(catalog.path, entries, LANGUAGE)


def write() -> None:
    """Write the pages and drawings."""
    for path, text in written_files():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    {"update": update, "write": write}[sys.argv[1]]()
    sys.stdout.write("".join(f"{line}\n" for line in find_old_messages()))
