"""Token files as samples: sample i is tokens i·L … i·L + L, cut into inputs and shifted targets.

    tokens   t0 t1 t2 t3 t4 t5 t6 t7 …                    L = data.sequence = 3
    sample 0 inputs t0 t1 t2   targets t1 t2 t3
    sample 1 inputs t3 t4 t5   targets t4 t5 t6

Files are memory-mapped: opening is free, and ranks on one machine share the pages.
"""

from __future__ import annotations

import bisect
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from shoal.base.errors import ConfigError, format_choice_error
from shoal.config.paths import check_tokens_folder, list_token_files
from shoal.config.sections import TOKEN_DTYPES
from shoal.data.files.token_dtypes import TokenHeader, check_dtype, read_header
from shoal.data.files.tokenizer_cache import NewEntry, content_key, open_cached

Counts = npt.NDArray[np.int64]

DEFAULT_DTYPE = "uint16"
"""Dtype of .bin files if neither data.dtype nor a meta.json sets another."""

LARGEST_VOCABULARY = 2**24
CHUNK_TOKENS = 2**22


@dataclass(frozen=True)
class TokenSpan:
    """Tokens start … stop − 1 of one file. `dtype` is that of a raw .bin file, `npy` for .npy."""

    path: str
    dtype: str
    start: int
    stop: int

    @property
    def tokens(self) -> int:
        """Number of tokens of the span."""
        return self.stop - self.start

    def open(self) -> npt.NDArray[Any]:
        """Return the tokens [stop − start], memory-mapped, not read."""
        return open_tokens(self.path, self.dtype)[self.start : self.stop]


def open_tokens(path: str, dtype: str) -> npt.NDArray[Any]:
    """Memory-map all tokens of one file; ConfigError for a file that is not token ids."""
    hint = ""
    try:
        if dtype == "npy":
            hint = "; try: name it .bin if it has raw ids, with data.dtype"
            tokens = np.load(path, mmap_mode="r", allow_pickle=False)
        elif (size := Path(path).stat().st_size) == 0:
            return np.zeros(0, dtype=dtype)  # an empty file cannot be mapped
        else:
            hint = _size_hint(size, np.dtype(dtype).itemsize)
            tokens = np.memmap(path, dtype=np.dtype(dtype).newbyteorder("<"), mode="r")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as {dtype} tokens: {error}{hint}") from error
    if tokens.ndim != 1 or tokens.dtype.kind not in "ui":
        raise ConfigError(
            f"{path}: has dtype {tokens.dtype} and shape {list(tokens.shape)}; tokens are one row "
            f"of integers"
        )
    return tokens


def _size_hint(size_bytes: int, item_bytes: int) -> str:
    """Return the dtypes that a file's size allows, if it is no whole number of tokens; else "".

    >>> _size_hint(10, 4), _size_hint(11, 2)
    ('; 10 bytes; try: data.dtype=uint16', '; 11 bytes; try: data.dtype=uint8, or copy it again')
    """
    if size_bytes % item_bytes == 0:
        return ""
    narrower = "uint8, or copy it again" if size_bytes % 2 else "uint16"
    if size_bytes % 4 == 0:
        narrower = "uint32"
    return f"; {size_bytes} bytes; try: data.dtype={narrower}"


def whole_file(path: Path, dtype: str, skipped_bytes: int = 0) -> TokenSpan:
    """Return the span of a whole file, without the bytes of a header."""
    first = skipped_bytes // np.dtype(dtype).itemsize if skipped_bytes else 0
    return TokenSpan(str(path), dtype, first, len(open_tokens(str(path), dtype)))


def split_tail(spans: Sequence[TokenSpan], share: float) -> tuple[list[TokenSpan], list[TokenSpan]]:
    """Split spans into all but their last `share` of tokens, and those tails.

    >>> a, b = split_tail([TokenSpan("f", "npy", 0, 100)], 0.1)
    >>> a[0].stop, b[0].start, b[0].stop
    (90, 90, 100)
    """
    cuts = [s.stop - max(1, round(share * s.tokens)) if share else s.stop for s in spans]
    heads = [TokenSpan(s.path, s.dtype, s.start, c) for s, c in zip(spans, cuts, strict=True)]
    tails = [TokenSpan(s.path, s.dtype, c, s.stop) for s, c in zip(spans, cuts, strict=True)]
    return heads, [t for t in tails if t.tokens]


