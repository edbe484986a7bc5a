"""Find which blocks of the source each test file executes: `make proof PART=touch`.

    python tests/touch/touch_map.py             all test files; goes on where it stopped
    python tests/touch/touch_map.py FILE …      these alone, added to the map

Each test file runs as a session of its own: what one session keeps for the next files (worlds, caches)
would be seen with the first of them only. The doctests of a room are one row. The environment below
build/ imports `touch_hook.py` in every Python that a test starts. The map goes into
proof/results/touched.json, for `tests/affected.py`:

    tests      test files, with the CPU seconds that each took
    sets       lists of tests, as bits in base64: the first test is the lowest bit of the first byte
    files      path → {function: [digest, [number of the set of each block]]}, or a set's number for a
               file that is no source of Python
"""

from __future__ import annotations

import base64
import concurrent.futures
import json
import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT / "tests")]

import touch_blocks  # noqa: E402

from file_times import make_environment  # noqa: E402

FOLDER = ROOT / "build" / "touch"
KEPT = ROOT / "proof" / "results" / "touched.json"
AT_ONCE = 3
LONGEST_S = 1800.0


def tracked() -> list[str]:
    """Return the files of the repository."""
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout.split("\n")[:-1]


def test_files(paths: list[str]) -> list[str]:
    """Return what is run as one session each: test files, and rooms with doctests."""
    tests = [p for p in paths if p.startswith("tests/") and Path(p).name.startswith("test_")]
    rooms = {"/".join(p.split("/")[:3]) for p in paths if p.startswith("src/shoal/")}
    with_doctests = {
        room
        for room in rooms
        for path in paths
        if path.startswith(room) and path.endswith(".py") and ">>> " in (ROOT / path).read_text()
    }
    return sorted([*(t for t in tests if t.endswith(".py")), *with_doctests])


def write_index() -> tuple[int, dict[str, int], dict[str, list[touch_blocks.Function]]]:
    """Number all blocks, and all other files, from 0 on.

    Returns:
        How many there are; path → its first number; path → its functions.
    """
    count, offsets, functions = 0, {}, {}
    sources = {str(p.relative_to(ROOT)): p for p in touch_blocks.source_files()}
    for name, path in sources.items():
        offsets[name] = count
        functions[name] = touch_blocks.divide(*touch_blocks.read(path))
        count += sum(len(one.blocks) for one in functions[name])
    for name in tracked():
        if not name.endswith(".py"):
            offsets[name] = count
            count += 1
    lines = [f"{at} {name}\n" for name, at in offsets.items()]
    (FOLDER / "index").write_text("".join(lines))
    return count, offsets, functions


def run_test(python: Path, test: str, count: int) -> None:
    """Run one test file, and keep which blocks it executed."""
    row = FOLDER / "rows" / (test.replace("/", "-") + ".bits")
    if row.exists():
        return
    cells = row.with_suffix(".map")
    cells.write_bytes(bytes(count))
    environ = {
        **os.environ,
        "SHOAL_TOUCH": str(cells),
        "SHOAL_TOUCH_INDEX": str(FOLDER / "index"),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    log = row.with_suffix(".log")
    began = time.monotonic()
    # The shell says what its children took: RUSAGE_CHILDREN counts all sessions that run at a time.
    command = f"{python} -m pytest {test} -p no:cacheprovider; code=$?; times; exit $code"
    with log.open("wb") as out:
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=ROOT,
            env=environ,
            stdout=out,
            stderr=out,
            check=False,
            timeout=LONGEST_S,
        )
    touched = cells.read_bytes()
    cells.unlink()
    cpu_s = sum(_seconds(word) for word in log.read_text(errors="replace").split()[-2:])
    told = {"status": done.returncode, "cpu_s": round(cpu_s, 1)}
    row.with_suffix(".json").write_text(json.dumps(told))
    row.write_bytes(touched)
    sys.stderr.write(
        f"{test}: {sum(touched)} blocks, {time.monotonic() - began:.0f} s"
        f"{', RED' if done.returncode not in (0, 5) else ''}\n"
    )


def _seconds(text: str) -> float:
    """Return the seconds of bash's `times`, as 0m1.234s."""
    minutes, _, seconds = text.rstrip("s").partition("m")
    return 60 * float(minutes) + float(seconds)


def write_map(
    offsets: dict[str, int], functions: dict[str, list[touch_blocks.Function]], tests: list[str]
) -> None:
    """Write the map of all rows."""
    rows = {}
    for test in tests:
        row = FOLDER / "rows" / (test.replace("/", "-") + ".bits")
        if row.exists():
            rows[test] = (row.read_bytes(), json.loads(row.with_suffix(".json").read_text()))
    sets: dict[int, int] = {}
    masks = [bits for bits, _ in rows.values()]

    def number(block: int) -> int:
        mask = sum(1 << at for at, bits in enumerate(masks) if bits[block])
        return sets.setdefault(mask, len(sets))

    files: dict[str, object] = {}
    for name, at in offsets.items():
        if name not in functions:
            files[name] = number(at)
            continue
        of_file = files[name] = {}
        block = at
        for one in functions[name]:
            numbers = [number(block + k) for k in range(len(one.blocks))]
            of_file[one.name] = [one.digest, numbers]
            block += len(one.blocks)
    width = (len(rows) + 7) // 8
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    record = {
        "commit": commit.stdout.strip(),
        "red": [test for test, (_, told) in rows.items() if told["status"] not in (0, 5)],
        "tests": {test: told["cpu_s"] for test, (_, told) in rows.items()},
        "sets": [base64.b64encode(one.to_bytes(width, "little")).decode() for one in sets],
        "files": files,
    }
    text = json.dumps(record, separators=(",", ":"))
    KEPT.write_text(text.replace('},"', '},\n"').replace('"files":{', '"files":{\n') + "\n")


def main(words: list[str]) -> int:
    """Run what has no row yet, and write the map."""
    (FOLDER / "rows").mkdir(parents=True, exist_ok=True)
    count, offsets, functions = write_index()
    python = make_environment(FOLDER / "environment", ROOT / "src")
    packages = next((FOLDER / "environment").glob("lib/python*/site-packages"))
    (packages / "touch.pth").write_text(
        f'{HERE}\nimport os; os.environ.get("SHOAL_TOUCH") and __import__("touch_hook")\n'
    )
    tests = test_files(tracked())
    for test in words:
        (FOLDER / "rows" / (test.replace("/", "-") + ".bits")).unlink(missing_ok=True)
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        for done in [pool.submit(run_test, python, test, count) for test in words or tests]:
            done.result()
    write_map(offsets, functions, tests)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
