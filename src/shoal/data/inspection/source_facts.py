"""Facts of a data source for `shoal data look`: sizes, lengths, learnt share, parts of a mixture.

Sizes and lengths come from the index of the source, which holds them already. Shares, shapes and
label counts come from at most MOST_SAMPLES samples, spread evenly over the source. No stream and no
generator advances.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.config.mixture_syntax import split_mixture
from shoal.config.paths import split_source
from shoal.data.files.token_files import SyntheticTokens, TokenDataset
from shoal.data.inspection.example_facts import example_facts
from shoal.data.inspection.sample_fields import (
    IGNORED_LABEL,
    count_misplaced,
    count_padding,
    describe_sample,
    mark_tokens,
)
from shoal.data.loading.dataset_kind import is_indexed
from shoal.data.loading.sample_seeds import seeded_rng
from shoal.data.loading.weighted_mixture import WeightedMixture
from shoal.data.sources import Source
from shoal.data.text.finetuning_samples import ExampleRows
from shoal.data.text.text_files import END_NAMES

MOST_SAMPLES = 256
"""Samples that are read for shares, shapes and label counts."""
MOST_TOKENS = 2**24
"""Tokens at the front of a file in which document ends are searched."""
MOST_LABELS = 64
EXACT = ("targets", "learnt_tokens")
"""Counts of all rows, which replace those of the sampled rows."""


def measure_source(source: Source, source_name: str) -> dict[str, Any]:
    """Return the JSON facts of an opened source.

    Args:
        source: an opened `data.source`.
        source_name: its text, which names the parts of a mixture.

    Returns:
        Keys by kind of data: samples, held_out, tokens, examples, cut, cut_learnt, left_out,
        lengths, held_out_lengths, full_share, targets, learnt_tokens, learnt_share, fields,
        labels, by_source. Keys without a value are missing.
    """
    facts: dict[str, Any] = {}
    train = source.train
    if is_indexed(train):
        facts["samples"] = len(train)
    if source.validation is not None and is_indexed(source.validation):
        facts["held_out"] = len(source.validation)
        held = _sum_index_facts([_index_facts(source.validation, source.tokenizer)])
        facts |= {"held_out_lengths": held["lengths"]} if "lengths" in held else {}
    parts = train.datasets if isinstance(train, WeightedMixture) else [train]
    facts |= _sum_index_facts([_index_facts(part, source.tokenizer) for part in parts])
    if is_indexed(train):
        counted = {key: facts[key] for key in EXACT if key in facts}
        facts |= _sampled_facts(train, source.classes) | counted
        if facts.get("targets") and "learnt_tokens" in counted:
            facts["learnt_share"] = facts["learnt_tokens"] / facts["targets"]
            facts["learnt_of"] = "all"
    if isinstance(train, WeightedMixture):
        facts["by_source"] = _mixture_parts(train, source_name, source.tokenizer)
    return facts


def part_names(source_name: str, count: int) -> list[str]:
    """Return the names of the parts of a mixture, or of the one source."""
    kind, argument = split_source(source_name)
    if kind != "mix":
        return [source_name] * count
    return [name for _, name in split_mixture(argument, "data.source")]


def spread_over(count: int, most: int) -> list[int]:
    """Return at most `most` indices below `count` at equal distances, in order.

    >>> spread_over(10, 4), spread_over(3, 4)
    ([0, 2, 5, 7], [0, 1, 2])
    """
    return [n * count // most for n in range(most)] if count > most else list(range(count))


def length_percentiles(lengths: npt.NDArray[np.int64] | Sequence[int]) -> dict[str, int]:
    """Return least, 10th, 50th and 90th percentile and most of some lengths."""
    ordered = np.sort(np.asarray(lengths))
    last = len(ordered) - 1
    ranks = {"least": 0, "p10": last // 10, "p50": last // 2, "p90": last * 9 // 10, "most": last}
    return {name: int(ordered[rank]) for name, rank in ranks.items()}


def _index_facts(train: Any, tokenizer: Any) -> dict[str, Any]:
    """Return the facts that a dataset's own index holds; {} for the user's own."""
    if isinstance(train, ExampleRows):
        return example_facts(train)
    if isinstance(train, TokenDataset):
        tokens = len(train) * train.sequence
        facts = {"tokens": tokens, "room": tokens, "targets": tokens, "learnt_tokens": tokens}
        lengths = _document_lengths(train, tokenizer)
        return {**facts, "lengths": lengths, "lengths_of": "texts"} if len(lengths) else facts
    if isinstance(train, SyntheticTokens):
        tokens = len(train) * train.sequence
        return {"tokens": tokens, "room": tokens, "targets": tokens, "learnt_tokens": tokens}
    return {}


def _document_lengths(train: TokenDataset, tokenizer: Any) -> npt.NDArray[np.int64]:
    """Return the tokens of each document, its end-of-text token included."""
    none = np.zeros(0, dtype=np.int64)
    ends = [tokenizer.token_to_id(name) for name in END_NAMES] if tokenizer is not None else []
    end = next((i for i in ends if i is not None), None)
    if end is None:
        return none
    found = [np.flatnonzero(span.open()[:MOST_TOKENS] == end) for span in train.spans]
    return np.concatenate([np.diff(one, prepend=-1) for one in found]) if found else none


def _sum_index_facts(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the facts of all parts of a mixture as one."""
    summed: dict[str, Any] = {}
    for key in ("examples", "tokens", "cut", "cut_learnt", "left_out"):
        if any(key in part for part in parts):
            summed[key] = sum(part.get(key, 0) for part in parts)
    for key in EXACT:
        if parts and all(key in part for part in parts):
            summed[key] = sum(part[key] for part in parts)
    if parts and all("room" in part for part in parts):
        summed["full_share"] = summed["tokens"] / max(1, sum(part["room"] for part in parts))
    lengths = [part["lengths"] for part in parts if "lengths" in part]
    if lengths and len(both := np.concatenate(lengths)):
        kinds = {part["lengths_of"] for part in parts if "lengths_of" in part}
        kind = kinds.pop() if len(kinds) == 1 else "texts and examples"
        summed["lengths"] = {"of": kind, "count": len(both), **length_percentiles(both)}
    return summed


