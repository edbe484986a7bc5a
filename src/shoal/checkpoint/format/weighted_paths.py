"""Checkpoints whose weights a run starts with: one path, or a weighted mean of several.

    runs/a                       the newest checkpoint of a run
    runs/a/tags/branch-east      a tag of it: an expert of branch-train-merge
    0.6*runs/a+0.4*runs/b        the mean of their weights, by these shares

Only the ratio of the shares counts. A run of islands counts as its first island, whose newest
checkpoint holds the merged weights.
"""

from __future__ import annotations

import re
from pathlib import Path

from shoal.base.errors import ConfigError, nearest_word
from shoal.checkpoint.format.listing import list_checkpoints

KEY = "checkpoint.initial_load_path"
BRANCH = "branch-"
"""Start of the tags under which branch-train-merge saves the weights of its owners."""
BETWEEN = re.compile(r"\+(?=\s*[0-9.]+\s*\*)")
"""The + between two parts; a + inside a path is not followed by a share."""
PART = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*\*\s*(\S.*?)\s*")


def parse_weighted_paths(text: str) -> list[tuple[float, Path]]:
    """Return the shares, which add up to 1, and the paths.

    Raises:
        ConfigError: one of several paths has no share, or a share of 0.

    >>> [(share, path.as_posix()) for share, path in parse_weighted_paths("3*runs/a+1*runs/b")]
    [(0.75, 'runs/a'), (0.25, 'runs/b')]
    """
    texts = BETWEEN.split(text)
    parts = [PART.fullmatch(one) for one in texts]
    if len(texts) == 1 and parts[0] is None:
        return [(1.0, Path(text.strip()).expanduser())]
    found = []
    for one, part in zip(texts, parts, strict=True):
        if part is None or not float(part[1]):
            raise ConfigError(
                f"{KEY} = {text}: {one.strip()} has no share of the mean above 0; try: "
                f"{KEY}=0.5*runs/a+0.5*runs/b"
            )
        found.append((float(part[1]), Path(part[2]).expanduser()))
    whole = sum(share for share, _ in found)
    return [(share / whole, path) for share, path in found]


def find_weighted_checkpoints(text: str) -> list[tuple[float, Path]]:
    """Return the shares, and the checkpoint of each path: the newest one of a run folder.

    Raises:
        ConfigError: as of `parse_weighted_paths`, or a path without a complete checkpoint.
    """
    return [(share, _find_checkpoint(path)) for share, path in parse_weighted_paths(text)]


def _find_checkpoint(path: Path) -> Path:
    if (path / "manifest.json").is_file():
        return path
    for root in (path / "checkpoints", path / "island-0" / "checkpoints", path):
        if found := list_checkpoints(root):
            return found[0].path
    near = _suggest_folder(path)
    why = "no complete checkpoint there" if path.is_dir() else "no such folder"
    raise ConfigError(f"{KEY} = {path}: {why}; try: {near}")


def _suggest_folder(path: Path) -> str:
    """Return a tag below the path, or the folder beside it that is spelt alike."""
    tags = sorted(tag.parent for tag in path.glob("**/tags/*/checkpoints"))
    if tags:
        return str(tags[0])
    beside = [one.name for one in path.parent.glob("*")] if path.parent.is_dir() else []
    close = nearest_word(path.name, beside)
    return str(path.parent / close) if close else "a run folder, or a tag in it, as runs/NAME"
