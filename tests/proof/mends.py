"""Revert mends of the lab log, one at a time: does a test go red, and does `affected.py` choose it?

    python tests/proof/mends.py               every mend without a result of this source
    python tests/proof/mends.py --only WORD   mends whose name or path contains WORD
    python tests/proof/mends.py --fresh       all of them again

`mends.toml` lists them. A mend is one hunk of a source as it is today:

    name       a few words               reference  entry of the lab log, or commit
    path       src/shoal/…               test       the test file that must go red
    old        today's text, once in the file
    new        the text without the mend: the fault of before
    select     pytest's -k, if the file's other tests are slow; may be missing

The tests run in a copy of the working tree, with an environment that imports the copy. They are green
before the hunk (once for each file and `select`) and red after it. Red is a failed test, not an error
of its collection, nor a test that does not end within LONGEST_S. Then `affected.py` chooses the tests
of the hunk, by the map proof/results/touched.json. Its share is the CPU seconds of the chosen files
over those of the suite.

Results: proof/results/mends.json. The exit status is 1 if a test stays green, if one is not chosen, or
if the median share exceeds MEDIAN_SHARE; 2 if `mends.toml` does not fit the source.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import hashlib
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "tests")]

from source import source_hash  # noqa: E402

import affected  # noqa: E402
from file_times import make_environment  # noqa: E402

LIST = Path(__file__).with_suffix(".toml")
TARGET = ROOT / "proof" / "results" / "mends.json"
LONGEST_S = 300.0
MEDIAN_SHARE = 0.35
"""Of the suite's CPU seconds: what the chosen tests of half of the mends may take at most."""

OPTIONS = ("-x", "-rfE", "-p", "no:cacheprovider")
GREEN, RED = 0, 1
"""Exit statuses of pytest."""


@dataclasses.dataclass(frozen=True)
class Mend:
    """One mend of the lab log, and how it is taken out. The fields are those of `mends.toml`."""

    name: str
    reference: str
    path: str
    old: str
    new: str
    test: str
    select: str = ""

    def reverted(self, text: str) -> str:
        """Return the text of the file without the mend.

        Raises:
            ValueError: `old` is not in it exactly once; the message has the nearest line.
        """
        where = f"{LIST.name}, {self.name}: old"
        if (count := text.count(self.old)) == 1:
            return text.replace(self.old, self.new)
        if count:
            raise ValueError(f"{where} is {count} times in {self.path}; try: more lines around it")
        lines = text.splitlines()
        wanted = [line for line in self.old.splitlines() if line.strip()]
        here = {line.strip(): at for at, line in reversed(list(enumerate(lines, start=1)))}
        lost = next((line for line in wanted if line not in lines), wanted[0]).strip()
        near = max(here, key=lambda line: _likeness(lost, line), default="")
        place = f"line {here[near]}, {near!r}" if near else "an empty file"
        raise ValueError(f"{where} is no longer in {self.path} ({lost!r}); try: {place}")

    def key(self, source: str) -> str:
        """Return a hash of all that a result depends on: this mend, its test, the source."""
        test = ROOT / self.test
        parts = [source, json.dumps(dataclasses.asdict(self)), test.read_text()]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def read_mends() -> list[Mend]:
    """Read `mends.toml`, and check it against the source.

    Raises:
        SystemExit: it does not fit the source; a line for each fault.
    """
    mends = [Mend(**one) for one in tomllib.loads(LIST.read_text())["mend"]]
    names = Counter(mend.name for mend in mends)
    faults = [f"{LIST.name}, {name}: {n} mends" for name, n in names.items() if n > 1]
    for mend in mends:
        for path in (mend.path, mend.test):
            if not (ROOT / path).is_file():
                close = difflib.get_close_matches(path, affected.git("ls-files").split("\n"), 1)
                near = f"; try: {close[0]}" if close else ""
                faults.append(f"{LIST.name}, {mend.name}: there is no {path}{near}")
        try:
            if (ROOT / mend.path).is_file():
                mend.reverted((ROOT / mend.path).read_text())
        except ValueError as fault:
            faults.append(str(fault))
    if faults:
        sys.stderr.write("\n".join(faults) + "\n")
        raise SystemExit(2)
    return mends


