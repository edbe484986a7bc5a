"""Choose the tests that a change can break, from the blocks that each test executes.

    python tests/affected.py              the test files for what differs from HEAD, and their CPU seconds
    python tests/affected.py main~3       for what differs from another commit
    python tests/affected.py … --run      run them, the cheapest first
    python tests/affected.py … --why      with the changed lines that chose each

The map (proof/results/touched.json) is made by `make proof PART=touch`. It holds the functions of one
commit, divided into blocks (`touch/touch_blocks.py`), each with a digest:

    a changed line in a function         tests that execute its block, if the digest is the map's; else
                                         tests that execute any block of that function
    a constant, a field, a class         tests that execute a block that names it
    a line of a page or a table          tests that open the file
    a test, or what tests share          itself; tests that execute it, or name it
    nothing known of a file              all tests of its room (of `config` and `sinks`, which have no
                                         folder of tests: those that execute any file there)

Comments choose nothing. A docstring chooses the doctests of its room. `make test` is what lands.
"""

from __future__ import annotations

import ast
import base64
import dataclasses
import functools
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(Path(__file__).parent / "touch"))

import touch_blocks  # noqa: E402

MAP = ROOT / "proof" / "results" / "touched.json"
ALWAYS = ("tests/test_house.py", "tests/test_names.py")
"""They read every source."""


@dataclasses.dataclass(frozen=True)
class Hunk:
    """Lines of one file that were replaced: `old` in the base, `new` in the tree (from 1, may be empty)."""

    path: str
    old: range
    new: range


class TouchMap:
    """Which test files execute which blocks."""

    def __init__(self, path: Path = MAP) -> None:
        told = json.loads(path.read_text())
        self.seconds: dict[str, float] = told["tests"]
        self.files: dict[str, dict[str, tuple[str, list[int]]] | int] = told["files"]
        self._tests = list(self.seconds)
        self._sets: list[str] = told["sets"]

    @functools.cache  # noqa: B019  # one map a process
    def tests_of(self, number: int) -> frozenset[str]:
        """Return the test files of a set."""
        bits = int.from_bytes(base64.b64decode(self._sets[number]), "little")
        return frozenset(t for at, t in enumerate(self._tests) if bits >> at & 1)

    def tests_in(self, path: str, function: touch_blocks.Function, blocks: set[int]) -> set[str]:
        """Return the tests that execute some blocks of a function as it is in the base."""
        of_file = self.files[path]
        assert isinstance(of_file, dict)
        if (
            function.name not in of_file
        ):  # a new name for an old function: the file is what is known
            return self.tests_of_file(path)
        digest, numbers = of_file[function.name]
        known = blocks if digest == function.digest else set(range(len(numbers)))
        return set().union(*(self.tests_of(numbers[one]) for one in known))

    def tests_of_file(self, path: str) -> set[str]:
        """Return the tests that execute anything of a file, or open it."""
        of_file = self.files[path]
        if isinstance(of_file, int):
            return set(self.tests_of(of_file))
        every = (number for _, numbers in of_file.values() for number in numbers)
        return set().union(*(self.tests_of(number) for number in set(every)))

    def room(self, path: str) -> set[str]:
        """Return the tests of a file's room; if it has no folder of tests, those that execute it."""
        parts = path.split("/")
        room = parts[2] if path.startswith("src/shoal/") else parts[1] if len(parts) > 1 else ""
        own = {t for t in self.seconds if t.startswith((f"tests/{room}/", f"src/shoal/{room}"))}
        if not path.startswith("src/") or any(t.startswith("tests/") for t in own):
            return own
        beside = [one for one in self.files if one.startswith(f"src/shoal/{room}/")]
        return own.union(*map(self.tests_of_file, beside))


def git(*words: str) -> str:
    """Return the output of a git command; "" where it fails."""
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else ""


