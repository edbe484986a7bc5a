"""The matrix of habits: each habit of a training loop × layout, beside plain PyTorch in one process.

    tests/proof/habit_matrix.py                    every cell that this source has not measured
    tests/proof/habit_matrix.py --only clip ddp    habits and layouts whose name holds one of the words;
                                                   prints them, and is kept with --out FILE alone
    tests/proof/habit_matrix.py --drawn 40         40 drawn habits on the wider layouts
    tests/proof/habit_matrix.py --share 0/2 --out A, --share 1/2 --out B, then --merge A B

A cell without an answer says little on a busy machine: `--verdicts hung --deadline 300` asks again.

A habit is a function (`tests/worlds/habits/`), asked of worlds of processes that start once. Rows go
to `proof/results/habits.json`; the exit status is 1 if a cell is WRONG.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import select
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "worlds")]

from kept_rows import parser_of, rows_before, write_rows  # noqa: E402
from source import source_hash  # noqa: E402

from habits.habit_sides import SETTINGS  # noqa: E402
from habits.habit_table import LAYOUTS, USUAL, outcome, table  # noqa: E402
from worlds import Failed, Members  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "proof/results/habits.json"
DEFINITION = (
    "a row is a habit × layout, 2 ranks (single: 1), float64, uneven shares, micro-batches of 2; "
    "right: weights, losses and noted numbers equal plain PyTorch's on the whole batch (1e-9); "
    "named: an error of Shoal or a line to the user; raised: another exception; hung: no answer; "
    "WRONG: other numbers without a line"
)


ERROR = re.compile(r'"error": "([^"]+)')
"""The error of a rank that answered while others wait for it."""


class Rooms:
    """Worlds by size; one that lost a rank is started anew."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.by_size = folder, dict[int, Members]()

    def __call__(self, size: int) -> Members:
        world = self.by_size.get(size)
        if world is None or any(p.poll() is not None for p in world.processes):
            self.by_size[size] = world = Members(size, self.folder)
        return world

    def close(self) -> None:
        for world in self.by_size.values():
            world.kill()


PROGRAM = ROOT / "tests/worlds/habits/habit_program.py"


