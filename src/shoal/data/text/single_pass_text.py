"""Reading of text files in one pass, with a sample for the tokenizer before the encoding.

    up to 128 MiB   every text is read and cached for the encoding; the tokenizer's sample is an
                    equal share of every file
    more            the sample is 64 places, evenly spread over all bytes, 64 KiB each, read
                    beforehand; of parquet the first rows of some row groups, of HF datasets rows

The sample depends on the files alone, so every rank and every machine trains the same tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

from shoal.data.files.documents import Document, spread_ranges
from shoal.data.text.text_rows import TextRows, iter_texts_at
from shoal.wire.phases import iter_with_progress

TRAIN_CHARACTERS = 2**22
"""Approximate characters on which the BPE is trained."""

PLACES = 64
WHOLE_BYTES = 2**27
"""Most bytes of files that are read whole for the sample; above it only some places are."""

KEPT_CHARACTERS = 2**28
"""Most characters that are kept in memory; larger texts are read a second time."""

Side = tuple[int, str]
"""A text and its side: 0 training, 1 held out."""


def choose_sample_rule(documents: Sequence[Document], limit_bytes: int | None = None) -> str:
    """Return "whole" if files fit in `limit_bytes`, else "places": evenly spread ranges."""
    limit = WHOLE_BYTES if limit_bytes is None else limit_bytes
    return "whole" if sum(d.size_bytes for d in documents) <= limit else "places"


def tokenizer_sample_share(documents: Sequence[Document]) -> float:
    """Return the share of all text on which a tokenizer is trained."""
    return min(1.0, TRAIN_CHARACTERS / max(1, sum(d.size_bytes for d in documents)))


def sample_texts_at_places(
    documents: Sequence[Document], of_rows: Callable[..., Iterator[str]] = iter_texts_at
) -> Iterator[str]:
    """Yield TRAIN_CHARACTERS of text, read at positions spread over documents of each kind.

    Args:
        of_rows: returns the texts of (documents of one kind, places, bytes).
    """
    share = tokenizer_sample_share(documents)
    for kind, some in groupby(documents, _kind):
        group = list(some)
        wanted = round(share * sum(d.size_bytes for d in group))
        if kind:
            yield from of_rows(group, PLACES, wanted)
        else:
            yield from (
                d.read_range(start, stop) for d, start, stop in spread_ranges(group, PLACES, wanted)
            )


def _kind(document: Document) -> tuple[str, ...]:
    return (document.kind, document.field) if isinstance(document, TextRows) else ()


class SinglePassTexts:
    """All texts of two groups of documents: first an optional sample, then every text.

    `has_text` is, after reading, whether each side has a non-empty text.
    """

    def __init__(self, train: Sequence[Document], validation: Sequence[Document]) -> None:
        self.train, self.validation = train, validation
        files, others = ([document.path for document in side] for side in (train, validation))
        sides = all(document.is_split for document in (*train, *validation))
        self._is_split = files == others and sides
        self._kept: list[list[Side]] = []
        self._room = KEPT_CHARACTERS
        self._has_all = False
        self.has_text = [False, False]

    def sample(self) -> Iterator[str]:
        """Yield training texts, or parts of them, on which a tokenizer is trained."""
        is_empty = True
        for text in self._sampled():
            is_empty = is_empty and not text
            yield text
        if is_empty:  # rows so long that none of them is the one in so many, or begins at a place
            texts = (text for document in self.train for text in document.texts() if text)
            yield next(texts, "")[:TRAIN_CHARACTERS]

    def _sampled(self) -> Iterator[str]:
        if choose_sample_rule(self.train) == "places":
            yield from sample_texts_at_places(self.train)
            return
        share = tokenizer_sample_share(self.train)
        for document in self.train:
            yield from document.sample_texts(self._cache_texts(document), share)
        self._has_all = self._room >= 0
        if not self._has_all:
            self._kept.clear()  # a part is useless, and takes memory during the second read

    def _cache_texts(self, document: Document) -> Iterator[str]:
        """Yield the training texts of a document; cache all its texts in memory if they fit."""
        kept: list[Side] = []
        self._kept.append(kept)
        for side, text in self._read(document):
            self._room -= len(text)
            if self._room >= 0:
                kept.append((side, text))
            if side == 0:
                yield text

    def _read(self, document: Document) -> Iterator[Side]:
        """Yield (0 training or 1 held out, text) of a training document; 1 only if it is split."""
        if self._is_split:
            return ((int(held), text) for held, text in document.iter_split())
        return ((0, text) for text in document.texts())

    def iter_all(self) -> Iterator[Side]:
        """Yield all training and held-out texts in order; a file with both is read once."""
        both = [(0, document) for document in self.train]
        if not self._is_split:
            both += [(1, document) for document in self.validation]
        kept = iter(self._kept if self._has_all else ())
        for side, document in iter_with_progress("encode", len(both), both):
            known = None if side else next(kept, None)
            if known is None:
                found = ((1, text) for text in document.texts()) if side else self._read(document)
            else:
                found = iter(known)
            for where, text in found:
                self.has_text[where] |= bool(text)
                yield where, text
            if known is not None:
                known.clear()
