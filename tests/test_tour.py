"""The tour of the source is what tests/tour.py writes, short, and wrong templates are one clear error."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import tour
from test_sentences import sentences

CODE = '''"""A module."""

LIMIT = 3
"""Most of it."""


class Run:
    """A run."""

    count: int = 0

    @property
    def step(self) -> int:
        """Return the step."""

        if self.count:
            return 1
        return 2
'''
"""A source of one file, `src/a.py`."""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a.py").write_text(CODE)
    return tmp_path


def test_the_page_is_what_the_program_writes() -> None:
    message = "docs/how-it-works/tour.md is of another source; try: python tests/tour.py"
    assert tour.PAGE.read_text() == tour.write_page(tour.TEMPLATE.read_text()), message


def test_the_command_writes_checks_and_fails_in_one_line(tmp_path: Path, root: Path) -> None:
    (root / "tests").mkdir()
    (root / "docs" / "how-it-works").mkdir(parents=True)
    program = shutil.copy(tour.__file__, root / "tests")
    template = root / "tests" / "tour.template.md"
    template.write_text("# Tour\n\n<!-- show src/a.py Run.step -->\n")

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, program, *words]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    assert run("--check").returncode == 1, "no page yet"
    assert run().returncode == 0
    page = root / "docs" / "how-it-works" / "tour.md"
    assert "def step(self) -> int:" in page.read_text()
    assert run("--check").returncode == 0
    page.write_text(page.read_text().replace("return 1", "return 3"))
    assert run("--check").returncode == 1, "code that the source lacks"
    template.write_text("<!-- show src/a.py Run.stepp -->\n")
    wrong = run()
    assert wrong.returncode == 2
    assert wrong.stderr == (
        "tests/tour.template.md: show src/a.py Run.stepp: no such name in it; nearest: Run.step\n"
    )


def test_code_is_dedented_with_its_decorators_under_a_link(root: Path) -> None:
    page = tour.write_page("# Tour\n\n<!-- show src/a.py Run.step -->\n\nAfter.\n", root)
    code = (
        '@property\ndef step(self) -> int:\n    """Return the step."""\n\n'
        "    if self.count:\n        return 1\n    return 2\n"
    )
    head = "[src/a.py](../../src/a.py), `Run.step`"
    assert page == f"# Tour\n\n{tour.NOTE}\n\n{head}\n\n```python\n{code}```\n\nAfter.\n"


def test_docstrings_and_parts_may_be_left_out(root: Path) -> None:
    def pieces(line: str) -> list[tuple[tuple[str, ...], bool]]:
        return [(one.code, one.is_part) for _, one in tour.iter_pieces(line, root)]

    bare = pieces("<!-- show src/a.py Run.step without docstring -->")
    assert bare == [
        (("@property", "def step(self) -> int:", "    if self.count:", "        return 1",
          "    return 2"), False)
    ]  # fmt: skip
    assert pieces('<!-- show src/a.py Run.step from "if self" to "return" -->') == [
        (("if self.count:", "    return 1"), True)
    ]
    assert pieces("<!-- show src/a.py LIMIT -->") == [(("LIMIT = 3", '"""Most of it."""'), False)]
    assert pieces("<!-- show src/a.py LIMIT without docstring -->") == [(("LIMIT = 3",), False)]
    assert pieces("<!-- show src/a.py Run.count -->") == [(("count: int = 0",), False)]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("src/b.py Run", "show src/b.py Run: no such file; nearest: src/a.py"),
        ("src/a.py Runs", "show src/a.py Runs: no such name in it; nearest: Run"),
        (
            'src/a.py Run.step from "if selff" to "return"',
            'show src/a.py Run.step: no line begins with "if selff"; nearest: if self.count:',
        ),
        (
            'src/a.py Run.step from "if self" to "retain 2"',
            'show src/a.py Run.step: no line after "if self" begins with "retain 2"; '
            "nearest: return 2",
        ),
        (
            'src/a.py Run.step from "return" to "return 2"',
            'show src/a.py Run.step: 2 lines begin with "return"',
        ),
        (
            "src/a.py Run with docstring",
            "<!-- show src/a.py Run with docstring -->: wanted: <!-- show FILE NAME -->, as "
            "tests/tour.py says",
        ),
    ],
)
def test_what_is_gone_is_named_with_the_nearest(root: Path, line: str, words: str) -> None:
    with pytest.raises(tour.TourError) as failure:
        tour.write_page(f"<!-- show {line} -->\n", root)
    assert str(failure.value) == words


def test_a_tour_is_short(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = "<!-- show src/a.py LIMIT -->\n"
    monkeypatch.setattr(tour, "MOST_LINES", 4)
    tour.write_page(line * 2, root)
    with pytest.raises(tour.TourError, match="^6 lines of code; a tour shows 4 at most$"):
        tour.write_page(line * 3, root)


def test_the_limit_is_what_a_reader_can_read_in_a_day() -> None:
    assert tour.MOST_LINES == 3_000
    pieces = list(tour.iter_pieces(tour.TEMPLATE.read_text()))
    assert sum(len(piece.code) for _, piece in pieces) <= tour.MOST_LINES


def test_notes_are_short() -> None:
    """The template alone: titles above code would lower the mean."""
    notes = sentences(tour.TEMPLATE.read_text())
    counts = {one: len(re.findall(r"[\w'\u2019-]+", one)) for one in notes}
    assert {one: count for one, count in counts.items() if count > 32} == {}
    assert sum(counts.values()) / len(counts) <= 18


def test_tests_and_files_that_notes_name_exist() -> None:
    text = tour.TEMPLATE.read_text()
    named = re.findall(r"`((?:src|tests|docs)/[\w/.-]+\.\w+)(?: [^`]*)?`", text)
    assert len(named) > 10
    assert [one for one in named if not (tour.ROOT / one).exists()] == []
