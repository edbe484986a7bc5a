"""The table of every architecture of the transformers library × fsdp, tp, pp, tp × pp.

`make proof` runs it. Tiny models of every class that `tiny_architectures.py` finds are proven as
`shoal prove` would, and beside each row stands what the plan for tp that comes with the model does.
What is done stays in proof/results/architectures.json, so it can be stopped and started again, also by
several at once; --fresh begins anew.

    python tests/proof/architectures.py                     everything, an hour on 2 idle cores
    python tests/proof/architectures.py --models llama,dbrx folders of transformers' models
    python tests/proof/architectures.py --layouts tp2,plan  some columns
    python tests/proof/architectures.py --fresh-tenth 7     a tenth of the models anew, drawn by 7
    python tests/proof/architectures.py --page              the page of the rows that are there
"""

from __future__ import annotations

import fcntl
import json
import random
import re
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / name) for name in ("worlds", "proof", "parallel")]
TARGET = ROOT / "proof" / "results" / "architectures.json"
PAGE = ROOT / "docs" / "proof" / "architectures.md"
LAYOUTS = {
    "fsdp2": {"dp_shard": 2},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "tp2 pp2": {"tp": 2, "pp": 2},
}
PLAN = "plan"
"""The column of the plan that comes with a model."""

DEADLINE_S = 120.0

from families import last_line, outcome, row_of  # noqa: E402
from kept_rows import Row, counted, parser_of, rows_before, versions  # noqa: E402
from source import source_hash  # noqa: E402
from tiny_architectures import Architecture, architectures  # noqa: E402

from worlds import Failed, Members  # noqa: E402


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--models", default="", help="folders, comma-separated; default: all")
    parser.add_argument("--layouts", default="", help=f"comma-separated, {PLAN} among them")
    parser.add_argument("--again", default="", help="verdicts whose rows are made anew")
    parser.add_argument(
        "--fresh-tenth",
        type=int,
        metavar="SEED",
        help="a drawn tenth of the models anew; keeps the rest",
    )
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no row after them")
    parser.add_argument("--page", action="store_true", help="the page only, no new row")
    options = parser.parse_args()
    if options.page:
        publish(recorded())
        return 0
    source = source_hash()
    seed: int | None = options.fresh_tenth
    options.keep = options.keep or seed is not None
    rows = rows_before(options, TARGET, source)
    layouts = options.layouts.split(",") if options.layouts else [*LAYOUTS, PLAN]
    folders = options.models.split(",") if options.models else None
    found = [one for one in architectures() if folders is None or one.folder in folders]
    random.Random(18).shuffle(found)  # stopped early, it is a fair sample
    asked = {f"{one.key} | {layout}" for one in found for layout in layouts}
    again = {key for key in asked & rows.keys() if rows[key]["verdict"] in options.again.split(",")}
    rows = {key: row for key, row in rows.items() if key not in again}
    if seed is not None:
        drawn = a_tenth([one.key for one in found], seed)
        found = [one for one in found if one.key in drawn]
        # What this seed has made already of this source stays: it goes on where it was stopped.
        rows = {
            key: row
            for key, row in rows.items()
            if key.partition(" | ")[0] not in drawn
            or (row.get("seed"), row["source"]) == (seed, source)
        }
    if options.again or not TARGET.exists() or rows != recorded():
        publish(rows)
    wanted = [
        (one, layout)
        for size in (2, 4)
        for one in found
        for layout in layouts
        if processes(layout) == size
        and f"{one.key} | {layout}" not in rows
        and (layout != PLAN or one.plan)
    ]
    with tempfile.TemporaryDirectory() as logs:
        fill(wanted, Path(logs), source, time.monotonic() + options.seconds, seed)
    rows = recorded()
    wrong = [key for key, row in rows.items() if row["verdict"] in ("different", "crash")]
    print(f"{len(rows)} rows, different or crashed: {wrong}")
    return 1 if wrong else 0


def processes(layout: str) -> int:
    """How many a layout needs.

    >>> processes("tp2 pp2"), processes("plan")
    (4, 2)
    """
    return 4 if layout == "tp2 pp2" else 2


