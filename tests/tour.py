"""Write docs/how-it-works/tour.md: notes of a template, and between them code of this source.

    python tests/tour.py            write the page
    python tests/tour.py --check    exit status 1 if the page is not of this source

The template is tests/tour.template.md. Each of its lines of this form becomes a code block:

    <!-- show FILE NAME -->                              a function, method, class or constant
    <!-- show FILE NAME without docstring -->            the same, shorter
    <!-- show FILE NAME from "text" to "text" -->        from the line that begins so to the next one

So the page shows no code that the source lacks. A file, name or line that is gone is one clear error.
"""

from __future__ import annotations

import ast
import difflib
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TEMPLATE = ROOT / "tests" / "tour.template.md"
PAGE = ROOT / "docs" / "how-it-works" / "tour.md"
NOTE = "<!-- Written by `python tests/tour.py` from tests/tour.template.md: edit that file. -->"
"""Line below the title, which is the first line of a page for `shoal docs`."""
MOST_LINES = 3_000
"""Most lines of code on the page."""

SHOW = re.compile(
    r"<!-- show (?P<file>\S+) (?P<name>\S+)(?P<bare> without docstring)?"
    r'(?: from "(?P<first>.+?)" to "(?P<last>.+?)")? -->'
)


class TourError(Exception):
    """A line of the template asks for code that the source does not have."""


@dataclass(frozen=True)
class CodePiece:
    """One piece of code on the page.

    Attributes:
        file: path from the root of the repository.
        name: qualified name in the file.
        code: its lines, dedented.
        is_part: lines before or after were left out.
    """

    file: str
    name: str
    code: tuple[str, ...]
    is_part: bool

    def block(self) -> str:
        """Return the Markdown: a line with a link to the file, and the code."""
        part = " (a part)" if self.is_part else ""
        head = f"[{self.file}](../../{self.file}), `{self.name}`{part}"
        return "\n".join([head, "", "```python", *self.code, "```"])


def nearest(word: str, known: Sequence[str]) -> str:
    """Return "; nearest: X" for the known word that is spelt most like `word`, else "".

    >>> nearest("Run.stepp", ["Run.save", "Run.step"])
    '; nearest: Run.step'
    """
    close = difflib.get_close_matches(word, known, 1, cutoff=0.3)
    return f"; nearest: {close[0]}" if close else ""


def iter_names(tree: ast.AST, above: str = "") -> Iterator[tuple[str, list[ast.stmt]]]:
    """Yield the qualified name and the statements of everything that a file names.

    A constant comes with the string below it, which is its docstring.

    >>> [name for name, _ in iter_names(ast.parse("class A:\\n    def f(self): ...\\nB = 1"))]
    ['A', 'A.f', 'B']
    """
    body: list[ast.stmt] = getattr(tree, "body", [])
    for number, node in enumerate(body):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield above + node.name, [node]
            yield from iter_names(node, f"{above}{node.name}.")
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            below = [one for one in body[number + 1 : number + 2] if is_text(one)]
            for target in targets:
                if isinstance(target, ast.Name):
                    yield above + target.id, [node, *below]


def is_text(node: ast.stmt) -> bool:
    """Return whether a statement is a string alone, as docstrings are."""
    constant = node.value if isinstance(node, ast.Expr) else None
    return isinstance(constant, ast.Constant) and isinstance(constant.value, str)


