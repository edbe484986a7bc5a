"""The table of any module × any layout: equal to one process, with every fallback named.

`make proof` runs it: ours, users' and transformers' models under tp, pp and their compositions. What
is done already stays in proof/results/any-module.json, so it can be stopped and started again; --fresh
begins anew. A row counts for the source that it was made with.

transformers' models cast to float32 inside; they have two rows: with the casts lifted, equal within
1e-12 as all others, and as they are, within 1e-6.

    python tests/proof/any_module.py                     everything, about an hour on 2 cores
    python tests/proof/any_module.py --layouts tp2,pp2   some columns
"""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "worlds"), str(ROOT / "tests" / "proof")]
TARGET = ROOT / "proof" / "results" / "any-module.json"
PAGE = ROOT / "docs" / "proof" / "any-module.md"
DEADLINE_S = 300.0
AS_IS = ", casts as they are"
SHARED = (2, 4)
"""Degrees of tp of which the share of parameters that is split is told."""
MOST_AS_IS = 1e-6
"""Largest difference of losses and gradients where a model casts to float32 on its way."""

from kept_rows import Row, counted, parser_of, rows_before, versions  # noqa: E402
from source import source_hash  # noqa: E402

import any_case  # noqa: E402
from worlds import Failed, Members  # noqa: E402


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--layouts", default="", help="comma-separated; default: all")
    parser.add_argument("--models", default="", help="separated by ;, default: all")
    parser.add_argument("--page", action="store_true", help="shares and page only, no new row")
    options = parser.parse_args()
    source = source_hash()
    rows = rows_before(options, TARGET, source)
    if options.page:
        kept = json.loads(TARGET.read_text())
        publish({**kept, "counts": counts(kept["rows"]), "shares": split_shares()})
        return 0
    wanted = chosen(options.layouts, options.models)
    with tempfile.TemporaryDirectory() as logs:
        fill(rows, wanted, Path(logs), source)
    write(rows, source, split_shares())
    wrong = [
        key
        for key, row in rows.items()
        if row["verdict"] not in ("equal", "refused", "within 1e-6")
        or any("computes something else" in line for line in row["whole"])
    ]
    print(f"{len(rows)} rows, {len(wrong)} not equal: {wrong}")
    return 1 if wrong else 0


def chosen(layouts: str, models: str) -> list[tuple[str, str]]:
    """Rows in an order that starts as few worlds as possible."""
    some_layouts = layouts.split(",") if layouts else list(any_case.LAYOUTS)
    some_models = models.split(";") if models else every_model()
    some_layouts.sort(key=any_case.processes)
    return [(model, layout) for layout in some_layouts for model in some_models]


def every_model() -> list[str]:
    """All rows: transformers' models a second time as they are."""
    known = any_case.models()
    return [*known, *(model + AS_IS for model in known if model.startswith("hf "))]


def fill(rows: dict[str, Row], wanted: list[tuple[str, str]], logs: Path, source: str) -> None:
    """Make the rows that are missing, one world of processes at a time."""
    world: Members | None = None
    try:
        for model, layout in wanted:
            key = f"{model} | {layout}"
            if key in rows:
                continue
            size = any_case.processes(layout)
            if world is None or world.size != size:
                if world is not None:
                    world.close()
                world = Members(size, logs)
            rows[key], broken = one_row(world, model, layout)
            if broken:
                for process in world.processes:
                    process.kill()
                world = None
            rows[key]["source"] = source
            print(f"{key}: {rows[key]['verdict']} {rows[key]['reason'][:150]}", flush=True)
            write(rows, source, {})
    finally:
        if world is not None:
            world.close()


def one_row(world: Members, model: str, layout: str) -> tuple[Row, bool]:
    """(the row, whether the world is of no use any more)."""
    began_s = time.monotonic()
    try:
        report = world.call(
            "any_case:prove",
            model=model.removesuffix(AS_IS),
            layout=layout,
            lifted=not model.endswith(AS_IS),
            deadline_s=DEADLINE_S,
        )[0]
    except Failed as failure:
        return {"verdict": "failed", "reason": str(failure)[-600:], "whole": []}, True
    trajectories = report["trajectories"]
    if trajectories and model.endswith(AS_IS):
        # The battery lifted the casts itself where that was needed; here they are asked about.
        trajectories[0]["largest"] = trajectories[0].get("as_is") or trajectories[0]["largest"]
        most = max(trajectories[0]["largest"][what] for what in ("loss", "gradient"))
        report["verdict"] = "within 1e-6" if most <= MOST_AS_IS else "differs"
        report["reason"], report["cause"] = f"largest difference {most:.1e}", None
    row = {
        "verdict": report["verdict"],
        "reason": report["reason"] or (report["cause"] and report["cause"]["text"]) or "",
        "largest": trajectories[0]["largest"] if trajectories else {},
        "whole": report["notices"],
        "seconds": round(time.monotonic() - began_s, 1),
    }
    return row, False


