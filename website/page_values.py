"""Compare numbers and outputs on the learning pages with their sources; make docs and a test use it.

A number is written with its source, so that the page is readable as it is:

    {value}`61.1 ms <shoal simulate ddp#walk.facts.step>`      a command's --json, and a key in it
    {value}`1.57 <benchmarks/results/a.json#ratio.median>`     a committed file, and a key in it
    {value}`6.4 <= 1/(0.1 + 0.9/16)>`                          arithmetic; {source} inside is a value

A number agrees if its source, in the unit of the text, rounds to it. A text agrees if the source
contains it. A block ```console shows commands behind `$ ` and their output; a line `…` stands for
omitted lines. Commands of `shoal simulate`, `plan` and `docs` run in this process, without torch.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import math
import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ROLE = re.compile(r"\{value\}`([^`<]+?)\s*<([^`]+)>`")
FENCE = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"[-−]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")
FACTORS = {
    **{"%": 0.01, "k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "million": 1e6, "billion": 1e9},
    **{"kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12},
    **{"KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40},
    **{
        "ms": 1e-3,
        "µs": 1e-6,
        "us": 1e-6,
        "min": 60.0,
        "minutes": 60.0,
        "h": 3600.0,
        "hours": 3600.0,
        "分钟": 60.0,
        "小时": 3600.0,
    },
    **{"Mbit/s": 1e6, "Gbit/s": 1e9, "GB/s": 1e9, "TFLOP/s": 1e12},
}
"""Unit → how much of the source's own unit (1, byte, second) it is; other words count as 1."""
FUNCTIONS = {name: getattr(math, name) for name in ("sqrt", "log2", "ceil", "floor", "exp")}
IN_PROCESS = ("simulate", "plan", "docs")
"""Verbs that need neither torch nor another process."""
OMITTED = "…"


@dataclass(frozen=True)
class Session:
    """One command of a page and the output that it shows; line: where it stands."""

    line: int
    command: str
    shown: tuple[str, ...]

    @property
    def runs_here(self) -> bool:
        """Whether the command runs in this process."""
        words = self.command.split()
        own_file = "--program" in words
        return (
            words[0] == "shoal" and words[1] in IN_PROCESS and not (own_file or needs_torch(words))
        )


def source_title(source: str, words: dict[str, str]) -> str:
    """Return the title over a figure, which names its source.

    Args:
        words: translations; none on an English page.

    >>> source_title("= 6 * 2", {}), source_title("a.json#b", {"from ": "来源："})
    ('computed: 6 * 2', '来源：a.json#b')
    """

    def say(english: str) -> str:
        return words.get(english, english)

    if source.startswith("="):
        return say("computed: ") + source[1:].strip()
    return say("from ") + source


def needs_torch(words: list[str]) -> bool:
    """Return whether a plan is of a model or machine that torch must look at."""
    plain = words[1] != "plan" or "--table" in words or "--on" in words
    return not plain or any(word.startswith("model.build=") for word in words)


@functools.cache
def run_command(command: str) -> str:
    """Run `shoal …` in this process and return its standard output, or the line of its error."""
    import sys

    from shoal.base.errors import ShoalError
    from shoal.cli.main import app

    words = shlex.split(command)[1:]
    out = io.StringIO()
    columns = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "80"
    typed = sys.argv
    sys.argv = ["shoal", *words]
    try:
        with contextlib.redirect_stdout(out):
            app(words, standalone_mode=False)
    except ShoalError as failure:
        out.write(f"shoal: {failure}\n")
    except SystemExit:
        pass
    finally:
        sys.argv = typed
        os.environ.pop("COLUMNS")
        if columns is not None:
            os.environ["COLUMNS"] = columns
    return out.getvalue()


@functools.cache
def _document(source: str) -> Any:
    """Return the JSON of a command or of a file."""
    if source.startswith("shoal "):
        return json.loads(run_command(f"{source} --json"))
    return json.loads((ROOT / source).read_text(encoding="utf-8"))


def find_value(source: str) -> Any:
    """Return the value that a source names.

    Raises:
        KeyError, OSError, ValueError: there is no such file, key or expression.

    >>> find_value("= 2 * {= 3 + 1}")
    8
    """
    if source.startswith("="):
        inner = re.sub(r"\{([^}]*)\}", lambda found: repr(find_value(found[1])), source[1:])
        return eval(inner.strip(), {"__builtins__": {}}, FUNCTIONS)
    document, _, key = source.replace("\\|", "|").partition("#")
    value = _document(document.strip())
    for part in key.split("."):
        value = value[int(part)] if isinstance(value, list) else value[part]
    return value


