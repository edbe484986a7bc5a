"""Find which blocks of the source each test file executes: `make proof PART=touch`.

    python tests/touch/touch_map.py             all test files; goes on where it stopped
    python tests/touch/touch_map.py FILE …      these alone, added to the map

Each test file runs as a session of its own (`touch_sessions.py`): what one session keeps for the next
files (worlds, caches) would be seen with the first of them only. The doctests of a room are one row. The
environment below build/ imports `touch_hook.py` in every Python that a test starts. Rows of another
source are dropped. The map goes into proof/results/touched.json, for `tests/affected.py`:

    tests      test files, with the CPU seconds that each took
    sets       lists of tests, as bits in base64: the first test is the lowest bit of the first byte
    files      path → {function: [digest, [number of the set of each block]]}, or a set's number for a
               file that is no source of Python
"""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT / "tests")]

import touch_blocks  # noqa: E402
from touch_sessions import row_of  # noqa: E402

from file_times import make_environment  # noqa: E402

FOLDER = ROOT / "build" / "touch"
KEPT = ROOT / "proof" / "results" / "touched.json"


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
    """Number all blocks, and all other files, from 0 on; drop the rows of another source.

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
    index = "".join(f"{at} {name}\n" for name, at in offsets.items())
    texts = [index.encode(), *(path.read_bytes() for path in sources.values())]
    stamp = hashlib.sha256(b"".join(texts)).hexdigest()
    if not (kept := FOLDER / "stamp").exists() or kept.read_text() != stamp:
        for name in ("rows", "index.code"):
            shutil.rmtree(FOLDER / name, ignore_errors=True)
    (FOLDER / "rows").mkdir(parents=True, exist_ok=True)
    (FOLDER / "index").write_text(index)
    kept.write_text(stamp)
    return count, offsets, functions


def write_map(
    offsets: dict[str, int], functions: dict[str, list[touch_blocks.Function]], tests: list[str]
) -> None:
    """Write the map of all rows."""
    rows = {}
    for test in tests:
        row = row_of(FOLDER, test)
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
    count, offsets, functions = write_index()
    python = make_environment(FOLDER / "environment", ROOT / "src")
    packages = next((FOLDER / "environment").glob("lib/python*/site-packages"))
    (packages / "touch.pth").write_text(
        f'{HERE}\nimport os; os.environ.get("SHOAL_TOUCH") and __import__("touch_hook")\n'
    )
    tests = test_files(tracked())
    for test in words:
        row_of(FOLDER, test).unlink(missing_ok=True)
    due = [test for test in words or tests if not row_of(FOLDER, test).exists()]
    program = str(HERE / "touch_sessions.py")
    subprocess.run([str(python), program, str(FOLDER), str(count), *due], cwd=ROOT, check=True)
    write_map(offsets, functions, tests)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
