"""Find what a Chinese page must not have: half-width punctuation, English sentences, lost terms.

    python website/chinese_style.py        # of every Chinese page, one line a problem

Terms of the field (rank, all-reduce, FSDP) may stay English; a sentence may not. The glossary is
the authority for the Chinese word of a term.
"""

from __future__ import annotations

import re
import sys
from functools import cache
from pathlib import Path

import page_messages

ROOT = Path(__file__).resolve().parents[1]
GLOSSARY = ROOT / "docs" / "learn" / "glossary.md"
HAN = r"\u4e00-\u9fff"
HALF = re.compile(rf"[{HAN}][,.;:?!()]|[,;:?!()][{HAN}]|`, (?=`)")
"""Half-width punctuation beside a Chinese letter, or between two pieces of code."""
WORDS = re.compile(r"(?:[A-Za-z][a-z']+[ ,]+){4,}[A-Za-z][a-z']+")
"""Five English words in a row: a sentence, or a part of one."""
OWN = re.compile(r"```.*?```|`[^`]*`|\]\([^)]*\)|<[^>]+>|<!--.*?-->", re.DOTALL)
"""What is no text: programs, code, addresses."""
ROLE = re.compile(r"\{value\}`([^`<]+?)\s*<[^`]+>`")
NAMES = ("Distributed Low-Communication, DeepMind",)
"""Names that stay English."""
ALLOWED = {
    "activation": ("激活检查点",),
    "bubble": ("气泡",),
    "overlap": ("重叠", "掩盖"),
    "island": ("孤岛",),
    "resume": ("续训", "继续"),
    "low bandwidth": ("带宽只有",),
    "rank": ("排第一", "慢节点", "孤岛"),
}
"""Other good words for a term: shorter forms, and senses that are not the term's."""


def find_problems(text: str) -> list[str]:
    r"""Return one line for each fault of a Chinese page.

    >>> find_problems("# 标题\n\n这是 rank 0,不是别的。")
    ["line 3: half-width punctuation: 'rank 0,不是别的。'"]
    """
    problems = []
    bare = ROLE.sub(r"\1", text)
    bare = OWN.sub(lambda found: f"`{_comments(found[0])}`", bare)
    for number, line in enumerate(bare.splitlines(), 1):
        for found in HALF.finditer(line):
            place = f"{line[max(0, found.start() - 6) : found.end() + 6]!r}"
            problems.append(f"line {number}: half-width punctuation: {place}")
        if is_english(line):
            problems.append(f"line {number}: English: {line[:60]!r}")
    return problems


def _comments(code: str) -> str:
    """Return code as empty lines, but for the comments of a program, which are text."""
    program = code.startswith("```") and not code.startswith(page_messages.CONSOLE)
    lines = code.split("\n")
    found = (page_messages.COMMENT.fullmatch(f"{line}\n") if program else None for line in lines)
    return "\n".join(one[2] if one else "" for one in found)


def is_english(line: str) -> bool:
    """Return whether a line holds an English sentence, or a part of five words.

    >>> is_english("每个 rank 都做 all-reduce"), is_english("each rank sends its own part")
    (False, True)
    """
    for name in NAMES:
        line = line.replace(name, "")
    return WORDS.search(line) is not None


@cache
def read_glossary() -> dict[str, tuple[str, ...]]:
    """Return the glossary: English term → its Chinese words."""
    found = {}
    for row in re.findall(
        r"^\| (.+?) \| (.+?) \| .+ \|$", GLOSSARY.read_text("utf-8"), re.MULTILINE
    ):
        english, chinese = row
        if english == "term" or set(english) == {"-"}:
            continue
        names = re.split(r", (?![^(]*\))", re.sub(r" \([A-Za-z0-9 ,]+\)", "", english))
        words = re.split("\uff0c", re.sub(r" \(.*?\)", "", chinese))
        if len(names) == len(words):
            found |= {name: (word,) for name, word in zip(names, words, strict=True)}
        else:
            found |= {name: tuple(words) for name in names}
    return found


def lost_terms(english: str, chinese: str) -> list[str]:
    """Return the glossary's terms in an English message that its translation does not have.

    The Chinese word counts, and so does the English term or its abbreviation.
    """
    here, there = (OWN.sub("`", text) for text in (english, chinese))
    return [term for term in read_glossary() if _has_term(here, term) and not _says(there, term)]


def _has_term(text: str, term: str) -> bool:
    """Return whether a text has a term; "ZeRO" is another word than "zero"."""
    flags = re.IGNORECASE if term.islower() else 0
    return re.search(rf"(?<![\w-]){re.escape(term)}s?(?![\w-])", text, flags) is not None


def _says(chinese: str, term: str) -> bool:
    words = (*read_glossary()[term], *ALLOWED.get(term, ()))
    return term.lower() in chinese.lower() or any(word in chinese for word in words)


def main() -> int:
    """Print the problems of all Chinese pages."""
    pages = [ROOT / "README.zh-CN.md", *sorted((ROOT / "docs" / "zh").rglob("*.md"))]
    lines = [
        f"{page.name}: {one}\n" for page in pages for one in find_problems(page.read_text("utf-8"))
    ]
    sys.stdout.write("".join(lines))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
