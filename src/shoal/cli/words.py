"""The arguments of a command line: a run.toml, and overrides SECTION.KEY=VALUE that win over it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer

from shoal.base.errors import ConfigError

ARGUMENTS = typer.Argument(
    None, metavar="RUN.TOML|SECTION.KEY=VALUE", help="A configuration and overrides."
)
TRUST = typer.Option(
    False, "--trust", help="Call functions that a run.toml names which is not your own."
)


def split_arguments(arguments: Sequence[str]) -> tuple[Path | None, list[str]]:
    """Separate the run.toml of a command line from its overrides.

    Raises:
        ConfigError: the command line names two files.

    >>> split_arguments(["run.toml", "train.steps=3"])[1]
    ['train.steps=3']
    """
    paths = [Path(one) for one in arguments if "=" not in one]
    if len(paths) > 1:
        raise ConfigError(f"command line: {paths[1]}: one run.toml at most; overrides have a '='")
    return paths[0] if paths else None, [one for one in arguments if "=" in one]
