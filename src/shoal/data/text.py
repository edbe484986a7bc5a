"""Text files into token files: choose held-out files, train a tokenizer, encode, cache.

    files ──hash of name──> train | held out        a byte-level BPE is trained on train only
    file, end-of-text, file, end-of-text …  ──> train.npy, validation.npy (uint16, or uint32)

The first run pays for it; later runs and other ranks read the cache, whose key is every file's
name, size and time, the tokenizer and the split. Source: Sennrich et al. 2016 (BPE); byte level as
in GPT-2, through the library `tokenizers`.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from shoal.base.errors import ConfigError
from shoal.base.phases import counting, phase
from shoal.config.paths import check_tokenizer, fixed_folder, glob_files
from shoal.data.cache import content_key, open_cached
from shoal.data.tokens import TokenSpan, count_tokens, cross_entropy, grown, split_tail, whole_file

END_OF_TEXT = "<|endoftext|>"
END_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")

EXCLUDED_FOLDERS = {
    "site-packages", "dist-packages", "test", "tests", "idlelib", "ensurepip", "lib2to3",
    "__pycache__",
}  # fmt: skip

TRAIN_CHARACTERS = 2**22
"""The BPE is trained on at most so much text, a like share of every file."""

PIECE_CHARACTERS = 2**18
ENCODE_CHARACTERS = 2**22
"""Encoded at once: the library holds some 100 bytes per token meanwhile."""


@dataclass(frozen=True)
class Document:
    """One file of text; `name` is its path below the source's folder, the same on every machine."""

    name: str
    path: str
    size_bytes: int
    modified_ns: int

    def text(self) -> str:
        """The whole file; bytes that are not UTF-8 become U+FFFD. Errors: ConfigError."""
        try:
            return Path(self.path).read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise ConfigError(f"{self.path}: cannot be read: {error.strerror}") from error

    def texts(self) -> Iterator[str]:
        """The texts in the file, one; errors as `text`."""
        yield self.text()

    def sample(self, share: float) -> Iterator[str]:
        """About so large a share of the file's text, the same every time."""
        text = self.text()
        yield text[: round(len(text) * share)]

    def recipe(self) -> list[Any]:
        """What its texts depend on, as JSON values."""
        return [self.name, self.size_bytes, self.modified_ns]

    @property
    def is_side(self) -> bool:
        """Whether other texts of the file are on the other side, and `sides` gives both."""
        return False

    def sides(self) -> Iterator[tuple[bool, str]]:
        """(whether it is held out, text) of all texts of the file."""
        raise NotImplementedError

    def unsplit(self) -> Document:
        """The document with all texts of its file, where it is one side of a split."""
        return self

    @classmethod
    def of(cls, path: Path, folder: Path, **more: Any) -> Self:
        """The document that a file below `folder` is; `more` fields where a kind has them."""
        stat = path.stat()
        name = path.relative_to(folder).as_posix()
        return cls(name, str(path), stat.st_size, stat.st_mtime_ns, **more)


def stdlib_documents() -> list[Document]:
    """The Python standard library's own .py files, without tests; about 600 files, 10 MiB.

    Errors: ConfigError where Python has no source files (some embedded builds).
    """
    folder = Path(sysconfig.get_path("stdlib"))
    documents = []
    for here, folders, files in os.walk(folder):
        folders[:] = sorted(f for f in folders if f not in EXCLUDED_FOLDERS)
        paths = [Path(here, f) for f in sorted(files) if f.endswith(".py")]
        documents += [Document.of(p, folder) for p in paths if p.is_file()]
    if not documents:
        raise ConfigError(f"data.source = stdlib: no .py files in {folder}; nearest: text:GLOB")
    return documents


def glob_documents(pattern: str, where: str = "data.source") -> list[Document]:
    """The files of `text:GLOB`. Errors: ConfigError if there are none, with the nearest path."""
    folder = fixed_folder(pattern)
    return [Document.of(p, folder) for p in glob_files(pattern, where)]


