"""Check one room in a minute: `make quick ROOM=trainer`; several: `make quick ROOM="trainer data"`.

Ruff over the tree, the import contracts, mypy with its warm cache, then the tests of `tests/ROOM` and
the doctests of `src/shoal/ROOM`. It says how many CPU seconds each took, and fails if one failed.
`make test` is what a change must pass; this is for the time before.
"""

from __future__ import annotations

import difflib
import resource
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent


def checks(rooms: list[str]) -> list[tuple[str, list[str]]]:
    """Return (name, command) of each check.

    Raises:
        SystemExit: no room, or a room that is not there, with the one that is spelt like it.
    """
    known = sorted(
        p.name for p in (ROOT / "src" / "shoal").iterdir() if (p / "__init__.py").exists()
    )
    if not rooms:
        raise SystemExit(f"which room? try: make quick ROOM=trainer, or one of {', '.join(known)}")
    for room in rooms:
        if room not in known:
            close = difflib.get_close_matches(room, known, 1)
            raise SystemExit(f"ROOM={room}: no such room; try: {(close or [', '.join(known)])[0]}")
    python = str(BIN / "python")
    paths = [path for room in rooms for path in (f"tests/{room}", f"src/shoal/{room}")]
    there = [path for path in paths if (ROOT / path).exists()]
    return [
        ("ruff", [str(BIN / "ruff"), "check", "src", "tests", "benchmarks", "examples"]),
        (
            "format",
            [str(BIN / "ruff"), "format", "--check", "src", "tests", "benchmarks", "examples"],
        ),
        ("imports", [str(BIN / "lint-imports")]),
        ("mypy", [str(BIN / "mypy")]),
        ("tests", [python, "-m", "pytest", *there]),
    ]


def cpu_s() -> float:
    """Return the CPU seconds of all children until now."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def main() -> int:
    """Run the checks of the rooms on the command line; 1 if one failed."""
    failed = []
    for name, command in checks(sys.argv[1:]):
        before = cpu_s()
        done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
        sys.stderr.write(f"{name}: {'well' if not done.returncode else 'RED'}, ")
        sys.stderr.write(f"{cpu_s() - before:.1f} CPU s\n")
        if done.returncode:
            failed.append(name)
            sys.stderr.write(done.stdout[-8000:] + done.stderr[-2000:])
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