def measure_program(name: str, layout: str, deadline_s: float) -> tuple[str, str]:
    """Return the outcome of a cell whose ranks may end, run under torchrun."""
    ranks = SETTINGS[layout].ranks
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
    ]
    with subprocess.Popen(
        [*command, str(PROGRAM), name, layout], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as running:  # fmt: skip
        try:
            text, _ = running.communicate(timeout=deadline_s)
        except subprocess.TimeoutExpired:
            running.terminate()  # torchrun ends its ranks
            text, _ = running.communicate()
            told = _list_named(text)
            return ("named", told[0]) if told else ("hung", "no answer")
    answers = [json.loads(line[7:]) for line in text.splitlines() if line.startswith("ANSWER ")]
    if len(answers) == ranks:
        return outcome(answers)
    told = _list_named(text)
    return ("named", told[0]) if told else ("raised", text[-600:])


def _list_named(text: str) -> list[str]:
    """Return the lines to the user in an output, without those on machine and layout."""
    lines = [line for line in text.splitlines() if line.startswith("shoal: ")]
    return [line for line in lines if not any(part in line for part in USUAL)]


END_S = 20.0
"""Seconds that ranks have to answer once another one has; a launcher would end them."""


def wait_for_error(world: Members, deadline_s: float) -> None:
    """Wait until a rank has answered, or all of them are silent for `deadline_s`."""
    select.select(world.channels, [], [], deadline_s - END_S)


def measure(rooms: Rooms, name: str, layout: str, deadline_s: float) -> tuple[str, str]:
    """Return the outcome of one cell, and what shows it."""
    if table()[name].ends and layout != "single":
        return measure_program(name, layout, deadline_s)
    world = rooms(SETTINGS[layout].ranks)
    earlier = [len(path.read_text()) for path in world.log_paths]
    world.ask("habits.habit_table:attempt", name=name, layout=layout)
    wait_for_error(world, deadline_s)
    try:
        answers = world.collect(END_S)
    except Failed as failure:
        world.kill()
        texts = [p.read_text()[n:] for p, n in zip(world.log_paths, earlier, strict=True)]
        told = [one for text in texts for one in text.splitlines() if one.startswith("shoal: ")]
        if told:
            return "named", told[0]
        if found := ERROR.search(str(failure)):  # a launcher ends the ranks that wait for this one
            return "named", found[1]
        silent = "silent" in str(failure)
        return ("hung" if silent else "raised"), str(failure)[-600:]
    return outcome(answers)


WIDE = [layout for layout in SETTINGS if layout not in LAYOUTS]
SEED = 50


def drawn(number: int) -> list[str]:
    """Return drawn habits, in the table's order."""
    some = random.Random(SEED).sample(sorted(table()), number)
    return [name for name in table() if name in some]


def chosen(options: argparse.Namespace) -> list[tuple[str, str]]:
    """Return the cells to measure."""
    if options.drawn:
        return [(name, layout) for name in drawn(options.drawn) for layout in WIDE]
    words = options.only or []
    names = [word for word in words if word not in SETTINGS]
    layouts = [layout for layout in SETTINGS if layout in words] or list(LAYOUTS)
    wanted = [name for name in table() if not names or any(word in name for word in names)]
    wanted.sort(key=lambda name: table()[name].ends)  # programs take longest
    return [(name, layout) for name in wanted for layout in layouts]


def summary(rows: dict[str, Any]) -> list[str]:
    """Return lines: outcomes of the cells, by their layouts and whether they are sums over samples."""
    habits, found = table(), {}
    for key, row in rows.items():
        name, _, layout = key.partition(" · ")
        if row["verdict"] != "n/a":
            where = "" if layout in LAYOUTS else ", wider layouts"
            kind = ("sums over samples" if habits[name].sums else "others") + where
            found.setdefault(kind, Counter())[row["verdict"]] += 1
    lines = []
    for kind in sorted(found, key=lambda kind: ("wider" in kind, "others" in kind)):
        counts = ", ".join(f"{number} {what}" for what, number in found[kind].most_common())
        share = 100 * found[kind]["right"] / found[kind].total()
        lines.append(f"{kind}: {counts}; right {share:.1f} %")
    return lines


def rows_of_table(rows: dict[str, Any], layouts: Sequence[str], names: list[str]) -> list[str]:
    """Return the lines of a table: habits by layout."""
    lines = [
        f"| habit | about | sum | {' | '.join(layouts)} |",
        f"|---|---|---|{'---|' * len(layouts)}",
    ]
    for name in names:
        habit = table()[name]
        cells = [rows.get(f"{name} · {layout}", {}).get("verdict", "—") for layout in layouts]
        words, sums = name.replace("_", " "), "sum" if habit.sums else ""
        lines.append(f"| {words} | {habit.kind} | {sums} | {' | '.join(cells)} |")
    return lines


def write_page(rows: dict[str, Any], path: Path) -> None:
    """Write the page of the documentation: outcomes by habit and layout, the open cells first."""
    sources = Counter(row["source"] for row in rows.values())
    lines = [
        "# Habits of training loops",
        "",
        "Find here what a habit of your loop does under a layout. Made by `make proof PART=habits`.",
        "A habit is a small script, run on 2 ranks and in plain PyTorch on the whole batch, in float64.",
        "",
        "- `right`: weights, losses and the numbers that the script reads are equal (1e-9).",
        "- `named`: an error of Shoal, or a line to the user.",
        "- `raised`: an exception of torch or Python. `WRONG`: other numbers, no line.",
        "- `hung`: no answer in time, which on a busy machine may be a slow start.",
        "",
        *(f"- {line}" for line in summary(rows)),
        f"- Sources, by rows: {', '.join(f'{n} {name}' for name, n in sources.most_common())}.",
        "",
        "A cell that is not `sum` is a mistake, or couples samples: no layout can make it right.",
        "",
        *rows_of_table(rows, LAYOUTS, list(table())),
    ]
    wide = [name for name in table() if any(f"{name} · {layout}" in rows for layout in WIDE)]
    if wide:
        lines += [
            "",
            "## Wider layouts",
            "",
            f"{len(wide)} habits, drawn with seed {SEED}. The layouts have two or four ranks:",
            f"{', '.join(f'{name} = `{SETTINGS[name].layout}`' for name in WIDE)}.",
            "`n/a`: the habit has a model or data of its own, which cp or ep cannot take.",
            "",
            *rows_of_table(rows, WIDE, wide),
        ]
    path.write_text("\n".join(lines) + "\n")


def main() -> int:
    """Measure the cells; 1 if one is WRONG."""
    parser = parser_of(__doc__)
    parser.add_argument("--only", nargs="*", help="parts of habits' names, and layouts")
    parser.add_argument("--deadline", type=float, default=120.0, help="seconds for a cell")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--page", type=Path, default=ROOT / "docs/proof/habits.md")
    parser.add_argument("--drawn", type=int, help="as many drawn habits, on the wider layouts")
    parser.add_argument("--share", default="0/1", help="0/2: the first of two shares of the cells")
    parser.add_argument("--merge", nargs="*", type=Path, default=[], help="results to add; no cell")
    parser.add_argument("--verdicts", nargs="*", default=[], help="only cells with such a verdict")
    options = parser.parse_args()
    source = source_hash()
    is_kept = options.out != OUT or not options.only  # a look at some cells is no matrix
    rows = rows_before(options, options.out, source)
    rows = {key: row for key, row in rows.items() if key.split(" · ")[0] in table()}
    for path in options.merge:
        rows |= json.loads(path.read_text())["rows"]
    if options.merge:
        write_rows(options.out, DEFINITION, rows)
    first, shares = map(int, options.share.split("/"))
    cells = [] if options.merge else chosen(options)[first::shares]
    with tempfile.TemporaryDirectory(prefix="habits-") as folder:
        rooms = Rooms(Path(folder))
        try:
            for name, layout in cells:
                key = f"{name} · {layout}"
                known = rows.get(key, {})
                if options.verdicts and known.get("verdict") not in options.verdicts:
                    continue
                if not (options.only or options.verdicts) and known.get("source") == source:
                    continue
                verdict, shown = measure(rooms, name, layout, options.deadline)
                rows[key] = {"verdict": verdict, "shown": shown, "source": source}
                sys.stdout.write(f"{verdict:6} {key}: {shown[:200]}\n")
                sys.stdout.flush()
                if is_kept:
                    write_rows(options.out, DEFINITION, rows)
        finally:
            rooms.close()
    if is_kept:
        write_page(rows, options.page)
    sys.stdout.write("\n".join(summary(rows)) + "\n")
    return int(any(row["verdict"] == "WRONG" for row in rows.values()))


if __name__ == "__main__":
    raise SystemExit(main())
