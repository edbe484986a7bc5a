"""Ownership check of a run.toml: do not call the functions of another user's file unasked.

A run.toml is code: it names functions, and their arguments, that are imported and called with this
user's rights. A file counts as the user's own if the user or root owns it and its folder, and not
everybody may write there. The functions of any other file are called only after `--trust`.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from shoal.base.errors import ConfigError, shorten
from shoal.config.load import LoadedConfig, load_config
from shoal.config.mixture_syntax import split_mixture
from shoal.config.owners import OWNER
from shoal.config.paths import split_source
from shoal.config.save import MICRO_BATCH, is_derived

ROOT = 0
CODE = (
    *("model.build", "model.loss", "data.source", "data.validation", "data.collate"),
    *("optimizer.name", "train.on"),
)
"""Keys whose values may name functions or classes, pkg.mod:name."""


def load_trusted(path: Path | None, overrides: Iterable[str], *, trust: bool) -> LoadedConfig:
    """Load a configuration for a command that calls its functions.

    A micro-batch that Shoal chose for the run which wrote the file stays its choice, and may become
    smaller on other layouts.

    Args:
        trust: the user passed --trust.

    Raises:
        ConfigError: as `load_config`; or another user's file names functions.
    """
    loaded = load_config(path, overrides)
    if path is not None:
        if not trust:
            check_owner(loaded, path)
        if loaded.origins.get(MICRO_BATCH) == str(path) and is_derived(path, MICRO_BATCH):
            # For another batch the choice is void.
            is_same = loaded.origins.get("train.batch") == str(path)
            size = loaded.config.train.micro_batch if is_same else 0
            loaded.replace("train", "derived", micro_batch=size)
    return loaded


def check_owner(loaded: LoadedConfig, path: Path) -> None:
    """Raise ConfigError if a file that is not this user's own names a function.

    Args:
        path: from which `loaded` was read.
    """
    named = next(_list_functions(loaded, str(path)), "")
    if named and (
        why := _describe_foreign_owner(path) or _describe_foreign_owner(path.absolute().parent)
    ):
        raise ConfigError(
            f"{path}: {why}, and it names functions that would be called here: {named}; try: "
            f"read it, then the same command with --trust"
        )


def _list_functions(loaded: LoadedConfig, origin: str) -> Iterator[str]:
    """Yield "key = value" for the keys of a file whose value names a function."""
    for key in CODE:
        section, _, name = key.partition(".")
        value = getattr(getattr(loaded.config, section), name)
        for text in [value] if isinstance(value, str) else value:
            if loaded.origins.get(key) == origin and _names_function(key, text):
                yield f"{key} = {shorten(text)}"


def _names_function(key: str, text: str) -> bool:
    if key not in ("data.source", "data.validation") or ":" not in text:  # a share has none
        return ":" in text
    kind, argument = split_source(text.replace(OWNER, "owner"), key)
    if kind == "mix":
        return any(_names_function(key, part) for _, part in split_mixture(argument, key))
    return kind == "function"


def _describe_foreign_owner(path: Path) -> str:
    """Return the reason why a file or folder is not this user's own; "" if it is."""
    found = path.stat()
    here = "" if path.is_file() else f"its folder {path} "
    if found.st_uid not in (os.geteuid(), ROOT):
        return f"{here}is {_user_name(found.st_uid)}'s"
    # In a folder with the sticky bit, as /tmp, no user can replace another user's file.
    open_to_all = found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX
    return f"{here}may be written by everybody" if open_to_all else ""


def _user_name(user: int) -> str:
    import pwd  # no such thing on Windows, where `load_trusted` is not asked

    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return f"user {user}"
