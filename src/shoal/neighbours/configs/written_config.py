"""Judge every key of another library's configuration by a table.

A table is a text beside this file, such as deepspeed_keys.txt: fate | block | keys | words, where a
row that begins with two spaces continues the one above.

    honoured   read; the words name its key in a run.toml
    told       the library itself ignores it, or no number depends on it; the words give the reason
    refused    Shoal lacks the feature; the words name the nearest one
    0.19.8     as refused, and the library refuses it too from this version on

A key is `name:kind=value,…`: n a number, i a whole one, i1 from 1 on, b true or false; then the
default value (`!` none), and others that are as harmless where the key is
refused. A block with `=off` is harmless unless it is switched on. `block{…}` has keys of its own;
blocks under `args` are arguments of classes.
"""

from __future__ import annotations

import base64
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from shoal.base.errors import ConfigError, nearest_word, shorten

NARROW_BLOCKS = (
    "bf16: blocks pass on and save bf16, as there; embeddings, the loss and code outside of blocks "
    "stay fp32; for blocks as under autocast: precision.residual=fp32"
)
"""Line on bf16 of libraries that cast a model's weights; decision 45."""


@dataclass(frozen=True)
class KeyRow:
    """Row of a key: fate, words, kind of its values, and as JSON the default, harmless ones."""

    fate: str
    words: str
    kind: str = ""
    values: tuple[str, ...] = ()


@dataclass(frozen=True)
class KeyVerdict:
    """Verdict on one key of a user's file: its path, its value, its row's fate and words."""

    path: str
    value: Any
    fate: str
    words: str


@cache
def read_table(name: str) -> dict[str, KeyRow]:
    """Read a table by its name; return a key's whole path, as `fp16.enabled`, → its row.

    >>> read_table("deepspeed_keys")["zero_optimization.stage"].words
    'layout.zero, layout.strategy'
    """
    text = Path(__file__).with_name(f"{name}.txt").read_text(encoding="utf-8")
    found: dict[str, KeyRow] = {}
    for row in text.replace("\n  ", " ").splitlines():
        if not row.strip() or row.startswith("#"):
            continue
        fate, block, names, words = (" ".join(part.split()) for part in row.split("|"))
        path, inside = block, [f"{block}." if block else ""]
        for word in names.replace("{", " { ").replace("}", " } ").split():
            if word == "{":
                inside.append(f"{path}.")
            elif word == "}":
                inside.pop()
            else:
                name, _, values = word.partition("=")
                name, _, kind = name.partition(":")
                path = f"{inside[-1]}{name}"
                listed = values[:1] != "["
                found[path] = KeyRow(
                    fate, words, kind, tuple(values.split(",") if listed else [values])
                )
    return found


def load_written(config: Mapping[str, Any] | str | Path, where: str) -> dict[str, Any]:
    """Load a dict, a file of JSON or HJSON, or url-safe base64 of one; return a new dict.

    Args:
        where: prefix of messages.

    Raises:
        ConfigError: the text is none of them, or a key appears twice.
    """
    if isinstance(config, Mapping):
        return {**config}
    try:
        there = os.path.exists(config)
        text = (
            Path(config).read_text(encoding="utf-8")
            if there
            else base64.urlsafe_b64decode(str(config)).decode()
        )
    except ValueError:  # binascii's and Unicode's too
        raise ConfigError(f"{where}: no such file, nor base64 of a configuration") from None

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError(f"{where}: {', '.join(twice)}: stands twice; try: leave one out")
        return dict(pairs)

    loads, said = _find_parser()
    try:
        found = loads(text, object_pairs_hook=once)
    except ValueError as failure:
        why = f"{failure}{said}" if there else "no such file, nor base64 of a configuration"
        raise ConfigError(f"{where}: {why}") from None
    if not isinstance(found, Mapping):
        raise ConfigError(f"{where}: a table of keys is wanted, got {shorten(str(found))}")
    return dict(found)


def _find_parser() -> tuple[Callable[..., Any], str]:
    """Return hjson's parser if installed, else JSON's, and the advice if that one fails."""
    try:
        import hjson
    except ModuleNotFoundError:
        said = "; comments and trailing commas (HJSON) need: pip install 'shoal[neighbours]'"
        return json.loads, said
    return hjson.loads, ""


def parse_version(text: str) -> tuple[int, ...]:
    """Return the numbers of a version.

    >>> parse_version("0.19.8+cu130"), parse_version("")
    ((0, 19, 8), ())
    """
    return tuple(int(one) for one in text.partition("+")[0].split(".") if one.isdecimal())


