"""Decoded text of a row of tokens, in segments that are learnt or not, by document.

    ids      12 7 7 3 | 9 9        learnt  − − ✓ ✓ | − ✓
    segments "user: hi" "<learnt> hello" | "user:" "<learnt> yes"

A segment's text is what decoding its tokens adds to the text of its document so far, so that a
space which belongs to a word's token stays. Special tokens are segments of their own, by name.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any

MOST_SEGMENTS = 400
"""Segments of a document above which each is decoded alone."""


def decode_segments(
    tokens: list[dict[str, Any]], tokenizer: Any, padding: int = 0
) -> list[dict[str, Any]]:
    """Return the text of a row: {"text", "learnt", "special", "document", "tokens"} in order.

    Args:
        tokens: of `mark_tokens`; ids that the tokenizer lacks become texts such as "⟨id 70000⟩".
        tokenizer: a `tokenizers.Tokenizer`.
        padding: tokens at the end that are padding; they have no segment.
    """
    special = special_ids(tokenizer)
    size = tokenizer.get_vocab_size()
    segments: list[dict[str, Any]] = []
    inputs = tokens[: len(tokens) - padding]
    for document, group in groupby(inputs, key=lambda token: token["document"]):
        runs = [
            (kind, learnt, [token["id"] for token in run])
            for (kind, learnt), run in groupby(
                group, key=lambda t: (_kind(t["id"], special, size), t["learnt"])
            )
        ]
        texts = _decode_runs([(kind, ids) for kind, _, ids in runs], tokenizer, special)
        segments += [
            {
                "text": text,
                "learnt": learnt,
                "special": kind != "text",
                "document": document,
                "tokens": len(ids),
            }
            for (kind, learnt, ids), text in zip(runs, texts, strict=True)
        ]
    return segments


def special_ids(tokenizer: Any) -> dict[int, str]:
    """Return id → name of the special tokens of a tokenizer."""
    added = tokenizer.get_added_tokens_decoder()
    return {number: token.content for number, token in added.items() if token.special}


def token_text(number: int, tokenizer: Any) -> str:
    """Return the text of one token, as `--ids` lists it; its name if no text comes of it."""
    text = tokenizer.decode([number], skip_special_tokens=False)
    return text if text and "�" not in text else tokenizer.id_to_token(number) or f"⟨id {number}⟩"


def _kind(number: int, special: dict[int, str], size: int) -> str:
    if number in special:
        return "special"
    return "text" if 0 <= number < size else "unknown"


def _decode_runs(
    runs: list[tuple[str, list[int]]], tokenizer: Any, special: dict[int, str]
) -> list[str]:
    """Return the text of each run of ids of one document."""
    texts: list[str] = []
    before: list[int] = []
    seen = ""
    for kind, ids in runs:
        if kind == "special":
            texts.append("".join(special[number] for number in ids))
            before, seen = [], ""
        elif kind == "unknown":
            texts.append("".join(f"⟨id {number}⟩" for number in ids))
            before, seen = [], ""
        elif len(runs) > MOST_SEGMENTS:
            texts.append(tokenizer.decode(ids, skip_special_tokens=False))
        else:
            before = before + ids
            whole = tokenizer.decode(before, skip_special_tokens=False)
            if whole.startswith(seen):
                texts.append(whole[len(seen) :])
            else:  # a character that two runs share
                texts.append(tokenizer.decode(ids, skip_special_tokens=False))
            seen = whole
    return texts
