"""Count the bytes of text behind each token, for losses that compare across tokenizers and texts.

A loss per token depends on how long tokens are: a tokenizer of one owner's text cuts another
language into more, shorter tokens. Bits per byte do not: all bits of the loss over all bytes of the
text that the targets stand for.

    bits per byte = Σ loss / (ln 2 · Σ bytes)        sums over the same targets

Source: Gao et al. 2020, "The Pile", §3.1.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
"""Token of a single byte, of tokenizers that fall back to bytes."""

SPACE = "\u2581"
"""Character of a space in a token, of Metaspace and SentencePiece."""

WORDS_WITH_SPACES = frozenset(("Metaspace", "ByteFallback"))
"""Decoders of tokenizers whose tokens hold the spaces between words."""


def count_token_bytes(tokenizer: Any, vocabulary: int) -> npt.NDArray[np.int64] | None:
    """Return the UTF-8 bytes of the text that each token id stands for, [vocabulary].

    Special tokens (the end of a text) stand for none.

    Args:
        tokenizer: a `tokenizers.Tokenizer`.
        vocabulary: ids are below it.

    Returns:
        None if the tokens do not tell it: WordPiece drops the spaces between words.
    """
    about = json.loads(tokenizer.to_str())
    kinds = set(_iter_kinds(about.get("decoder")))
    if "ByteLevel" not in kinds and not kinds & WORDS_WITH_SPACES:
        return None
    added = {one["id"]: one for one in about.get("added_tokens", ())}
    found = np.zeros(vocabulary, dtype=np.int64)
    for number in range(min(vocabulary, tokenizer.get_vocab_size())):
        token = tokenizer.id_to_token(number)
        if token is None or added.get(number, {}).get("special"):
            continue
        if "ByteLevel" in kinds and number not in added:
            found[number] = len(token)  # one character for each byte
        elif BYTE.fullmatch(token):
            found[number] = 1
        else:
            found[number] = len(token.replace(SPACE, " ").encode())
    return found


def compute_bits_per_byte(loss: float, targets: float, text_bytes: float) -> float:
    """Return the bits per byte of a mean loss in nats; NaN without text.

    Args:
        loss: nats per target, a mean over `targets`.
        targets: number of targets.
        text_bytes: bytes of the text that they stand for.

    >>> compute_bits_per_byte(math.log(2), 10, 20)
    0.5
    """
    return loss * targets / (math.log(2) * text_bytes) if text_bytes else math.nan


def _iter_kinds(decoder: Any) -> Iterator[str]:
    """Yield the types of a decoder and of those inside it."""
    if isinstance(decoder, dict):
        yield str(decoder.get("type"))
        for one in decoder.get("decoders", ()):
            yield from _iter_kinds(one)
