"""Recipes of docs/recipes run as they stand, with the numbers that they print, on one process and two."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted((ROOT / "docs" / "recipes").glob("*.md"))
PROGRAMS = [page for page in PAGES if "```python" in page.read_text()]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
IN_MAKE_TEST = "contrastive"
"""The recipe that `make test` runs: drawn negatives, keyword inputs, a loss by sample."""


def write_recipe(page: Path, *folders: Path) -> list[str]:
    """Write a page's program into some folders, and return the lines that the page shows."""
    text = page.read_text()
    for folder in folders:
        folder.mkdir()
        (folder / "recipe.py").write_text(text.split("```python\n")[1].split("```")[0])
    return text.split("```\n\n```\n")[1].split("\n```")[0].splitlines()


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[] if page.stem == IN_MAKE_TEST else pytest.mark.proof)
        for page in PROGRAMS
    ],
    ids=lambda page: page.stem,
)
def test_a_recipe_prints_what_its_page_says(page: Path, tmp_path: Path, programs: Any) -> None:
    output = write_recipe(page, tmp_path / "alone", tmp_path / "both")
    alone = programs.run("recipe.py", cwd=tmp_path / "alone")
    assert alone.stdout.splitlines() == output, alone.stderr
    first, second = programs.world(2, "recipe.py", cwd=tmp_path / "both")
    assert first.stdout.splitlines() == output, first.stderr
    assert not second.stdout


@pytest.mark.proof  # torchrun itself: tests/worlds/machines/test_launchers.py
@pytest.mark.parametrize("page", PROGRAMS, ids=lambda page: page.stem)
def test_a_recipe_prints_the_same_under_torchrun(page: Path, tmp_path: Path, programs: Any) -> None:
    output = write_recipe(page, tmp_path / "both")
    done = programs.run(*TORCHRUN, "recipe.py", cwd=tmp_path / "both")
    assert done.stdout.splitlines() == output, done.stderr


def test_excerpts_are_of_the_examples_that_they_name() -> None:
    """What `tests/trainer/test_examples.py` runs is what the page shows."""
    found = 0
    for page in PAGES:
        for path, shown in re.findall(
            r"<!-- (examples/\S+) -->\n```\n(.*?)\n```", page.read_text(), re.S
        ):
            assert shown in (ROOT / path).read_text(), f"{page.name}: not in {path}"
            found += 1
    assert found == 3


def test_the_list_of_recipes_names_every_page() -> None:
    listed = set(
        re.findall(r"\]\((\S+\.md)\)", (ROOT / "docs" / "recipes" / "README.md").read_text())
    )
    assert listed == {page.name for page in PAGES} - {"README.md"}
