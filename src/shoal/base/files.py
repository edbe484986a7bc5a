"""Writes a small file whole or not at all: a reader, or a crash, never meets half of it."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Replace the content of `path` by `text` in one rename. Errors: OSError, and it stays."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fresh.write_text(text)
        os.replace(fresh, path)
    finally:
        fresh.unlink(missing_ok=True)
