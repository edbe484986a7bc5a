"""Sentences of the documentation are short: language.md of the design, held by pysbd's rules."""

from __future__ import annotations

import re
from pathlib import Path

import pysbd
import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = [
    ROOT / "README.md",
    *(page for folder in ("learn", "start", "recipes", "how-it-works", "reference", "proof")
      for page in sorted((DOCS / folder).glob("*.md"))),
]  # fmt: skip
MADE = {"any-module.md", "architectures.md", "families.md", "guards.md", "landings.md", "names.md"}
"""Pages of docs/proof that a program wrote, and the records of readers."""
LONGEST = 35
SPLIT = pysbd.Segmenter(language="en", clean=False)


def sentences(text: str) -> list[str]:
    """Split the prose of a page: no code, tables, headings, and quoted messages.

    >>> sentences("One word. `x = 1` is code.\\n\\n    indented = 1\\n\\n| a | b |")
    ['One word.', 'code is code.']
    """
    text = re.sub(r"```.*?```|<!--.*?-->", "", text, flags=re.DOTALL)
    found: list[str] = []
    for paragraph in re.split(r"\n\s*\n", text):
        skip = ("|", "#", "    ", ">")
        lines = [line for line in paragraph.split("\n") if not line.startswith(skip)]
        for item in re.split(r"\n(?=\s*(?:[-*]|\d+\.) )", "\n".join(lines)):
            bare = re.sub(
                r"\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"^\s*(?:[-*]|\d+\.) +", "", item)
            )
            words = " ".join(re.sub(r"`[^`]*`", "code", bare).split())
            found += [one.strip() for one in SPLIT.segment(words) if re.search(r"\w", one)]
    return found


WRITTEN = [page for page in PAGES if not (page.name in MADE and page.parent.name == "proof")]


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: str(page.relative_to(ROOT)))
def test_sentences_are_short(page: Path) -> None:
    counts = {one: len(re.findall(r"[\w'\u2019-]+", one)) for one in sentences(page.read_text())}
    long = {one: count for one, count in counts.items() if count > LONGEST}
    assert not long
    mean = sum(counts.values()) / len(counts)
    assert mean <= (18 if page.name == "README.md" else 20)
