"""A comparison of layouts as a picture: speed on the left, memory per rank on the right.

matplotlib draws it, which comes with the extra `report`. Without matplotlib there is no picture,
one line explains how to install it, and everything else works.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from shoal.base.errors import ConfigError
from shoal.view.compare import KINDS, fullest_rank_memory, parts_text

Record = dict[str, Any]
GET_IT = "pip install 'shoal[report]'"
COLOURS = {
    "weights": "#4477aa",
    "gradients": "#66ccee",
    "optimizer": "#228833",
    "rest": "#bbbbbb",
}
"""Paul Tol's bright palette, distinguishable for colour-blind readers."""


def has_matplotlib() -> bool:
    """Return whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def check_matplotlib(where: str) -> None:
    """Refuse a picture if matplotlib is not installed.

    Args:
        where: begins the message.

    Raises:
        ConfigError: matplotlib is missing; the message explains how to install it.
    """
    if not has_matplotlib():
        raise ConfigError(f"{where}: a PNG is drawn by matplotlib, which is not here; {GET_IT}")


def draw_comparison(record: Record, path: Path) -> bool:
    """Draw a comparison, `record` as in compare.json, and write it to `path` as PNG.

    Returns:
        True if the file was written; False if no row was measured or matplotlib is not installed.

    Raises:
        ConfigError: the file cannot be written.
    """
    rows = [row for row in record["rows"] if row["per_s"]]
    if not rows or not has_matplotlib():
        return False
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 1.6 + 0.42 * len(rows)), layout="constrained")
    speed, memory = figure.subplots(1, 2, sharey=True)
    names = [f"{row['layout']} × {parts_text(row)}" for row in rows]
    places = range(len(rows))
    tones = ["#ccbb44" if row["oversubscribed"] else "#4477aa" for row in rows]
    bars = speed.barh(places, [row["per_s"] for row in rows], color=tones)
    speed.bar_label(bars, [f"{row['per_s']:,.0f}" for row in rows], padding=3)
    speed.set_yticks(places, names)
    speed.invert_yaxis()
    speed.margins(x=0.15)
    starred = any(row["oversubscribed"] for row in rows)
    more = " (yellow: more processes than cores, no proof of speed)" if starred else ""
    speed.set_title(f"{record['unit']}/s{more}", fontsize=10)
    left = [0.0] * len(rows)
    for kind in (*KINDS, "rest"):
        part = [fullest_rank_memory(row).get(kind, 0) / 2**20 for row in rows]
        memory.barh(places, part, left=left, color=COLOURS[kind], label=kind)
        left = [start + more_mib for start, more_mib in zip(left, part, strict=True)]
    memory.set_title("MiB on the fullest rank", fontsize=10)
    figure.legend(*memory.get_legend_handles_labels(), loc="outside lower right", ncols=4)
    for axes in (speed, memory):
        axes.spines[["top", "right"]].set_visible(False)
    machine = record["machine"]
    figure.suptitle(
        f"shoal compare: {record['model']}, {machine['cores']} cores, torch "
        f"{machine.get('torch', '')}",
        fontsize=11,
    )
    try:
        FigureCanvasAgg(figure).print_png(path)
    except OSError as failure:
        raise ConfigError(f"--png = {path}: cannot be written: {failure.strerror}") from failure
    return True