@dataclass
class WrittenConfig:
    """A user's configuration, with the table's verdict on each of its keys.

    Attributes:
        where: the file, for messages.
        table: as `read_table` returns it.
        library, era: the library, and its version, as (0, 19, 8); () not known.
    """

    config: dict[str, Any]
    where: str
    library: str
    era: tuple[int, ...]
    table: Mapping[str, KeyRow]

    def make_error(self, path: str, value: Any, why: str) -> ConfigError:
        """Return the ConfigError of one line on a value."""
        return ConfigError(
            f"{self.where}: {path} = {shorten(json.dumps(value, default=str))}: {why}"
        )

    def block(self, path: str) -> dict[str, Any]:
        """Return a block by its path; {} if it is missing."""
        found: Any = self.config
        for name in path.split(".") if path else ():
            found = found.get(name) or {}
            if not isinstance(found, Mapping):
                raise self.make_error(path, found, "a table of keys is wanted")
        return dict(found)

    def value(self, path: str, row: str = "") -> Any:
        """Return a key's value, or its default; texts of numbers are numbers.

        Args:
            row: path of its row in the table, if not `path`.

        Raises:
            ConfigError: the value is not of the key's kind.
        """
        block, _, name = path.rpartition(".")
        key = self.table[row or path]
        value = self.block(block).get(name)
        if value is None:
            if key.values[0] == "!":
                raise ConfigError(f"{self.where}: {path} is not said, and has no default")
            return json.loads(key.values[0] or "null")
        if not key.kind:
            return value
        found, wanted = _convert_value(value, key.kind)
        if found is None:
            raise self.make_error(path, value, f"{wanted} is wanted")
        return found

    def judge(self, path: str = "", row: str = "", *, off: bool = False) -> Iterator[KeyVerdict]:
        """Yield a verdict on every key of a block, and of those inside it.

        Args:
            row: path of its rows in the table, if not `path`.
            off: the block is switched off.

        Raises:
            ConfigError: a key is unknown, with the nearest one, or refused.
        """
        dot = "." if path else ""
        for name, value in self.block(path).items():
            here, there = f"{path}{dot}{name}", f"{row or path}{dot}{name}"
            key = self.table.get(there)
            if key is None:
                raise ConfigError(
                    f"{self.where}: {shorten(here)}: no such key{self._suggest_key(there)}"
                )
            gone = parse_version(key.fate)
            if gone and self.era >= gone:
                why = f"{self.library} {key.fate} took it away; try: leave it out, or {key.words}"
                raise self.make_error(here, value, why)
            inner = isinstance(value, Mapping) and any(
                x.startswith(f"{there}.") for x in self.table
            )
            if key.fate in ("honoured", "told"):
                yield KeyVerdict(here, value, key.fate, key.words)
            elif off or _harmless(value, key, inner=inner):
                yield KeyVerdict(here, value, "told", "is as without it")
            else:
                raise self.make_error(here, value, f"is not here; try: {key.words}")
            if inner:
                yield from self.judge(here, there, off=off or "off" in key.values)

    def arguments(self, block: str, kind: str) -> tuple[dict[str, Any], list[KeyVerdict]]:
        """Return all arguments of a class whose rows are under `args`, and their verdicts."""
        verdicts = [*self.judge(f"{block}.params", f"args.{kind}")]
        rows = [one for one in self.table if one.startswith(f"args.{kind}.")]
        names = [one.rpartition(".")[2] for one in rows if self.table[one].fate == "honoured"]
        row = f"args.{kind}"
        return {x: self.value(f"{block}.params.{x}", f"{row}.{x}") for x in names}, verdicts

    def _suggest_key(self, path: str) -> str:
        """Return the nearest spelling in the same block, else the block that has such a key."""
        inside, dot, name = path.rpartition(".")
        here = [one[len(inside + dot) :] for one in self.table if one.startswith(inside + dot)]
        if close := nearest_word(name, [one for one in here if "." not in one]):
            return f"; try: {close}"
        known = (one for one in self.table if not one.startswith("args."))
        elsewhere = [one for one in known if one.rpartition(".")[2] == name]
        return f"; try: {elsewhere[0]}" if elsewhere else f", here or in {self.library}"


def format_ignored_keys(verdicts: Iterable[KeyVerdict]) -> list[str]:
    """Return a line for each reason why keys are ignored."""
    lines: dict[str, list[str]] = {}
    for one in verdicts:
        if one.fate == "told" and not isinstance(one.value, Mapping):
            lines.setdefault(one.words, []).append(one.path)
    return [f"{', '.join(paths)}: {words}" for words, paths in lines.items()]


def _convert_value(value: Any, kind: str) -> tuple[Any, str]:
    """Return (a value of a kind, or None; the kind in words)."""
    if kind == "b":
        flags = {"true": True, "1": True, "false": False, "0": False}
        return flags.get(str(value).lower()), "true or false"
    least = 1 if kind == "i1" else 0
    wanted = f"a {'whole ' if kind[0] == 'i' else ''}number from {least} on"
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    fits = math.isfinite(number) and number >= least and (kind == "n" or number == int(number))
    return (None if not fits else number if kind == "n" else int(number)), wanted


def _harmless(value: Any, key: KeyRow, *, inner: bool) -> bool:
    if "off" in key.values:
        if not isinstance(value, Mapping):
            return not value or value == "auto"
        switches = (value.get("enabled"), value.get("deepcompile"), value.get("autotp_size"))
        return all(one in (None, False) or (one == 1 and one is not True) for one in switches)
    if key.values == ("",):  # its own keys decide
        return inner
    return value is None or any(value == json.loads(one) for one in key.values)
