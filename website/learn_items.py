"""Find each item of the study notes that the pages answer, from the front page in at most three clicks.

`items.toml` names for each item a term and a place: a page, with `#heading` if it is not the page's
beginning. The term must stand in the heading, or in the first paragraph or table after it.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[1] / "docs"
ITEMS = Path(__file__).with_name("items.toml")
FRONT = "README.md"
MOST_CLICKS = 3
LINK = re.compile(r"\]\(([^)#\s]+\.md)(?:#[^)]*)?\)")


def read_items() -> list[dict[str, Any]]:
    """Return all items: number, term, page."""
    found: list[dict[str, Any]] = tomllib.loads(ITEMS.read_text(encoding="utf-8"))["item"]
    return found


def count_clicks() -> dict[str, int]:
    """Return for each page the fewest links from the front page to it."""
    clicks, new = {FRONT: 0}, [FRONT]
    while new:
        page = new.pop(0)
        path = DOCS / page
        for link in LINK.findall(path.read_text(encoding="utf-8")):
            target = (path.parent / link).resolve()
            if target.is_relative_to(DOCS) and target.is_file():
                name = str(target.relative_to(DOCS))
                if name not in clicks:
                    clicks[name] = clicks[page] + 1
                    new.append(name)
    return clicks


def slug(heading: str) -> str:
    """Return the anchor of a heading, as GitHub and MyST make it.

    >>> slug("Buckets and overlap: `DDP`, drawn")
    'buckets-and-overlap-ddp-drawn'
    """
    kept = re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower())
    return kept.strip().replace(" ", "-")


def opening(text: str, anchor: str) -> str | None:
    """Return a heading and the first block under it; None if there is no such heading.

    The line that names what a page needs is no paragraph.
    """
    lines = text.splitlines()
    for place, line in enumerate(lines):
        heading = re.match(r"#+ (.*)", line)
        if heading and anchor in ("", slug(heading[1])):
            rest = "\n".join(lines[place + 1 :])
            blocks = [
                b for b in re.split(r"\n\s*\n", rest.strip("\n")) if not b.startswith("*Needs")
            ]
            return f"{line}\n{blocks[0] if blocks else ''}"
    return None


def find_problems(items: list[dict[str, Any]] | None = None) -> list[str]:
    """Return one line for each item that is not found as it must be."""
    clicks, problems = count_clicks(), []
    for item in read_items() if items is None else items:
        page, _, anchor = item["page"].partition("#")
        name = f"item {item['number']}"
        if clicks.get(page, MOST_CLICKS + 1) > MOST_CLICKS:
            problems.append(f"{name}: {page} is not within {MOST_CLICKS} clicks of the front page")
            continue
        text = opening((DOCS / page).read_text(encoding="utf-8"), anchor)
        if text is None:
            problems.append(f"{name}: {page} has no heading #{anchor}")
        elif item["term"].lower() not in text.lower():
            problems.append(f"{name}: {item['page']} begins without {item['term']!r}")
    return problems


if __name__ == "__main__":
    found = find_problems()
    sys.stdout.write("".join(f"{line}\n" for line in found) or "all items are found\n")
    sys.exit(1 if found else 0)
