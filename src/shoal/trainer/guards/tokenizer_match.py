"""Comparison of a model's vocabulary with the tokenizer that cut its data.

    refused    a token id of the data has no row in any embedding of the model
    notice     weights of a folder with a tokenizer.json, and data cut by another one: the same
               token has another id there, so the weights read other words

The comparison runs when a loop opens a dataset of `open_data` (run.loader, run.steps), and in
`parallelize(tokenizer=…)`; `shoal train` opens its data the same way. An embedding that is padded
to more rows passes. A model that is built from a configuration alone has no tokenizer to match: its
embedding differs from the one in the folder's weights.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shoal.base.errors import ConfigError, shorten
from shoal.base.pretrained_folders import TOKENIZER, WEIGHTS
from shoal.data.text.encodings import Encoding, find_encoding

ROWS = 4
"""Rows of an embedding that are compared with the file of its weights."""


@dataclass(frozen=True)
class ModelVocabulary:
    """Token ids that a model can take, before its weights are placed.

    Attributes:
        rows: token ids are below it; 0: unknown.
        name: of the embedding, or "" if it is the largest dim of any weight.
        origin: `name_or_path` of a transformers model; "" for any other.
        first_rows: [≤ ROWS, dim], copied from the embedding; None if it has no values yet.
    """

    rows: int
    name: str
    origin: str
    first_rows: torch.Tensor | None


def describe_vocabulary(module: nn.Module) -> ModelVocabulary:
    """Return the vocabulary of a model, whose weights are whole yet.

    Only a model of transformers names its table of tokens. Any other may hold it as a plain weight,
    beside a table of positions; then no id may be above the largest dim of all weights.
    """
    for prefix, part in module.named_modules():
        table = _input_table(part)
        if table is None:
            continue
        name = next((n for n, one in module.named_modules() if one is table), prefix)
        origin = getattr(part.config, "_name_or_path", "") if hasattr(part, "config") else ""
        origin = origin if isinstance(origin, str) else ""
        is_known = bool(origin) and not table.weight.is_meta
        first_rows = table.weight.detach()[:ROWS].cpu().clone() if is_known else None
        return ModelVocabulary(table.num_embeddings, name, origin, first_rows)
    if not any(isinstance(part, nn.Embedding) for part in module.modules()):
        return ModelVocabulary(0, "", "", None)
    widest = max(max(p.shape) for p in module.parameters() if p.ndim > 1)
    return ModelVocabulary(widest, "", "", None)


def _input_table(part: nn.Module) -> nn.Embedding | None:
    """Return the embedding of tokens that a model of transformers names; None for other modules."""
    get_table = getattr(part, "get_input_embeddings", None)
    if not callable(get_table) or not hasattr(part, "config"):
        return None
    try:
        table = get_table()
    except Exception:  # models of images have none
        return None
    return table if isinstance(table, nn.Embedding) else None


class TokenizerCheck:
    """Check of each dataset that a run opens against its model.

    Args:
        vocabulary: of the model.
        notice: reports a line that holds for all ranks.
    """

    def __init__(self, vocabulary: ModelVocabulary, notice: Callable[[str], None]) -> None:
        self.vocabulary, self.notice = vocabulary, notice
        self._checked: set[str] = set()

    def check_dataset(self, dataset: Any) -> None:
        """Compare the encoding of a dataset with the model, if it is known.

        Raises:
            ConfigError: the model has no row for some of its ids.
        """
        if (encoding := find_encoding(dataset)) is not None:
            self.check_encoding(encoding)

    def check_tokenizer(self, tokenizer: Any) -> None:
        """Compare a tokenizer of `parallelize(tokenizer=…)` with the model.

        Raises:
            ConfigError: the model has no row for some of its ids.
        """
        backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
        if callable(getattr(backend, "get_vocab", None)):
            size = backend.get_vocab_size() if hasattr(backend, "get_vocab_size") else 0
            self.check_encoding(Encoding("", "tokenizer=", size, backend))

    def check_encoding(self, encoding: Encoding) -> None:
        """Refuse ids without a row; print a notice on another tokenizer than the weights'."""
        refuse_missing_rows(encoding, self.vocabulary)
        line = describe_other_tokenizer(encoding, self.vocabulary)
        if line and line not in self._checked:
            self._checked.add(line)
            self.notice(line)


def refuse_missing_rows(encoding: Encoding, vocabulary: ModelVocabulary) -> None:
    """Raise ConfigError if the largest id of the data has no row in the model's embeddings."""
    most = largest_id(encoding)
    if not vocabulary.rows or most < vocabulary.rows:
        return
    folder = _tokenizer_file(vocabulary.origin)
    near = f"tokenizer={folder}, or " if folder is not None and encoding.source else ""
    table = f"model: {vocabulary.name} has {vocabulary.rows} rows"
    if not vocabulary.name:
        table = f"model: no weight has more than {vocabulary.rows} rows"
    raise ConfigError(
        f"{table}, and {_where(encoding)} has token ids up to {most}; try: {near}a model with a "
        f"vocabulary of {most + 1}"
    )


