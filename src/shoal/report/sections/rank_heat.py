"""Time of a step by rank and part, and lateness by rank and step as a heat map."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shoal.base.runlog.damaged_lines import is_number
from shoal.base.runlog.rank_records import PARTS
from shoal.base.text.units import seconds_text
from shoal.report.markup import Child, Markup, table, tag
from shoal.report.order_statistics import percentile
from shoal.report.png_image import png_data_url, shade_cells
from shoal.report.rank_times import RankTimes
from shoal.report.run_contents import RunContents
from shoal.report.svg_charts import chart_frame, number_label, second_label, stacked_bar

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

MOST_ROWS, WORST_ROWS = 256, 32
"""Ranks up to which each has a row of the map · of more ranks, the latest that have one."""
BAR_ROWS = 32
"""Ranks up to which each has a bar; of more ranks, the latest."""
PERCENTILES = (50, 90, 99, 100)
DARKEST = 99.8
"""Percentile of the cells from which all are darkest."""
LEAST_SHARE = 0.005
"""Share of a step below which a rank is not late."""
LOOKS = ("s6", "s1", "s0", "s4", "s3", "s5", "s2", "wait")
"""Colour of each part, in the order of `PARTS`."""
NAMES = (
    "other", "data", "forward and backward", "sum", "update", "callbacks", "backward", "waiting",
)  # fmt: skip
"""Name of each part, as in `shoal watch`; `part_name` is for runs with backward passes apart."""
PASSES, BACKWARD = PARTS.index("passes"), PARTS.index("backward")
SHOWN_MOMENTS = 12


def part_name(part: int, used: Sequence[int]) -> str:
    """Return the name of a part; passes are the forward ones where backward passes are recorded.

    >>> part_name(2, [1, 2, 3]), part_name(2, [2, 6])
    ('forward and backward', 'forward')
    """
    return "forward" if part == PASSES and BACKWARD in used else NAMES[part]


def ranks_section(run: RunContents) -> Markup:
    """Return bars by rank, the map of lateness, and its worst moments."""
    times = run.rank_times
    parts: list[Child] = [tag("h2", "Ranks")]
    if times is None:
        why = (
            "No times by rank were recorded: this run had no watchdog (macOS, some own loops), or "
            "its version wrote none. The curves show rank 0."
        )
        if run.islands:
            why = "Times by rank are in the report of each island. The curves show its rank 0."
        return tag("section", [*parts, tag("p", why)], id="ranks")
    parts += [_bars(run, times), _means_note(run, times)]
    if len(times.ranks) > 1:
        parts += [_late_map(times), _moments(run, times)]
    return tag("section", parts, id="ranks")


def _means_note(run: RunContents, times: RankTimes) -> Markup:
    count = f"steps {times.first_step:,}–{times.last_step:,} ({times.steps:,} rows)"
    device = any(row.get("timed_by") == "device" for row in run.newest[-1:])
    clock = "the device's events" if device else "the host's clock"
    return tag("p", f"Means of {count}, by {clock}.", class_="note")


def _bars(run: RunContents, times: RankTimes) -> Markup:
    """Return a table with a bar of parts for each rank, or for the latest of many."""
    shown = list(range(len(times.ranks)))
    caption = ""
    if len(shown) > BAR_ROWS:
        shown = sorted(shown, key=lambda at: -times.late_s[at])[:BAR_ROWS]
        caption = f"The {BAR_ROWS} latest of {len(times.ranks):,} ranks, by mean lateness."
    means = times.mean_s
    longest_s = float(means[shown].sum(axis=1).max())
    used = [part for part in (1, 2, 6, 3, 4, 5, 0, 7) if means[:, part].max() > longest_s / 1000]
    rows: list[Sequence[Child]] = []
    hosts = _hosts_by_rank(run)
    if len(times.ranks) > 1:
        rows.append(_bar_row("mean", means.mean(axis=0), used, longest_s, None, None, ""))
    for at in shown:
        late_s, worst_s = float(times.late_s[at]), float(times.worst_s[at])
        name = f"{times.ranks[at]:,}"
        host = hosts.get(times.ranks[at], "")
        rows.append(_bar_row(name, means[at], used, longest_s, late_s, worst_s, host))
    head = [
        "rank",
        "seconds of a step by part",
        "step, mean",
        "waiting",
        "late, mean",
        "late, most",
    ]
    if not any(hosts.values()):
        rows = [row[:-1] for row in rows]
    else:
        head.append("host")
    legend = [
        tag("span", tag("i", class_=f"key {LOOKS[part]}"), part_name(part, used)) for part in used
    ]
    return tag(
        "figure",
        [
            tag("figcaption", "time of a step by part and rank"),
            tag("div", legend, class_="legend"),
            table(head, rows, numeric="nbnnnn", caption=caption),
        ],
    )


def _bar_row(
    name: str,
    seconds: Array,
    used: Sequence[int],
    longest_s: float,
    late_s: float | None,
    worst_s: float | None,
    host: str,
) -> list[Child]:
    told = ", ".join(
        f"{part_name(part, used)} {seconds_text(float(seconds[part]))}" for part in used
    )
    bar = stacked_bar([(LOOKS[part], float(seconds[part])) for part in used], longest_s, told)
    late = [("–" if one is None else seconds_text(one)) for one in (late_s, worst_s)]
    whole, waits = float(seconds.sum()), float(seconds[-1])
    return [name, bar, seconds_text(whole), seconds_text(waits), *late, host]


def _hosts_by_rank(run: RunContents) -> dict[int, str]:
    """Return the host of each rank; {} for one host, which needs no column."""
    found = {}
    for one in run.ranks:
        if is_number(one.get("rank")) and isinstance(one.get("host"), str):
            found[int(one["rank"])] = str(one["host"])
    return found if len(set(found.values())) > 1 else {}


def map_figure(
    title: str,
    values: Array,
    most: float,
    least: float,
    y_marks: Sequence[tuple[float, str]],
    x_marks: Sequence[tuple[float, str]],
    text: str,
    labels: Sequence[str],
) -> Markup:
    """Return a heat map with its scale.

    Args:
        title: with the unit.
        values: [rows, columns].
        most, least: darkest value, and the largest that stays white.
        y_marks, x_marks: positions and texts at the axes.
        text: for screen readers.
        labels: at the ends of the scale.
    """
    rows = len(values)
    image = tag("img", src=Markup(png_data_url(shade_cells(values, most, least))), alt=text)
    ramp = tag("img", src=Markup(png_data_url([bytes(range(0, 256, 3))])), alt="scale")
    size = "low" if rows <= 4 else "mid" if rows <= 12 else "tall" if rows <= 24 else "high"
    scale = tag("div", labels[0], ramp, labels[1], class_="ramp")
    frame = chart_frame(title, image, y_marks, x_marks, x_title="step", size=size)
    return tag("div", frame, scale)


def _late_map(times: RankTimes) -> Markup:
    """Return the map of lateness: a row per rank, or percentiles and the latest ranks."""
    import numpy as np

    values, names = times.late_map, [f"{rank:,}" for rank in times.ranks]
    if len(times.ranks) > MOST_ROWS:
        worst = np.argsort(-times.late_s, kind="stable")[:WORST_ROWS]
        levels = percentile(values, PERCENTILES, axis=0)
        height = 4  # rows of the image for each percentile, so that they can be seen
        values = np.concatenate([np.repeat(levels, height, axis=0), values[worst]])
        named = ["median", "90 %", "99 %", "latest"]
        names = [name for name in named for _ in range(height)]
        names += [f"{times.ranks[at]:,}" for at in worst]
    # A few moments of a second would make all others white: the table has them.
    least = times.step_s * LEAST_SHARE
    most = max(float(percentile(values, DARKEST, lower=True)), least)
    if float(values.max()) <= least:
        text = f"No rank was later than the others by more than {seconds_text(least)} in any step."
        return tag("p", text)
    text = (
        f"Lateness of {len(times.ranks)} ranks over steps {times.first_step} to "
        f"{times.last_step}, at most {seconds_text(float(values.max()))}"
    )
    note = (
        "Lateness: the median of the others' waits less the rank's own wait. A cell shows the "
        "largest one of its steps. Pipeline stages wait by plan."
    )
    drawn = map_figure(
        "how long the others wait for a rank, by rank and step",
        values,
        most,
        least,
        _row_marks(names),
        _column_marks(times.columns),
        text,
        ("0", f"{second_label(most)} and more; in the middle {second_label(most / 4)}"),
    )
    return tag("div", drawn, tag("p", note, class_="note"))


def _row_marks(names: Sequence[str]) -> list[tuple[float, str]]:
    """Return names of some rows, at the middles of their rows; each name once."""
    first: dict[str, list[int]] = {}
    for at, name in enumerate(names):
        first.setdefault(name, []).append(at)
    middles = [((rows[0] + rows[-1] + 1) / 2 / len(names), name) for name, rows in first.items()]
    words = [pair for pair in middles if not pair[1].replace(",", "").isdigit()]
    numbered = middles[len(words) :]
    return words + numbered[:: max(1, -(-len(numbered) // 12))]


def _column_marks(columns: Sequence[int]) -> list[tuple[float, str]]:
    """Return step numbers below some columns of a map; columns have equally many steps."""
    count = len(columns)
    places = sorted({0, count // 4, count // 2, 3 * count // 4, count - 1})
    return [((at + 0.5) / count, number_label(columns[at])) for at in places]


def _moments(run: RunContents, times: RankTimes) -> Child:
    """Return the moments with the largest lateness, exact."""
    if not times.moments:
        return None
    hosts = _hosts_by_rank(run)
    rows = [
        [
            f"{one.step:,}",
            f"{one.rank:,}",
            seconds_text(one.late_s),
            NAMES[PARTS.index(one.part)],
            seconds_text(one.part_s),
            seconds_text(one.usual_s),
            hosts.get(one.rank, ""),
        ]
        for one in times.moments[:SHOWN_MOMENTS]
    ]
    head = ["step", "rank", "late", "in", "its seconds there", "median of the others", "host"]
    if not any(row[-1] for row in rows):
        head, rows = head[:-1], [row[:-1] for row in rows]
    summary = "The longest waits for one rank, exact"
    return tag("figure", tag("figcaption", summary), table(head, rows, numeric="nnn nn"))
