"""A plan as text: the ranked layouts, memory and time of the best, and its reasons.

All of it comes from the plan's JSON document (forecast/search/plan_document.py). One screen of at
most 100 columns: a table, two bars with their parts, and sentences.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from rich.console import Console
from rich.text import Text

from shoal.base.text.units import bytes_text, count_text, seconds_text

Record = Mapping[str, Any]
Line = tuple[str, str]
"""(text, style)"""

WIDTH = 100
BAR = 12
LEAST_SHARE = 0.005
"""Parts below this share of a bar appear only in the sum."""

STYLES = {"fits": "", "tight": "yellow", "no": "red"}


def print_plan(record: Record, stream: TextIO) -> None:
    """Write a plan to `stream`: ranked layouts, memory and time of the best, and reasons.

    In colours on a terminal, 80 to 100 columns wide.

    Args:
        record: the plan's JSON document (`planner.plan_document.plan_record`).
    """
    console = Console(file=stream, highlight=False, markup=False, emoji=False)
    for text, style in plan_lines(record, min(WIDTH, max(80, console.width))):
        console.print(Text(text, style=style), soft_wrap=True)


def plan_lines(record: Record, width: int = WIDTH) -> list[Line]:
    """Return the whole plan as lines of at most `width` columns."""
    best = record["layouts"][0]
    lines = [(text, "bold") for text in _wrap_text(_subject(record), width)]
    lines += [(text, "") for note in record["notes"] for text in _wrap_text(f"({note})", width)]
    lines += [("", ""), *_table(record, width), ("", "")]
    lines += _memory_lines(best, record["machine"], width)
    lines += [("", ""), *_time_lines(best, width), ("", "")]
    for label, text in _sentences(record):
        lines += [(line, "") for line in _labelled_lines(label, text, width)]
    return lines


def _subject(record: Record) -> str:
    model, machine = record["model"], record["machine"]
    sequence = f", sequence {model['sequence']}" if model["sequence"] else ""
    tokens = record["batch"] * model["sequence"]
    each = f" ({count_text(tokens)} tokens)" if tokens else ""
    where = f"{machine['own_devices']} × {machine['device']}"
    if machine["nodes"] > 1:
        where = f"{machine['nodes']} × {machine['per_node']} × {machine['device']}"
    for group in machine["groups"]:
        where += f" + {group['devices']} × {group['device']}"
    links = machine["inside"] if machine["devices"] > 1 else ""
    residual = ", residual stream bf16" if record.get("residual") == "bf16" else ""
    if machine["nodes"] > 1:
        links += f" inside, {machine['across']} across"
    frozen = model.get("frozen_parameters", 0)
    trained = f"trained of {count_text(model['parameters'] + frozen)} " if frozen else ""
    return (
        f"{model['name']}: {count_text(model['parameters'])} {trained}parameters{sequence}, "
        f"{record['compute']}{residual}; {record['batch']} samples per step{each}; on {where}"
        f"{f' ({links})' if links else ''}"
    )


def _table(record: Record, width: int) -> list[Line]:
    """Return one line per layout."""
    rows = record["layouts"]
    in_tokens = bool(record["model"]["sequence"])
    # A core has no rated peak; its share is of its own measured matrix products.
    share = "MFU" if record["machine"]["kind"] == "gpu" else "of matmul"
    head = ("", "layout", "step", share, "tokens/s" if in_tokens else "samples/s", "memory", "")
    cells = [head]
    for row in rows:
        rate = row["tokens_per_s"] if in_tokens else row["samples_per_s"]
        cells.append(
            (
                str(row["rank"]),
                row["text"],
                seconds_text(row["step_s"]),
                f"{row['mfu']:.0%}" if row["mfu"] else "",
                count_text(rate),
                bytes_text(row["peak_bytes"]),
                _verdict(row),
            )
        )
    widths = [max(len(line[place]) for line in cells) for place in range(len(head))]
    room = width - sum(widths) + widths[1] - 2 * (len(head) - 1)
    widths[1] = max(20, min(widths[1], room))
    lines = []
    for place, line in enumerate(cells):
        style = "bold" if place == 0 else STYLES[rows[place - 1]["verdict"]]
        named = textwrap.wrap(line[1], widths[1]) or [""]
        shown = [line[0].rjust(widths[0]), named[0].ljust(widths[1])]
        shown += [line[k].rjust(widths[k]) for k in range(2, 6)]
        lines.append(("  ".join([*shown, line[6]]).rstrip(), style))
        lines += [(" " * (widths[0] + 2) + more, style) for more in named[1:]]
    return lines


def _verdict(row: Record) -> str:
    margin = bytes_text(abs(row["margin_bytes"]))
    if row["instant"] and row["after"] != "no":
        at = f"in its {row['instant']}" if "step" in row["instant"] else f"while {row['instant']}"
        return f"{row['verdict']}, {at}; steps {row['after']}"
    if row["verdict"] == "no":
        return f"no, lacks {margin}"
    return f"{row['verdict']}, {margin} {'free' if row['margin_bytes'] >= 0 else 'over'}"


LEAST_FILES_BYTES = 2**30
"""Smaller parts do not matter for planning."""


def _memory_lines(row: Record, machine: Record, width: int) -> list[Line]:
    """Return the parts of the fullest rank's memory at its peak."""
    capacity = machine["memory_bytes"]
    slack = (row["peak_high_bytes"] - row["peak_low_bytes"]) / 2
    at = f", stage {row['stage']}" if row["degrees"]["pp"] > 1 else ""
    head = (
        f"memory of 1: {bytes_text(row['peak_bytes'])} ± {bytes_text(slack)} of "
        f"{bytes_text(capacity)} at its peak (in {row['when']}{at})"
    )
    lines = [(head, "bold"), *_bars(row["memory"], row["peak_bytes"], bytes_text, width)]
    lines += [(text, "bold") for text in _wrap_text(_other_instants_text(row, machine), width)]
    files = max((one["files_bytes"] for one in row["instants"]), default=0.0)
    if files >= LEAST_FILES_BYTES:
        size = bytes_text(files)
        where = "in TMPDIR unless twice as much memory is free beside them"
        lines.append((f"each machine builds the model once, in files: {size}, {where}", "bold"))
    if row["host_bytes"]:
        waits = f"states that wait in the host's memory: {bytes_text(row['host_bytes'])} per rank"
        lines.append((waits, "bold"))
    if row["disk_bytes"]:
        lines.append(
            (f"states in files: {bytes_text(row['disk_bytes'])} per rank in TMPDIR", "bold")
        )
    return lines


