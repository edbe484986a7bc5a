"""Write docs/reference/where.md: every folder and file of the source, with the first line of its docstring.

python tests/where.py            write the page
python tests/where.py --check    exit status 1 if the page is not of this source
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "shoal"
PAGE = ROOT / "docs" / "reference" / "where.md"
HEAD = """# Source files: which file does what

This page lists Shoal's source files, for readers of the code. Pages for users: [docs](../README.md).

Every folder and file of `src/shoal`, with the first line of its docstring. Written by `python tests/where.py`.
Search this page for a word of the field: "all-gather", "manifest", "learning rate". The order of rooms and one walk
through them: [architecture](../how-it-works/architecture.md).
"""


def first_line(path: Path) -> str:
    """Return the first line of a file's docstring."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.split("\n", 1)[0].strip()


def folder_lines(folder: Path) -> list[str]:
    """Return the lines of a folder: heading, its docstring, a line for each file, sub-folders."""
    name = str(folder.relative_to(SOURCE))
    level = "##" if "/" not in name else "###"
    files = [p for p in sorted(folder.glob("*.py")) if p.name not in ("__init__.py", "__main__.py")]
    lines = ["", f"{level} {name}/", "", first_line(folder / "__init__.py"), ""]
    lines += [f"- `{path.name}`: {first_line(path)}" for path in files]
    for below in sorted(p.parent for p in folder.glob("*/__init__.py")):
        lines += folder_lines(below)
    return lines


def page() -> str:
    """Return the whole page."""
    lines = [HEAD.rstrip()]
    for init in sorted(SOURCE.glob("*/__init__.py")):
        lines += folder_lines(init.parent)
    lines += ["", "## Files beside the rooms", ""]
    lines += [f"- `{path.name}`: {first_line(path)}" for path in sorted(SOURCE.glob("*.py"))]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write or check the page."""
    if "--check" in sys.argv[1:]:
        return int(PAGE.read_text(encoding="utf-8") != page())
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
