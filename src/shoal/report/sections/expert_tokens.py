"""Load of experts: the share of tokens that each expert of each layer gets, over steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shoal.base.runlog.damaged_lines import Record, is_number
from shoal.report.markup import Child, Markup, clean_text, table, tag
from shoal.report.run_contents import RunContents, iter_records
from shoal.report.sections.rank_heat import map_figure
from shoal.report.svg_charts import number_label

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

MOST_COLUMNS, MOST_ROWS = 320, 256
MOST_LAYERS, MOST_EXPERTS = 128, 4_096


@dataclass
class LayerLoad:
    """Load of one layer's experts: [experts] of each column of the map, 1.0 is a fair share.

    Attributes:
        name: of the layer.
        steps: last step of each column.
        loads: the columns.
        merged: steps in a column.
        idle: steps in which an expert got no token.
        count: steps with tokens.
    """

    name: str
    steps: list[int]
    loads: list[Array]
    merged: int = 1
    idle: int = 0
    count: int = 0


def read_expert_loads(records: Sequence[Record] | Any) -> list[LayerLoad]:
    """Return the load of each layer from the lines of experts.jsonl."""
    import numpy as np

    layers: dict[str, LayerLoad] = {}
    for record in records:
        step, found = record.get("step"), record.get("layers")
        if not is_number(step) or not isinstance(found, dict):
            continue
        for name, tokens in found.items():
            if not _is_load(tokens) or (name not in layers and len(layers) == MOST_LAYERS):
                continue
            layer = layers.setdefault(name, LayerLoad(clean_text(name), [], []))
            load = np.array(tokens, np.float32)
            load *= len(load) / load.sum()
            if layer.loads and len(layer.loads[0]) != len(load):
                continue
            layer.count += 1
            layer.idle += bool((load == 0).any())
            _add_column(layer, int(step), load)
    return list(layers.values())


def _is_load(tokens: Any) -> bool:
    if not isinstance(tokens, list) or not 1 < len(tokens) <= MOST_EXPERTS:
        return False
    return all(is_number(one) and one >= 0 for one in tokens) and 0 < sum(tokens) < 1e30


def _add_column(layer: LayerLoad, step: int, load: Array) -> None:
    """Add a step; if there are too many columns, two neighbours become their mean."""
    weight = (layer.count - 1) % layer.merged
    if weight and layer.loads:
        layer.loads[-1] = (layer.loads[-1] * weight + load) / (weight + 1)
        layer.steps[-1] = step
    else:
        layer.steps.append(step)
        layer.loads.append(load)
    if len(layer.loads) == 2 * MOST_COLUMNS and layer.count % layer.merged == 0:
        pairs = zip(layer.loads[::2], layer.loads[1::2], strict=True)
        layer.loads = [(one + other) / 2 for one, other in pairs]
        layer.steps = layer.steps[1::2]
        layer.merged *= 2


def experts_section(run: RunContents) -> Markup:
    """Return the map of experts' loads and a table by layer; nothing without experts."""
    path = run.folder / "experts.jsonl"
    layers = read_expert_loads(iter_records(path)) if path.exists() else []
    if not layers:
        return Markup("")
    import numpy as np

    rows: list[Sequence[Child]] = []
    for layer in layers:
        newest, mean = layer.loads[-1], np.mean(layer.loads, axis=0)
        busiest = int(mean.argmax())
        rows.append(
            [
                layer.name,
                str(len(mean)),
                f"{busiest}",
                f"{mean[busiest]:.2f} ×",
                f"{mean.min():.2f} ×",
                f"{newest.max():.2f} ×",
                f"{layer.idle / layer.count:.0%}",
            ]
        )
    head = (
        "layer", "experts", "busiest", "its load, mean", "least load", "most, newest",
        "steps with an idle expert",
    )  # fmt: skip
    note = "Load: an expert's tokens over a fair share. The busiest one sets the time of the layer."
    parts: list[Child] = [tag("h2", "Experts"), _load_map(layers)]
    parts += [table(head, rows, numeric=" nnnnnn"), tag("p", note, class_="note")]
    return tag("section", parts, id="experts")


def _load_map(layers: Sequence[LayerLoad]) -> Child:
    """Return the map: a row per expert, or the busiest expert of each layer if there are many."""
    import numpy as np

    columns = min(len(layer.loads) for layer in layers)
    tables = [np.array(layer.loads[:columns]).T for layer in layers]
    title = "load of experts above a fair share, by layer, expert and step"
    if sum(map(len, tables)) > MOST_ROWS:
        tables = [one.max(axis=0, keepdims=True) for one in tables]
        title = "load of the busiest expert above a fair share, by layer and step"
    values, marks, at = np.concatenate(tables), [], 0
    names = _short_names([layer.name for layer in layers])
    for name, one in zip(names, tables, strict=True):
        marks.append((at + len(one) / 2, name))
        at += len(one)
    every = -(-len(marks) // 12)
    y_marks = [(place / at, name[:8]) for place, name in marks[::every]]
    steps = layers[0].steps[:columns]
    places = sorted({0, columns // 2, columns - 1})
    x_marks = [((k + 0.5) / columns, number_label(steps[k])) for k in places]
    most = float(values.max())
    labels = ("1 ×", f"{most:.2f} ×; in the middle {1 + (most - 1) / 4:.2f} ×")
    text = f"Load of the experts of {len(layers)} layers, at most {most:.2f} times a fair share"
    above = np.maximum(values - 1.0, 0.0)
    return map_figure(title, above, most - 1.0, 0.0, y_marks, x_marks, text, labels)


def _short_names(names: Sequence[str]) -> list[str]:
    """Return names without the words that all of them begin and end with.

    >>> _short_names(["blocks.0.mixture", "blocks.12.mixture"]), _short_names(["mixture"])
    (['0', '12'], ['mixture'])
    """
    words = [name.split(".") for name in names]
    for end in (0, -1):
        while len({row[end] for row in words}) == 1 and min(map(len, words)) > 1:
            for row in words:
                row.pop(end)
    return [".".join(row) for row in words]