class TokenDataset(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Samples of `sequence` tokens from spans of files; a sample never lies in two spans.

    dataset[i] is (inputs [sequence], targets [sequence]), int64. `part` names it in messages.
    Raises a ConfigError if no span has sequence + 1 tokens.
    """

    draws_nothing = True

    def __init__(self, spans: Sequence[TokenSpan], sequence: int, part: str = "train") -> None:
        if sequence < 1:
            raise ConfigError(f"data.sequence = {sequence}: must be at least 1 token")
        self.spans = list(spans)
        self.sequence = sequence
        counts = [max(0, (s.tokens - 1) // sequence) for s in self.spans]
        self._ends = list(itertools.accumulate(counts))
        self._opened: list[npt.NDArray[Any] | None] = [None] * len(self.spans)
        if not self._ends or self._ends[-1] == 0:
            longest = max((s.tokens for s in self.spans), default=0)
            hint = f"; try: data.sequence={longest - 1}" if longest > 1 else ""
            raise ConfigError(
                f"data.sequence = {sequence}: a sample takes {sequence + 1} tokens, the {part} "
                f"part has {longest}{hint}"
            )

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and targets [sequence] of one sample; may raise IndexError."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        number = bisect.bisect_right(self._ends, index)
        tokens = self._opened[number]
        if tokens is None:
            tokens = self._opened[number] = self.spans[number].open()
        first = (index - (self._ends[number - 1] if number else 0)) * self.sequence
        block = torch.from_numpy(tokens[first : first + self.sequence + 1].astype(np.int64))
        return block[:-1], block[1:]

    def __getstate__(self) -> dict[str, Any]:
        """Return paths instead of maps: a worker process opens the files itself."""
        return {**self.__dict__, "_opened": [None] * len(self.spans)}


class SyntheticTokens(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Uniform random token ids for benchmarks: sample i follows from (seed, i) alone.

    dataset[i] is (inputs [sequence], targets [sequence]), int64. Nothing can be learnt from it: the
    best loss is ln(vocabulary).
    """

    draws_nothing = True  # from the shared generators

    def __init__(self, samples: int, sequence: int, vocabulary: int, seed: int) -> None:
        self.samples = samples
        self.sequence = sequence
        self.vocabulary = vocabulary
        self.seed = seed

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and targets [sequence] of one sample; may raise IndexError."""
        if not 0 <= index < self.samples:
            raise IndexError(f"sample {index} of {self.samples}")
        draw = np.random.Generator(np.random.Philox(key=[self.seed & (2**64 - 1), index]))
        ids = draw.integers(0, self.vocabulary, self.sequence + 1, dtype=np.int64)
        block = torch.from_numpy(ids)
        return block[:-1], block[1:]


def count_tokens(spans: Sequence[TokenSpan]) -> Counts:
    """Count the occurrences of each id, [largest id + 1].

    Raises a ConfigError with file, position and id of the first id below 0 or absurdly large.
    """
    counts: Counts = np.zeros(0, dtype=np.int64)
    for span in spans:
        tokens = span.open()
        for start in range(0, span.tokens, CHUNK_TOKENS):
            chunk = np.asarray(tokens[start : start + CHUNK_TOKENS])
            if int(chunk.min()) < 0 or int(chunk.max()) >= LARGEST_VOCABULARY:
                bad = int(np.flatnonzero((chunk < 0) | (chunk >= LARGEST_VOCABULARY))[0])
                others = [one for one in TOKEN_DTYPES if one not in ("auto", span.dtype)]
                hint = "" if span.dtype == "npy" else f"; try: data.dtype={' or '.join(others)}"
                raise ConfigError(
                    f"{span.path}: token id {chunk[bad]} at {span.start + start + bad}: ids are "
                    f"0 … {LARGEST_VOCABULARY - 1}{hint}"
                )
            found = np.bincount(chunk, minlength=len(counts))
            found[: len(counts)] += counts
            counts = found.astype(np.int64, copy=False)
    return counts


def cross_entropy(train: Counts, validation: Counts) -> float:
    """Return nats per validation token under train frequencies, as of a model without context.

    Formula  −Σ_v q(v) · ln((c(v) + 1) / (N + V)), add-one smoothing; c, N from train, q from
             validation, V the length of both

    >>> round(cross_entropy(np.array([1, 1]), np.array([3, 5])), 4)
    0.6931
    """
    smoothed = np.log((train + 1) / (train.sum() + len(train)))
    return float(-(validation * smoothed).sum() / max(1, validation.sum()))


def pad_counts(counts: Counts, vocabulary: int) -> Counts:
    """Return counts with zeros up to the vocabulary, [vocabulary]."""
    return np.pad(counts, (0, vocabulary - len(counts)))


@dataclass(frozen=True)
class TokenFolder:
    """Content of `tokens:FOLDER`: spans of both parts, and the result of a scan of every id."""

    train: tuple[TokenSpan, ...]
    validation: tuple[TokenSpan, ...]
    vocabulary: int
    unigram_entropy: float
    files: int


def open_folder(
    folder: str, share: float, where: str = "data.source", dtype: str = "auto"
) -> TokenFolder:
    """Open `train*`/`val*` as .npy or .bin, and check every id.

    meta.json (optional): {"dtype": "uint16", "vocabulary": 50257}. The default of `vocabulary` is
    the largest id + 1. Without val* files the last `share` of each train file is held out. The scan
    of all ids is cached by the files' names, sizes and times.

    Args:
        folder: folder of the files.
        share: share of each train file that is held out if there is no val* file.
        where: the key, for messages.
        dtype: dtype of .bin files; auto: that of a header of llm.c, of Megatron-LM's index, or of
            meta.json, else uint16.

    Raises:
        ConfigError: a missing folder, a file that is not tokens or was written with another dtype,
            an id ≥ vocabulary.
    """
    check_tokens_folder(folder, where)
    path = Path(folder).expanduser()
    said, vocabulary = _meta(path)
    by = "data.dtype" if dtype != "auto" else f"as {path / 'meta.json'} says" if said else "default"
    told = dtype if dtype != "auto" else said
    dtype = told or DEFAULT_DTYPE
    parts, headed = {}, set[str]()
    for part in ("train", "val"):
        parts[part] = list[TokenSpan]()
        for file in list_token_files(path, part):
            header = TokenHeader("npy") if file.suffix == ".npy" else read_header(file, told, by)
            headed |= {str(file)} if header.dtype else set()
            parts[part].append(whole_file(file, header.dtype or dtype, header.skipped_bytes))
    train, validation = parts["train"], parts["val"]
    if not validation:
        train, validation = split_tail(train, share)
    stats = [(s, Path(s.path).stat()) for s in [*train, *validation]]
    key = content_key(
        [[s.path, s.dtype, s.start, s.stop, t.st_size, t.st_mtime_ns] for s, t in stats],
        len(train),
        vocabulary,
        "dtype checked",  # an earlier version kept scans of files read by another dtype
    )

    def scan(_entry: NewEntry) -> dict[str, Any]:
        for raw in dict.fromkeys(s.path for s, _ in stats if s.path not in headed):
            check_dtype(raw, dtype, by)
        counts = [count_tokens(train), count_tokens(validation)]
        size = vocabulary or max(map(len, counts))
        if max(map(len, counts)) > size:
            _refuse_id([*train, *validation], size, path)
        both = [pad_counts(c, size) for c in counts]
        entropy = cross_entropy(both[0], both[1] if validation else both[0])
        return {"vocabulary": size, "unigram_entropy": entropy}

    _, about = open_cached("scan", key, scan)
    return TokenFolder(
        train=tuple(train),
        validation=tuple(validation),
        vocabulary=about["vocabulary"],
        unigram_entropy=about["unigram_entropy"],
        files=len({s.path for s, _ in stats}),
    )


def _refuse_id(spans: Sequence[TokenSpan], vocabulary: int, folder: Path) -> None:
    for span in spans:
        tokens = span.open()
        for start in range(0, span.tokens, CHUNK_TOKENS):
            bad = np.flatnonzero(tokens[start : start + CHUNK_TOKENS] >= vocabulary)
            if bad.size:
                place = start + int(bad[0])
                raise ConfigError(
                    f"{span.path}: token id {tokens[place]} at {span.start + place}: ids must be "
                    f"below vocabulary = {vocabulary} of {folder / 'meta.json'}"
                )


def _meta(folder: Path) -> tuple[str, int | None]:
    """Return dtype and vocabulary of meta.json; "" and None for missing entries."""
    path = folder / "meta.json"
    if not path.is_file():
        return "", None
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
        dtype, vocabulary = str(meta.get("dtype", "")), meta.get("vocabulary")
    except (ValueError, AttributeError) as error:
        raise ConfigError(
            f'{path}: must be like {{"dtype": "uint16", "vocabulary": 50257}}: {error}'
        ) from error
    if dtype and dtype not in TOKEN_DTYPES[1:]:
        raise ConfigError(format_choice_error(f"{path}: dtype", dtype, TOKEN_DTYPES[1:]))
    if vocabulary is not None and not (
        isinstance(vocabulary, int) and 0 < vocabulary <= LARGEST_VOCABULARY
    ):
        raise ConfigError(f"{path}: vocabulary = {vocabulary}: must be 1 … {LARGEST_VOCABULARY}")
    return dtype, vocabulary
