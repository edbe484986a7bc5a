"""Bytes by axis and collective, the forecast beside the measurement, and the use of devices."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from shoal.base.runlog.damaged_lines import Record, is_number
from shoal.base.text.forecast_text import forecast_comment, ratio_text
from shoal.base.text.units import bytes_text, seconds_text
from shoal.report.markup import Child, Markup, table, tag
from shoal.report.run_contents import RunContents, iter_records
from shoal.report.run_starts import list_starts
from shoal.report.svg_charts import stacked_bar
from shoal.view.progress import count_unit, step_amount

MEDIAN_STEPS = 10_000
"""Newest steps of a median; the first step of a run is left out: it is its warm-up."""
MOST_KINDS = 64
MOST_DEVICES = 64


def traffic_section(run: RunContents) -> Markup:
    """Return the bytes that a rank sends in a step, by axis and collective."""
    means, by_axis = mean_traffic(run.newest)
    total = sum(means.values())
    if not total:
        return Markup("")
    longest = max(means.values())
    rows: list[Sequence[Child]] = []
    for (axis, kind), sent in sorted(means.items(), key=lambda pair: -pair[1]):
        share = sent / total
        bar = stacked_bar([("s0", sent)], longest, f"{axis} {kind}: {share:.0%}")
        names = [axis, kind] if by_axis else [kind]
        rows.append([*names, bar, bytes_text(sent), f"{share:.0%}"])
    head = ["axis", "collective"] if by_axis else ["collective"]
    note = f"Mean of the newest {len(run.newest):,} steps, of rank 0; {bytes_text(total)} in all."
    if not by_axis:
        note += " This run recorded no axes."
    return tag(
        "section",
        [
            tag("h2", "Communication"),
            tag("figure", [
                tag("figcaption", "bytes that a rank sends in a step"),
                table([*head, "", "bytes", "of all"], rows, numeric=" " * len(head) + "bnn"),
            ]),
            tag("p", note, class_="note"),
        ],
        id="communication",
    )  # fmt: skip


def mean_traffic(rows: Sequence[Record]) -> tuple[dict[tuple[str, str], float], bool]:
    """Return ((axis, collective) → mean bytes of a step, whether axes are known).

    >>> mean_traffic([{"comm_bytes_by_axis": {"tp": {"all_reduce": 8}}}, {}])
    ({('tp', 'all_reduce'): 4.0}, True)
    """
    sums: dict[tuple[str, str], float] = {}
    by_axis = any(isinstance(row.get("comm_bytes_by_axis"), dict) for row in rows)
    for row in rows:
        found = row.get("comm_bytes_by_axis") if by_axis else {"": row.get("comm_bytes_by_kind")}
        for axis, kinds in found.items() if isinstance(found, dict) else ():
            for kind, sent in kinds.items() if isinstance(kinds, dict) else ():
                key = (str(axis), str(kind))
                if is_number(sent) and (key in sums or len(sums) < MOST_KINDS):
                    sums[key] = sums.get(key, 0.0) + sent
    return {key: sent / len(rows) for key, sent in sums.items() if sent >= len(rows)}, by_axis


def forecast_section(run: RunContents) -> Markup:
    """Return what the planner foresaw beside what was measured."""
    said = run.plan.get("predicted")
    if not isinstance(said, dict) or "reason" in said:
        reason = said.get("reason") if isinstance(said, dict) else None
        text = f"Nothing was foreseen: {reason}" if reason else ""
        body = tag("p", text)
        return tag("section", [tag("h2", "Foreseen"), body], id="foreseen") if text else Markup("")
    names = {
        "step_s": f"time of a step, {median_name(run)}",
        "peak_memory_bytes": f"peak memory of {fullest_name(run)}",
        "sent_bytes": "bytes sent in a step",
    }
    rows: list[Sequence[Child]] = []
    for key, (foreseen, found) in forecast_pairs(run).items():
        show: Callable[[float], str] = seconds_text if key == "step_s" else bytes_text
        measured = [show(found), ratio_text(foreseen, found)] if found else ["–", "–"]
        rows.append([names[key], show(foreseen), *measured])
    if not rows:
        return Markup("")
    parts: list[Child] = [tag("h2", "Foreseen and measured")]
    head = ("", "foreseen", "measured", "measured ÷ foreseen")
    parts.append(table(head, rows, numeric=" nnn"))
    foreseen_s, measured_s = forecast_pairs(run).get("step_s", (0.0, None))
    if measured_s:
        comment = forecast_comment(foreseen_s, measured_s)
        parts.append(tag("p", f"{comment}.", class_="note") if comment else None)
    if len(starts := list_starts(run.events)) > 1:
        last = f"Foreseen at the last of {len(starts):,} starts; another start may foresee another."
        parts.append(tag("p", last, class_="note"))
    parts += [_shares("where the time was foreseen", said.get("time"), seconds_text)]
    parts += [_shares("where the memory was foreseen", said.get("memory"), bytes_text)]
    if isinstance(machine := said.get("machine"), str) and machine:
        parts.append(tag("p", f"Machine: {machine}.", class_="note"))
    return tag("section", parts, id="foreseen")


def forecast_pairs(run: RunContents) -> dict[str, tuple[float, float | None]]:
    """Return what the planner foresaw and what was measured, by key of a plan's forecast.

    Returns:
        `step_s` (median), `peak_memory_bytes` and `sent_bytes` of a step, as far as they were
        foreseen. The measured value is None if none was recorded.
    """
    said = run.plan.get("predicted")
    if not isinstance(said, dict) or "reason" in said:
        return {}
    measured = {
        "step_s": median_of(run, "step_s"),
        "peak_memory_bytes": peak_of(run),
        "sent_bytes": _sent(run),
    }
    foreseen = {key: said.get(key) for key in measured}
    return {k: (v, measured[k]) for k, v in foreseen.items() if is_number(v) and v > 0}


def fullest_name(run: RunContents) -> str:
    """Return whose peak memory `peak_of` is."""
    return "the fullest rank" if run.named("memory_peaks") else "rank 0"


def _shares(title: str, record: Any, text: Callable[[float], str]) -> Child:
    """Return a bar of the parts of a forecast, with a legend."""
    if not isinstance(record, dict):
        return None
    parts = [(str(k), float(v)) for k, v in record.items() if is_number(v) and v > 0]
    parts = sorted(parts, key=lambda pair: -pair[1])[:8]
    total = sum(size for _, size in parts)
    if not total:
        return None
    names = ", ".join(f"{name} {text(size)}" for name, size in parts)
    bar = stacked_bar([(f"s{at}", size) for at, (_, size) in enumerate(parts)], total, names)
    legend = [
        tag("span", tag("i", class_=f"key s{at}"), f"{name.replace('_', ' ')} {text(size)}")
        for at, (name, size) in enumerate(parts)
    ]
    return tag("figure", tag("figcaption", title), bar, tag("div", legend, class_="legend"))


def median_of(run: RunContents, name: str) -> float | None:
    """Return the median of a column over its newest steps; None without any."""
    values = run.metrics.column(name)[1]
    newest = values[max(1, len(values) - MEDIAN_STEPS) :] or values
    return statistics.median(newest) if len(newest) else None


def median_rate(run: RunContents) -> float | None:
    """Return the median of tokens per second, or of samples if the data are no tokens."""
    unit = count_unit(run.plan)
    if unit != "samples":
        return median_of(run, "tokens_per_s")
    pairs = [(step_amount(row, unit), row.get("step_s")) for row in run.newest]
    rates = [amount / s for amount, s in pairs if amount and is_number(s) and s > 0]
    return statistics.median(rates) if rates else None


def median_name(run: RunContents) -> str:
    """Return the name of `median_of`, with the first and the last of its steps."""
    steps = run.metrics.column("step_s")[0]
    newest = steps[max(1, len(steps) - MEDIAN_STEPS) :] or steps
    return f"median of steps {int(newest[0]):,}–{int(newest[-1]):,}" if newest else "median"


def peak_of(run: RunContents) -> float | None:
    """Return the peak memory of the fullest rank, or of rank 0 if only that is known."""
    found = [event.get("peak_memory_bytes_by_rank") for event in run.named("memory_peaks")]
    peaks = [one for row in found if isinstance(row, list) for one in row if is_number(one)]
    peaks += run.metrics.column("peak_memory_bytes")[1]
    return max(peaks, default=None)


def _sent(run: RunContents) -> float | None:
    sent = [row["comm_bytes"] for row in run.newest if is_number(row.get("comm_bytes"))]
    return statistics.median(sent) if sent else None


def devices_section(run: RunContents) -> Markup:
    """Return the use of each device, from devices.jsonl."""
    path = run.folder / "devices.jsonl"
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for record in iter_records(path) if path.exists() else ():
        devices = record.get("devices")
        for one in devices if isinstance(devices, list) else ():
            if isinstance(one, dict):
                key = (str(record.get("host")), str(one.get("index")))
                if key in found or len(found) < MOST_DEVICES:
                    _add_sample(found.setdefault(key, {"name": one.get("name")}), one)
    if not found:
        return Markup("")
    rows = [
        [
            host, index, str(use["name"] or ""),
            _mean_text(use, "utilisation", "{:.0%}"),
            _most_text(use, "memory_used_bytes", bytes_text),
            _mean_text(use, "power_w", "{:.0f} W"),
            _most_text(use, "temperature_c", "{:.0f} °C".format),
        ]
        for (host, index), use in found.items()
    ]  # fmt: skip
    head = ("host", "device", "name", "use, mean", "memory, most", "power, mean", "warmest")
    return tag("section", tag("h2", "Devices"), table(head, rows, numeric=" n nnnn"), id="devices")


def _add_sample(use: dict[str, Any], one: Record) -> None:
    for key in ("utilisation", "memory_used_bytes", "power_w", "temperature_c"):
        if is_number(value := one.get(key)):
            count, total, most = use.get(key, (0, 0.0, value))
            use[key] = (count + 1, total + value, max(most, value))


def _mean_text(use: dict[str, Any], key: str, form: str) -> str:
    return form.format(use[key][1] / use[key][0]) if key in use else "–"


def _most_text(use: dict[str, Any], key: str, text: Callable[[float], str]) -> str:
    return text(use[key][2]) if key in use else "–"
