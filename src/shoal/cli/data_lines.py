"""Lines of `shoal data look`: the facts of the data, then rows with learnt tokens marked.

The document comes from `trainer/jobs/data_inspection.py`; its texts are the user's data, so every
control character is escaped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import groupby
from typing import Any

from shoal.base.text.units import count_text
from shoal.cli.row_style import RowStyle
from shoal.cli.sample_table import sample_table_lines
from shoal.cli.wrapped_text import TextWrapper, cell_width, escape_text
from shoal.config.sections import DataSection

NAME_WIDTH, TEXT_WIDTH = 12, 16
HALF_FULL = 0.5
"""Share of a row with tokens below which packing is proposed."""
IGNORED_LABEL = -100
LEARNT, SPECIAL = "\x1b[4;32m", "\x1b[35m"
RAMP = " .:-=+*#%@"
MOST_LINES = 40
"""Lines of one row's text; the rest is counted."""


def data_lines(document: dict[str, Any], style: RowStyle, most: int) -> Iterator[str]:
    """Yield the lines of a document, with the texts of at most `most` rows.

    Samples of a step are sorted by gradient norm if that is known, else by loss.
    """
    by = "grad_norm" if any("grad_norm" in row for row in document["rows"]) else "loss"
    rows = sorted(document["rows"], key=lambda row: -row.get(by, -math.inf))
    if "step" in document:
        yield from step_lines(document)
        yield ""
        yield from sample_table_lines(rows, style.width, is_mixture=_is_mixture(document))
        if by == "loss" and any(by in row for row in rows):
            yield "the gradient norm of each sample: --norms"
        if rows[:most]:
            yield "sample: its number in the data; position: its place in the stream of the run"
    else:
        yield from head_lines(document["data"])
    if not style.with_ids and any(row["kind"] == "tokens" for row in rows[:most]):
        yield style.legend
    for row in rows[:most]:
        yield ""
        yield row_title(row, "step" in document, _is_mixture(document))
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
    yield "samples", _samples_fact(data)
    yield "step", f"{data['batch']} samples, in micro-batches of {data['micro_batch']}"
    if data["kind"] == "tokens":
        yield from _token_facts(data)
    if "learnt_share" in data:
        yield from _learnt_facts(data)
    if shapes := data.get("fields"):
        for field in shapes:
            yield "field", f"{_field_fact(field)}{_sampled_text(data)}"
    if labels := data.get("labels"):
        shown = ", ".join(f"{one.get('name', one['label'])} {one['count']}" for one in labels[:12])
        more = f", {data['label_count'] - 12} more" if data["label_count"] > 12 else ""
        yield "labels", f"{shown}{more}{_sampled_text(data)}"


def _sampled_text(data: dict[str, Any]) -> str:
    """Return of how many samples a fact is, if not of all."""
    count = data.get("sampled", 0)
    return f" (of {count} samples)" if count < data.get("samples", count + 1) else ""


def _token_facts(data: dict[str, Any]) -> Iterator[tuple[str, str]]:
    name = data["tokenizer"]
    is_trained = name.startswith("bpe:")
    trained = ", trained on this data" if is_trained else ""
    yield "tokenizer", f"{name or 'none known here'}{trained}, {data['vocabulary']:,} ids"
    if is_trained and name == DataSection().tokenizer:
        yield "", "a pretrained model brings its own"
    is_packed = data["packing"] == "on"
    full = data.get("full_share", 1)
    packing = ", packed" if is_packed else ""
    filled = f", {full:.0%} full" if is_packed or full < 1 else ""
    tokens = f", {count_text(data['tokens'])} tokens" if "tokens" in data else ""
    hint = "; try: data.packing=on" if not is_packed and full < HALF_FULL else ""
    yield "sequence", f"{data['sequence']} tokens a row{packing}{filled}{tokens}{hint}"
    if "lengths" in data:
        yield "lengths", _lengths_fact(data["lengths"])
    if "held_out_lengths" in data:
        yield "", f"held out: {_lengths_fact(data['held_out_lengths'], is_short=True)}"
    if "cut" in data:
        yield "cut", _cut_fact(data)


def _samples_fact(data: dict[str, Any]) -> str:
    """Return how many samples there are to train on, and how many are held out."""
    rows = "rows" if data["kind"] == "tokens" else "samples"
    held = data.get("held_out", 0)
    lengths = data.get("held_out_lengths", {})
    if "samples" not in data:
        return f"unknown: the data can only be iterated{f', {held:,} held out' if held else ''}"
    if "examples" not in data or "lengths" not in data or data["lengths"]["of"] != "examples":
        return f"{data['samples']:,} {rows} to train on, {held:,} held out"
    examples, out = data["examples"], lengths.get("count", 0)
    left = data.get("left_out", 0)
    text = f"{examples + out + left:,} examples: {examples:,} to train on, {out:,} held out"
    text += f", {left:,} left out" if left else ""
    return text + (f"; {data['samples']:,} + {held:,} rows" if data["packing"] == "on" else "")


