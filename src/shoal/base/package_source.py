"""Folder and hash of Shoal's own source; `shoal --version` imports no more than this."""

from __future__ import annotations

import hashlib
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
"""Folder of the package `shoal`."""


def package_digest() -> str:
    """Hash the source of Shoal itself, in hexadecimal digits: an edited layout is another layout.

    Only the package's own folder is read. Beside it, in site-packages, lie all other libraries.
    """
    found = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()
