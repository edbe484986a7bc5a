"""Writer of a configuration as run.toml, each line with the origin of its value.

`load_config` reads it back. The standard library has no TOML writer; this one writes the few types
that sections hold.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from shoal.base.runlog.atomic_files import write_atomically
from shoal.config.load import LoadedConfig, load_config
from shoal.config.sections import Config, keys

MICRO_BATCH = "train.micro_batch"
"""Shoal chooses it if the user leaves it open; its origin in run.toml is then "derived"."""


def to_toml(loaded: LoadedConfig) -> str:
    """Return a configuration as the text of a run.toml: every key, with its value's origin.

    The text includes defaults; the function writes nothing to disk.

    >>> text = to_toml(LoadedConfig(Config(), {"train.seed": "command line"}))
    >>> [line for line in text.splitlines() if line.startswith("seed")]
    ['seed = 0                                # command line']
    """
    lines: list[str] = []
    for section in fields(Config):
        lines.append(f"[{section.name}]")
        values = getattr(loaded.config, section.name)
        pairs = [(key.name, getattr(values, key.name)) for key in keys(values)]
        if section.name == "model":
            pairs += list(values.arguments.items())
        for key, value in pairs:
            origin = loaded.origins.get(f"{section.name}.{key}", "default")
            lines.append(f"{f'{key} = {toml_value(value)}':<39} # {origin}")
        lines.append("")
    return "\n".join(lines)


def restore_origins(loaded: LoadedConfig, path: Path) -> None:
    """Restore, in `loaded`, the origins that a run's own run.toml records with its values.

    Values that have been set since keep their new origin; an edited "default" has the file as its
    origin.

    Args:
        path: the run.toml from which `loaded` was read.
    """
    for section, key, value, origin in _read_origins(path):
        defaults = getattr(Config(), section, None)
        name = f"{section}.{key}"
        edited = origin == "default" and toml_value(value) != toml_value(
            getattr(defaults, key, value)
        )
        if loaded.origins.get(name) == str(path) and not edited:
            loaded.origins[name] = origin


def is_derived(path: Path, key: str) -> bool:
    """Return whether a value in a run.toml was derived from others, and not chosen by the user.

    Args:
        path: a run.toml that `load_config` has accepted.
        key: "section.key".
    """
    section, _, name = key.partition(".")
    found = {(one[0], one[1]): one[3] for one in _read_origins(path, only=name)}
    return found.get((section, name)) == "derived"


def _read_origins(path: Path, only: str = "") -> Iterator[tuple[str, str, Any, str]]:
    """Yield section, key, value and recorded origin of each line of a run.toml that has an origin.

    Args:
        path: the file.
        only: skip the lines of all keys whose names do not begin with this; parsing costs most.
    """
    section = ""
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.lstrip().startswith(("[", only)):
            continue
        written, mark, origin = line.rpartition("# ")
        try:
            table = tomllib.loads(written if mark else line)
        except tomllib.TOMLDecodeError:  # the mark is inside a string
            continue
        if line.startswith("["):
            section = next(iter(table))
            continue
        for key, value in table.items() if mark else ():
            yield section, key, value, origin


def write_derived(path: Path, section: str, **values: Any) -> None:
    """Write values that workers derived into a run's run.toml, so that its resumes keep them.

    Args:
        path: the run.toml.
        section: of the keys.
        **values: by key.

    Raises:
        OSError: it cannot be written.
    """
    loaded = load_config(path)
    restore_origins(loaded, path)
    loaded.replace(section, "derived", **values)
    write_atomically(path, to_toml(loaded))


def toml_value(value: Any) -> str:
    r"""Return one value as TOML.

    >>> toml_value(True), toml_value(0.1), toml_value('a"b'), toml_value((0.9, 0.95))
    ('true', '0.1', '"a\\"b"', '[0.9, 0.95]')
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k} = {toml_value(v)}" for k, v in value.items()) + "}"
    return "[" + ", ".join(toml_value(v) for v in value) + "]"
