"""The README is short, shows before it tells, and its program prints what it says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
LINK = re.compile(r"\]\(([^)#]+)(?:#[^)]*)?\)")


def place(text: str) -> int:
    return next(number for number, line in enumerate(README.splitlines(), 1) if text in line)


def test_it_is_short_and_shows_before_it_tells() -> None:
    assert len(README.split()) <= 900
    assert place("```python") < 40
    assert place("![") < 60


def test_the_next_release_is_read_in_two_minutes() -> None:
    """A line with details stands in docs/history.md, "Next in detail"."""
    changes = (ROOT / "CHANGELOG.md").read_text().split("\n## ")[1]
    assert changes.startswith("Next\n")
    assert len(changes.split()) <= 600


def test_its_links_lead_somewhere() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    wrong = [
        f"{page.name}: {link}"
        for page in pages
        if page.name != "lab-log.md"
        for link in LINK.findall(page.read_text())
        if not link.startswith(("http", "mailto")) and not (page.parent / link).exists()
    ]
    assert not wrong


def write_program(folder: Path) -> list[list[str]]:
    """Write the README's program; return the lines that it prints alone, and on two processes."""
    (folder / "train.py").write_text(README.split("```python\n")[1].split("```")[0])
    said = [line for line in README.splitlines() if line.startswith("epoch ")]
    return [[*map(str.strip, one)] for one in zip(*(s.split("  ", 1) for s in said), strict=True)]


def test_its_program_prints_what_it_says(tmp_path: Path, programs: Any) -> None:
    alone, both = write_program(tmp_path)
    assert programs.run("train.py", cwd=tmp_path).stdout.splitlines() == alone
    first, second = programs.world(2, "train.py", cwd=tmp_path)
    assert first.stdout.splitlines() == both, first.stderr
    assert not second.stdout


@pytest.mark.proof  # torchrun itself: tests/worlds/machines/test_launchers.py
def test_its_program_prints_the_same_under_torchrun(tmp_path: Path, programs: Any) -> None:
    _, both = write_program(tmp_path)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py")
    assert programs.run(*torchrun, cwd=tmp_path).stdout.splitlines() == both