def read_code(file: str, name: str, *, with_docstring: bool, root: Path = ROOT) -> list[str]:
    """Return the lines of a name in a file, dedented, decorators included.

    Args:
        file: path from `root`.
        name: qualified name: `Run.step`.
        with_docstring: False: leave the docstring of this name out.
        root: folder of the source.

    Raises:
        TourError: the file or the name is gone.
    """
    if not (root / file).is_file():
        files = [str(path.relative_to(root)) for path in root.glob("src/**/*.py")]
        raise TourError(f"show {file} {name}: no such file{nearest(file, files)}")
    text = (root / file).read_text(encoding="utf-8")
    known = dict(iter_names(ast.parse(text)))
    if name not in known:
        raise TourError(f"show {file} {name}: no such name in it{nearest(name, list(known))}")
    nodes = known[name]
    node, start, stop = nodes[0], nodes[0].lineno, nodes[-1].end_lineno or 0
    start = min([start, *(one.lineno for one in getattr(node, "decorator_list", []))])
    texts = [one for one in (*getattr(node, "body", [])[:1], *nodes[1:]) if is_text(one)]
    docstring_lines = {
        line
        for one in texts
        for line in range(one.lineno, (one.end_lineno or 0) + 1)
        if not with_docstring
    }
    lines = text.splitlines()
    docstring_lines |= {
        line + 1 for line in docstring_lines if line < stop and not lines[line].strip()
    }
    kept = [lines[line - 1] for line in range(start, stop + 1) if line not in docstring_lines]
    return textwrap.dedent("\n".join(kept)).strip("\n").split("\n")


def cut_lines(code: Sequence[str], first: str, last: str, where: str) -> list[str]:
    """Return the lines from the one that begins with `first` to the next that begins with `last`.

    Args:
        code: lines; their indentation is ignored in the comparison.
        first: start of exactly one line.
        last: start of a line at or after it.
        where: start of the message.

    Raises:
        TourError: no such line, or several that begin with `first`.

    >>> cut_lines(["a = 1", "if a:", "    b = 2", "c = 3"], "if", "b", "f")
    ['if a:', '    b = 2']
    """
    bare = [line.strip() for line in code]
    starts = [number for number, line in enumerate(bare) if line.startswith(first)]
    if len(starts) != 1:
        found = f"{len(starts)} lines begin" if starts else "no line begins"
        raise TourError(f'{where}: {found} with "{first}"{"" if starts else nearest(first, bare)}')
    stops = [n for n in range(starts[0], len(bare)) if bare[n].startswith(last)]
    if not stops:
        raise TourError(
            f'{where}: no line after "{first}" begins with "{last}"'
            f"{nearest(last, bare[starts[0] :])}"
        )
    return textwrap.dedent("\n".join(code[starts[0] : stops[0] + 1])).split("\n")


def iter_pieces(template: str, root: Path = ROOT) -> Iterator[tuple[str, CodePiece]]:
    """Yield each `show` line of a template, and the code that replaces it.

    Raises:
        TourError: a line that is not of the form above, or asks for code that is gone.
    """
    for line in template.splitlines():
        if not line.startswith("<!-- show"):
            continue
        found = SHOW.fullmatch(line)
        if found is None:
            raise TourError(f"{line}: wanted: <!-- show FILE NAME -->, as tests/tour.py says")
        file, name, bare, first, last = found.groups()
        code = read_code(file, name, with_docstring=not bare, root=root)
        if first is not None:
            code = cut_lines(code, first, last, f"show {file} {name}")
        yield line, CodePiece(file, name, tuple(code), first is not None)


def write_page(template: str, root: Path = ROOT) -> str:
    """Return the page of a template.

    Raises:
        TourError: as `iter_pieces`, or the page shows too many lines.
    """
    pieces = list(iter_pieces(template, root))
    total = sum(len(piece.code) for _, piece in pieces)
    if total > MOST_LINES:
        raise TourError(f"{total} lines of code; a tour shows {MOST_LINES} at most")
    blocks = iter(piece.block() for _, piece in pieces)
    lines = [
        next(blocks) if line.startswith("<!-- show") else line for line in template.splitlines()
    ]
    return "\n".join([*lines[:1], "", NOTE, *lines[1:]]) + "\n"


def main() -> int:
    """Write or check the page; one line on standard error if the template is wrong."""
    try:
        text = write_page(TEMPLATE.read_text(encoding="utf-8"))
    except TourError as error:
        sys.stderr.write(f"{TEMPLATE.relative_to(ROOT)}: {error}\n")
        return 2
    if "--check" in sys.argv[1:]:
        return int(not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text)
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