def place_of(text: str) -> float:
    """Where a hash puts a text between 0 and 1: what is below a share is held out."""
    digest = hashlib.blake2b(text.encode(errors="surrogateescape"), digest_size=8)
    return int.from_bytes(digest.digest(), "big") / 2**64


def hold_out(documents: Sequence[Document], share: float) -> tuple[list[Document], list[Document]]:
    """Documents for training and for validation, chosen by a hash of each name.

    Adding a file moves no other. Each side has at least one document if there are two and share is
    above 0; a lone document stays whole here (its tail is held out, see open_corpus).
    """
    if share <= 0 or len(documents) < 2:
        return list(documents), []

    ranked = sorted(documents, key=lambda document: place_of(document.name))
    count = sum(place_of(d.name) < share for d in documents)
    held = {d.name for d in ranked[: min(max(1, count), len(documents) - 1)]}
    return [d for d in documents if d.name not in held], [d for d in documents if d.name in held]


@dataclass(frozen=True)
class Corpus:
    """Text as token files, with its tokenizer (a `tokenizers.Tokenizer`)."""

    train: tuple[TokenSpan, ...]
    validation: tuple[TokenSpan, ...]
    tokenizer: Any
    vocabulary: int
    unigram_entropy: float

    @property
    def tokens(self) -> int:
        """Tokens of both parts."""
        return sum(span.tokens for span in (*self.train, *self.validation))


def open_corpus(
    train: Sequence[Document], validation: Sequence[Document], tokenizer: str, tail: float = 0.0
) -> Corpus:
    """Tokens of both groups of documents, from the cache or made now.

    Takes   tokenizer, `bpe:VOCABULARY` (trained on train) or the path of a tokenizer.json
            tail, the share of train's last tokens to hold out where validation has no text
    Errors  ConfigError for a tokenizer that is not there, or text without a single token
    """
    recipe = tokenizer_recipe(tokenizer)
    groups = [[d.recipe() for d in g] for g in (train, validation)]
    key = content_key(groups, recipe, tail)

    def build(folder: Path) -> dict[str, Any]:
        return _build(folder, train, validation, tokenizer, tail)

    folder, about = open_cached("text", key, build)
    heads = [whole_file(folder / "train.npy", "npy")]
    held = folder / "validation.npy"
    tails = [whole_file(held, "npy")] if held.exists() else []
    if not tails:
        heads, tails = split_tail(heads, tail)
    return Corpus(
        train=tuple(heads),
        validation=tuple(tails),
        tokenizer=load_tokenizer(folder / "tokenizer.json"),
        vocabulary=about["vocabulary"],
        unigram_entropy=about["unigram_entropy"],
    )


def _build(
    folder: Path,
    train: Sequence[Document],
    validation: Sequence[Document],
    spec: str,
    tail: float,
) -> dict[str, Any]:
    """Fill a cache entry: tokenizer.json, train.npy and validation.npy."""
    if tail and validation and not (_has_text(train) and _has_text(validation)):
        # lines so few that all of them fell on one side
        train, validation = [document.unsplit() for document in train], []
    if spec.startswith("bpe:"):
        tokenizer = train_bpe(train, int(spec[4:]))
    else:
        tokenizer = load_tokenizer(Path(spec).expanduser())
    tokenizer.save(str(folder / "tokenizer.json"))
    vocabulary = tokenizer.get_vocab_size()
    spans = {"train": list[TokenSpan](), "validation": list[TokenSpan]()}
    for part, ids in zip(spans, encode(tokenizer, train, validation), strict=True):
        if ids is not None:
            np.save(folder / f"{part}.npy", ids, allow_pickle=False)
            spans[part] = [whole_file(folder / f"{part}.npy", "npy")]
    if not spans["train"][0].tokens:
        raise ConfigError(f"data.source: {len(train)} files hold no text")
    heads, tails = spans["train"], spans["validation"]
    if not tails:
        heads, tails = split_tail(heads, tail)
    counts = [grown(count_tokens(part), vocabulary) for part in (heads, tails or heads)]
    return {"vocabulary": vocabulary, "unigram_entropy": cross_entropy(counts[0], counts[1])}


