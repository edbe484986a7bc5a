"""Lines of `shoal data look`: the facts of the data, then rows with learnt tokens marked.

The document comes from `trainer/jobs/data_inspection.py`; its texts are the user's data, so every
control character is escaped.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.base.errors import ConfigError
from shoal.base.runlog.damaged_lines import iter_lines_backward, parse_step
from shoal.base.text.units import count_text

NAME_WIDTH = 12
LEARNT, SPECIAL, FAINT, PLAIN = "\x1b[32;4m", "\x1b[35m", "\x1b[2m", "\x1b[0m"
LETTERS = {"\t": "\\t", "\r": "\\r", "\\": "\\\\"}
MOST_LINES = 40
"""Lines of one row's text; the rest is counted."""


@dataclass(frozen=True)
class RowStyle:
    """How rows are drawn.

    Attributes:
        width: columns of the terminal.
        coloured: learnt tokens are green and underlined; else between ⟦ and ⟧.
        with_ids: list tokens in columns.
        encoding: of the output; one without ⟦ gets [[ and ]].
    """

    width: int = 80
    coloured: bool = False
    with_ids: bool = False
    encoding: str = "utf-8"

    @property
    def marks(self) -> tuple[str, str]:
        """Text before and after learnt tokens."""
        if self.coloured:
            return LEARNT, PLAIN
        try:
            "⟦⟧".encode(self.encoding)
        except (UnicodeEncodeError, LookupError):
            return "[[", "]]"
        return "⟦", "⟧"


def find_step_row(folder: Path, step: int) -> dict[str, Any]:
    """Return the newest line of a step in a run's metrics.jsonl, with its samples.

    Raises:
        ConfigError: no such file, no such step, or a line without samples.
    """
    first = last = None
    try:
        with (folder / "metrics.jsonl").open("rb") as file:
            for _, line in iter_lines_backward(file):
                row = parse_step(line)
                if row is None:
                    continue
                here = int(row["step"])
                first, last = here, here if last is None else last
                if here == step:
                    return _with_samples(folder, row)
                if here < step:
                    break
    except OSError as failure:
        if islands := sorted(folder.glob("island-*/metrics.jsonl")):
            raise ConfigError(
                f"{folder}: is a run of islands, each with steps of its own; try: shoal data look "
                f"{islands[0].parent} --step {step}"
            ) from None
        raise ConfigError(
            f"{folder}/metrics.jsonl: cannot be read ({failure.strerror}), so no step of this run "
            f"is known; a run folder has one"
        ) from None
    if last is None:
        raise ConfigError(f"--step {step}: {folder} has run no step yet")
    near = last if step > last else first
    raise ConfigError(
        f"--step {step}: {folder} has no line of it; its newest step is {last}; try: --step {near}"
    )


def _with_samples(folder: Path, row: dict[str, Any]) -> dict[str, Any]:
    span = row.get("samples")
    spans = span if isinstance(span, list) and len(span) == 2 else [0, 0]
    if not all(type(n) is int for n in spans) or not 0 <= spans[0] < spans[1]:
        raise ConfigError(
            f"--step {row['step']}: its line in {folder}/metrics.jsonl names no samples: the "
            f"batches came from your own loop, not from run.loader"
        )
    return row


def data_lines(document: dict[str, Any], style: RowStyle, most: int) -> Iterator[str]:
    """Yield the lines of a document, with at most `most` rows."""
    yield from head_lines(document["data"])
    if "step" in document:
        yield ""
        yield from step_lines(document)
    rows = sorted(document["rows"], key=lambda row: -row.get("loss", -math.inf))
    for row in rows[:most]:
        yield ""
        yield row_title(row, "step" in document, "by_source" in document["data"])
        yield from row_lines(row, style)
    if len(rows) > most:
        yield ""
        yield f"{len(rows) - most} more rows; try: --rows {len(rows)}"
    for line in document.get("notices", ()):
        yield f"notice: {escape_text(line)}"


def head_lines(data: dict[str, Any]) -> Iterator[str]:
    """Yield a name and its fact per line."""
    for name, text in _facts(data):
        yield f"{name:<{NAME_WIDTH}}{escape_text(text)}"
    for part in data.get("by_source", ()):
        tokens = f", {count_text(part['tokens'])} tokens" if "tokens" in part else ""
        yield (
            f"{'':<{NAME_WIDTH}}{part['weight']:4.0%} {escape_text(part['source'])}: "
            f"{part['samples']} samples{tokens}, {part['passes_per_epoch']:.0%} of it per epoch"
        )


