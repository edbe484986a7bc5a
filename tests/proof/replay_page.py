"""Page docs/proof/replays.md, from the results of replays.py, statistics_rows.py and traces.py.

    python tests/proof/replay_page.py

It measures nothing itself.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from proof_pages import PAGES, date_of, read

WHAT = {
    "same": "drawn steps on the run's own layout: every bit",
    "other": "drawn steps on another layout: to rounding",
    "islands": "steps of an island: every bit",
    "plant": "planted differences that repeat: first step, first tensor, and the key",
    "transient": "faults of a moment, and other environments: the step, and the tensor where digests exist",
}
GOOD = ("equal", "named")


def table_of_replays(rows: dict[str, Any]) -> list[str]:
    """Return the table of all kinds of rows."""
    lines = ["| rows | right |", "|---|---|"]
    for kind, what in WHAT.items():
        held = [row for key, row in rows.items() if key.split()[0] == kind]
        right = sum(row["outcome"] in GOOD for row in held)
        lines.append(f"| {what} | {right} of {len(held)} |")
    return lines


def table_of_plants(rows: dict[str, Any]) -> list[str]:
    """Return the table of plants: what was named of each."""
    lines = ["| planted | step | first tensor | what differs | named |", "|---|---|---|---|---|"]
    for key, row in rows.items():
        kind, _, name = key.partition(" ")
        if kind not in ("plant", "transient"):
            continue
        tensor = row.get("tensor") or {}
        step = tensor.get("step") or row.get("step") or (row.get("number") or {}).get("step", "–")
        where = f"{tensor['kind']}, `{tensor['name']}`" if tensor else "–"
        keys = row.get("keys") or ([row["key"]] if row.get("key") else [])
        told = f"`{keys[0]}`" if keys else "–"
        right = "yes" if row["outcome"] in GOOD else "no"
        lines.append(f"| {name} | {step} | {where} | {told} | {right} |")
    return lines


def statistics_lines(found: dict[str, Any]) -> list[str]:
    """Return what statistics cost, and how exact they are."""
    cost = found["cost"]
    most = max(
        value
        for row in found["rows"]
        for value in row.values()
        if isinstance(value, float) and value != row.get("bound")
    )
    return [
        f"In {found['equal']} layouts, schedules and policies every number of `statistics.jsonl` equals that of one process, in float64. The",
        f"largest difference is {most:.1e} of the largest number of its kind. The bound is 1e-12 under SGD and 1e-10 under AdamW.",
        "",
        f"A step that records statistics takes {cost['ratio']:.2f} × the processor seconds of another ({cost['steps']} pairs, one process). The",
        f"other steps of such a run take {cost['others']:.3f} × those of a run without statistics, and make {cost['calls']['other']:,} Python calls,",
        f"where a run without statistics makes {cost['calls']['without']:,}.",
    ]


def trace_lines(found: dict[str, Any]) -> list[str]:
    """Return how sound merged traces are."""
    names = ", ".join(row["layout"] for row in found["rows"])
    return [
        f"Traces of four ranks were merged under {len(found['rows'])} layouts: {names}. Our own checker of nesting, of messages (sent",
        f"before received) and of the schema found no fault in {found['sound']}. Compute and waits of each rank differ from the run's own",
        f"records by at most {100 * found['most']:.1f} % (gate: {100 * found['gate']:.0f} %). Clocks are compared by the ends of collectives, so a",
        "busy machine makes their error larger: messages may then seem to arrive before they are sent.",
    ]


def page() -> str:
    """Return the page."""
    replays, numbers, traces = (
        read(f"{name}.json") for name in ("replays", "statistics", "traces")
    )
    rows = replays["rows"]
    sources = Counter(row["source"] for row in rows.values())
    source = f"source `{next(iter(sources))}`" if len(sources) == 1 else f"{len(sources)} sources"
    days = {name: date_of(f"{name}.json") for name in ("replays", "statistics", "traces")}
    return "\n".join(
        [
            "# Replays, statistics and traces",
            "",
            "This page shows how often a [replay](../reference/replay.md) repeats a step, and what it names where two runs part.",
            "",
            "    make proof PART='replays statistics traces'",
            "",
            "## Replays",
            "",
            "Five small runs (one process, ddp, fsdp, tp, pp; dropout on) train twelve steps with a checkpoint after every fourth. Four steps",
            "of each are drawn and repeated on the run's layout, and four on another one. Then differences are planted.",
            "",
            *table_of_replays(rows),
            "",
            *table_of_plants(rows),
            "",
            f"Measured on {days['replays']} on CPUs with torch {replays['versions']['torch']}, {source}: [replays.json](../../proof/results/replays.json).",
            "",
            "## Statistics",
            "",
            *statistics_lines(numbers),
            "",
            f"Measured on {days['statistics']}: [statistics.json](../../proof/results/statistics.json).",
            "",
            "## Traces",
            "",
            *trace_lines(traces),
            "",
            f"Measured on {days['traces']}: [traces.json](../../proof/results/traces.json).",
            "",
        ]
    )


if __name__ == "__main__":
    (PAGES / "replays.md").write_text(page(), encoding="utf-8")