def _has_text(documents: Sequence[Document]) -> bool:
    return any(next(document.texts(), "") for document in documents)


def tokenizer_recipe(spec: str) -> str:
    """What a tokenizer depends on besides the text. Errors: ConfigError."""
    check_tokenizer(spec)
    if spec.startswith("bpe:"):
        return spec
    return hashlib.blake2b(Path(spec).expanduser().read_bytes(), digest_size=16).hexdigest()


def load_tokenizer(path: Path) -> Any:
    """The tokenizer of a tokenizer.json. Errors: ConfigError."""
    from tokenizers import Tokenizer  # here: 0.1 s that other sources need not pay

    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more precise
        raise ConfigError(f"data.tokenizer = {path}: is no tokenizer.json: {error}") from error


def train_bpe(documents: Sequence[Document], vocabulary: int) -> Any:
    """A tokenizer by `train_bpe_on` from a like share of every document."""
    total_bytes = sum(d.size_bytes for d in documents)
    share = min(1.0, TRAIN_CHARACTERS / max(1, total_bytes))
    return train_bpe_on((t for d in documents for t in d.sample(share)), vocabulary)


@phase("tokenizer")
def train_bpe_on(texts: Iterable[str], vocabulary: int) -> Any:
    """A byte-level BPE tokenizer of at most `vocabulary` entries; the same for the same texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _pieces(text: str) -> Iterator[str]:
    """A text in pieces that end at a line's end, so that a huge file is encoded in parallel."""
    start = 0
    while start < len(text):
        stop = start + PIECE_CHARACTERS
        if stop < len(text):
            stop = text.rfind("\n", start, stop) + 1 or stop
        yield text[start:stop]
        start = stop


def encode(
    tokenizer: Any, train: Sequence[Document], validation: Sequence[Document]
) -> list[np.ndarray[Any, Any] | None]:
    """Tokens of all texts, each followed by the end-of-text token if there is one, by side.

    Gives   ids [tokens] of each side, uint16 where the vocabulary allows, else uint32; None for a
            side without documents. Files that have both sides are read once
    Limits  the result must fit in memory: 2 bytes per token, about half a byte per byte of text
    """
    dtype = np.uint16 if tokenizer.get_vocab_size() <= 2**16 else np.uint32
    ends = [tokenizer.token_to_id(name) for name in END_NAMES]
    end = next(([i] for i in ends if i is not None), [])
    encode_all = getattr(tokenizer, "encode_batch_fast", tokenizer.encode_batch)
    chunks: tuple[list[np.ndarray[Any, Any]], ...] = ([], [])

    def flush(pieces: list[tuple[int, str | None]]) -> None:
        texts = [piece for _, piece in pieces if piece is not None]
        done = iter(encode_all(texts, add_special_tokens=False))
        for side, piece in pieces:
            chunks[side].append(np.asarray(end if piece is None else next(done).ids, dtype=dtype))

    waiting: list[tuple[int, str | None]] = []
    characters = 0
    for side, text in _texts(train, validation):
        for piece in _pieces(text):
            waiting.append((side, piece))
            characters += len(piece)
            if characters >= ENCODE_CHARACTERS:
                flush(waiting)
                waiting, characters = [], 0
        waiting.append((side, None))  # the text's end
    flush(waiting)
    return [
        (np.concatenate(one) if one else np.zeros(0, dtype=dtype)) if documents else None
        for one, documents in zip(chunks, (train, validation), strict=True)
    ]


def _texts(train: Sequence[Document], validation: Sequence[Document]) -> Iterator[tuple[int, str]]:
    """(side, text) of all texts; of files that have both sides in one reading."""
    files, others = ([document.path for document in side] for side in (train, validation))
    if files == others and all(document.is_side for document in (*train, *validation)):
        for document in counting("encode", len(train), train):
            yield from ((int(held), text) for held, text in document.sides())
        return
    both = [(0, document) for document in train] + [(1, document) for document in validation]
    for side, document in counting("encode", len(both), both):
        yield from ((side, text) for text in document.texts())