def changed(base: str) -> list[Hunk]:
    """Return the hunks between a commit and the working tree, files that git does not know among them."""
    found, path = [], ""
    for line in git("diff", "--unified=0", "--no-renames", "--no-color", base).splitlines():
        if line.startswith("diff --git "):
            path = line.rpartition(" b/")[2]
        elif at := re.match(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@", line):
            first, count, new, more = (int(x) if x is not None else 1 for x in at.groups())
            old = range(first, first + count) if count else range(first + 1, first + 1)
            found.append(
                Hunk(path, old, range(new, new + more) if more else range(new + 1, new + 1))
            )
        elif line.startswith("Binary files"):
            found.append(Hunk(path, range(0), range(0)))
    for path in git("ls-files", "--others", "--exclude-standard").splitlines():
        found.append(Hunk(path, range(0), range(1, 2)))
    return found


class Source:
    """One version of a Python file."""

    def __init__(self, text: str) -> None:
        self.lines = text.splitlines()
        self.tree = ast.parse(text)
        self.functions = touch_blocks.divide(self.tree, text)
        self.said = set(self._docstrings())

    def _docstrings(self) -> Iterator[int]:
        for node in ast.walk(self.tree):
            body = getattr(node, "body", None)
            for one in body if isinstance(body, list) else ():
                if isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant):
                    yield from range(one.lineno, (one.end_lineno or one.lineno) + 1)

    def speaks(self, line: int) -> bool:
        """Return whether a line is blank, a comment, or lies in a docstring."""
        text = self.lines[line - 1].strip() if 0 < line <= len(self.lines) else ""
        return not text or text.startswith("#") or line in self.said

    def at(self, line: int) -> tuple[touch_blocks.Function, int] | None:
        """Return the innermost function of a line, and the block in it."""
        for one in reversed(self.functions):
            if line in one.lines:
                return one, one.lines[line]
        return None

    def names_at(self, line: int) -> set[str]:
        """Return what a statement outside of functions defines: a class with the field, a constant."""
        names: set[str] = set()
        for node in ast.walk(self.tree):
            if not isinstance(node, ast.stmt) or isinstance(node, touch_blocks.Named):
                continue
            if not node.lineno <= line <= (node.end_lineno or node.lineno):
                continue
            targets = getattr(node, "targets", None) or [getattr(node, "target", None)]
            if isinstance(node, ast.ClassDef) and line <= node.body[0].lineno:
                names.add(node.name)
            for one in targets if isinstance(node, ast.Assign | ast.AnnAssign) else ():
                names |= {n.id for n in ast.walk(one) if isinstance(n, ast.Name)}  # type: ignore[arg-type]
        return names

    def imports(self, line: int) -> bool:
        """Return whether a line outside of functions is an import."""
        return any(
            isinstance(node, ast.Import | ast.ImportFrom)
            and node.lineno <= line <= (node.end_lineno or node.lineno)
            for node in ast.walk(self.tree)
        )


