"""The table of unlike transformers families × tp, pp and fsdp on two processes: is any accused?

`make proof` runs it. Every row is what `shoal prove` would say of a tiny model of the family, as its
authors wrote it: equal, not proven, or refused; "different" must not come up. What is done stays in
proof/results/families.json, so it can be stopped and started again; --fresh begins anew.

    python tests/proof/families.py                      everything, about 20 minutes on 2 cores
    python tests/proof/families.py --families olmo2,opt some rows
    python tests/proof/families.py --seconds 200        as many rows as fit
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / name) for name in ("worlds", "proof", "parallel")]
TARGET = ROOT / "proof" / "results" / "families.json"
PAGE = ROOT / "docs" / "proof" / "families.md"
LAYOUTS = {"tp2": {"tp": 2}, "pp2": {"pp": 2}, "fsdp2": {"dp_shard": 2}}
NAMED = 3
"""Parameters that stay whole and are named in the page; the record has all."""

from hf_families import FAMILIES  # noqa: E402
from kept_rows import Row, counted, parser_of, rows_before, versions  # noqa: E402
from source import source_hash  # noqa: E402

from worlds import Failed, Members  # noqa: E402


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--families", default="", help="comma-separated; default: all")
    parser.add_argument("--again", default="", help="verdicts whose rows are made anew")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no row after them")
    options = parser.parse_args()
    source = source_hash()
    rows = rows_before(options, TARGET, source)
    wanted = options.families.split(",") if options.families else list(FAMILIES)
    again = {f"{family} | {layout}" for family in wanted for layout in LAYOUTS}
    again = {k for k in again & rows.keys() if rows[k]["verdict"] in options.again.split(",")}
    rows = {key: row for key, row in rows.items() if key not in again}
    with tempfile.TemporaryDirectory() as logs:
        fill(rows, wanted, Path(logs), source, time.monotonic() + options.seconds)
    wrong = [k for k, row in rows.items() if row["verdict"] in ("different", "failed")]
    print(f"{len(rows)} rows: {counts(rows)}; accused or failed: {wrong}")
    return 1 if wrong else 0


def fill(rows: dict[str, Row], wanted: list[str], logs: Path, source: str, until_s: float) -> None:
    """Make the rows that are missing, in one world."""
    world: Members | None = None
    for family in wanted:
        for layout, degrees in LAYOUTS.items():
            key = f"{family} | {layout}"
            if key in rows or time.monotonic() > until_s:
                continue
            world = world or Members(2, logs)
            began_s = time.monotonic()
            try:
                report = world.call("family_case:prove", family=family, layout=degrees)[0]
            except Failed as failure:
                rows[key] = {"verdict": "failed", "reason": last_line(str(failure)), "said": []}
                for process in world.processes:
                    process.kill()
                world = None
            else:
                rows[key] = row_of(report)
            rows[key] |= {"seconds": round(time.monotonic() - began_s, 1), "source": source}
            print(f"{key}: {told(rows[key])}", flush=True)
            write(rows)
    if world is not None:
        world.close()


def last_line(text: str) -> str:
    """What an exception said, without the places of this machine's files.

    >>> last_line("Traceback …\\n  File …\\nRuntimeError: no\\n")
    'RuntimeError: no'
    """
    return text.strip().splitlines()[-1] if text.strip() else ""


def row_of(report: dict[str, Any]) -> Row:
    """What is kept of a report."""
    trajectory = report["trajectories"][0] if report["trajectories"] else {}
    cause = report["cause"]["text"] if report["cause"] else ""
    return {
        "verdict": report["verdict"],
        "reason": report["reason"] or cause,
        "said": report["said"],
        "largest": trajectory.get("largest"),
        "as_is": trajectory.get("as_is"),
        "notices": report["notices"],
        "share_split": report["shares"].get("share"),
        "whole": report["shares"].get("whole", []),
    }


def outcome(row: Row) -> str:
    """Equal, equal within 1e-6 (casts as they are), not proven, refused, different or failed."""
    as_is = row["verdict"] == "equal" and row.get("as_is")
    return "equal within 1e-6" if as_is else row["verdict"]


def told(row: Row) -> str:
    """A row in one line."""
    apart = (row.get("largest") or {}).get("gradient")
    far = "" if apart is None else f" {apart:.0e}"
    share = f", {row['share_split']:.0%} split" if row.get("share_split") is not None else ""
    said = "; ".join(row["said"])
    return f"{outcome(row)}{far}{share} {row['reason'][:300]} {said} ({row['seconds']} s)"


def counts(rows: dict[str, Row]) -> str:
    """How often every outcome came up."""
    return counted(map(outcome, rows.values()))


def write(rows: dict[str, Row]) -> None:
    """The record, and the page that people read."""
    result = {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "versions": versions(),
        "definition": "what `shoal prove` says of tiny models (4 layers, 8 tokens; 4 heads, or 6 "
        "where that is marked), 3 steps of SGD with momentum in float64, the second short",
        "counts": counts(rows),
        "rows": rows,
    }
    TARGET.write_text(json.dumps(result, indent=1) + "\n")
    PAGE.write_text(page(result))


def page(result: dict[str, Any]) -> str:
    """The table as Markdown, and beneath it every line that needs words."""
    rows: dict[str, Row] = result["rows"]
    made_with = result["versions"]
    families = list(dict.fromkeys(key.partition(" | ")[0] for key in rows))
    lines = [
        "# Families of the transformers library",
        "",
        f"Made by `tests/proof/families.py`, {result['date']}, torch {made_with['torch']}, "
        f"transformers {made_with['transformers']}: {result['definition']}. {len(families)} "
        f"families, {len(rows)} rows: **{result['counts']}**. Sources, by rows made with them: "
        f"{counted(row['source'] for row in rows.values())}.",
        "",
        "A cell is the largest difference of a gradient, as a share of the whole gradient's norm. "
        "`casts` marks models that cast to float32 on their way: they are equal with their casts "
        "lifted, and within 1e-6 as they are (the second number). The column behind `tp2` is the "
        "share of the parameters that is split; all else is whole on every rank.",
        "",
        "| family | heads | " + " | ".join(_heads()) + " |",
        "|---|---|" + "---|" * len(_heads()),
    ]
    for family in families:
        cells = []
        for layout in LAYOUTS:
            row = rows.get(f"{family} | {layout}")
            cells.append(_cell(row))
            if layout == "tp2":
                share = row.get("share_split") if row else None
                cells.append("" if share is None else f"{share:.0%}")
        lines.append(f"| {family} | {6 if _six(family) else 4} | " + " | ".join(cells) + " |")
    lines += ["", "## Refused, or not proven, and why", ""]
    for key, row in rows.items():
        if row["verdict"] != "equal":
            lines.append(f"- {key}: {row['verdict']}: {row['reason']}")
    lines += ["", "## What was done for the proof", ""]
    by_said: dict[str, list[str]] = {}
    for key, row in rows.items():
        for text in row["said"]:
            by_said.setdefault(text, []).append(key)
    lines += [f"- {', '.join(keys)}: {text}" for text, keys in by_said.items()]
    lines += ["", "## What stays whole under tp2", ""]
    for key, row in rows.items():
        if row.get("whole"):
            names = row["whole"]
            more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
            lines.append(f"- {key}: {', '.join(names[:NAMED])}{more}")
            lines += [f"  - {text}" for text in row["notices"] if "stays whole" in text][:NAMED]
    return "\n".join(lines) + "\n"


def _heads() -> list[str]:
    found = list(LAYOUTS)
    found.insert(1, "split")
    return found


def _six(family: str) -> bool:
    return family in FAMILIES and FAMILIES[family].six


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    if row["verdict"] != "equal":
        return row["verdict"]
    far = f"{row['largest']['gradient']:.0e}"
    return f"{far} casts {row['as_is']['gradient']:.0e}" if row["as_is"] else far


if __name__ == "__main__":
    sys.exit(main())