class Copy:
    """A copy of the working tree: a repository of one commit, with an environment of its own."""

    def __init__(self, folder: Path) -> None:
        self.root = folder
        names = affected.git("ls-files", "-z", "--cached", "--others", "--exclude-standard")
        for name in filter(None, names.split("\0")):
            if (ROOT / name).exists():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
        git = ("git", "-c", "core.hooksPath=/dev/null", "-c", "user.name=mends")
        for words in (
            ("init", "--quiet"),
            ("add", "--all"),
            ("-c", "user.email=mends@localhost", "commit", "--quiet", "--message", "copy"),
        ):
            subprocess.run([*git, *words], cwd=folder, check=True, capture_output=True)
        self.python = make_environment(folder / ".venv", folder / "src")
        affected.ROOT = folder
        self.greens: dict[tuple[str, str], tuple[int, str]] = {}

    def write(self, path: str, text: str) -> None:
        """Write a source; drop what was compiled of it, whose time may be the same second."""
        (self.root / path).write_text(text)
        for old in (self.root / path).parent.glob(f"__pycache__/{Path(path).stem}.*.pyc"):
            old.unlink()

    def run(self, mend: Mend) -> tuple[int, str]:
        """Run a mend's test; return pytest's exit status (-1 if it did not end), and its output."""
        select = ["-k", mend.select] if mend.select else []
        environ = {**os.environ, "PYTHONPATH": str(self.root / "src")}
        process = subprocess.Popen(
            [self.python, "-m", "pytest", mend.test, *select, *OPTIONS],
            cwd=self.root,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            out, _ = process.communicate(timeout=LONGEST_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return -1, f"not ended within {LONGEST_S:.0f} s"
        return process.returncode, out

    def green(self, mend: Mend) -> tuple[int, str]:
        """Run a mend's test with the mend, once for each file and `select`."""
        which = (mend.test, mend.select)
        if which not in self.greens:
            self.greens[which] = self.run(mend)
        return self.greens[which]

    def try_out(self, mend: Mend) -> dict[str, Any]:
        """Return what the test says of the source without a mend.

        Returns:
            verdict: red, green, "red before", "not ended" or "error"; failed: what failed first.
        """
        began_s = time.monotonic()
        status, out = self.green(mend)
        if status != GREEN:
            return {"verdict": "red before", "failed": _first_failure(out)}
        text = (self.root / mend.path).read_text()
        self.write(mend.path, mend.reverted(text))
        try:
            status, out = self.run(mend)
        finally:
            self.write(mend.path, text)
        words = {GREEN: "green", RED: "red", -1: "not ended"}
        told = {"verdict": words.get(status, "error"), "failed": _first_failure(out)}
        return {**told, "seconds": round(time.monotonic() - began_s, 1)}

    def choose(self, mend: Mend) -> dict[str, Any]:
        """Return whether `affected.py` chooses the test of a mend, and the share of its choice."""
        text = (self.root / mend.path).read_text()
        self.write(mend.path, mend.reverted(text))
        affected._text.cache_clear()
        affected._source.cache_clear()
        try:
            choice = affected.choose("HEAD")
        finally:
            self.write(mend.path, text)
        suite_s = sum(choice.map.seconds.values())
        return {
            "chosen": mend.test in choice.why,
            "files": len(choice.why),
            "share": round(choice.cpu_s() / suite_s, 4),
        }


def _likeness(part: str, line: str) -> tuple[int, float]:
    """Return how much of a part of a line is in another line, in one run and in all."""
    matcher = difflib.SequenceMatcher(None, part, line, autojunk=False)
    return matcher.find_longest_match().size, matcher.ratio()


def _first_failure(out: str) -> str:
    """Return the first failed test of pytest's output, or its last line."""
    found = re.search(r"^(?:FAILED|ERROR) (\S.*)", out, re.MULTILINE)
    return (found.group(1) if found else (out.strip().splitlines() or [""])[-1])[:200]


def summarise(rows: dict[str, dict[str, Any]]) -> tuple[str, bool]:
    """Return the table's last line, and whether the figures are as required."""
    red = sum(row["verdict"] == "red" for row in rows.values())
    chosen = sum(row["chosen"] for row in rows.values())
    median = statistics.median(row["share"] for row in rows.values())
    line = (
        f"{len(rows)} mends: {red} red, {chosen} chosen, median share {median:.1%} of the suite's "
        f"CPU seconds (required: all, all, at most {MEDIAN_SHARE:.0%})"
    )
    return line, red == chosen == len(rows) and median <= MEDIAN_SHARE


def main() -> int:
    """Try all mends, print the table, and keep the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--only", default="", help="mends whose name or path contains this")
    parser.add_argument("--fresh", action="store_true", help="forget what is done already")
    options = parser.parse_args()
    mends, source = read_mends(), source_hash()
    if not affected.MAP.exists():
        sys.stderr.write("proof/results/touched.json: no such file; try: make proof PART=touch\n")
        return 2
    kept: dict[str, Any] = {}
    if TARGET.exists():
        kept = {} if options.fresh else json.loads(TARGET.read_text())["rows"]
    tried = [m for m in mends if options.only in m.name or options.only in m.path]
    if not tried:
        names = difflib.get_close_matches(options.only, [m.name for m in mends], 3, cutoff=0.0)
        sys.stderr.write(f"--only {options.only}: no such mend; try: {', '.join(names)}\n")
        return 2
    rows: dict[str, dict[str, Any]] = {}
    print(f"{'mend':58} {'red':10} {'chosen':6} {'share':>6}", flush=True)
    with tempfile.TemporaryDirectory(prefix="shoal-mends-") as folder:
        copy = Copy(Path(folder))
        for mend in tried:
            key, row = mend.key(source), kept.get(mend.name, {})
            if row.get("key") != key or row["verdict"] != "red":
                row = {"key": key, **copy.try_out(mend)}
            row |= {"reference": mend.reference, "path": mend.path, "test": mend.test}
            rows[mend.name] = kept[mend.name] = row | copy.choose(mend)
            show(mend.name, rows[mend.name])
            write(kept, mends, source)
    line, is_met = summarise(rows)
    print(line)
    return 0 if is_met else 1


def show(name: str, row: dict[str, Any]) -> None:
    """Print a row of the table; a line more if the test is not red, or not chosen."""
    red = "yes" if row["verdict"] == "red" else row["verdict"]
    print(
        f"{name:58} {red:10} {'yes' if row['chosen'] else 'no':6} {row['share']:6.1%}", flush=True
    )
    if red != "yes" or not row["chosen"]:
        print(f"    {row['path']}, {row['test']}: {row['failed']}", flush=True)


def write(kept: dict[str, dict[str, Any]], mends: list[Mend], source: str) -> None:
    """Write the results that are of this source, its tests and its list."""
    now = {mend.name: mend.key(source) for mend in mends}
    rows = {name: kept[name] for name in now if kept.get(name, {}).get("key") == now[name]}
    told = {"source": source, "summary": summarise(rows)[0], "rows": rows}
    TARGET.write_text(json.dumps(told, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