def a_tenth(models: list[str], seed: int) -> set[str]:
    """A tenth of the models, whatever order they come in.

    >>> a_tenth([f"m{n}" for n in range(20)], 1) == a_tenth([f"m{n}" for n in range(19, -1, -1)], 1)
    True
    >>> len(a_tenth([f"m{n}" for n in range(21)], 1))
    3
    """
    return set(random.Random(seed).sample(sorted(models), -(-len(models) // 10)))


def fill(
    wanted: list[tuple[Architecture, str]],
    logs: Path,
    source: str,
    until_s: float,
    seed: int | None = None,
) -> None:
    """Make the rows that are missing, one world of processes after the other."""
    world: Members | None = None
    for one, layout in wanted:
        key = f"{one.key} | {layout}"
        if time.monotonic() > until_s:
            break
        if key in recorded():  # another sitting made it meanwhile
            continue
        if world is not None and world.size != processes(layout):
            world.close()
            world = None
        world = world or Members(processes(layout), logs)
        row, broken = one_row(world, one, layout)
        if broken:
            world.kill()
            world = None
        row |= {"source": source, "made": time.strftime("%Y-%m-%d %H:%M"), "plan": one.plan}
        if seed is not None:
            row["seed"] = seed
        print(f"{key}: {row['verdict']} {row['reason'][:200]} ({row['seconds']} s)", flush=True)
        keep(key, row)
    if world is not None:
        world.close()


def one_row(world: Members, one: Architecture, layout: str) -> tuple[Row, bool]:
    """(the row, whether the world is of no use any more)."""
    began_s = time.monotonic()
    asked: dict[str, Any] = {"folder": one.folder, "name": one.name}
    broken = False
    try:
        if layout == PLAN:
            told = world.call("architecture_case:theirs", deadline_s=DEADLINE_S, **asked)
            errors = [answer.pop("error") for answer in told]
            # Where one rank alone fails, what the others sent is still on its way.
            broken = any(errors) and not all(errors)
            row = {"verdict": "failed" if any(errors) else "ran", "reason": max(errors), **told[0]}
        else:
            asked["layout"] = LAYOUTS[layout]
            row = row_of(world.call("architecture_case:prove", deadline_s=DEADLINE_S, **asked)[0])
    except Failed as failure:
        text = str(failure)
        # A rank that failed alone has left the others in a collective: nothing more from this world.
        broken = True
        row = {"verdict": "crash", "reason": told_by(text)}
    row["seconds"] = round(time.monotonic() - began_s, 1)
    return row, broken


def told_by(text: str) -> str:
    """What the first rank that failed said, and whether others waited for it in vain.

    >>> told_by("ranks [1] silent for 9.0 s ['Traceback …\\\\n  File …\\\\nValueError: no\\\\n']")
    'ranks [1] silent for 9.0 s; ValueError: no'
    """
    silent, found, error = last_line(text).partition(" ['Traceback")
    parts = [part for part in error.removesuffix("']").split("\\n") if part.strip()]
    return f"{silent}; {parts[-1]}"[:500] if found else silent[:500]


def keep(key: str, row: Row) -> None:
    """Put one row into the record, whoever else does."""
    lock_file = ROOT / "build" / "architectures.lock"
    lock_file.parent.mkdir(exist_ok=True)
    with lock_file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        publish({**recorded(), key: row})


def recorded() -> dict[str, Row]:
    """All rows that are there."""
    rows: dict[str, Row] = json.loads(TARGET.read_text())["rows"]
    return rows


def publish(rows: dict[str, Row]) -> None:
    """The record, and the page that people read."""
    result = {"versions": versions(), "rows": dict(sorted(rows.items()))}
    fresh = TARGET.with_suffix(".new")
    fresh.write_text(json.dumps(result, indent=1) + "\n")
    fresh.replace(TARGET)  # whole for whoever reads it
    PAGE.write_text(page(result["rows"]))


def share(rows: list[Row], *verdicts: str) -> str:
    """How many of the rows have such a verdict, as a number and as a share.

    >>> share([{"verdict": "equal"}, {"verdict": "crash"}], "equal")
    '1 (50.0%)'
    """
    count = sum(row["verdict"] in verdicts for row in rows)
    return f"{count} ({count / max(1, len(rows)):.1%})"


VERDICTS = ("equal", "refused", "not proven", "different", "crash")


def page(rows: dict[str, Row]) -> str:
    """Counts first, then the table, then what stays whole and why, then refusals."""
    ours = {key: row for key, row in rows.items() if not key.endswith(f" | {PLAN}")}
    made = {key: row for key, row in ours.items() if row["verdict"] != "not made"}
    models = list(dict.fromkeys(key.partition(" | ")[0] for key in made))
    missing = sorted({k.partition(" | ")[0] for k in ours} - set(models))
    lines = [
        "# Every architecture",
        "",
        f"Made by `tests/proof/architectures.py`: tiny models of {len(models)} classes, 3 steps of "
        "SGD with momentum in float64 beside one process. `plan` is the plan for tp that comes with "
        "a model of transformers. Sources, by rows made with them: "
        f"{counted(row['source'] for row in rows.values())}.",
        "",
        "| | rows | " + " | ".join(VERDICTS) + " |",
        "|---|---|" + "---|" * len(VERDICTS),
    ]
    lines[4:4] = fresh_tenths(rows)
    with_plan = {key: row for key, row in made.items() if row["plan"]}
    for name, some in (
        ("all", list(made.values())),
        ("models with a plan for tp", list(with_plan.values())),
        ("of these fsdp2, tp2, pp2", [r for k, r in with_plan.items() if "tp2 pp2" not in k]),
        *(
            (layout, [r for k, r in made.items() if k.endswith(f"| {layout}")])
            for layout in LAYOUTS
        ),
    ):
        cells = [share(some, verdict) for verdict in VERDICTS]
        lines.append(f"| {name} | {len(some)} | " + " | ".join(cells) + " |")
    lines += ["", *beside_plans(rows)]
    lines += ["", "## What stays whole under tp2, by reason", ""]
    whole: dict[str, list[str]] = {}
    for key, row in made.items():
        if key.endswith("| tp2"):
            for text in row.get("notices", ()):
                told = re.search(r"(?:stays whole|by its parts only): (?:whole: )?([^\[;]*)", text)
                if told:
                    why = told[1].strip()
                    whole.setdefault(why, []).append(key.partition(" ")[0])
    for why, names in sorted(whole.items(), key=lambda item: -len(set(item[1]))):
        known = list(dict.fromkeys(names))
        more = f" and {len(known) - 8} more" if len(known) > 8 else ""
        lines.append(f"- {why}: {len(known)} models ({', '.join(known[:8])}{more})")
    for verdict in VERDICTS[1:]:
        lines += ["", f"## {verdict.capitalize()}", ""]
        lines += [f"- {k}: {r['reason']}" for k, r in made.items() if r["verdict"] == verdict]
    lines += ["", "## Not made", ""]
    first = {key.partition(" | ")[0]: row["reason"] for key, row in ours.items()}
    lines += [f"- {name}: {first[name]}" for name in missing]
    lines += ["", "## Every row", "", *table(rows, models)]
    return "\n".join(lines) + "\n"


def fresh_tenths(rows: dict[str, Row]) -> list[str]:
    """One line for every seed: the source, the verdicts, which models.

    >>> fresh_tenths({"a A | tp2": {"verdict": "equal", "source": "5f", "seed": 7}})
    ['Drawn by seed 7 and made anew with source 5f: 1 equal (a A).', '']
    """
    drawn: dict[tuple[int, str], dict[str, Row]] = {}
    for key, row in rows.items():
        if "seed" in row:
            drawn.setdefault((row["seed"], row["source"]), {})[key] = row
    lines = []
    for (seed, source), some in sorted(drawn.items()):
        models = ", ".join(dict.fromkeys(key.partition(" | ")[0] for key in some))
        verdicts = counted(row["verdict"] for row in some.values())
        lines += [
            f"Drawn by seed {seed} and made anew with source {source}: {verdicts} ({models}).",
            "",
        ]
    return lines


def beside_plans(rows: dict[str, Row]) -> list[str]:
    """How ours and theirs compare, where both ran."""
    both = []
    for key, theirs in rows.items():
        ours = rows.get(key.replace(f"| {PLAN}", "| tp2"), {})
        if key.endswith(f"| {PLAN}") and theirs["verdict"] == "ran" and ours.get("share_split"):
            both.append((key.partition(" | ")[0], ours["share_split"], theirs["share"], theirs))
    failed = Counter(r["verdict"] for k, r in rows.items() if k.endswith(f"| {PLAN}"))
    wrong = [name for name, _, _, row in both if max(row["loss"], row["gradient"]) > 1e-6]
    less = sorted((name, a, b) for name, a, b, _ in both if a < b - 0.005)
    lines = [
        f"Plans of transformers: {failed['ran']} ran, {failed['failed'] + failed['crash']} did not. Of {len(both)} "
        f"models that both split, the plan is farther than 1e-6 from one process in {len(wrong)}, "
        f"and it splits a larger share of the parameters than we do in {len(less)}:",
        "",
    ]
    for name, a, b in less:
        why = "; ".join(why_whole(rows[f"{name} | tp2"]))
        lines.append(f"- {name}: {a:.0%} of ours, {b:.0%} of the plan's: {why}")
    return lines


def why_whole(row: Row) -> list[str]:
    """Why parts of a model stay whole, each reason once, with the parameter or layer it was said of."""
    found: dict[str, str] = {}
    for text in row.get("notices", ()):
        told = re.search(
            r": (\S+)(?: \(and.*?\))? (?:stays whole|is split by its parts only): (.*)", text
        )
        if told:
            why = re.sub(r" ?\[[^\]]*\] on every rank|; its gradient.*|^whole: ", "", told[2])
            found.setdefault(why, told[1])
    if not found:
        first = row.get("whole", [""])[0]
        found = {"outside of the layers that repeat": first} if first else {}
    return [f"{name}: {why}" for why, name in found.items()]


def table(rows: dict[str, Row], models: list[str]) -> list[str]:
    """One line per model."""
    lines = ["| model | fsdp2 | tp2 | split | pp2 | tp2 pp2 | plan's split | plan's error |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for model in models:
        cells = [_cell(rows.get(f"{model} | {layout}")) for layout in LAYOUTS]
        split = rows.get(f"{model} | tp2", {}).get("share_split")
        cells.insert(2, "" if split is None else f"{split:.0%}")
        theirs = rows.get(f"{model} | {PLAN}", {})
        ran = theirs.get("verdict") == "ran"
        cells.append(f"{theirs['share']:.0%}" if ran else theirs.get("verdict", ""))
        cells.append(f"{max(theirs['loss'], theirs['gradient']):.0e}" if ran else "")
        lines.append(f"| {model} | " + " | ".join(cells) + " |")
    return lines


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    if row["verdict"] != "equal":
        return row["verdict"]
    casts = " casts" if outcome(row) != "equal" else ""
    return f"{row['largest']['gradient']:.0e}{casts}"


if __name__ == "__main__":
    sys.exit(main())
