"""Compact list of a step's samples for `shoal data look RUN --step N`: one line per sample.

  loss grad norm    sample learnt  source      text
5.5802    1.2041       154     32  text:b.txt  ↵b91: summer a sat a of summer fish …
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from shoal.cli.wrapped_text import cell_width, escape_text

MOST_SAMPLES = 20
MOST_SOURCE, LEAST_TEXT = 20, 12
"""Most columns of a source · least columns of a text."""
BLANKS = re.compile(" {2,}")


def sample_table_lines(
    rows: Sequence[dict[str, Any]], width: int, *, is_mixture: bool
) -> Iterator[str]:
    """Yield a head and a line per sample, at most `MOST_SAMPLES`.

    Args:
        rows: samples of a step in the order of the list.
        width: columns of the terminal.
        is_mixture: whether the source of each sample is shown.
    """
    names = [name for name in ("loss", "grad_norm") if any(name in row for row in rows)]
    of_tokens = any(row["kind"] == "tokens" for row in rows)
    head = "".join(f"{name.replace('_', ' '):>10}" for name in names) + f"{'sample':>10}"
    head += f"{'learnt':>7}" if of_tokens else ""
    sources = [escape_text(row.get("source", "")) for row in rows]
    wide = min(MOST_SOURCE, max([6, *(sum(map(cell_width, name)) for name in sources)]))
    source = f"  {'source':<{wide}}" if is_mixture else ""
    yield f"{head}{source}  {'text' if of_tokens else 'target'}"
    room = max(LEAST_TEXT, width - len(head) - len(source) - 3)
    for row, name in zip(rows[:MOST_SAMPLES], sources, strict=False):
        numbers = "".join(f"{_number_text(row.get(key)):>10}" for key in names)
        numbers += f"{_sample_text(row):>10}"
        numbers += f"{row.get('learnt', ''):>7}" if of_tokens else ""
        origin = f"  {_fit_cells(name, wide, pad=True)}" if is_mixture else ""
        yield f"{numbers}{origin}  {_fit_cells(_text_of(row), room)}".rstrip()
    if len(rows) > MOST_SAMPLES:
        yield f"{len(rows) - MOST_SAMPLES} more samples; try: --json"


def _number_text(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else "–"


def _sample_text(row: dict[str, Any]) -> str:
    """Return the number of a sample; of a micro-batch that cannot be cut, its number."""
    return f"mb {row['micro_batch']}" if "whole_micro_batch" in row else str(row["sample"])


def _text_of(row: dict[str, Any]) -> str:
    """Return the text of a row on one line; ids if nobody can decode it; of others the target."""
    if row["kind"] != "tokens":
        none: dict[str, Any] = {}
        found = next((one for one in row["fields"] if one["name"] == "targets"), none)
        name = f"{found['class']} " if "class" in found else ""
        values = ", ".join(map(str, found.get("values", ())))
        return escape_text(f"{name}{values}")
    if "segments" in row:
        text = "".join(one["text"] for one in row["segments"])
        return BLANKS.sub(" ", escape_text(text, keep_breaks=True).replace("\n", "")).strip()
    return " ".join(str(token["id"]) for token in row.get("tokens", ()))


def _fit_cells(text: str, width: int, *, pad: bool = False) -> str:
    """Return text cut to some columns of a terminal, with … if it is longer.

    >>> _fit_cells("summer", 4), _fit_cells("漢字漢", 4), _fit_cells("a", 3, pad=True)
    ('sum…', '漢…', 'a  ')
    """
    if sum(map(cell_width, text)) <= width:
        return text + " " * (width - sum(map(cell_width, text))) if pad else text
    used, kept = 1, list[str]()
    for letter in text:
        used += cell_width(letter)
        if used > width:
            break
        kept.append(letter)
    return "".join([*kept, "…"])