def agrees(text: str, value: Any) -> bool:
    """Return whether a text is the value, rounded to the digits and unit that the text has.

    >>> (
    ...     agrees("112 GB", 112.3e9),
    ...     agrees("1.6", 1.57),
    ...     agrees("1.6", 1.66),
    ...     agrees("9.0 s", "9.0 s = 37.5% of it"),
    ... )
    (True, True, False, True)
    """
    if isinstance(value, str):
        return re.search(rf"(?<![\w.]){re.escape(text)}(?![\w]|\.\d)", value) is not None
    found = NUMBER.search(text)
    if found is None or isinstance(value, bool) or not isinstance(value, int | float):
        return False
    number = found[0].replace(",", "").replace("−", "-")
    words = text[found.end() :].split()
    factor = FACTORS.get(words[0], 1.0) if words else 1.0
    digits = len(number.partition("e")[0].partition(".")[2])
    exponent = int(number.partition("e")[2] or 0)
    half = 0.5 * 10.0 ** (exponent - digits)
    return abs(value / factor - float(number)) <= half * (1 + 1e-9)


def sessions(text: str) -> Iterator[Session]:
    r"""Yield the commands of a page's console blocks, each with its output.

    >>> [(one.command, one.shown) for one in sessions("```console\n$ a\nb\n$ c\n```\n")]
    [('a', ('b',)), ('c', ())]
    """
    for block in FENCE.finditer(text):
        first = text[: block.start(1)].count("\n") + 1
        command, line = "", first
        shown: list[str] = []
        for place, row in enumerate(block[1].splitlines(), first):
            if row.startswith("$ "):
                if command:
                    yield Session(line, command, tuple(shown))
                command, shown, line = row[2:], [], place
            elif command.endswith("\\"):
                command = f"{command[:-1].rstrip()} {row.strip()}"
            else:
                shown.append(row.rstrip())
        if command:
            yield Session(line, command, tuple(shown))


def same_output(shown: tuple[str, ...], got: str) -> bool:
    r"""Return whether an output is the shown one; `…` stands for any lines, or the rest of a line.

    >>> same_output(("a", "…", "d"), "a\nb\nc\nd\n"), same_output(("a", "d"), "a\nb\nd\n")
    (True, False)
    >>> same_output(("took …", "…"), "took 3 s\nb\n"), same_output(("took …",), "gave 3 s\n")
    (True, False)
    """
    lines = [line.rstrip() for line in got.strip("\n").splitlines()]
    parts: list[list[str]] = [[]]
    for line in shown:
        if line == OMITTED:
            parts.append([])
        else:
            parts[-1].append(line)
    while parts[-1] and parts[-1][-1] == "":
        parts[-1].pop()
    at = 0
    for place, part in enumerate(parts):
        size = len(part)
        last = place == len(parts) - 1
        starts = range(at, len(lines) - size + 1)
        if place == 0:
            starts = range(1)
        elif last and size:
            starts = range(len(lines) - size, len(lines) - size + 1)
        at = next(
            (s + size for s in starts if s >= at and _same_lines(part, lines[s : s + size])), -1
        )
        if at < 0:
            return False
    return len(parts) > 1 or at == len(lines)


def _same_lines(shown: list[str], got: list[str]) -> bool:
    """Compare lines; a shown line that ends with ` …` is the beginning of its line."""
    return len(shown) == len(got) and all(
        line.startswith(want.removesuffix(OMITTED))
        if want.endswith(f" {OMITTED}")
        else line == want
        for want, line in zip(shown, got, strict=True)
    )


def page_problems(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line, message) for each number and output of a page that is not its source's."""
    bare = FENCE.sub(lambda found: "\n" * found[0].count("\n"), text)
    for found in ROLE.finditer(bare):
        line = bare[: found.start()].count("\n") + 1
        shown, source = found[1].replace("\n", " "), found[2].replace("\n", " ")
        try:
            value = find_value(source)
        except Exception as failure:
            yield line, f"{source}: {type(failure).__name__}: {failure}"
            continue
        if not agrees(shown, value):
            yield line, f"the page has {shown!r}, {source} has {value!r}"
    for one in sessions(text):
        if one.runs_here and one.shown and not same_output(one.shown, run_command(one.command)):
            yield one.line, f"$ {one.command} prints something else than the page shows"