def _mixture_parts(
    train: WeightedMixture, source_name: str, tokenizer: Any
) -> list[dict[str, Any]]:
    """Return name, weight, samples and tokens of each part, and its passes in an epoch."""
    rows = []
    whole = sum(train.parts)
    names = part_names(source_name, len(train.datasets))
    for name, dataset, part in zip(names, train.datasets, train.parts, strict=True):
        facts = _index_facts(dataset, tokenizer)
        used = len(train) * part / whole
        row = {"source": name, "weight": part / whole, "samples": len(dataset)}
        row |= {"tokens": facts["tokens"]} if "tokens" in facts else {}
        rows.append({**row, "passes_per_epoch": used / len(dataset)})
    return rows


def _sampled_facts(train: Any, classes: Sequence[str]) -> dict[str, Any]:
    """Return shares, shapes and label counts of samples that are spread over a dataset."""
    described = []
    indices = spread_over(len(train), MOST_SAMPLES)
    for index in indices:
        with seeded_rng("look", index):
            sample = train[index]
        pair = isinstance(sample, tuple | list) and len(sample) == 2
        inputs, targets = sample if pair else (sample, sample)
        described.append(describe_sample(inputs, targets))
    facts: dict[str, Any] = {"sampled": len(indices)}
    if all(one["kind"] == "tokens" for one in described):
        return facts | _label_shares(described)
    return facts | _field_ranges(described) | _label_counts(described, classes)


def _label_shares(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return counts of targets without padding, of learnt tokens, and of documents per row."""
    marked = [mark_tokens(row) for row in rows]
    padding = [count_padding(tokens) for tokens in marked]
    labels = [label for row in rows for label in row["labels"] or ()]
    pads = sum(n for row, n in zip(rows, padding, strict=True) if row["labels"] is not None)
    targets = len(labels) - pads
    learnt = sum(label != IGNORED_LABEL for label in labels)
    facts: dict[str, Any] = {
        "targets": targets,
        "learnt_tokens": learnt,
        "learnt_of": "sampled",
        "learnt_share": learnt / max(1, targets),
        "misplaced": sum(count_misplaced(row) for row in rows),
        "row_lengths": length_percentiles([len(row["input_ids"]) for row in rows]),
    }
    if any(row["position_ids"] for row in rows):
        documents = [
            1 + tokens[-1 - count]["document"]
            for tokens, count in zip(marked, padding, strict=True)
        ]
        facts["documents_per_row"] = sum(documents) / len(documents)
    return facts


def _field_ranges(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return name, dtype, shapes and range of each field over some samples."""
    fields: dict[str, dict[str, Any]] = {}
    for entry in (field for row in rows for field in row.get("fields", ())):
        known = fields.setdefault(
            entry["name"], {"name": entry["name"], "dtypes": set(), "shapes": Counter()}
        )
        known["dtypes"].add(entry["dtype"])
        known["shapes"][tuple(entry["shape"])] += 1
        values = [v for v in entry.get("values", ()) if isinstance(v, int | float)]
        for key, choose in (("least", min), ("most", max)):
            here = [*([entry[key]] if key in entry else []), *values]
            if here:
                known[key] = choose([*here, *([known[key]] if key in known else [])])
        known["not_finite"] = known.get("not_finite", 0) + entry.get("not_finite", 0)
    return {
        "fields": [
            {
                **one,
                "dtypes": sorted(one["dtypes"]),
                "shapes": [[list(s), n] for s, n in one["shapes"].most_common(MOST_LABELS)],
            }
            for one in fields.values()
        ]
    }


def _label_counts(rows: list[dict[str, Any]], classes: Sequence[str]) -> dict[str, Any]:
    """Return how often each label occurs, if targets are one integer per sample."""
    found: Counter[int] = Counter()
    for row in rows:
        for entry in row.get("fields", ()):
            values = entry.get("values", [])
            is_label = entry["name"] in ("targets", "labels", "label")
            if is_label and len(values) == 1 and isinstance(values[0], int):
                found[values[0]] += 1
    if not found:
        return {}
    named = {label: classes[label] for label in found if 0 <= label < len(classes)}
    some = sorted(found.items(), key=lambda pair: (-pair[1], pair[0]))[:MOST_LABELS]
    return {
        "labels": [
            {"label": label, "count": count, **({"name": named[label]} if label in named else {})}
            for label, count in some
        ],
        "label_count": len(found),
    }
