"""The layout of a run: coordinates of each rank, the parameters that it holds, cuts of tensors."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from itertools import islice

from shoal.base.layouts.layout import Layout
from shoal.base.plans.placement import At, Placement
from shoal.base.text.units import bytes_text, count_text
from shoal.report.markup import Child, Markup, table, tag
from shoal.report.run_contents import RunContents
from shoal.report.run_starts import list_starts

SHOWN_RANKS = 64
SHOWN_PATTERNS = 100
MOST_PLACEMENTS = 50_000


def layout_section(run: RunContents) -> Markup:
    """Return the layout in words, a table of ranks, and a table of tensors."""
    record = run.plan.get("layout")
    if not isinstance(record, dict):
        return Markup("")
    layout = Layout(**record)
    placements = _placements(run)
    parts: list[Child] = [tag("h2", "Layout"), tag("p", _layout_words(run, layout))]
    parts.append(_rank_table(run, layout, placements))
    if placements:
        parts.append(_tensor_table(placements))
    return tag("section", parts, id="layout")


def _placements(run: RunContents) -> list[Placement]:
    records = run.plan.get("placements")
    found = records[:MOST_PLACEMENTS] if isinstance(records, list) else []
    return [Placement.of_record(one) for one in found]


def _layout_words(run: RunContents, layout: Layout) -> list[Child]:
    batch = [run.plan.get(key) for key in ("accumulate", "micro_batch", "batch")]
    words: list[Child] = [layout.text(), "."]
    if all(isinstance(number, int) and number for number in batch):
        words.append(
            f" {layout.data_degree} data rank{'s' if layout.data_degree > 1 else ''} × {batch[0]} "
            f"micro-batches × {batch[1]} samples = {batch[2]} samples per step."
        )
    why = run.plan.get("why")
    if isinstance(why, str) and why:
        words += [tag("br"), why, _forecast_start(run, why)]
    return words


def _forecast_start(run: RunContents, why: str) -> str | None:
    """Return of which start the forecast in these words is, for a run of several starts."""
    if len(list_starts(run.events)) < 2:
        return None
    number, found = 0, 1
    for event in run.events:
        number += event["event"] in ("run_started", "restarting")
        if event["event"] == "notice" and event.get("text") == why:
            found = number
    return f" (foreseen at start {found:,} of {number:,})"


def _rank_table(run: RunContents, layout: Layout, placements: Sequence[Placement]) -> Markup:
    axes = [axis for axis, degree in layout.degrees.items() if degree > 1]
    if layout.ep > 1:
        axes += [axis for axis, degree in layout.expert_degrees.items() if degree > 1]
        axes = list(dict.fromkeys(axes))
    whole = sum(one.elements for one in placements if one.trains)
    hosts = {one.get("rank"): one for one in run.ranks}
    rows = []
    for rank in range(min(layout.processes, SHOWN_RANKS)):
        at = layout.at(rank)
        here = hosts.get(rank, {})
        device = here.get("device_name") or here.get("device") or ""
        row: list[Child] = [f"{rank:,}", *(str(at.get(axis, 0)) for axis in axes)]
        if placements:
            held = [stored_elements(one, at, layout) for one in placements]
            trained = sum(n for n, one in zip(held, placements, strict=True) if one.trains)
            size = sum(n * one.element_bytes for n, one in zip(held, placements, strict=True))
            share = f"{trained / whole:.1%}" if whole else "–"
            row += [count_text(trained), share, bytes_text(size)]
        if run.ranks:
            row += [str(here.get("host", "–")), str(device)]
        rows.append(row)
    head: list[Child] = ["rank", *axes]
    if placements:
        head += ["parameters held", "of all", "weights"]
    if run.ranks:
        head += ["host", "device"]
    more = layout.processes - len(rows)
    caption = f"The first {len(rows)} of {layout.processes:,} ranks." if more > 0 else ""
    return table(head, rows, numeric="n" * (len(head) - 2 * bool(run.ranks)), caption=caption)


def stored_elements(one: Placement, at: At, layout: Layout) -> int:
    """Return the elements of a tensor that a rank stores between steps.

    >>> row = Placement("w", (10, 4), "float32", data="rows")
    >>> layout = Layout(dp_shard=4, zero=3)
    >>> [stored_elements(row, layout.at(rank), layout) for rank in range(4)]
    [12, 12, 12, 4]
    """
    if at.get("pp", 0) not in one.stages and not one.is_table:
        return 0
    shape = one.local_shape(at)
    if one.data != "rows" or not shape:
        return math.prod(shape)
    axis = one.data_axes[1]
    rows = -(-shape[0] // one.degree(axis, layout))
    own = max(0, min(rows, shape[0] - at[axis] * rows))
    return own * math.prod(shape[1:])


def _tensor_table(placements: Sequence[Placement]) -> Markup:
    """Return a table of tensors, those of equal layers in one row."""
    groups: dict[tuple[str, ...], list[Placement]] = {}
    for one in placements:
        groups.setdefault(tuple(_tensor_words(one)), []).append(one)
    rows = [
        [_names(found), str(len(found)), *words[1:]]
        for words, found in islice(groups.items(), SHOWN_PATTERNS)
    ]
    head = ("tensor", "count", "shape", "dtype", "stages", "cut", "data ranks", "summed over")
    more = len(groups) - len(rows)
    caption = f"{more:,} more patterns are not shown." if more > 0 else ""
    summary = tag("summary", f"Tensors ({len(placements):,})")
    return tag("details", summary, table(head, rows, numeric=" n", caption=caption))


DATA_WORDS = {"whole": "each all", "states": "each a share of the states", "rows": "each some rows"}


def _tensor_words(one: Placement) -> Iterator[str]:
    yield re.sub(r"\d+", "*", one.name)
    yield " × ".join(map(str, one.shape)) or "scalar"
    yield one.dtype
    yield ", ".join(map(str, one.stages))
    yield f"dim {one.cut.dim} by {one.cut.axis}" if one.cut else "–"
    yield DATA_WORDS.get(one.data, one.data)
    yield ", ".join(one.sum_over) or "–"


def _names(found: Sequence[Placement]) -> str:
    if len(found) == 1:
        return found[0].name
    return f"{found[0].name} … {found[-1].name}"