def describe_other_tokenizer(encoding: Encoding, vocabulary: ModelVocabulary) -> str:
    """Return the notice on data that another tokenizer cut than the model's own; "" if none is due.

    Due only if the model's embedding is that of the weights in its folder, which has a
    tokenizer.json with other ids for tokens that both have.
    """
    if encoding.tokenizer is None or vocabulary.first_rows is None:
        return ""
    path = _tokenizer_file(vocabulary.origin)
    if path is None:
        return ""
    differing = find_differing_token(encoding.tokenizer.get_vocab(), _read_vocabulary(path))
    if differing is None or not _has_stored_rows(path.parent, vocabulary):
        return ""
    token, here, there = differing
    return (
        f"model: the weights of {vocabulary.origin} know {shorten(repr(token))} as "
        f"{'nothing' if there is None else f'token {there}'}, and {_where(encoding)} cuts it as "
        f"token {here}, so they read other words; try: open_data(…, tokenizer={str(path)!r}), or "
        f"data.tokenizer={path}"
    )


def largest_id(encoding: Encoding) -> int:
    """Return the largest id that text can get: of a token of the vocabulary, or the end of a text.

    Added tokens, of which many tokenizers hold more than the model has rows, occur in no plain
    text.
    """
    tokenizer = encoding.tokenizer
    if tokenizer is None:
        return encoding.vocabulary - 1
    try:
        base = tokenizer.get_vocab(with_added_tokens=False)
    except TypeError:
        base = tokenizer.get_vocab()
    from shoal.data.text.text_files import END_NAMES  # of text only

    ends = [tokenizer.token_to_id(name) for name in END_NAMES] if encoding.source else []
    end = next((one for one in ends if one is not None), -1)
    return max([end, *base.values()])


def find_differing_token(
    here: dict[str, int], there: dict[str, int]
) -> tuple[str, int, int | None] | None:
    """Return a token with another id in two vocabularies: (token, id here, id there).

    Tokens that only one of them has are no difference, unless they share none.

    >>> find_differing_token({"a": 0, "b": 1, "c": 2}, {"a": 0, "b": 5})
    ('b', 1, 5)
    >>> find_differing_token({"a": 0, "b": 1, "c": 2}, {"a": 0, "b": 1}) is None
    True
    """
    common = here.keys() & there.keys()
    if not common and here and there:
        token = min(here, key=lambda one: here[one])
        return token, here[token], None
    unlike = [token for token in common if here[token] != there[token]]
    # a whole word is a better example than a byte
    best = max(unlike, key=lambda one: (one.isalpha(), len(one), one), default=None)
    return None if best is None else (best, here[best], there[best])


def _where(encoding: Encoding) -> str:
    """Return the name of the tokenizer or the tokens, with the key that set it."""
    if not encoding.source:
        return "the tokenizer of parallelize(tokenizer=…)"
    if not encoding.spec:
        return f"data.source = {encoding.source}"
    return f"data.tokenizer = {encoding.spec} of {encoding.source}"


def _tokenizer_file(origin: str) -> Path | None:
    """Return the tokenizer.json of a folder, or of a model in the cache of the Hub; else None."""
    if not origin:
        return None
    path = Path(origin).expanduser() / TOKENIZER
    if path.is_file():
        return path
    return _cached_file(origin, TOKENIZER)


def _cached_file(origin: str, name: str) -> Path | None:
    """Return a file of a model that the cache of the Hub holds; nothing is downloaded."""
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(origin, name)
    except Exception:  # not installed, or a text that is no name of a model
        return None
    return Path(found) if isinstance(found, str) else None


def _read_vocabulary(path: Path) -> dict[str, int]:
    from tokenizers import Tokenizer

    try:
        vocabulary: dict[str, int] = Tokenizer.from_file(str(path)).get_vocab()
    except Exception:  # the library raises nothing more precise
        return {}
    return vocabulary


def _has_stored_rows(folder: Path, vocabulary: ModelVocabulary) -> bool:
    """Return whether the model's embedding begins as the one in a folder's weights."""
    if vocabulary.first_rows is None:
        return False
    ending = vocabulary.name.split(".")[-1] + ".weight"
    for file, key in _stored_tensors(folder, ending):
        try:
            from safetensors import safe_open

            with safe_open(str(file), framework="pt") as opened:
                rows = opened.get_slice(key)[: len(vocabulary.first_rows)]
        except Exception:  # a damaged file, or one of another library
            continue
        mine = vocabulary.first_rows
        if rows.shape == mine.shape and torch.equal(rows.to(mine.dtype), mine):
            return True
    return False


def _stored_tensors(folder: Path, ending: str) -> list[tuple[Path, str]]:
    """Return (file, key) of the tensors of a folder of safetensors whose names end so."""
    single, index = (folder / name for name in WEIGHTS)
    try:
        if single.is_file():
            from safetensors import safe_open

            with safe_open(str(single), framework="pt") as opened:
                names = opened.keys()
                return [(single, key) for key in names if key.endswith(ending)]
        known = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return [(folder / file, key) for key, file in known.items() if key.endswith(ending)]
    except Exception:  # no weights as safetensors there
        return []
