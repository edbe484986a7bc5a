"""Small files written whole or not at all, and the folder where what is slow to make is kept."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Where things are kept between runs: $SHOAL_CACHE, else $XDG_CACHE_HOME/shoal, ~/.cache/shoal.

    The folder need not exist.
    """
    own, shared = os.environ.get("SHOAL_CACHE"), os.environ.get("XDG_CACHE_HOME")
    if own:
        return Path(own).expanduser()
    return (Path(shared) if shared else Path.home() / ".cache") / "shoal"


def write_whole(path: Path, text: str) -> None:
    """Replace the content of `path` by `text` in one rename. Errors: OSError, and it stays."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fresh.write_text(text)
        os.replace(fresh, path)
    finally:
        fresh.unlink(missing_ok=True)
