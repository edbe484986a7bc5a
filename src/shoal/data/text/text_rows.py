"""Rows of text: one object each, its text under one key, from JSON lines, parquet, HF datasets.

    {"text": "…"}                                  text, or whatever data.field says
    {"prompt": "…", "completion": "…"}             fine-tuning, loss on the completion
    {"messages": [{"role": "user", "content": "…"}, …]}     chat, loss on what assistants say

The first row of a source determines its form; every other row must have the same. An error names
file and number of a row with another form. A hash of its text decides whether a row is held out:
rows added to a file move no other, and equal rows are on the same side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shoal.base.errors import ConfigError, nearest_word, shorten
from shoal.config.paths import fixed_folder, glob_files
from shoal.data.files import row_files
from shoal.data.files.documents import Document, hash_fraction, spread_ranges
from shoal.data.text import hf_rows

TEXT, PAIR, CHAT = ("text",), ("prompt", "completion"), ("messages",)
FORMS = (CHAT, PAIR, TEXT)
"""Keys that determine the form of a line, in search order."""


Reader = Callable[[str, Sequence[str]], Iterator[tuple[str, dict[str, Any]]]]
"""Reader of (path, requested keys; none: all) that yields (place, object) pairs."""


def _reader(kind: str) -> Reader:
    """Return the reader of a kind of files."""
    if kind == "parquet":
        return row_files.read_parquet
    if kind == "hf":
        return hf_rows.read_hf
    return lambda path, _: row_files.read_objects(path)


def row_text(row: dict[str, Any], key: str, place: str) -> str:
    """Return the text of one object under `key`.

    Raises:
        ConfigError: the key is missing or its value is no text; with `place` and the nearest key.
    """
    if key not in row:
        close = nearest_word(key, row)
        has = f"nearest key: {close}" if close else f"it has {shorten(', '.join(row)) or 'nothing'}"
        raise ConfigError(f"{place}: has no {key}; {has}")
    value = row[key]
    if not isinstance(value, str):
        raise ConfigError(f"{place}: {key} is {type(value).__name__}, a text is wanted")
    return value


def find_form(documents: Sequence[Document], field: str) -> tuple[str, ...]:
    """Return the keys by which a source's rows are read: TEXT, PAIR, CHAT, or (data.field,).

    Raises:
        ConfigError: the files have no row, or the first row has none of these forms.
    """
    if field:
        return (field,)
    for document in documents:
        for place, row in _first(document):
            for form in FORMS:
                if all(key in row for key in form):
                    return form
            has = shorten(", ".join(row)) or "nothing"
            strings = [key for key, value in row.items() if isinstance(value, str)]
            close = nearest_word("text", strings) or (strings[0] if strings else "")
            raise ConfigError(
                f"{place}: has {has}; text, messages, or prompt and completion are wanted"
                + (f"; try: data.field={close}" if close else "")
            )
    raise ConfigError(f"data.source: {', '.join(d.path for d in documents[:3])}: hold no row")


@dataclass(frozen=True)
class TextRows(Document):
    """One side of a file of rows: its texts under `field`, held out or not by `share`.

    Attributes:
        kind: jsonl, parquet or hf.
    """

    kind: str = "jsonl"
    field: str = "text"
    share: float = 0.0
    held: bool = False

    def rows(self, keys: Sequence[str] = ()) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield (location, object) of every row of the file; only `keys` if the format allows.

        Raises a ConfigError with file and number.
        """
        return _reader(self.kind)(self.path, keys)

    def texts(self) -> Iterator[str]:
        """Yield the texts of this side, in order; ConfigError for any bad row of the file."""
        return (text for held, text in self.iter_split() if held is self.held)

    @property
    def is_split(self) -> bool:
        """True if other rows of the file are on the other side."""
        return self.share > 0

    def iter_split(self) -> Iterator[tuple[bool, str]]:
        """Yield (whether it is held out, text) of every row; raises as `texts`."""
        for place, row in self.rows((self.field,)):
            text = row_text(row, self.field, place)
            yield hash_fraction(text) < self.share if self.share else self.held, text

    def sample_texts(self, texts: Iterable[str], share: float) -> Iterator[str]:
        """Yield about so large a share of these texts, as whole rows, evenly spread."""
        for number, text in enumerate(texts):
            if int((number + 1) * share) > int(number * share):
                yield text

    def recipe(self) -> list[Any]:
        """Return the settings that its texts depend on, as JSON values."""
        return [*super().recipe(), self.field, self.share, self.held]

    def unsplit(self) -> TextRows:
        """Return the document with every row of the file."""
        return replace(self, share=0.0, held=False)


def iter_rows(document: Document, keys: Sequence[str] = ()) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (location, object) of every row of a document; raises as its reader."""
    if isinstance(document, TextRows):
        return document.rows(keys)
    raise TypeError(f"{document.path} has no rows")


def _first(document: Document) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the first rows of a document; for parquet one made of its columns.

    The smallest read of a column is a row group, and every rank does this.
    """
    if isinstance(document, TextRows) and document.kind == "parquet":
        return row_files.parquet_columns(document.path)
    return iter_rows(document)


def iter_rows_at(
    documents: Sequence[TextRows], count: int, wanted: int, keys: Sequence[str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (location, object) of rows at positions spread over documents of one kind.

    Args:
        count: number of places.
        wanted: approximate bytes of all places together.

    Raises:
        ConfigError: as the readers.
    """
    kind = documents[0].kind
    if kind == "hf":
        for document in documents:
            yield from hf_rows.read_spread(document.path, keys, wanted / document.size_bytes)
    elif kind == "parquet":
        yield from row_files.read_row_groups(
            [(d.path, d.size_bytes) for d in documents], keys, wanted
        )
    else:
        places: dict[str, list[tuple[int, int]]] = {}
        for document, start, stop in spread_ranges(documents, count, wanted):
            places.setdefault(document.path, []).append((start, stop))
        for path, some in places.items():
            yield from row_files.read_lines_at(path, some)


def iter_texts_at(documents: Sequence[TextRows], count: int, wanted: int) -> Iterator[str]:
    """Yield the texts of `iter_rows_at` for one side; raise as `TextRows.texts` does."""
    one = documents[0]
    for place, row in iter_rows_at(documents, count, wanted, (one.field,)):
        text = row_text(row, one.field, place)
        if not one.share or (hash_fraction(text) < one.share) is one.held:
            yield text


def split_row_documents(
    kind: str, argument: str, field: str, share: float, where: str = "data.source"
) -> tuple[list[Document], list[Document]]:
    """Return training and held-out rows of KIND:ARGUMENT (share 0: none held out).

    Args:
        field: key of the text; "" for examples, or before `find_form` has determined it.

    Raises:
        ConfigError: no file matches; with the nearest path.
    """
    if kind == "hf":
        files = [hf_rows.document_fields(argument, where)]
    else:
        folder = fixed_folder(argument)
        files = [_fields(path, folder) for path in glob_files(argument, where, kind)]
    sides: list[list[Document]] = [
        [TextRows(**file, kind=kind, field=field, share=share, held=held) for file in files]
        for held in ((False, True) if share else (False,))
    ]
    return sides[0], sides[1] if share else []


def _fields(path: Path, folder: Path) -> dict[str, Any]:
    return vars(Document.of(path, folder))
