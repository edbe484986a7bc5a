"""JSON lines: one object a line, the text of each under one key; .jsonl, or .jsonl.gz packed.

    {"text": "…"}                                  text, or whatever data.field says
    {"prompt": "…", "completion": "…"}             fine-tuning, loss on the completion
    {"messages": [{"role": "user", "content": "…"}, …]}     chat, loss on what assistants say

Which of the three a source is, its first line tells; every other line must be the same. A line that
is not is told with its file and number. Held out are lines, by a hash of each text: lines added to
a file move no other, and of two equal lines none is trained on that the other validates.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from shoal.base.errors import ConfigError, nearest, short
from shoal.config.paths import fixed_folder, glob_files
from shoal.data.text import Document, place_of

TEXT, PAIR, CHAT = ("text",), ("prompt", "completion"), ("messages",)
FORMS = (CHAT, PAIR, TEXT)
"""Keys by which a line's form is known, in the order in which they are looked for."""


def read_objects(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (`FILE:LINE`, object) of every line that is not empty.

    Errors   ConfigError with file and line for what is not JSON, no object, or cannot be read
    """
    number = 0
    try:
        # the format says one object a line, so only \n ends one
        with gzip.open(path) if path.endswith(".gz") else open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield f"{path}:{number}", _object(line, f"{path}:{number}")
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{path}:{number + 1}: cannot be read: {error}") from error


def _object(line: bytes, place: str) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(line)
    except (msgspec.DecodeError, ValueError) as error:
        raise ConfigError(f"{place}: is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{place}: is {type(value).__name__}, an object is wanted: {{…}}")
    return value


def text_of(row: dict[str, Any], key: str, place: str) -> str:
    """The text that one object has under `key`.

    Errors   ConfigError with `place` and the nearest key where there is none, or it is no text
    """
    if key not in row:
        close = nearest(key, row)
        has = f"nearest key: {close}" if close else f"it has {short(', '.join(row)) or 'nothing'}"
        raise ConfigError(f"{place}: has no {key}; {has}")
    value = row[key]
    if not isinstance(value, str):
        raise ConfigError(f"{place}: {key} is {type(value).__name__}, a text is wanted")
    return value


def find_form(paths: list[str], field: str) -> tuple[str, ...]:
    """The keys that the lines of a source are read by: TEXT, PAIR, CHAT, or (data.field,).

    Errors   ConfigError for files without a line, or a first line of none of these forms
    """
    if field:
        return (field,)
    for path in paths:
        for place, row in read_objects(path):
            for form in FORMS:
                if all(key in row for key in form):
                    return form
            has = short(", ".join(row)) or "nothing"
            strings = [key for key, value in row.items() if isinstance(value, str)]
            close = nearest("text", strings) or (strings[0] if strings else "")
            raise ConfigError(
                f"{place}: has {has}; text, messages, or prompt and completion are wanted"
                + (f"; nearest: data.field={close}" if close else "")
            )
    raise ConfigError(f"data.source: {', '.join(paths[:3])}: hold no line")


@dataclass(frozen=True)
class JsonLines(Document):
    """One side of a file of JSON lines: its texts under `field`, held out or not by `share`."""

    field: str = "text"
    share: float = 0.0
    held: bool = False

    def texts(self) -> Iterator[str]:
        """The texts of this side, in order. Errors: ConfigError, of any line of the file."""
        for place, row in read_objects(self.path):
            text = text_of(row, self.field, place)
            if not self.share or (place_of(text) < self.share) is self.held:
                yield text

    def sample(self, share: float) -> Iterator[str]:
        """Whole lines, evenly spread, of which there are about so large a share."""
        for number, text in enumerate(self.texts()):
            if int((number + 1) * share) > int(number * share):
                yield text

    def recipe(self) -> list[Any]:
        """What its texts depend on, as JSON values."""
        return [*super().recipe(), self.field, self.share, self.held]

    def unsplit(self) -> JsonLines:
        """The document with every line of the file."""
        return replace(self, share=0.0, held=False)


def json_documents(
    pattern: str, field: str, share: float, where: str = "data.source"
) -> tuple[list[Document], list[Document]]:
    """Both sides of the lines that `jsonl:GLOB` names: for training, and held out (share 0: none).

    Errors: ConfigError if no file matches, with the nearest path.
    """
    folder = fixed_folder(pattern)
    files = glob_files(pattern, where, "jsonl")
    sides = [
        [JsonLines.of(p, folder, field=field, share=share, held=held) for p in files]
        for held in ((False, True) if share else (False,))
    ]
    return [*sides[0]], [*sides[1]] if share else []
