"""Data sources: `data.source` and `data.validation` opened as datasets for the trainer.

stdlib · text:GLOB    text ──text_files.py──> token files    tokens:FOLDER   token files already
jsonl:GLOB, parquet:GLOB, hf:FOLDER   ──text_rows──> text, or examples ──finetuning_samples──> rows
images:FOLDER, wds:GLOB               ──image_folders.py, webdataset.py──> images and classes
digits                8×8 images of scikit-learn       synthetic       random tokens
mix:0.7*A+0.3*B       several of these by weight ──weighted_mixture.py
pkg.mod:function      the user's own: a dataset, an iterable, or (train, validation)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from shoal.base.errors import ConfigError, ShoalError, nearest_word
from shoal.base.layouts.policies import check_value
from shoal.base.text.units import bytes_text, count_text
from shoal.config.paths import (
    ROWS,
    TEXTS,
    check_data,
    is_remote,
    load_function,
    parse_validation_share,
    reads_tokens,
    refuse_packing,
    split_source,
)
from shoal.config.sections import DataSection
from shoal.config.sections import keys as keys_of
from shoal.data.digits import EvenSubset, open_digits
from shoal.data.files.documents import Document, glob_documents, hold_out, stdlib_documents
from shoal.data.files.token_files import SyntheticTokens, TokenDataset, open_folder
from shoal.data.loading.dataset_kind import Collate, is_indexed
from shoal.data.text.encodings import Encoding, record_encoding
from shoal.data.text.text_files import open_corpus
from shoal.wire.phases import phase

DIGITS_SHARE = 0.2
SYNTHETIC_VOCABULARY = 2048
SYNTHETIC_SAMPLES = 2**16
SYNTHETIC_VALIDATION = 2**8
OF_THE_LOADER = ("workers", "collate")
"""Keys of [data] for fetching, which do not select samples."""


@dataclass(frozen=True)
class Source:
    """Datasets ready to load, and their properties.

    Attributes:
        train, validation: datasets (or iterables); validation None if nothing is held out.
        collate: list of samples -> batch; None: torch's default_collate.
        vocabulary: token ids are below it; None for other samples.
        tokenizer: a `tokenizers.Tokenizer` if text was encoded here, else None.
        unigram_entropy: nats per target of a model without context, which the loss should fall
            below; digits: the class entropy; None if unknown.
        description: one line for the user.
        kind: tokens: (inputs [sequence], targets [sequence]) int64 · samples: any other.
        classes, image: names of the classes, and (channels, size), if samples are images.

    `validation_samples`: samples of `validation` that one validation reads; None: all of them.
    """

    train: Any
    validation: Any
    collate: Collate | None
    vocabulary: int | None
    tokenizer: Any
    unigram_entropy: float | None
    description: str
    kind: str
    validation_samples: int | None = None
    classes: tuple[str, ...] = ()
    image: tuple[int, int] = (0, 0)


@phase("data")
def open_source(section: DataSection, seed: int) -> Source:
    """Open the datasets of `data.source` and `data.validation`.

    Args:
        section: all of [data].
        seed: `train.seed`, for synthetic tokens.

    Note:
        The first call on new text trains a tokenizer and encodes it into the cache folder; a source
        pkg.mod:function is imported and called.

    Raises:
        ConfigError: one line: unknown source (with the nearest), missing files, too little data, a
            user's function that raises, a second source that does not fit the first.
    """
    check_data(section)
    if is_remote(section.source) or is_remote(section.validation):
        from shoal.data.files.remote_data import local_section  # others do without

        section = local_section(section)
    share, second = parse_validation_share(section)
    kind, argument = split_source(section.source)
    pictures = _open_pictures(section, kind, argument, share)
    if pictures is not None:
        source = pictures
    elif kind in TEXTS:
        source, second = _open_text(section, share, second)
    elif kind == "mix":
        from shoal.data.mixed_source import open_mixture  # others do without

        def opened(part: DataSection) -> Source:
            return open_source(_make_source_section(part, part.source), seed)

        def documents(part: str) -> list[Document]:
            return list_documents(section, part, share, "data.source")[0]

        source, second = open_mixture(section, argument, second, documents, opened), ""
    elif kind == "tokens":
        source = _open_tokens(section, argument, share)
    elif kind == "digits":
        source = _open_digits(section, share)
    elif kind == "synthetic":
        source = _open_synthetic(section, share, seed)
    else:
        source = _open_function(argument, share)
    if second:
        source = _attach_validation(source, section, second, seed)
    if section.collate:
        source = replace(source, collate=load_function(section.collate, "data.collate"))
    return _record_encoding(source, section)


def _record_encoding(source: Source, section: DataSection) -> Source:
    """Record how the training tokens of a source were made; return the source."""
    if source.kind == "tokens" and source.vocabulary:
        spec = section.tokenizer if source.tokenizer is not None else ""
        encoding = Encoding(section.source, spec, source.vocabulary, source.tokenizer)
        record_encoding(source.train, encoding)
    return source


def open_data(source: str, *, seed: int = 0, **keys: Any) -> Source:
    """Open a source by its name in `data.source`: datasets, tokenizer, vocabulary.

    Args:
        source: jsonl:GLOB, hf:FOLDER, mix:0.7*SOURCE+0.3*SOURCE, … (docs/reference/data.md).
        seed: seed of random tokens.
        keys: further keys of [data], with the same values and defaults: tokenizer, sequence,
            packing, validation, field, image_size.

    Returns:
        `train` and `validation` (None: nothing held out) for `run.loader` and `run.evaluate`,
        `vocabulary`, `tokenizer`, `description`. Every process must call it; one process computes
        slow results and caches them.

    Raises:
        ConfigError: an unknown key or value, and all errors of `shoal train`.
    """
    known = {key.name: key for key in keys_of(DataSection)}
    for name in keys.keys() - known.keys() | keys.keys() & set(OF_THE_LOADER):
        close = nearest_word(name, [key for key in known if key not in OF_THE_LOADER])
        near = f"run.loader(…, {name}=…)" if name in OF_THE_LOADER else close
        hint = f"try: {near}" if near else f"there are {', '.join(known)}"
        raise ConfigError(f"open_data has no argument {name}; {hint}")
    share = keys.get("validation")
    if isinstance(share, int | float) and not isinstance(share, bool):
        keys["validation"] = str(share)
    try:
        section = msgspec.convert({"source": source, **keys}, DataSection)
    except msgspec.ValidationError as error:
        raise ConfigError(f"open_data: {error}") from None
    for name in keys:
        check_value(name, known[name], getattr(section, name))
    try:
        return open_source(section, seed)
    except ShoalError as error:
        from shoal.base.text.argument_names import OF_OPEN_DATA, rename_error

        rename_error(error, OF_OPEN_DATA)
        raise


def list_documents(
    section: DataSection, source: str, share: float, where: str
) -> tuple[list[Document], list[Document]]:
    """Return the training texts of a source, and its held-out texts."""
    kind, argument = split_source(source, where)
    if kind in ROWS:
        from shoal.data.text.text_rows import find_form, split_row_documents  # others do without

        files, _ = split_row_documents(kind, argument, "", 0.0, where)
        return split_row_documents(kind, argument, find_form(files, section.field)[0], share, where)
    documents = stdlib_documents() if kind == "stdlib" else glob_documents(argument, where)
    return hold_out(documents, share)


def _open_text(section: DataSection, share: float, second: str) -> tuple[Source, str]:
    """Open a text source; return the second source if still to be opened (it is not text)."""
    if by_row := split_source(section.source)[0] in ROWS:
        from shoal.data.text.finetuning_source import open_finetuning  # others do without

        if (found := open_finetuning(section, share, second)) is not None:
            return Source(**found, collate=None, kind="tokens"), ""
        if section.packing == "on":
            refuse_packing(section.source)
    train, held = list_documents(section, section.source, share, "data.source")
    if second and split_source(second)[0] in TEXTS:
        held, second = list_documents(section, second, 0.0, "data.validation")[0], ""
    tail = share if by_row or not held else 0.0
    corpus = open_corpus(train, held, section.tokenizer, tail)
    name = section.source.partition(":")[2] or "Python standard library"
    sizes = {d.path: d.size_bytes for d in (*train, *held)}
    kept = f"{_files(len(held))} held out" if held else f"last {tail:.0%} held out"
    if by_row and share:
        kept = f"{share:.0%} of the rows held out"
    train_part = TokenDataset(corpus.train, section.sequence, "train")
    held_part = _held_out(corpus.validation, section.sequence)
    source = Source(
        train=train_part,
        validation=held_part,
        validation_samples=validation_sample_count(share, train_part, held_part),
        collate=None,
        vocabulary=corpus.vocabulary,
        tokenizer=corpus.tokenizer,
        unigram_entropy=corpus.unigram_entropy,
        description=f"{name}: {_files(len(sizes))}, {bytes_text(sum(sizes.values()))}, "
        f"{count_text(corpus.tokens)} tokens; {kept if corpus.validation else 'none held out'}",
        kind="tokens",
    )
    return source, second


def validation_sample_count(share: float, train: Any, held: Any) -> int | None:
    """Return the samples of a share of all, if more are held out, else None.

    Text is held out by whole files, so that no file is on both sides: of twenty files at least one,
    whatever the share. One validation still reads only the share.
    """
    if held is None or not share:
        return None
    most = max(1, round(share * (len(train) + len(held))))
    return most if most < len(held) else None


def _files(count: int) -> str:
    return "1 file" if count == 1 else f"{count} files"


def _held_out(spans: Any, sequence: int) -> TokenDataset | None:
    return TokenDataset(spans, sequence, "held-out") if spans else None


def _open_tokens(section: DataSection, folder: str, share: float) -> Source:
    tokens = open_folder(folder, share, dtype=section.dtype)
    total = sum(span.tokens for span in (*tokens.train, *tokens.validation))
    held = sum(span.tokens for span in tokens.validation)
    kept = f"{count_text(held)} tokens held out" if held else "none held out"
    return Source(
        train=TokenDataset(tokens.train, section.sequence, "train"),
        validation=_held_out(tokens.validation, section.sequence),
        collate=None,
        vocabulary=tokens.vocabulary,
        tokenizer=None,
        unigram_entropy=tokens.unigram_entropy,
        description=f"{folder}: {_files(tokens.files)}, {count_text(total)} tokens, "
        f"vocabulary {tokens.vocabulary}; {kept}",
        kind="tokens",
    )


def _open_synthetic(section: DataSection, share: float, seed: int) -> Source:
    def tokens(samples: int, number: int) -> SyntheticTokens:
        return SyntheticTokens(samples, section.sequence, SYNTHETIC_VOCABULARY, number)

    return Source(
        train=tokens(SYNTHETIC_SAMPLES, 2 * seed),
        validation=tokens(SYNTHETIC_VALIDATION, 2 * seed + 1) if share else None,
        collate=None,
        vocabulary=SYNTHETIC_VOCABULARY,
        tokenizer=None,
        unigram_entropy=math.log(SYNTHETIC_VOCABULARY),
        description=f"synthetic: {SYNTHETIC_SAMPLES} samples of random tokens, vocabulary "
        f"{SYNTHETIC_VOCABULARY}; for benchmarks, nothing can be learnt",
        kind="tokens",
    )


def _open_digits(section: DataSection, share: float) -> Source:
    if section.validation == DataSection().validation:
        share = DIGITS_SHARE  # 5 % of 1797 images is too few to read a loss from
    digits = open_digits(share)
    held = f"{len(digits.validation)} held out" if digits.validation else "none held out"
    return Source(
        train=digits.train,
        validation=digits.validation,
        collate=None,
        vocabulary=None,
        tokenizer=None,
        unigram_entropy=digits.class_entropy,
        description=f"digits of scikit-learn: {digits.images} images of 8×8, 10 classes; {held}",
        kind="samples",
    )


def _open_pictures(
    section: DataSection,
    kind: str,
    argument: str,
    share: float,
    known: tuple[str, ...] | None = None,
) -> Source | None:
    """Open images and classes; None if a source has none. `known`: the training data's classes."""
    where = "data.source" if known is None else "data.validation"
    found: dict[str, Any] | None = None
    if kind == "images":
        from shoal.data.files.image_folders import open_images  # others do without

        found = open_images(argument, section.image_size, share, where, known)
    elif kind == "wds":
        from shoal.data.streams.webdataset import open_shards

        found = open_shards(argument, section.image_size, share, where)
    elif kind == "hf":
        from shoal.data.text.hf_rows import open_hf_images

        found = open_hf_images(argument, section.image_size, share, where)
    return None if found is None else Source(**found, collate=None, kind="samples")


