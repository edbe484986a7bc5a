"""Habits of training loops with the quick proof on, beside the same without it.

    tests/proof/proven_habits.py                        150 drawn cells under tp, pp and zero2
    tests/proof/proven_habits.py --cells 0              every cell
    tests/proof/proven_habits.py --only clip tp         habits and layouts whose name holds a word

A cell is a habit of `habit_matrix.py` × a layout, run twice in one world of processes: with
`prove="off"`, then with `prove="auto"` and no known proof. It is `as before` if the outcome and the
lines to the user are the same without the proof's own (of a cell that is not right, but for numbers
in them), `refused` if the proof names a cell that was not right, else `changed`. Rows go to proof/results/proven-habits.json; the exit status is 1 if a cell
is changed.
"""

from __future__ import annotations

import os
import random
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import habit_matrix
from habit_matrix import Rooms, measure_program, parser_of, rows_before, source_hash, write_rows
from kept_rows import verdicts

from habits.habit_sides import SETTINGS
from habits.habit_table import outcome, table
from worlds import Failed

OUT = habit_matrix.ROOT / "proof/results/proven-habits.json"
LAYOUTS = ("tp", "pp", "zero2")
EQUAL = "computes what one process computes"
DEFINITION = (
    "as before: outcome and lines of a habit are the same with the quick proof as without it; "
    "refused: the proof ends a run that was not right; changed: anything else"
)


def main() -> int:
    """Measure the cells; 1 if one is changed."""
    parser = parser_of(__doc__)
    parser.add_argument("--only", nargs="*", default=[], help="parts of habits' names, and layouts")
    parser.add_argument("--cells", type=int, default=150, help="how many are drawn; 0: all")
    parser.add_argument("--seed", type=int, default=49)
    parser.add_argument("--deadline", type=float, default=120.0, help="seconds for a run of a cell")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    source = source_hash()
    rows = rows_before(options, options.out, source)
    with tempfile.TemporaryDirectory(prefix="habits-") as folder:
        rooms = Rooms(Path(folder))
        try:
            for name, layout in drawn(options.only, options.cells, options.seed):
                key = f"{name} · {layout}"
                if not options.only and rows.get(key, {}).get("source") == source:
                    continue
                sides = [
                    measure(rooms, Path(folder), name, layout, prove, options.deadline)
                    for prove in ("off", "auto")
                ]
                rows[key] = {"source": source, **compare(*sides)}
                print(f"{rows[key]['verdict']:9} {key}: {rows[key]['shown'][:300]}", flush=True)
                write_rows(options.out, DEFINITION, rows)
        finally:
            rooms.close()
    bad = [key for key, row in rows.items() if row["verdict"] == "changed"]
    print(verdicts(rows), *bad, sep="\n")
    return bool(bad)


def drawn(words: list[str], count: int, seed: int) -> list[tuple[str, str]]:
    """Return the cells of the words, or as many drawn ones."""
    names = [word for word in words if word not in SETTINGS]
    layouts = [word for word in words if word in SETTINGS] or LAYOUTS
    cells = [
        (name, layout)
        for name in table()
        if not names or any(word in name for word in names)
        for layout in layouts
    ]
    return random.Random(seed).sample(cells, count) if 0 < count < len(cells) else cells


def measure(
    rooms: Rooms, folder: Path, name: str, layout: str, prove: str, deadline_s: float
) -> dict[str, Any]:
    """Return the outcome of a cell, the lines to the user, and those of the proof."""
    cache = tempfile.mkdtemp(dir=folder)
    if table()[name].ends:
        os.environ.update(SHOAL_PROVE=prove, SHOAL_CACHE=cache)
        verdict, shown = measure_program(name, layout, deadline_s)
        if verdict == "named" and all(EQUAL in line for line in shown.split(" | ")):
            verdict = "WRONG"  # the line of the proof names nothing
        return {"outcome": verdict, "shown": shown, "lines": [], "proof": []}
    world = rooms(SETTINGS[layout].ranks)
    try:
        answers = world.call(
            "proven_habit_case:attempt", deadline_s=deadline_s, name=name, layout=layout,
            folder=cache, prove=prove,
        )  # fmt: skip
    except Failed as failure:
        world.kill()
        silent = "silent" in str(failure)
        verdict = "hung" if silent else "raised"
        return {"outcome": verdict, "shown": str(failure)[-600:], "lines": [], "proof": []}
    if any(one["error"] or one["raised"] for one in answers):
        world.kill()  # ranks may have made different numbers of collectives
    verdict, shown = outcome(answers)
    lines = {
        key: sorted({line for one in answers for line in one[key]}) for key in ("lines", "proof")
    }
    return {"outcome": verdict, "shown": shown, **lines}


def compare(off: dict[str, Any], auto: dict[str, Any]) -> dict[str, Any]:
    """Return a row of two measured sides."""
    number = re.compile("" if off["outcome"] == "right" else r"\d[\d.e-]*")
    lines = [{number.sub("", line) for line in side["lines"]} for side in (off, auto)]
    same = off["outcome"] == auto["outcome"] and lines[0] == lines[1]
    by_proof = auto["outcome"] == "named" and "proof: " in auto["shown"]
    verdict = "as before" if same else "changed"
    if not same and by_proof and off["outcome"] != "right":
        verdict = "refused"
    row = {"verdict": verdict, "outcome": auto["outcome"], "proof": auto["proof"]}
    if same:
        return {**row, "shown": (auto["proof"] or [auto["shown"] or "no line of the proof"])[0]}
    fields = ("outcome", "shown", "lines")
    before, now = ([one[field] for field in fields] for one in (off, auto))
    return {**row, "shown": f"{before} → {now}"}


if __name__ == "__main__":
    sys.exit(main())
