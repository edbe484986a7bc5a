"""Check a change in a minute: `make quick`; one room: `make quick ROOM=trainer`; several: `ROOM="base data"`.

Ruff over the tree, the import contracts, mypy with its warm cache, then tests of BUDGET_S CPU seconds:
without a room those that execute the lines that differ from HEAD (`affected.py`), the cheapest first;
of a room those that execute the most of its source a second, by the map of `make proof PART=touch`.
It says how many CPU seconds each took, which tests it left out, and fails if one failed.
`make test` is what a change must pass; this is for the time before.
"""

from __future__ import annotations

import difflib
import resource
import subprocess
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))

from affected import TouchMap, choose

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
BUDGET_S = 100.0
"""CPU seconds of the tests as the map has them, each file as a session of its own; together they take
less than half of that. Ruff, imports and mypy take up to 15 beside it."""


def known_rooms() -> list[str]:
    """Return the rooms of the package."""
    return sorted(p.parent.name for p in (ROOT / "src" / "shoal").glob("*/__init__.py"))


def check_rooms(rooms: list[str]) -> None:
    """Refuse a room that is not there.

    Raises:
        SystemExit: with the one that is spelt like it.
    """
    known = known_rooms()
    for room in rooms:
        if room not in known:
            close = difflib.get_close_matches(room, known, 1)
            raise SystemExit(f"ROOM={room}: no such room; try: {(close or [', '.join(known)])[0]}")


def tests_of_room(touched: TouchMap, room: str, budget_s: float) -> list[str]:
    """Choose the test files that execute the most blocks of a room a second, one after the other.

    Args:
        touched: the map.
        room: a folder of src/shoal.
        budget_s: CPU seconds of the choice at most.

    Returns:
        Test files, the most useful first; each adds a block.
    """
    blocks: dict[str, set[tuple[str, str, int]]] = {}
    for path, functions in touched.files.items():
        if not path.startswith(f"src/shoal/{room}/") or isinstance(functions, int):
            continue
        for name, (_, numbers) in functions.items():
            for at, number in enumerate(numbers):
                for test in touched.tests_of(number):
                    blocks.setdefault(test, set()).add((path, name, at))
    if not blocks:
        return tests_naming(touched, room, budget_s)
    chosen: list[str] = []
    seen: set[tuple[str, str, int]] = set()
    while True:
        spent_s = sum(touched.seconds[test] for test in chosen)
        gains = {
            test: len(found - seen) / max(touched.seconds[test], 0.5)
            for test, found in blocks.items()
            if spent_s + touched.seconds[test] <= budget_s and (ROOT / test).exists()
        }
        best = max(gains, key=lambda test: gains[test], default="")
        if not best or not gains[best]:
            return chosen
        chosen.append(best)
        seen |= blocks.pop(best)


def tests_naming(touched: TouchMap, room: str, budget_s: float) -> list[str]:
    """Choose test files that name a room of which the map has no file, the shortest texts first."""
    sys.stderr.write(f"the map has no file of {room}; try: make proof PART=touch\n")
    texts = {str(p.relative_to(ROOT)): p.read_text() for p in (ROOT / "tests").rglob("test_*.py")}
    found = [t for t, text in texts.items() if f"shoal.{room}" in text or f"tests/{room}/" in t]
    chosen: list[str] = []
    for test in sorted(found, key=lambda test: len(texts[test])):
        if sum(touched.seconds.get(t, 5.0) for t in (*chosen, test)) <= budget_s:
            chosen.append(test)
    return chosen


def tests_of_change(budget_s: float) -> tuple[list[str], list[str]]:
    """Choose the cheapest test files that execute what differs from HEAD; return the others too."""
    choice = choose()
    seconds = choice.map.seconds
    chosen: list[str] = []
    left = sorted(choice.why, key=lambda test: seconds.get(test, 1.0))
    while left and sum(seconds.get(t, 1.0) for t in (*chosen, left[0])) <= budget_s:
        chosen.append(left.pop(0))
    return chosen, left


def choose_tests(rooms: list[str]) -> list[str]:
    """Choose the tests to run, and say which are left out."""
    if not rooms:
        chosen, left = tests_of_change(BUDGET_S)
        more = f"; {len(left)} files more: python tests/affected.py --run" if left else ""
        sys.stderr.write(f"{len(chosen)} test files execute what differs from HEAD{more}\n")
        return chosen
    touched = TouchMap()
    chosen = [t for room in rooms for t in tests_of_room(touched, room, BUDGET_S / len(rooms))]
    chosen = list(dict.fromkeys(chosen))
    own = {t for t in touched.seconds for room in rooms if t.startswith(f"tests/{room}/")}
    if left := sorted(own - {*chosen}):
        folders = " ".join(f"tests/{room}" for room in rooms)
        sys.stderr.write(
            f"left out: {len(left)} files of {folders}; all of them: pytest {folders}\n"
        )
    return chosen


def checks(tests: list[str]) -> list[tuple[str, list[str]]]:
    """Return (name, command) of each check."""
    sources = ["src", "tests", "benchmarks", "examples", "website"]
    found = [
        ("ruff", [str(BIN / "ruff"), "check", *sources]),
        ("format", [str(BIN / "ruff"), "format", "--check", *sources]),
        ("imports", [str(BIN / "lint-imports")]),
        ("mypy", [str(BIN / "mypy")]),
    ]
    if tests:
        found.append(("tests", [str(BIN / "python"), "-m", "pytest", *tests]))
    return found


def cpu_s() -> float:
    """Return the CPU seconds of all children until now."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def main() -> int:
    """Run the checks of the rooms on the command line; 1 if one failed."""
    check_rooms(sys.argv[1:])
    failed = []
    for name, command in checks(choose_tests(sys.argv[1:])):
        before = cpu_s()
        done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
        sys.stderr.write(f"{name}: {'well' if not done.returncode else 'RED'}, ")
        sys.stderr.write(f"{cpu_s() - before:.1f} CPU s\n")
        if done.returncode:
            failed.append(name)
            sys.stderr.write(done.stdout[-8000:] + done.stderr[-2000:])
    sys.stderr.write(f"all: {cpu_s():.1f} CPU s\n")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
