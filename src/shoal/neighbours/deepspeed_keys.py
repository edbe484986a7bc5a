"""What becomes of every key of a DeepSpeed configuration: kept, told, refused, or of an era.

The table is deepspeed_keys.txt beside this file: fate | block | keys | words, where a row that
begins with a space goes on with the one above.

    honoured   read into `Settings`; the words name what it is in a run.toml
    told       DeepSpeed itself ignores it, or no number depends on it; the words say why
    refused    what it asks for is not here; the words name the nearest that is
    0.19.8     as refused, and DeepSpeed refuses it too from this version on

A key is `name:kind=value,…`: n a number, i a whole one, i1 from 1 on, b true or false; then the
value that holds without it, and others that are as harmless where the key is refused. A block with
`=off` is harmless unless it is switched on. `block{…}` has keys of its own.
Keys are those of docs/_pages/config-json.md, which a test holds against the table, and of
deepspeed/runtime/config.py, 0.19.8.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from shoal.base.errors import ConfigError, nearest, short


@dataclass(frozen=True)
class Key:
    """A key's row: fate, words, kind of its values, and as JSON the default, harmless ones."""

    fate: str
    words: str
    kind: str = ""
    values: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """What becomes of one key that a user wrote: its path, its value, its row's fate and words."""

    path: str
    value: Any
    fate: str
    words: str


@cache
def keys() -> dict[str, Key]:
    """Read the table. Gives a key's whole path, as `zero_optimization.stage`, → its row."""
    text = Path(__file__).with_suffix(".txt").read_text()
    found: dict[str, Key] = {}
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
                found[path] = Key(
                    fate, words, kind, tuple(values.split(",") if listed else [values])
                )
    return found


def version(text: str) -> tuple[int, ...]:
    """Read a version's numbers.

    >>> version("0.19.8+cu130"), version("")
    ((0, 19, 8), ())
    """
    return tuple(int(one) for one in text.partition("+")[0].split(".") if one.isdecimal())


@dataclass
class Written:
    """A configuration that a user wrote, with the table's word on each of its keys.

    where  the file, for messages · era  DeepSpeed's version, as (0, 19, 8); () not known
    """

    config: dict[str, Any]
    where: str
    era: tuple[int, ...]

    def wrong(self, path: str, value: Any, why: str) -> ConfigError:
        """One line on a value."""
        return ConfigError(f"{self.where}: {path} = {short(json.dumps(value, default=str))}: {why}")

    def block(self, path: str) -> dict[str, Any]:
        """A table by its path; {} where it is missing."""
        found: Any = self.config
        for name in path.split(".") if path else ():
            found = found.get(name) or {}
            if not isinstance(found, Mapping):
                raise self.wrong(path, found, "a table of keys is wanted")
        return dict(found)

    def value(self, path: str, row: str = "") -> Any:
        """A key's value, or its default; `row`: where its row stands, if not by its path.

        Errors   ConfigError for a value that is not of its kind; texts of numbers are numbers
        """
        block, _, name = path.rpartition(".")
        key = keys()[row or path]
        value = self.block(block).get(name)
        if value is None:
            if key.values[0] == "!":
                raise ConfigError(f"{self.where}: {path} is not said, and has no default")
            return json.loads(key.values[0] or "null")
        if not key.kind:
            return value
        found, wanted = _typed(value, key.kind)
        if found is None:
            raise self.wrong(path, value, f"{wanted} is wanted")
        return found

    def judge(self, path: str = "", row: str = "", *, off: bool = False) -> Iterator[Verdict]:
        """Give a verdict on every key of a block, and of those inside it.

        row      where its rows stand, if not by its path · off  the block is switched off
        Errors   ConfigError for a key that nobody knows, with the nearest, and for a refused one
        """
        dot = "." if path else ""
        for name, value in self.block(path).items():
            here, there = f"{path}{dot}{name}", f"{row or path}{dot}{name}"
            key = keys().get(there)
            if key is None:
                raise ConfigError(f"{self.where}: {short(here)}: no such key{_hint(there)}")
            gone = version(key.fate)
            if gone and self.era >= gone:
                why = f"DeepSpeed {key.fate} took it away; nearest: leave it out, or {key.words}"
                raise self.wrong(here, value, why)
            inner = isinstance(value, Mapping) and any(x.startswith(f"{there}.") for x in keys())
            if key.fate in ("honoured", "told"):
                yield Verdict(here, value, key.fate, key.words)
            elif off or _harmless(value, key, inner=inner):
                yield Verdict(here, value, "told", "is as without it")
            else:
                raise self.wrong(here, value, f"is not here; nearest: {key.words}")
            if inner:
                yield from self.judge(here, there, off=off or "off" in key.values)


def _typed(value: Any, kind: str) -> tuple[Any, str]:
    """A value of a kind, None if it is not, and what is wanted."""
    if kind == "b":
        return {"true": True, "false": False}.get(str(value).lower()), "true or false"
    least = 1 if kind == "i1" else 0
    wanted = f"a {'whole ' if kind[0] == 'i' else ''}number from {least} on"
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    fits = math.isfinite(number) and number >= least and (kind == "n" or number == int(number))
    return (None if not fits else number if kind == "n" else int(number)), wanted


def _harmless(value: Any, key: Key, *, inner: bool) -> bool:
    if "off" in key.values:
        if not isinstance(value, Mapping):
            return not value or value == "auto"
        switches = (value.get("enabled"), value.get("deepcompile"), value.get("autotp_size"))
        return all(one in (None, False) or (one == 1 and one is not True) for one in switches)
    if key.values == ("",):  # its own keys decide
        return inner
    return value is None or any(value == json.loads(one) for one in key.values)


def _hint(path: str) -> str:
    """The nearest spelling in the same block, else the block in which the name is one."""
    inside, dot, name = path.rpartition(".")
    here = [one[len(inside + dot) :] for one in keys() if one.startswith(inside + dot)]
    if close := nearest(name, [one for one in here if "." not in one]):
        return f"; nearest: {close}"
    known = (one for one in keys() if not one.startswith("args."))
    elsewhere = [one for one in known if one.rpartition(".")[2] == name]
    return f"; nearest: {elsewhere[0]}" if elsewhere else ", here or in DeepSpeed"
