"""Source `mix:`: parts opened with one tokenizer, mixed by weight, and their held-out parts.

bpe:VOCABULARY is trained on an equal share of all parts' text. Then each part is opened as if
alone, and weighted_mixture.py selects the part of every sample.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch.utils.data import ConcatDataset

from shoal.base.errors import ConfigError, shorten
from shoal.config.mixture_syntax import split_mixture
from shoal.config.paths import TEXTS, split_source
from shoal.config.sections import DataSection
from shoal.data.files.documents import Document
from shoal.data.files.tokenizer_cache import NewEntry, content_key, open_cached
from shoal.data.loading.dataset_kind import is_indexed
from shoal.data.loading.sample_seeds import draws_nothing
from shoal.data.loading.weighted_mixture import WeightedMixture
from shoal.data.text.chat_examples import iter_examples
from shoal.data.text.single_pass_text import (
    choose_sample_rule,
    sample_texts_at_places,
    tokenizer_sample_share,
)
from shoal.data.text.text_files import train_bpe_on
from shoal.data.text.text_rows import CHAT, PAIR, TextRows, iter_rows, iter_rows_at, iter_texts_at

WHOLE_BYTES = 2**26
"""Bytes of text above which the tokenizer samples places: opening reads the parts again."""

Open = Callable[[DataSection], Any]
Documents = Callable[[str], list[Document]]


class ConcatenatedParts(ConcatDataset[Any]):
    """Concatenated held-out parts, with a marker whether reading them draws at random.

    Attributes:
        source_names: name of each part's source.
    """

    def __init__(self, datasets: list[Any], source_names: Sequence[str] = ()) -> None:
        super().__init__(datasets)
        self.draws_nothing = all(draws_nothing(dataset) for dataset in datasets)
        self.source_names = tuple(source_names)

    def source_of(self, index: int) -> str:
        """Return the name of the source of sample `index`."""
        return self.source_names[bisect.bisect_right(self.cumulative_sizes, index)]


def open_mixture(
    section: DataSection, argument: str, second: str, documents: Documents, opened: Open
) -> Any:
    """Return the `Source` of a mixture.

    Args:
        second: another source for validation; "": each part's held-out samples.
        documents: returns the training texts of a part.
        opened: opens one part.

    Raises:
        ConfigError: parts cannot be mixed: other kinds, iterables, or more token ids than the
            first.
    """
    parts = split_mixture(argument, "data.source")
    texts = [source for _, source in parts if split_source(source)[0] in TEXTS]
    if texts and section.tokenizer.startswith("bpe:"):
        found = [document for source in texts for document in documents(source)]
        section = replace(section, tokenizer=_shared_tokenizer(found, section.tokenizer))
    held = "0" if second else section.validation
    sources = [opened(replace(section, source=s, validation=held)) for _, s in parts]
    first = sources[0]
    for (_, name), source in zip(parts, sources, strict=True):
        _check(parts[0][1], first, name, source)
    names = [name for _, name in parts]
    train = WeightedMixture([s.train for s in sources], [part for part, _ in parts], names)
    if second:
        other = opened(replace(section, source=second, validation="0"))
        if other.kind != first.kind:
            raise ConfigError(
                f"data.validation = {second}: gives {other.kind}, data.source = {section.source} "
                f"gives {first.kind}"
            )
        validation, read = other.train, None
    else:
        kept = [source for source in sources if source.validation is not None]
        kept_names = [n for n, s in zip(names, sources, strict=True) if s.validation is not None]
        held_out = [source.validation for source in kept]
        validation = ConcatenatedParts(held_out, kept_names) if kept else None
        read = sum(s.validation_samples or len(s.validation) for s in kept) or None
    told = " + ".join(
        f"{part}/{sum(p for p, _ in parts)} of {source.description}"
        for (part, _), source in zip(parts, sources, strict=True)
    )
    tokenizers = [source.tokenizer for source in sources if source.tokenizer is not None]
    return replace(
        first,
        train=train,
        validation=validation,
        validation_samples=read,
        vocabulary=max((s.vocabulary for s in sources if s.vocabulary), default=None),
        tokenizer=tokenizers[0] if tokenizers else None,
        unigram_entropy=None,
        description=f"mixture, {len(train)} samples an epoch: {told}",
    )


def _check(first_name: str, first: Any, name: str, source: Any) -> None:
    where = f"data.source: the mixture's part {name}"
    if not is_indexed(source.train):
        raise ConfigError(
            f"{where} can only be iterated, so its samples cannot be dealt; try: a dataset "
            f"with __getitem__ and __len__"
        )
    if source.kind != first.kind:
        raise ConfigError(f"{where} gives {source.kind}, {first_name} gives {first.kind}")
    if source.classes != first.classes:  # class 0 would be another thing in each
        raise ConfigError(
            f"{where} has the classes {shorten(', '.join(source.classes)) or '(none)'}, "
            f"{first_name} "
            f"has {shorten(', '.join(first.classes)) or '(none)'}; try: the same folders in both"
        )


def _shared_tokenizer(documents: list[Document], spec: str) -> str:
    """Return the path of the tokenizer trained on all documents; from the cache if possible."""
    share, rule = tokenizer_sample_share(documents), choose_sample_rule(documents, WHOLE_BYTES)

    def build(entry: NewEntry) -> dict[str, Any]:
        texts = (
            _sample_evenly(documents, share)
            if rule == "whole"
            else sample_texts_at_places(documents, _sample_at_places)
        )
        train_bpe_on(texts, int(spec[4:])).save(str(entry.folder / "tokenizer.json"))
        return {}

    how = [spec, *["places"] * (rule == "places")]
    key = content_key([d.recipe() for d in documents], *how)
    return str(open_cached("tokenizer", key, build)[0] / "tokenizer.json")


def _form(document: Document) -> tuple[str, ...]:
    """Return the form of a document's examples, () for plain text."""
    field = document.field if isinstance(document, TextRows) else ""
    return next((form for form in (PAIR, CHAT) if form[0] == field), ())


def _sample_evenly(documents: list[Document], share: float) -> Iterator[str]:
    """Yield about so large a share of each document's text; for examples the model's input."""
    for document in documents:
        if not (form := _form(document)):
            yield from document.sample_texts(document.texts(), share)
            continue
        for number, example in enumerate(iter_examples(iter_rows(document, form), form, "", None)):
            if int((number + 1) * share) > int(number * share):
                yield example.text


def _sample_at_places(documents: list[TextRows], count: int, wanted: int) -> Iterator[str]:
    """Yield the model's input texts of rows at positions spread over documents."""
    if not (form := _form(documents[0])):
        return iter_texts_at(documents, count, wanted)
    rows = iter_rows_at(documents, count, wanted, form)
    return (example.text for example in iter_examples(rows, form, "", None))