def _lengths_fact(lengths: dict[str, Any], *, is_short: bool = False) -> str:
    """Return count, range and percentiles of some lengths; equal percentiles once."""
    count, least, most = lengths["count"], lengths["least"], lengths["most"]
    of = lengths["of"] if count != 1 else lengths["of"].removesuffix("s")
    if least == most:
        return f"{count:,} {of} of {least:,} tokens"
    low, half, high = (lengths[name] for name in ("p10", "p50", "p90"))
    text = f"{count:,} {of} of {least:,} … {most:,} tokens, median {half:,}"
    if low == high or is_short:
        return text
    return f"{text}; 10th percentile {low:,}, 90th {high:,}"


def _cut_fact(data: dict[str, Any]) -> str:
    """Return how many examples are cut or left out, and their loss of learnt tokens."""
    cut, left, lost = data["cut"], data["left_out"], data.get("cut_learnt")
    if not cut and not left:
        return "none"
    learnt = f", {lost:,} learnt token{'s' if lost != 1 else ''} lost" if lost is not None else ""
    ends = f"example{'s end' if cut != 1 else ' ends'} at token {data['sequence'] + 1}"
    examples = f"{cut:,} {ends}"
    out = f"; {left:,} left out: no answer before the cut" if left else ""
    return f"{examples}{learnt}{out}"