def _open_function(name: str, share: float) -> Source:
    function: Callable[[], Any] = load_function(name, "data.source")
    try:
        made = function()
    except Exception as error:
        raise ConfigError(
            f"data.source = {name}: {name}() raises {type(error).__name__}: {error}"
        ) from error
    train, validation = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if train is None:
        raise ConfigError(f"data.source = {name}: gives None, not a dataset or an iterable")
    if validation is not None and is_indexed(validation) and not len(validation):
        raise ConfigError(
            f"data.source = {name}: its validation data has 0 samples; try: the training data "
            f"alone, of which data.validation is held out"
        )
    samples = len(train) if is_indexed(train) else None
    if validation is None and samples is not None and samples >= 2 and share:
        held = min(max(1, round(share * samples)), samples - 1)
        train, validation = EvenSubset(train, held, False), EvenSubset(train, held, True)
        kept = f"{held} held out"
    else:
        kept = "no validation data" if validation is None else "with its own validation data"
    size = "samples in order" if samples is None else f"{samples} samples"
    return Source(
        train=train,
        validation=validation,
        collate=None,
        vocabulary=None,
        tokenizer=None,
        unigram_entropy=None,
        description=f"{name}: {type(made).__name__}, {size}; {kept}",
        kind="samples",
    )


def _make_source_section(section: DataSection, source: str) -> DataSection:
    """Copy [data] for one of several sources: `dtype` only if it has tokens, no collate.

    Args:
        source: value of `data.source` for the copy.
    """
    dtype = section.dtype if reads_tokens(source) else "auto"
    return replace(section, source=source, dtype=dtype, collate="")


