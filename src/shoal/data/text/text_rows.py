"""Rows of text: one object each, its text under one key, from JSON lines, parquet, HF datasets.

    {"text": "…"}                                  text, or whatever data.field says
    {"prompt": "…", "completion": "…"}             fine-tuning, loss on the completion
    {"messages": [{"role": "user", "content": "…"}, …]}     chat, loss on what assistants say

Which of the three a source is, its first row tells; every other row must be the same. A row that
is not is told with its file and number. Held out are rows, by a hash of each text: rows added to
a file move no other, and of two equal rows none is trained on that the other validates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shoal.base.errors import ConfigError, nearest, short
from shoal.config.paths import fixed_folder, glob_files
from shoal.data.files.documents import Document, place_of, spread

TEXT, PAIR, CHAT = ("text",), ("prompt", "completion"), ("messages",)
FORMS = (CHAT, PAIR, TEXT)
"""Keys by which a line's form is known, in the order in which they are looked for."""


Reader = Callable[[str, Sequence[str]], Iterator[tuple[str, dict[str, Any]]]]
"""Reads (path, the keys that are wanted, none: all) as (place, object) pairs."""


def _reader(kind: str) -> Reader:
    """Who reads files of a kind; their libraries are loaded for them alone."""
    if kind == "parquet":
        from shoal.data.files.row_files import read_parquet

        return read_parquet
    if kind == "hf":
        from shoal.data.text.hf_rows import read_hf

        return read_hf
    from shoal.data.files.row_files import read_objects

    return lambda path, _: read_objects(path)


def text_of(row: dict[str, Any], key: str, place: str) -> str:
    """The text that one object has under `key`.

    Raises:
        ConfigError: with `place` and the nearest key where there is none, or it is no text.
    """
    if key not in row:
        close = nearest(key, row)
        has = f"nearest key: {close}" if close else f"it has {short(', '.join(row)) or 'nothing'}"
        raise ConfigError(f"{place}: has no {key}; {has}")
    value = row[key]
    if not isinstance(value, str):
        raise ConfigError(f"{place}: {key} is {type(value).__name__}, a text is wanted")
    return value


def find_form(documents: Sequence[Document], field: str) -> tuple[str, ...]:
    """The keys that the rows of a source are read by: TEXT, PAIR, CHAT, or (data.field,).

    Raises:
        ConfigError: for files without a row, or a first row of none of these forms.
    """
    if field:
        return (field,)
    for document in documents:
        for place, row in _first(document):
            for form in FORMS:
                if all(key in row for key in form):
                    return form
            has = short(", ".join(row)) or "nothing"
            strings = [key for key, value in row.items() if isinstance(value, str)]
            close = nearest("text", strings) or (strings[0] if strings else "")
            raise ConfigError(
                f"{place}: has {has}; text, messages, or prompt and completion are wanted"
                + (f"; try: data.field={close}" if close else "")
            )
    raise ConfigError(f"data.source: {', '.join(d.path for d in documents[:3])}: hold no row")


@dataclass(frozen=True)
class Rows(Document):
    """One side of a file of rows: its texts under `field`, held out or not by `share`.

    Attributes:
        kind: jsonl, parquet or hf.
    """

    kind: str = "jsonl"
    field: str = "text"
    share: float = 0.0
    held: bool = False

    def rows(self, keys: Sequence[str] = ()) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield (place, object) of every row of the file; of `keys` alone where a format can.

        Errors: ConfigError with file and number.
        """
        return _reader(self.kind)(self.path, keys)

    def texts(self) -> Iterator[str]:
        """The texts of this side, in order. Errors: ConfigError, of any row of the file."""
        return (text for held, text in self.sides() if held is self.held)

    @property
    def is_side(self) -> bool:
        """Whether other rows of the file are on the other side."""
        return self.share > 0

    def sides(self) -> Iterator[tuple[bool, str]]:
        """(whether it is held out, text) of every row. Errors: as `texts`."""
        for place, row in self.rows((self.field,)):
            text = text_of(row, self.field, place)
            yield place_of(text) < self.share if self.share else self.held, text

    def sampled(self, texts: Iterable[str], share: float) -> Iterator[str]:
        """Whole rows of these, evenly spread, of which there are about so large a share."""
        for number, text in enumerate(texts):
            if int((number + 1) * share) > int(number * share):
                yield text

    def recipe(self) -> list[Any]:
        """Return the settings that its texts depend on, as JSON values."""
        return [*super().recipe(), self.field, self.share, self.held]

    def unsplit(self) -> Rows:
        """The document with every row of the file."""
        return replace(self, share=0.0, held=False)


def rows_of(document: Document, keys: Sequence[str] = ()) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (place, object) of every row of a document. Errors: as its reader."""
    if isinstance(document, Rows):
        return document.rows(keys)
    raise TypeError(f"{document.path} has no rows")


def _first(document: Document) -> Iterator[tuple[str, dict[str, Any]]]:
    """The first rows of a document; of parquet one made of its columns.

    The least that is read of a column is a row group, and every rank asks.
    """
    if isinstance(document, Rows) and document.kind == "parquet":
        from shoal.data.files.row_files import parquet_columns

        return parquet_columns(document.path)
    return rows_of(document)


def rows_at(
    documents: Sequence[Rows], count: int, wanted: int, keys: Sequence[str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (place, object) of rows of documents of one kind, at places spread over their bytes.

    Args:
        count: places.
        wanted: bytes at all of them together, about.

    Raises:
        as the readers.
    """
    kind = documents[0].kind
    if kind == "hf":
        from shoal.data.text.hf_rows import read_spread

        for document in documents:
            yield from read_spread(document.path, keys, wanted / document.size_bytes)
    elif kind == "parquet":
        from shoal.data.files.row_files import read_row_groups

        yield from read_row_groups([(d.path, d.size_bytes) for d in documents], keys, wanted)
    else:
        from shoal.data.files.row_files import read_lines_at

        places: dict[str, list[tuple[int, int]]] = {}
        for document, start, stop in spread(documents, count, wanted):
            places.setdefault(document.path, []).append((start, stop))
        for path, some in places.items():
            yield from read_lines_at(path, some)


def texts_at(documents: Sequence[Rows], count: int, wanted: int) -> Iterator[str]:
    """The texts of `rows_at`, of the side that the documents are. Errors: as `Rows.texts`."""
    one = documents[0]
    for place, row in rows_at(documents, count, wanted, (one.field,)):
        text = text_of(row, one.field, place)
        if not one.share or (place_of(text) < one.share) is one.held:
            yield text


def row_documents(
    kind: str, argument: str, field: str, share: float, where: str = "data.source"
) -> tuple[list[Document], list[Document]]:
    """Both sides of the rows that KIND:ARGUMENT names: for training, and held out (share 0: none).

    Args:
        field: key of the text; "" where examples are read, or before `find_form` has found it.

    Raises:
        ConfigError: if no file matches, with the nearest path.
    """
    if kind == "hf":
        from shoal.data.text.hf_rows import document_fields

        files = [document_fields(argument, where)]
    else:
        folder = fixed_folder(argument)
        files = [_fields(path, folder) for path in glob_files(argument, where, kind)]
    sides: list[list[Document]] = [
        [Rows(**file, kind=kind, field=field, share=share, held=held) for file in files]
        for held in ((False, True) if share else (False,))
    ]
    return sides[0], sides[1] if share else []


def _fields(path: Path, folder: Path) -> dict[str, Any]:
    return vars(Document.of(path, folder))