def _facts(data: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "source", data["source"]
    held = f", {data['held_out']} held out" if "held_out" in data else ""
    if "samples" in data:
        rows = "rows" if data["kind"] == "tokens" else "samples"
        yield "samples", f"{data['samples']} {rows}{held}"
    else:
        yield "samples", f"unknown: the data can only be iterated{held}"
    yield "step", f"{data['batch']} samples, in micro-batches of {data['micro_batch']}"
    if data["kind"] == "tokens":
        yield from _token_facts(data)
    if shapes := data.get("fields"):
        for field in shapes:
            yield "field", _field_fact(field)
    if labels := data.get("labels"):
        shown = ", ".join(f"{one.get('name', one['label'])} {one['count']}" for one in labels[:12])
        more = f", {data['label_count'] - 12} more" if data["label_count"] > 12 else ""
        yield "labels", f"{shown}{more} (of {data['sampled']} samples)"


def _token_facts(data: dict[str, Any]) -> Iterator[tuple[str, str]]:
    names = f"{data['tokenizer'] or 'none known here'}, {data['vocabulary']} ids"
    yield "tokenizer", names
    packing = f", packed, {data['full_share']:.0%} full" if data["packing"] == "on" else ""
    if data["packing"] != "on" and data.get("full_share", 1) < 1:
        packing = f", {data['full_share']:.0%} full"
    tokens = f", {count_text(data['tokens'])} tokens" if "tokens" in data else ""
    yield "sequence", f"{data['sequence']} tokens a row{packing}{tokens}"
    if lengths := data.get("lengths"):
        yield (
            "lengths",
            f"{lengths['least']} least, {lengths['p10']} 10 %, {lengths['p50']} half, "
            f"{lengths['p90']} 90 %, {lengths['most']} most tokens of {lengths['count']} "
            f"{lengths['of']}",
        )
    if data.get("cut") or data.get("left_out"):
        yield (
            "cut",
            f"{data['cut']} examples longer than {data['sequence'] + 1} tokens; {data['left_out']} "
            f"left out, with no answer within these",
        )
    if "learnt_share" in data:
        documents = data.get("documents_per_row")
        packed = f", {documents:.1f} documents a row" if documents else ""
        yield "learnt", f"{data['learnt_share']:.0%} of the targets have a loss{packed}"
    if data.get("misplaced"):
        yield "labels", f"{data['misplaced']} are neither −100 nor the token that follows"


def _field_fact(field: dict[str, Any]) -> str:
    shapes = ", ".join(f"{shape}" for shape, _ in field["shapes"][:4])
    more = ", …" if len(field["shapes"]) > 4 else ""
    ranged = f", {field['least']:g} … {field['most']:g}" if "least" in field else ""
    bad = f", {field['not_finite']} not finite" if field.get("not_finite") else ""
    return f"{field['name'] or 'value'}: {'/'.join(field['dtypes'])} {shapes}{more}{ranged}{bad}"


def step_lines(document: dict[str, Any]) -> Iterator[str]:
    """Yield what is known of the step."""
    step = document["step"]
    start, stop = step["samples"]
    numbers = [
        f"{name.replace('_', ' ')} {step[name]:.4g}"
        for name in ("loss", "grad_norm")
        if isinstance(step.get(name), int | float)
    ]
    skipped = ", skipped" if step.get("skipped") else ""
    yield (
        f"step {step['step']}: samples {start} … {stop - 1} of the stream"
        f"{''.join(f', {one}' for one in numbers)}{skipped}"
    )
    if "checkpoint" in step:
        number, whole = step["checkpoint_step"], step["checkpoint_loss"]
        trained = ", which has trained on them already" if number >= step["step"] else ""
        mean = f": {whole:.4g} on the whole" if isinstance(whole, float) else ""
        yield escape_text(f"losses by {step['checkpoint']}{trained}{mean}; the largest first")
    elif "why_no_loss" in step:
        yield escape_text(f"losses of samples: none, {step['why_no_loss']}")


def row_title(row: dict[str, Any], of_step: bool, is_mixture: bool) -> str:
    """Return the line above a row: its loss, number, place in the step, origin and length."""
    parts = [f"sample {row['sample']}"]
    if "whole_micro_batch" in row:
        parts = [f"micro-batch {row['micro_batch']}: {row['whole_micro_batch']} samples, joined"]
    if isinstance(row.get("loss"), float):
        parts.insert(0, f"loss {row['loss']:.4f}")
    if of_step:
        parts.append(f"micro-batch {row['micro_batch']}, position {row['position']}")
    if is_mixture or not row.get("origin"):
        parts.append(row["source"])
    if row.get("origin"):
        parts.append(row["origin"])
    if row["kind"] == "tokens":
        count = row["documents"]
        documents = f" in {count} documents" if count > 1 else ""
        padding = f", {row['padding']} padding" if row["padding"] else ""
        size = f"{len(row['input_ids'])} tokens{documents}{padding}"
        parts.append(f"{size}, {row['learnt']} learnt")
    return escape_text(" · ".join(parts))


def row_lines(row: dict[str, Any], style: RowStyle) -> Iterator[str]:
    """Yield the lines of one row."""
    if row["kind"] != "tokens":
        for field in row["fields"]:
            yield f"  {_value_text(field, style.width - 2)}"
    elif style.with_ids or "segments" not in row:
        yield from id_lines(row, style)
    else:
        yield from text_lines(row, style)


def text_lines(row: dict[str, Any], style: RowStyle) -> Iterator[str]:
    """Yield the decoded text of a row, wrapped, a new line per document."""
    before, after = style.marks
    lines: list[str] = []
    documents = 1 + max((one["document"] for one in row["segments"]), default=0)
    for number in range(documents):
        title = f"{number:>2} │ " if documents > 1 else "  │ "
        wrapper = TextWrapper(title, "   │ " if documents > 1 else "  │ ", style.width)
        for segment in row["segments"]:
            if segment["document"] != number:
                continue
            paint = ""
            if style.coloured:
                paint = LEARNT if segment["learnt"] else SPECIAL if segment["special"] else ""
                paint += SPECIAL if segment["special"] and segment["learnt"] else ""
            elif segment["learnt"]:
                wrapper.add(before)
            wrapper.add(escape_text(_segment_text(segment), keep_breaks=True), paint)
            if segment["learnt"] and not style.coloured:
                wrapper.add(after)
        lines += wrapper.finish()
    yield from lines[:MOST_LINES]
    if len(lines) > MOST_LINES:
        yield f"  … {len(lines) - MOST_LINES} more lines"


def _segment_text(segment: dict[str, Any]) -> str:
    """Return the text of a segment; a repeated special token once, with its count."""
    text, count = segment["text"], segment["tokens"]
    name = text[: len(text) // count]
    return f"{name}×{count}" if segment["special"] and count > 2 and name * count == text else text


def id_lines(row: dict[str, Any], style: RowStyle) -> Iterator[str]:
    """Yield the tokens of a row in columns: position, id, learnt, label, text."""
    yield f"{'doc':>5} {'pos':>6} {'id':>8} {'label':>8} learnt  token"
    for token in row["tokens"]:
        position = "–" if token["position"] is None else token["position"]
        label = "–" if token["label"] is None else token["label"]
        mark = "  ✓   " if token["learnt"] else "      "
        text = escape_text(token.get("text", ""))
        yield f"{token['document']:>5} {position:>6} {token['id']:>8} {label:>8} {mark}  {text}"


def _value_text(field: dict[str, Any], width: int) -> str:
    name = f"{field['name']}: " if field["name"] else ""
    head = f"{name}{field['dtype']} {field['shape']}"
    if "text" in field:
        return escape_text(f"{head} {field['text']}")[:width]
    if "values" in field:
        return escape_text(f"{head} = {', '.join(str(v) for v in field['values'])}")
    if "least" not in field:
        return escape_text(head)
    bad = f", {field['not_finite']} not finite" if field.get("not_finite") else ""
    return escape_text(
        f"{head} {field['least']:.4g} … {field['most']:.4g}, mean {field['mean']:.4g}, std "
        f"{field['std']:.4g}{bad}"
    )


def escape_text(text: str, *, keep_breaks: bool = False) -> str:
    r"""Return text with control and format characters as escapes.

    Args:
        text: of the user's data.
        keep_breaks: a line break stays, behind ↵.

    >>> escape_text("a\x1b[1m\u202eb\n"), escape_text("a\n", keep_breaks=True)
    ('a\\x1b[1m\\u202eb\\n', 'a↵\n')
    """
    return "".join(map(_escape_breaks if keep_breaks else _escape_letter, text))


def _escape_breaks(letter: str) -> str:
    return "↵\n" if letter == "\n" else _escape_letter(letter)


def _escape_letter(letter: str) -> str:
    if letter in LETTERS:
        return LETTERS[letter]
    if letter == "\n":
        return "\\n"
    if unicodedata.category(letter)[0] != "C" and letter not in "\u2028\u2029":
        return letter
    number = ord(letter)
    return f"\\x{number:02x}" if number < 256 else f"\\u{number:04x}"


def cell_width(letter: str) -> int:
    """Return the columns that a letter takes in a terminal.

    >>> cell_width("a"), cell_width("漢"), cell_width("\u0301")
    (1, 2, 0)
    """
    if unicodedata.combining(letter):
        return 0
    return 2 if unicodedata.east_asian_width(letter) in "WF" else 1


class TextWrapper:
    """Wrapper of painted text to the width of a terminal, letter by letter.

    Args:
        first, other: what stands before the first line and the others.
        width: columns of the terminal.
    """

    def __init__(self, first: str, other: str, width: int) -> None:
        self.prefix, self.other = first, other
        self.room = max(8, width - len(first) - 1)
        self.lines: list[str] = []
        self.line: list[str] = []
        self.used = 0

    def add(self, text: str, paint: str = "") -> None:
        """Append text, in a colour."""
        open_paint = False
        for letter in text:
            wide = 0 if letter == "\n" else cell_width(letter)
            if self.used + wide > self.room:
                self._break(open_paint)
                open_paint = False
            if letter == "\n":
                self._break(open_paint)
                open_paint = False
                continue
            if paint and not open_paint:
                self.line.append(paint)
                open_paint = True
            self.line.append(letter)
            self.used += wide
        if open_paint:
            self.line.append(PLAIN)

    def finish(self) -> list[str]:
        """Return the lines."""
        if self.line or not self.lines:
            self._break(False)
        return self.lines

    def _break(self, painted: bool) -> None:
        self.lines.append(self.prefix + "".join(self.line) + (PLAIN if painted else ""))
        self.prefix, self.line, self.used = self.other, [], 0