def _attach_validation(source: Source, section: DataSection, second: str, seed: int) -> Source:
    """Replace a source's validation data by another source's training data.

    Raises a ConfigError if the two do not fit: tokens and samples, or ids beyond the vocabulary.
    """
    where = f"data.validation = {second}"
    kind = split_source(second)[0]
    pictures = None
    if source.classes:
        pictures = _open_pictures(section, *split_source(second), 0.0, source.classes)
    if kind in TEXTS and pictures is None:
        raise ConfigError(
            f"{where}: text needs the tokenizer that encoded data.source = {section.source}, which "
            f"is none; try: a share such as data.validation=0.05, or tokens:FOLDER"
        )
    other = pictures or open_source(
        replace(_make_source_section(section, second), validation="0"), seed + 1
    )
    if other.kind != source.kind:
        raise ConfigError(
            f"{where}: gives {other.kind}, data.source = {section.source} gives {source.kind}"
        )
    if source.vocabulary and other.vocabulary and other.vocabulary > source.vocabulary:
        raise ConfigError(
            f"{where}: has token ids up to {other.vocabulary - 1}, data.source = {section.source} "
            f"has a vocabulary of {source.vocabulary}"
        )
    return replace(
        source,
        validation=other.train,
        unigram_entropy=None,
        description=f"{source.description.rpartition(';')[0]}; validation: {other.description}",
    )
