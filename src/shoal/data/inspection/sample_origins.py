"""Origin of samples: the part of a mixture, and the file, row or key that each comes from.

    text          sample i ──token i · sequence──> end-of-text tokens before it ──> file, or row
    examples      row of several examples ──> their numbers ──> file:line of each
    images, wds   path below the folder, key in the shards
    own data      the index alone

Files are read once for all wanted samples, up to the last of them. An origin that would take more
than MOST_TOKENS tokens or MOST_ROWS rows to find is left out.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from shoal.base.errors import ShoalError
from shoal.config.paths import ROWS, TEXTS, parse_validation_share, split_source
from shoal.config.sections import DataSection
from shoal.data.files.documents import Document
from shoal.data.files.image_folders import ImageFolder
from shoal.data.files.token_files import TokenDataset
from shoal.data.inspection.example_facts import row_ends
from shoal.data.inspection.source_facts import part_names
from shoal.data.loading.weighted_mixture import WeightedMixture
from shoal.data.sources import Source, list_documents
from shoal.data.streams.webdataset import TarSamples
from shoal.data.text.finetuning_samples import ExampleRows
from shoal.data.text.text_files import END_NAMES
from shoal.data.text.text_rows import TextRows, split_row_documents

MOST_TOKENS = 2**27
MOST_ROWS = 10**6


def find_origins(
    source: Source, section: DataSection, indices: Sequence[int]
) -> list[dict[str, Any]]:
    """Return source, index in it, and origin ("" if unknown) of each sample.

    Samples of fine-tuning rows also have `ends`, as of `row_ends`.

    Args:
        source: the opened data.
        section: [data] of the run.
        indices: dataset indices, as a step's `sample_ids`.
    """
    train = source.train
    is_mixture = isinstance(train, WeightedMixture)
    datasets, firsts = (train.datasets, train.firsts) if is_mixture else ([train], [0])
    names = part_names(section.source, len(datasets))
    found: list[dict[str, Any]] = []
    for index in indices:
        part = bisect.bisect_right(firsts, index) - 1 if is_mixture else 0
        part = min(max(part, 0), len(datasets) - 1)
        found.append({"source": names[part], "part": part, "part_sample": index - firsts[part]})
    for number, dataset in enumerate(datasets):
        mine = [row for row in found if row["part"] == number]
        try:
            origins = _part_origins(dataset, source, section, mine)
        except (ShoalError, OSError):  # files that changed under a cache of their tokens
            origins = [""] * len(mine)
        for row, origin in zip(mine, origins, strict=True):
            row["origin"] = origin
            if isinstance(dataset, ExampleRows):
                row["ends"] = row_ends(dataset, row["part_sample"])
    return [{k: v for k, v in row.items() if k != "part"} for row in found]


def _part_origins(
    dataset: Any, source: Source, section: DataSection, rows: list[dict[str, Any]]
) -> list[str]:
    """Return the origins of some samples of one part."""
    numbers = [row["part_sample"] for row in rows]
    if not rows:
        return []
    if isinstance(dataset, ImageFolder):
        return [dataset.names[n] if 0 <= n < len(dataset.names) else "" for n in numbers]
    if isinstance(dataset, TarSamples):
        return [dataset.key(n) for n in numbers]
    kind, argument = split_source(rows[0]["source"])
    if isinstance(dataset, ExampleRows):
        documents, _ = split_row_documents(kind, argument, "", 0.0, "data.source")
        return _example_origins(dataset, documents, numbers)
    if isinstance(dataset, TokenDataset) and kind in TEXTS:
        share, _ = parse_validation_share(section)
        part = replace(section, source=rows[0]["source"])
        documents, _ = list_documents(part, part.source, share, "data.source")
        return _text_origins(dataset, documents, source.tokenizer, numbers, kind in ROWS)
    return [""] * len(rows)


def _example_origins(
    dataset: ExampleRows, documents: Sequence[Document], numbers: Sequence[int]
) -> list[str]:
    """Return file:line of the examples in each row of a fine-tuning source."""
    members = [dataset.numbers[dataset.examples_of(n)].tolist() for n in numbers]
    places = (place for one in documents if isinstance(one, TextRows) for place, _ in one.rows())
    named = _pick(places, {n for row in members for n in row})
    return [", ".join(named[n] for n in row if n in named) for row in members]


def _text_origins(
    dataset: TokenDataset,
    documents: Sequence[Document],
    tokenizer: Any,
    numbers: Sequence[int],
    by_row: bool,
) -> list[str]:
    """Return the file or row in which each sample of running text begins."""
    ends = [tokenizer.token_to_id(name) for name in END_NAMES] if tokenizer is not None else []
    end = next((one for one in ends if one is not None), None)
    last = max(numbers) * dataset.sequence
    if end is None or len(dataset.spans) != 1 or last > MOST_TOKENS:
        return [""] * len(numbers)
    tokens = dataset.spans[0].open()
    stops = np.flatnonzero(tokens[:last] == end) + 1  # first tokens of the second text, the third …
    texts = [int(np.searchsorted(stops, n * dataset.sequence, side="right")) for n in numbers]
    if not by_row:
        if max(texts) >= len(documents):  # a file holds the end-of-text token itself
            return [""] * len(numbers)
        return [documents[text].name for text in texts]
    named = _pick(_side_places(documents), set(texts))
    return [named.get(text, "") for text in texts]


def _side_places(documents: Sequence[Document]) -> Iterator[str]:
    """Yield the file and line of each training row, in the order of its text."""
    for document in documents:
        if not isinstance(document, TextRows):
            continue
        sides = document.iter_split()
        for (place, _), (held, _) in zip(document.rows(), sides, strict=False):
            if held is document.held:
                yield place


def _pick(places: Iterator[str], wanted: set[int]) -> dict[int, str]:
    """Return the items at some indices of a stream, reading no further than the last of them."""
    last = min(max(wanted, default=-1), MOST_ROWS)
    found = {}
    for number, place in enumerate(places):
        if number > last:
            break
        if number in wanted:
            found[number] = place
    return found