def _learnt_facts(data: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what is learnt in rows of tokens, also in those of the user's own dataset."""
    if data["kind"] != "tokens":
        lengths = data["row_lengths"]
        yield "rows", f"{lengths['least']} … {lengths['most']} tokens, {lengths['p50']} half"
    documents = data.get("documents_per_row")
    if documents and data.get("examples") and "by_source" not in data:
        documents = data["examples"] / data["samples"]
    packed = f"; {documents:.1f} documents a row" if documents else ""
    learnt, targets = data["learnt_tokens"], data["targets"]
    sampled = _sampled_text(data) if data["learnt_of"] != "all" else ""
    if targets and learnt == targets:
        yield "learnt", f"all {count_text(targets)} tokens{sampled}{packed}"
    else:
        share = f"{100 * learnt / max(1, targets):.0f} %"
        yield "learnt", f"{learnt:,} of {targets:,} tokens, {share}{sampled}{packed}"
        if data.get("examples"):
            yield "", "prompts and padding have no loss"
    if data.get("misplaced"):
        yield "labels", f"{data['misplaced']} are neither −100 nor the token that follows"


def _field_fact(field: dict[str, Any]) -> str:
    shapes = ", ".join(f"{shape}" for shape, _ in field["shapes"][:4])
    more = ", …" if len(field["shapes"]) > 4 else ""
    ranged = f", {field['least']:.4g} … {field['most']:.4g}" if "least" in field else ""
    bad = f", {field['not_finite']} not finite" if field.get("not_finite") else ""
    return f"{field['name'] or 'value'}: {'/'.join(field['dtypes'])} {shapes}{more}{ranged}{bad}"


def step_lines(document: dict[str, Any]) -> Iterator[str]:
    """Yield what is known of the step: numbers, events, source, losses by source."""
    step, data = document["step"], document["data"]
    start, stop = step["samples"]
    numbers = [
        f", {name.replace('_', ' ')} {step[name]:.4g}"
        for name in ("loss", "grad_norm")
        if isinstance(step.get(name), int | float)
    ]
    skipped = ", skipped" if step.get("skipped") else ""
    span = f"samples {start} … {stop - 1} of the stream"
    if data.get("kind") == "tokens" and "sequence" in data:
        span += f", rows of {data['sequence']} tokens"
    yield f"{'step':<{NAME_WIDTH}}{step['step']}: {span}{''.join(numbers)}{skipped}"
    for text in step.get("events", ()):
        yield f"{'event':<{NAME_WIDTH}}{escape_text(text)}"
    yield f"{'source':<{NAME_WIDTH}}{escape_text(data['source'])}"
    if _is_mixture(document):
        yield from _source_lines(document["rows"])
    if "checkpoint" in step:
        yield from _checkpoint_lines(step)
    elif "why_no_loss" in step:
        yield f"{'losses':<{NAME_WIDTH}}{escape_text('none: ' + step['why_no_loss'])}"


def _checkpoint_lines(step: dict[str, Any]) -> Iterator[str]:
    """Yield with which weights the samples' losses are computed, and their mean."""
    number, whole = step["checkpoint_step"], step["checkpoint_loss"]
    mean = f"; mean over their targets {whole:.4g}" if isinstance(whole, float) else ""
    text = f"those below are computed with the weights of step {number}{mean}"
    yield f"{'losses':<{NAME_WIDTH}}{text}"
    if number >= step["step"]:
        yield f"{'':<{NAME_WIDTH}}these weights have trained on the samples; no older ones are kept"
    yield f"{'':<{NAME_WIDTH}}{escape_text(step['checkpoint'])}"


def _is_mixture(document: dict[str, Any]) -> bool:
    return bool(document["data"]["source"].startswith("mix:"))


def _source_lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield count and mean loss of the samples of each source in a step."""
    by_source: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_source.setdefault(row["source"], []).append(row)
    for name, some in sorted(by_source.items()):
        weighed = [row for row in some if "loss" in row]
        targets = sum(row["targets"] for row in weighed)
        total = sum(row["loss"] * row["targets"] for row in weighed)
        loss = f", loss {total / targets:.4g}" if targets else ""
        count = f"{len(some)} sample{'s' if len(some) > 1 else ''}"
        yield f"{'':<{NAME_WIDTH}}{escape_text(name)}: {count}{loss}"


def row_title(row: dict[str, Any], of_step: bool, is_mixture: bool) -> str:
    """Return the line above a row: its loss, number, place in the step, origin and length."""
    parts = [f"sample {row['sample']}"]
    if "whole_micro_batch" in row:
        parts = [f"micro-batch {row['micro_batch']}: {row['whole_micro_batch']} samples, joined"]
    if isinstance(row.get("grad_norm"), float):
        parts.insert(0, f"grad norm {row['grad_norm']:.4f}")
    if isinstance(row.get("loss"), float):
        parts.insert(0, f"loss {row['loss']:.4f}")
    if of_step:
        parts.append(f"micro-batch {row['micro_batch']}, position {row['position']}")
    if is_mixture or not row.get("origin"):
        parts.append(row["source"])
    if row.get("origin"):
        parts.append(row["origin"])
    if row["kind"] == "tokens":
        parts += [_size_text(row), *([row["note"]] if "note" in row else [])]
    return escape_text(" · ".join(parts))


def _size_text(row: dict[str, Any]) -> str:
    """Return the size of a row: tokens that are shown, those that are inputs, padding."""
    count, padding = row["documents"], row["padding"]
    lasts = sum(token["position"] is None for token in row["tokens"])
    documents = f" in {count} documents" if count > 1 else ""
    count = len(row["tokens"]) - padding
    inputs = f" ({count - lasts} inputs)" if lasts else ""
    text = f"{count} tokens{inputs}{documents}, {row['learnt']} learnt"
    if row.get("cut"):
        text += f", {row['cut']:,} more cut off"
    return f"{text}, {padding} padding" if padding else text


def row_lines(row: dict[str, Any], style: RowStyle) -> Iterator[str]:
    """Yield the lines of one row."""
    if row["kind"] != "tokens":
        for field in row["fields"]:
            yield f"  {_value_text(field)}"[: style.width]
            for shades in field.get("shades", ()):
                yield "    " + "".join(RAMP[int(one)] for one in shades)
    elif style.with_ids:
        yield from id_lines(row)
    else:
        yield from text_lines(row if "segments" in row else _with_id_segments(row), style)


def _with_id_segments(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row whose tokens nobody can decode, with their ids as its text."""
    segments: list[dict[str, Any]] = []
    shown = row["tokens"][: len(row["tokens"]) - row.get("padding", 0)]
    runs = groupby(shown, key=lambda token: (token["document"], token["learnt"]))
    for (document, learnt), run in runs:
        ids = [str(token["id"]) for token in run]
        between = " " if segments and segments[-1]["document"] == document else ""
        entry = {
            "learnt": learnt,
            "special": False,
            "ids": True,
            "document": document,
            "tokens": len(ids),
        }
        segments.append({**entry, "text": between + " ".join(ids)})
    return {**row, "segments": segments}


def text_lines(row: dict[str, Any], style: RowStyle) -> Iterator[str]:
    """Yield the decoded text of a row, wrapped, a new line per document."""
    lines: list[str] = []
    count = row.get("documents") or 1 + max((s["document"] for s in row["segments"]), default=0)
    for number in range(count):
        segments = [one for one in row["segments"] if one["document"] == number]
        title = f"{number:>2} │ " if count > 1 else "  │ "
        wrapper = TextWrapper(title, "   │ " if count > 1 else "  │ ", style.width)
        if style.coloured:
            for segment in segments:
                wrapper.add(_segment_text(segment), _paint(segment), by_words="ids" in segment)
        else:
            _add_marked(wrapper, segments, *style.marks)
        lines += wrapper.finish()
    if row.get("padding"):
        lines.append(f"{'   │ ' if count > 1 else '  │ '}<pad>×{row['padding']}")
    yield from lines[:MOST_LINES]
    if len(lines) > MOST_LINES:
        yield f"  … {len(lines) - MOST_LINES} more lines"


def _paint(segment: dict[str, Any]) -> str:
    """Return the colours of a segment."""
    return (LEARNT if segment["learnt"] else "") + (SPECIAL if segment["special"] else "")


def _add_marked(
    wrapper: TextWrapper, segments: list[dict[str, Any]], before: str, after: str
) -> None:
    """Add the text of a document, with marks around its learnt stretches."""
    for learnt, stretch in groupby(segments, key=lambda segment: segment["learnt"]):
        wrapper.add(before if learnt else "")
        for segment in stretch:
            wrapper.add(_segment_text(segment), by_words="ids" in segment)
        wrapper.add(after if learnt else "")


def _segment_text(segment: dict[str, Any]) -> str:
    """Return the text of a segment, escaped; a repeated special token once, with its count."""
    text, count = segment["text"], segment["tokens"]
    name = text[: len(text) // count]
    if segment["special"] and count > 2 and name * count == text:
        text = f"{name}×{count}"
    return escape_text(text, keep_breaks=True)


def id_lines(row: dict[str, Any]) -> Iterator[str]:
    """Yield the predictions of a row in columns: the token at a position, and its target."""
    yield "  each line: after this token, predict the target; ✓: it has a loss, -100: none"
    yield f"{'doc':>5} {'position':>8} {'id':>7}  {'token':<{TEXT_WIDTH}} {'target':>7} learnt"
    padding = row.get("padding", 0)
    tokens = row["tokens"][: len(row["tokens"]) - padding]
    for token, after in zip(tokens, [*tokens[1:], None], strict=True):
        if token["position"] is None:  # the target of the line before
            continue
        is_same = after is not None and after["document"] == token["document"]
        label = token["label"]
        if not row.get("shifted", True):  # a label stands at its own token
            label = after["label"] if after is not None and is_same else None
        mark = "✓" if label is not None and label != IGNORED_LABEL else ""
        name = after.get("text", "") if after is not None and is_same and mark else ""
        text = _pad_cells(escape_text(token.get("text", "")), TEXT_WIDTH)
        target = "–" if label is None else label
        columns = f"{token['document']:>5} {token['position']:>8} {token['id']:>7}  {text}"
        same = after is not None and after["id"] == label
        yield f"{columns} {target:>7} {mark:^6} {escape_text(name) if same else ''}".rstrip()
    if padding:
        first, last = (row["tokens"][n]["position"] for n in (-padding, -1))
        span = f"{first}…{last}" if padding > 1 else f"{first}"
        columns = f"{'–':>5} {span:>8} {row['tokens'][-1]['id']:>7}"
        yield f"{columns}  {f'<pad>×{padding}':<{TEXT_WIDTH}} {IGNORED_LABEL:>7}"


def _pad_cells(text: str, width: int) -> str:
    """Return text with spaces behind it up to some columns of a terminal."""
    return text + " " * (width - sum(map(cell_width, text)))


def _value_text(field: dict[str, Any]) -> str:
    """Return dtype, shape and values or ranges of a field."""
    name = f"{field['name']}: " if field["name"] else ""
    head = f"{name}{field['dtype']} {field['shape'] if field['shape'] else ''}".rstrip()
    bad = f", {field['not_finite']} not finite" if field.get("not_finite") else ""
    if "text" in field:
        return escape_text(f"{head} {field['text']}")
    if "values" in field:
        class_name = f" ({field['class']})" if "class" in field else ""
        return escape_text(f"{head} = {', '.join(map(str, field['values']))}{class_name}{bad}")
    if "least" not in field:
        return escape_text(f"{head}{bad}")
    return (
        f"{escape_text(head)} {field['least']:.4g} … {field['most']:.4g}, mean "
        f"{field['mean']:.4g}, std {field['std']:.4g}{bad}"
    )
