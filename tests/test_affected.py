"""The tests of a change are chosen by the blocks that they execute: each rule of `affected.py`."""

from __future__ import annotations

import ast
import base64
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path += [str(Path(__file__).parent / "touch"), str(Path(__file__).parent / "proof")]

import mends
import touch_blocks

import affected
import quick

SOURCE = '''\
"""A file."""

LIMIT = 3


def first(x):
    """Say so."""
    if x > LIMIT:
        return 1
    y = x
    for one in range(y):
        y += one
    return y


class Kind:
    """A kind."""

    width: int = 4

    def second(self):
        try:
            return self.width
        except ValueError:
            return 0
'''
TESTS = ("tests/room/test_a.py", "tests/room/test_b.py", "tests/room/test_c.py", "src/shoal/room")


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one source, three tests, a page, and a map."""
    for name, text in {
        "src/shoal/room/a.py": SOURCE,
        "src/shoal/room/other.py": "def unseen():\n    return 1\n",
        "src/shoal/bare/known.py": "def seen():\n    return 1\n",
        "src/shoal/bare/new.py": "def unseen():\n    return 1\n",
        "docs/page.md": "A page.\n",
        **dict.fromkeys(TESTS[:3], "def test(): pass\n"),
        "tests/helper.py": "X = 1\n",
        "tests/test_house.py": "\n",
        "tests/test_names.py": "\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / TESTS[0]).write_text("import helper\n")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "-c", "user.name=x", "-c", "user.email=x", "commit", "--quiet", "-m", "x")
    functions = {one.name: one for one in touch_blocks.divide(ast.parse(SOURCE), SOURCE)}
    a, b, c, room = (1 << at for at in range(4))
    by_block = {"first": [a | b | room, a, b, b], "Kind.second": [c, 0]}
    sets = [a | b | room, a, b, c, 0, b | c]
    told = {
        "tests": dict.fromkeys(TESTS, 10.0),
        "sets": [base64.b64encode(bytes([one])).decode() for one in sets],
        "files": {
            "src/shoal/room/a.py": {
                name: [functions[name].digest, [sets.index(one) for one in numbers]]
                for name, numbers in by_block.items()
            },
            "src/shoal/bare/known.py": {"seen": ["", [sets.index(a)]]},
            "docs/page.md": 5,
        },
    }
    (tmp_path / "map.json").write_text(json.dumps(told))
    monkeypatch.setattr(affected, "ROOT", tmp_path)
    monkeypatch.setattr(affected, "MAP", tmp_path / "map.json")
    monkeypatch.setattr(affected.TouchMap.__init__, "__defaults__", (tmp_path / "map.json",))
    affected._text.cache_clear()
    affected._source.cache_clear()
    return tmp_path


def git(folder: Path, *words: str) -> None:
    """Run git there."""
    subprocess.run(["git", *words], cwd=folder, check=True)


def chosen(tree: Path, old: str, new: str, path: str = "src/shoal/room/a.py") -> set[str]:
    """The tests for one replacement, without those that are always chosen, by their last letter."""
    text = (tree / path).read_text()
    assert old in text
    (tree / path).write_text(text.replace(old, new))
    git(tree, "add", "--intent-to-add", ".")
    names = set(affected.choose().why) - {*affected.ALWAYS}
    (tree / path).write_text(text)
    return {"doc" if name == "src/shoal/room" else Path(name).stem[-1] for name in names}


def test_blocks_begin_where_the_flow_may_part() -> None:
    first, second = touch_blocks.divide(ast.parse(SOURCE), SOURCE)
    assert (first.name, second.name) == ("first", "Kind.second")
    assert [body[0].lineno for body in first.blocks] == [8, 9, 10, 12]
    assert [body[0].lineno for body in second.blocks] == [22, 25]
    assert (first.lines[13], second.lines[24]) == (2, 1)


def test_marks_keep_what_the_source_does() -> None:
    tree = ast.parse(SOURCE)
    functions = touch_blocks.divide(tree, SOURCE)
    touch_blocks.mark(tree, functions, lambda number: ast.parse(f"seen.add({number})").body[0])
    seen: set[int] = set()
    inside: dict[str, Any] = {"seen": seen}
    exec(compile(tree, "a.py", "exec"), inside)
    assert (inside["first"](2), inside["first"].__doc__) == (3, "Say so.")
    assert seen == {0, 2, 3}
    assert (inside["first"](5), inside["Kind"]().second()) == (1, 4)
    assert seen == {0, 1, 2, 3, 4}


@pytest.mark.parametrize(
    ("old", "new", "tests"),
    [
        ("return 1\n", "return 2\n", {"a"}),  # one branch
        ("y += one", "y -= one", {"b"}),  # a loop's body
        ("    y = x\n", "    y = x\n    y += 0\n", {"b"}),  # a line more
        ("def first(x)", "def first(x, z=1)", {"a", "b", "doc"}),  # the signature: its entry
        ("LIMIT = 3", "LIMIT = 4", {"a", "b", "doc"}),  # a constant: the block that names it
        ("width: int = 4", "width: int = 5", {"c"}),  # a field likewise
        (
            "            return 0\n",
            "            return 7\n",
            {"a", "b", "c", "doc"},
        ),  # nobody: room
        ("Say so.", "Say it.", {"doc"}),  # a docstring
        ("    y = x\n", "    # why\n    y = x\n", set()),  # a comment
        ("class Kind", "def more(x):\n    return x\n\n\nclass Kind", set()),  # new: its callers
    ],
)
def test_a_changed_line_chooses_the_tests_of_its_block(
    tree: Path, old: str, new: str, tests: set[str]
) -> None:
    assert chosen(tree, old, new) == tests


def test_a_function_that_changed_since_the_map_counts_whole(tree: Path) -> None:
    text = (tree / "src/shoal/room/a.py").read_text()
    (tree / "src/shoal/room/a.py").write_text(text.replace("y = x\n", "y = x + 0\n"))
    git(tree, "-c", "user.name=x", "-c", "user.email=x", "commit", "--quiet", "-am", "y")
    assert chosen(tree, "return 1\n", "return 2\n") == {"a", "b", "doc"}


def test_other_files(tree: Path) -> None:
    assert chosen(tree, "A page", "The page", "docs/page.md") == {"b", "c"}
    assert chosen(tree, "def test", "def  test", TESTS[1]) == {"b"}
    assert chosen(tree, "X = 1", "X = 2", "tests/helper.py") == {"a"}
    assert chosen(tree, "return 1", "return 2", "src/shoal/room/other.py") == {"a", "b", "c", "doc"}
    assert chosen(tree, "return 1", "return 2", "src/shoal/bare/new.py") == {"a"}
    (tree / "docs" / "new.md").write_text("x")
    assert set(affected.choose().why) == {TESTS[1], TESTS[2]}


def test_a_commit_that_is_none_is_refused(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert affected.main(["nowhere"]) == 2
    assert "nowhere: no such commit; try: " in capsys.readouterr().err
    assert affected.main([]) == 0
    assert "no test executes what differs from HEAD" in capsys.readouterr().err


def test_a_room_that_the_map_lacks_runs_the_tests_that_name_it(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(quick, "ROOT", tree)
    (tree / TESTS[1]).write_text("import shoal.later.file\n")
    assert quick.tests_of_room(affected.TouchMap(), "later", 20.0) == [TESTS[1]]
    assert "the map has no file of later; try: make proof PART=touch" in capsys.readouterr().err
    assert quick.tests_of_room(affected.TouchMap(), "room", 20.0) == [TESTS[1], TESTS[0]]


def test_every_mend_of_the_list_is_a_hunk_of_the_source() -> None:
    """Else `make proof PART=mends` would refuse the list: a file moves with its hunk."""
    assert len(mends.read_mends()) == 40
