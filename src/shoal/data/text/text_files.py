"""Text files to token files: choose held-out files, train a tokenizer, encode, cache.

    files ──hash of name──> train | held out        a byte-level BPE is trained on train only
    file, end-of-text, file, end-of-text …  ──> train.npy, validation.npy (uint16, or uint32)

The first run does the work; later runs and other ranks read the cache, whose key is every file's
name, size and time, the tokenizer and the split. Source: Sennrich et al. 2016 (BPE); byte level as
in GPT-2, through the library `tokenizers`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shoal.base.errors import ConfigError
from shoal.config.paths import check_tokenizer
from shoal.data.files.documents import Document
from shoal.data.files.token_files import (
    TokenSpan,
    count_tokens,
    cross_entropy,
    pad_counts,
    split_tail,
    whole_file,
)
from shoal.data.files.tokenizer_cache import NewEntry, content_key, open_cached
from shoal.data.text.single_pass_text import SinglePassTexts, choose_sample_rule
from shoal.wire.phases import phase

END_OF_TEXT = "<|endoftext|>"
END_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")

PIECE_CHARACTERS = 2**18
ENCODE_CHARACTERS = 2**22
"""Characters encoded at a time: the library uses some 100 bytes per token meanwhile."""


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
        """Number of training and held-out tokens."""
        return sum(span.tokens for span in (*self.train, *self.validation))


def open_corpus(
    train: Sequence[Document], validation: Sequence[Document], tokenizer: str, tail: float = 0.0
) -> Corpus:
    """Open the tokens of training and held-out documents, from the cache or encoded now.

    Args:
        tokenizer: `bpe:VOCABULARY` (trained on train) or the path of a tokenizer.json.
        tail: share of train's last tokens to hold out if validation has no text.

    Raises:
        ConfigError: the tokenizer is missing, or the text has no token.
    """
    recipe = tokenizer_cache_key(tokenizer)
    groups = [[d.recipe() for d in g] for g in (train, validation)]
    by_places = tokenizer.startswith("bpe:") and choose_sample_rule(train) == "places"
    key = content_key(groups, recipe, tail, *["places"] * by_places)

    def build(entry: NewEntry) -> dict[str, Any]:
        return _build(entry, train, validation, tokenizer, tail)

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
    entry: NewEntry,
    train: Sequence[Document],
    validation: Sequence[Document],
    spec: str,
    tail: float,
) -> dict[str, Any]:
    """Fill a cache entry: tokenizer.json, train.npy and validation.npy."""
    texts = SinglePassTexts(train, validation)
    tokenizer, sides = _encoded(texts, spec)
    if tail and validation and not all(texts.has_text):
        # lines so few that all of them fell on one side
        texts = SinglePassTexts([document.unsplit() for document in train], [])
        tokenizer, sides = _encoded(texts, spec)
    tokenizer.save(str(entry.folder / "tokenizer.json"))
    vocabulary = tokenizer.get_vocab_size()
    spans = {"train": list[TokenSpan](), "validation": list[TokenSpan]()}
    for part, ids in zip(spans, sides, strict=True):
        if ids is not None:
            spans[part] = [whole_file(entry.save_array(part, ids), "npy")]
    if not spans["train"][0].tokens:
        raise ConfigError(f"data.source: {len(train)} files hold no text")
    heads, tails = spans["train"], spans["validation"]
    if not tails:
        heads, tails = split_tail(heads, tail)
    counts = [pad_counts(count_tokens(part), vocabulary) for part in (heads, tails or heads)]
    return {"vocabulary": vocabulary, "unigram_entropy": cross_entropy(counts[0], counts[1])}


def _encoded(texts: SinglePassTexts, spec: str) -> tuple[Any, list[np.ndarray[Any, Any] | None]]:
    """Return the tokenizer, trained now or loaded, and tokens of training and held-out texts."""
    if spec.startswith("bpe:"):
        tokenizer = train_bpe_on(texts.sample(), int(spec[4:]))
    else:
        tokenizer = load_tokenizer(Path(spec).expanduser())
    return tokenizer, encode_texts(tokenizer, texts)


def tokenizer_cache_key(spec: str) -> str:
    """Return what a tokenizer depends on besides the text; may raise ConfigError."""
    check_tokenizer(spec)
    if spec.startswith("bpe:"):
        return spec
    return hashlib.blake2b(Path(spec).expanduser().read_bytes(), digest_size=16).hexdigest()


def load_tokenizer(path: Path) -> Any:
    """Load the tokenizer of a tokenizer.json; may raise ConfigError."""
    from tokenizers import Tokenizer  # here: 0.1 s that other sources need not pay

    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more precise
        raise ConfigError(f"data.tokenizer = {path}: is no tokenizer.json: {error}") from error


@phase("tokenizer")
def train_bpe_on(texts: Iterable[str], vocabulary: int) -> Any:
    """Train a byte-level BPE of at most `vocabulary` entries; the same for the same texts."""
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
    """Yield a text in pieces that end at line ends, so that a huge file encodes in parallel."""
    start = 0
    while start < len(text):
        stop = start + PIECE_CHARACTERS
        if stop < len(text):
            stop = text.rfind("\n", start, stop) + 1 or stop
        yield text[start:stop]
        start = stop


def encode_texts(tokenizer: Any, texts: SinglePassTexts) -> list[np.ndarray[Any, Any] | None]:
    """Encode training and held-out texts, each followed by the end-of-text token if there is one.

    Returns:
        ids [tokens] of each side, uint16 where the vocabulary allows, else uint32; None for a side
        without documents.

    Note:
        The result must fit in memory: 2 bytes per token, about half a byte per byte of text.
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
    for side, text in texts.iter_all():
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
        for one, documents in zip(chunks, (texts.train, texts.validation), strict=True)
    ]
