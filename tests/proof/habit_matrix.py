"""The matrix of habits: each habit of a training loop × layout, beside plain PyTorch in one process.

    tests/proof/habit_matrix.py                    every cell that this source has not measured
    tests/proof/habit_matrix.py --only clip ddp    habits and layouts whose name holds one of the words

A habit is a function (`tests/worlds/habits/`), asked of worlds of processes that start once. Rows go
to `proof/results/habits.json`; the exit status is 1 if a cell is WRONG.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
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
            return "hung", "no answer"
    lines = [line for line in text.splitlines() if line.startswith("shoal: ")]
    answers = [json.loads(line[7:]) for line in text.splitlines() if line.startswith("ANSWER ")]
    if len(answers) == ranks:
        return outcome(answers)
    told = [line for line in lines if not any(part in line for part in USUAL)]
    return ("named", told[0]) if told else ("raised", text[-600:])


def measure(rooms: Rooms, name: str, layout: str, deadline_s: float) -> tuple[str, str]:
    """Return the outcome of one cell, and what shows it."""
    if table()[name].ends and layout != "single":
        return measure_program(name, layout, deadline_s)
    world = rooms(SETTINGS[layout].ranks)
    earlier = [len(path.read_text()) for path in world.log_paths]
    try:
        answers = world.call(
            "habits.habit_table:attempt", deadline_s=deadline_s, name=name, layout=layout
        )
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


def chosen(options: argparse.Namespace) -> list[tuple[str, str]]:
    """Return the cells to measure."""
    words = options.only or []
    names = [word for word in words if word not in SETTINGS]
    layouts = [layout for layout in SETTINGS if layout in words] or list(LAYOUTS)
    return [
        (name, layout)
        for name in table()
        if not names or any(word in name for word in names)
        for layout in layouts
    ]


def summary(rows: dict[str, Any]) -> list[str]:
    """Return lines: outcomes of all cells, and of the cells of sums over samples."""
    habits, lines = table(), []
    for text, sums in (("sums over samples", True), ("others", False)):
        found = Counter(
            row["verdict"] for key, row in rows.items() if habits[key.split(" · ")[0]].sums == sums
        )
        total = sum(found.values()) or 1
        counts = ", ".join(f"{number} {what}" for what, number in found.most_common())
        lines.append(f"{text}: {counts}; right {100 * found['right'] / total:.1f} %")
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
        "- `raised`: an exception of torch or Python. `hung`: no answer. `WRONG`: other numbers, no line.",
        "",
        *(f"- {line}" for line in summary(rows)),
        f"- Sources, by rows: {', '.join(f'{n} {name}' for name, n in sources.most_common())}.",
        "",
        "A cell that is not `sum` is a mistake, or couples samples: no layout can make it right.",
        "",
        f"| habit | about | sum | {' | '.join(LAYOUTS)} |",
        f"|---|---|---|{'---|' * len(LAYOUTS)}",
    ]
    for name, habit in table().items():
        cells = [rows.get(f"{name} · {layout}", {}).get("verdict", "—") for layout in LAYOUTS]
        words = name.replace("_", " ")
        lines.append(
            f"| {words} | {habit.kind} | {'sum' if habit.sums else ''} | {' | '.join(cells)} |"
        )
    path.write_text("\n".join(lines) + "\n")


def main() -> int:
    """Measure the cells; 1 if one is WRONG."""
    parser = parser_of(__doc__)
    parser.add_argument("--only", nargs="*", help="parts of habits' names, and layouts")
    parser.add_argument("--deadline", type=float, default=120.0, help="seconds for a cell")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--page", type=Path, default=ROOT / "docs/proof/habits.md")
    parser.add_argument("--verdicts", nargs="*", default=[], help="only cells with such a verdict")
    options = parser.parse_args()
    source = source_hash()
    rows = rows_before(options, options.out, source)
    rows = {key: row for key, row in rows.items() if key.split(" · ")[0] in table()}
    with tempfile.TemporaryDirectory(prefix="habits-") as folder:
        rooms = Rooms(Path(folder))
        try:
            for name, layout in chosen(options):
                key = f"{name} · {layout}"
                if options.verdicts and rows.get(key, {}).get("verdict") not in options.verdicts:
                    continue
                if (
                    not (options.only or options.verdicts)
                    and rows.get(key, {}).get("source") == source
                ):
                    continue
                verdict, shown = measure(rooms, name, layout, options.deadline)
                rows[key] = {"verdict": verdict, "shown": shown, "source": source}
                sys.stdout.write(f"{verdict:6} {key}: {shown[:200]}\n")
                sys.stdout.flush()
                write_rows(options.out, DEFINITION, rows)
        finally:
            rooms.close()
    write_page(rows, options.page)
    sys.stdout.write("\n".join(summary(rows)) + "\n")
    return int(any(row["verdict"] == "WRONG" for row in rows.values()))


if __name__ == "__main__":
    raise SystemExit(main())