def _other_instants_text(row: Record, machine: Record) -> str:
    """Return memory at other instants: on the device, and after a plus on the node's host."""
    on_host = machine["kind"] != "cpu"
    told = []
    for one in row["instants"]:
        if one["name"] != "step":
            device, host = (bytes_text(one[where]) for where in ("device_bytes", "host_bytes"))
            size = f"{device} + {host}" if on_host else device
            told.append(f"{one['name']} {size if one['device_bytes'] else f'{host} of a host'}")
    if not told:
        return ""
    has = machine["node_memory_bytes"]
    node = f" + a node's {bytes_text(has) if has else 'memory, not known'}" if on_host else ""
    return f"on a device{node}: {', '.join(told)}"


def _time_lines(row: Record, width: int) -> list[Line]:
    """Return the parts of a step's time."""
    slack = (row["step_high_s"] - row["step_low_s"]) / 2
    head = f"step of 1: {seconds_text(row['step_s'])}"
    if slack:
        head += f" ± {seconds_text(slack)}"
    sent = ", ".join(
        f"{bytes_text(size)} over {link}" for link, size in row["sent"].items() if size
    )
    if sent:
        head += f"; each rank sends {sent}"
    hidden = sum(row["hidden"].values())
    if hidden > LEAST_SHARE * row["step_s"]:
        head += f"; {seconds_text(hidden)} of messages hidden behind compute"
    lines = [(text, "bold") for text in _wrap_text(head, width)]
    return [*lines, *_bars(row["time"], row["step_s"], seconds_text, width)]


def _bars(parts: Mapping[str, float], total: float, text: Any, width: int) -> list[Line]:
    """Return parts, largest first, two to a line, each with a bar of its share."""
    if not total:
        return []
    large = sorted((p for p in parts.items() if p[1] > LEAST_SHARE * total), key=lambda p: -p[1])
    cells = [
        f"{name:<12}{_bar(size / total)} {text(size):>10} {size / total:4.0%}"
        for name, size in large
    ]
    columns = 2 if width >= 2 * 46 else 1
    rows = -(-len(cells) // columns)
    lines = []
    for place in range(rows):
        line = [cells[k].ljust(46) for k in range(place, len(cells), rows)]
        lines.append((f"  {'  '.join(line).rstrip()}", ""))
    return lines


def _bar(share: float) -> str:
    full = round(share * BAR)
    return "█" * full + "·" * (BAR - full)


def _sentences(record: Record) -> list[tuple[str, str]]:
    best = record["layouts"][0]
    found: list[tuple[str, str]] = []
    if record["starting"]:
        found.append(("start", f"no: {record['starting']}"))
    if best["after"] != "fits":
        fixes = record["fixes"]
        if fixes:
            first = fixes[0]
            found.append(
                (
                    "make it fit" if best["after"] == "no" else "fits surely",
                    f"{first['set']}: {bytes_text(first['peak_bytes'])}, "
                    f"{seconds_text(first['step_s'])} per step{_format_change(first['set'])}",
                )
            )
            found += [("or", fix["set"] + _format_change(fix["set"])) for fix in fixes[1:]]
        elif best["after"] == "no":
            found.append(
                (
                    "make it fit",
                    "more devices, a smaller model, or other values of keys that were given; "
                    "no open key is enough",
                )
            )
    if best["after"] != "no" and best["why"]:
        found.append(("why 1", best["why"]))
    if best["dies_first"]:
        found.append(("fills most", best["dies_first"]))
    if record["guide"]:
        found.append(("guide", record["guide"]))
    found += record["advice"].items()
    if record.get("next"):
        found.append(("next", record["next"]))
    return found


def _format_change(settings: str) -> str:
    """Return what settings change beside memory and time: the one that changes a number format."""
    narrow = "precision.residual=bf16" in settings
    return " (blocks' activations in bf16, as FSDP2's param_dtype has them)" if narrow else ""


def _labelled_lines(label: str, text: str, width: int) -> list[str]:
    head = f"{label:<12}"
    return textwrap.wrap(
        text, width, initial_indent=head, subsequent_indent=" " * len(head), break_on_hyphens=False
    )


def _wrap_text(text: str, width: int) -> Sequence[str]:
    return textwrap.wrap(text, width, break_on_hyphens=False)