class Choice:
    """The tests chosen for a change, and why."""

    def __init__(self, known: TouchMap, base: str) -> None:
        self.map, self.base = known, base
        self.why: dict[str, list[str]] = {}

    def add(self, tests: Iterable[str], why: str) -> bool:
        """Choose some tests; return whether there were any."""
        chosen = [test for test in tests if (ROOT / test).exists()]
        for test in chosen:
            self.why.setdefault(test, []).append(why)
        return bool(chosen)

    def file(self, path: str, hunks: list[Hunk]) -> None:
        """Choose for one file."""
        name = Path(path).name
        if path.startswith("tests/") and name.startswith("test_"):
            self.add([path], f"{path} itself")
        elif not path.endswith(".py"):
            self._other(path)
        elif path.startswith(("src/", "tests/")):
            self._python(path, hunks)

    def _other(self, path: str) -> None:
        if path in self.map.files:
            self.add(self.map.tests_of_file(path), f"{path} is opened")
            return
        folder = path.rpartition("/")[0]
        beside = [one for one in self.map.files if one.rpartition("/")[0] == folder]
        for one in beside if folder else ():
            if isinstance(self.map.files[one], int):
                self.add(self.map.tests_of_file(one), f"{path} is new beside {one}")

    def _python(self, path: str, hunks: list[Hunk]) -> None:
        if path.startswith("src/"):
            self.add(ALWAYS, f"{path}: every source is read")
        before = git("show", f"{self.base}:{path}")
        here = ROOT / path
        old = Source(before)
        new = Source(here.read_text()) if here.exists() else Source("")
        if path not in self.map.files:
            if not self._mentioned(path):
                self.add(self.map.room(path), f"{path} is not in the map: its room")
            return
        found = [self._hunk(path, old, new, hunk) for hunk in hunks]
        if not any(found) and any(f is not None for f in found) and not self._mentioned(path):
            self.add(self.map.room(path), f"{path}: no test executes the change: its room")

    def _mentioned(self, path: str) -> bool:
        """Choose the tests that name a file that tests share, if it is one."""
        if not path.startswith("tests/"):
            return False
        stem = re.compile(rf"\b{re.escape(Path(path).stem)}\b")
        tests = [t for t in self.map.seconds if t.endswith(".py") and stem.search(_text(t))]
        return self.add(tests, f"{path} is named")

    def _hunk(self, path: str, old: Source, new: Source, hunk: Hunk) -> bool | None:
        """Choose for one hunk; return whether a test was chosen, None where nothing can break."""
        removed = [line for line in hunk.old if not old.speaks(line)]
        added = [line for line in hunk.new if not new.speaks(line)]
        if any(line in old.said for line in hunk.old) or any(n in new.said for n in hunk.new):
            room = "/".join(path.split("/")[:3])
            self.add([room] if room in self.map.seconds else [], f"{path}: a docstring")
        if not removed and not added:
            return None
        blocks: dict[str, tuple[touch_blocks.Function, set[int]]] = {}
        outside: set[str] = set()
        by_name = {one.name: one for one in old.functions}
        for line in removed:
            if place := old.at(line):
                blocks.setdefault(place[0].name, (place[0], set()))[1].add(place[1])
            elif not old.imports(line):
                outside |= old.names_at(line)
        for line in added:
            place = new.at(line)
            if place is None:
                outside |= set() if new.imports(line) else new.names_at(line)
            elif place[0].name in by_name and place[0].name not in blocks:
                one = by_name[place[0].name]
                around = (hunk.old.start - 1, hunk.old.start, hunk.old.stop)
                inside = {one.lines[n] for n in around if n in one.lines} or {0}
                blocks[one.name] = (one, inside)
        chosen = False
        for one, numbers in blocks.values():
            tests = self.map.tests_in(path, one, numbers)
            chosen |= self.add(tests, f"{path}:{hunk.new.start} {one.name}")
        for name in outside:
            chosen |= self.add(self._naming(path, old, name), f"{path}:{hunk.new.start} {name}")
        only_new = not blocks and not outside
        return chosen or (None if only_new else False)

    def _naming(self, path: str, old: Source, name: str) -> set[str]:
        """Return the tests that execute a block that names a constant, a field or a class."""
        word = re.compile(rf"\b{re.escape(name)}\b")
        found: set[str] = set()
        for other in self.map.files if not name.startswith("_") else (path,):
            if not other.endswith(".py") or not word.search(_text(other)):
                continue
            source = old if other == path else _source(other)
            for one in source.functions:
                numbers = {
                    b for line, b in one.lines.items() if word.search(source.lines[line - 1])
                }
                if numbers:
                    found |= self.map.tests_in(other, one, numbers)
        return found

    def cpu_s(self) -> float:
        """Return the CPU seconds of the choice."""
        return sum(self.map.seconds.get(test, 1.0) for test in self.why)


@functools.cache
def _text(path: str) -> str:
    there = ROOT / path
    return there.read_text(errors="replace") if there.is_file() else ""


@functools.cache
def _source(path: str) -> Source:
    return Source(_text(path))


def choose(base: str = "HEAD") -> Choice:
    """Choose the tests for what differs from a commit."""
    choice = Choice(TouchMap(), base)
    hunks: dict[str, list[Hunk]] = {}
    for hunk in changed(base):
        hunks.setdefault(hunk.path, []).append(hunk)
    for path, of_file in sorted(hunks.items()):
        choice.file(path, of_file)
    return choice


def main(words: list[str]) -> int:
    """Print the choice, or run it."""
    bases = [word for word in words if not word.startswith("-")] or ["HEAD"]
    if not git("rev-parse", "--verify", bases[0] + "^{commit}"):
        sys.stderr.write(f"affected.py {bases[0]}: no such commit; try: affected.py main~1\n")
        return 2
    choice = choose(bases[0])
    chosen = sorted(choice.why, key=lambda test: choice.map.seconds.get(test, 1.0))
    if not chosen:
        sys.stderr.write(f"no test executes what differs from {bases[0]}\n")
        return 0
    for test in chosen:
        print(f"{choice.map.seconds.get(test, 0.0):7.1f}  {test}")
        for why in dict.fromkeys(choice.why[test] if "--why" in words else ()):
            print(f"           {why}")
    total = sum(choice.map.seconds.values())
    print(
        f"{choice.cpu_s():7.1f}  CPU s of {len(chosen)} files, {choice.cpu_s() / total:.0%} of the suite"
    )
    if "--run" in words:
        command = [sys.executable, "-m", "pytest", *chosen]
        return subprocess.run(command, cwd=ROOT, check=False).returncode
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