def split_shares() -> dict[str, list[float]]:
    """Share of every model's parameters that tp2 and tp4 split: planned only, nothing is run."""
    names = [name for name in every_model() if not name.endswith(AS_IS)]
    return {name: [any_case.split_share(name, degree) for degree in SHARED] for name in names}


def counts(rows: dict[str, Row]) -> str:
    """How often every outcome came up."""
    return counted(row["verdict"] for row in rows.values())


def write(rows: dict[str, Row], source: str, shares: dict[str, list[float]]) -> None:
    """The record, and the page that people read."""
    result = {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "source": source,
        "machine": {"cores": os.cpu_count(), "platform": platform.platform()},
        "versions": versions(),
        "definition": "float64, SGD with momentum, 5 steps, the last one short: losses, norms, "
        "gradients and weights within 1e-12 of one process, transformers' casts to float32 lifted; "
        "as they are, losses and gradients within 1e-6",
        "counts": counts(rows),
        "shares": shares,
        "rows": rows,
    }
    publish(result)


def publish(result: dict[str, Any]) -> None:
    """Both files in docs/proof."""
    TARGET.write_text(json.dumps(result, indent=1) + "\n")
    PAGE.write_text(page(result))


def page(result: dict[str, Any]) -> str:
    """The table as Markdown: the largest difference of any gradient, and what stays whole."""
    layouts = list(any_case.LAYOUTS)
    lines = [
        "# Any module, any layout",
        "",
        f"Made by `tests/proof/any_module.py`, {result['date']}, torch "
        f"{result['versions']['torch']}. {result['definition']}. A cell is the largest difference "
        "of a gradient, as a share of the whole gradient's norm; `·` marks cells in which something "
        "that could be split stays whole (listed below).",
        "",
        f"{len(result['rows'])} rows: **{result['counts']}**. Sources, by rows made with them: "
        f"{counted(row['source'] for row in result['rows'].values())}. Sequences are 12 tokens (ours) or 6, "
        "heads 4, key/value heads 2 where a model has fewer; rows of 6 heads (3 for keys and "
        "values in Llama) read 12 or 8 tokens, which 4 ranks can share, and have heads that they "
        "cannot. The second column is the share of the "
        "parameters that tp2 and tp4 split (empty where `--page` was not run since the last new "
        "row); what is left is whole on every rank.",
        "",
        "| model | split by tp2 · tp4 | " + " | ".join(layouts) + " |",
        "|---|---|" + "---|" * len(layouts),
    ]
    kept: dict[str, set[str]] = {}
    for model in every_model():
        cells = []
        for layout in layouts:
            row = result["rows"].get(f"{model} | {layout}")
            cells.append(cell(row))
            for text in row["whole"] if row else []:
                kept.setdefault(model, set()).add(text)
        shared = " · ".join(f"{n:.0%}" for n in result["shares"].get(model, ()))
        lines.append(f"| {model} | {shared} | " + " | ".join(cells) + " |")
    lines += ["", "## What stays whole, or is refused, and why", ""]
    for model, texts in kept.items():
        lines += [f"- **{model}**", *(f"  - {text}" for text in sorted(texts))]
    told = ("equal", "within 1e-6")
    refused = [(k, r["reason"]) for k, r in result["rows"].items() if r["verdict"] not in told]
    lines += [f"- {key}: {reason}" for key, reason in refused]
    return "\n".join(lines) + "\n"


def cell(row: Row | None) -> str:
    if row is None:
        return ""
    if row["verdict"] not in ("equal", "within 1e-6"):
        return row["verdict"]
    return f"{row['largest'].get('gradient', 0.0):.0e}{' ·' if row['whole'] else ''}"


if __name__ == "__main__":
    sys.exit(main())
