"""Environment of a run besides its settings: library versions, and the user's source files.

A checkpoint stores them, so that a resume can report what has changed since. This imports neither
torch nor the user's modules: `shoal train --resume` compares before it starts anything.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import re
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from pathlib import Path

from shoal.base.package_source import PACKAGE

LIBRARIES = ("torch", "numpy", "shoal")
"""Libraries that are always recorded; others only if loaded."""
IF_LOADED = ("transformers", "peft", "datasets", "tokenizers", "webdataset", "torchvision", "timm")

Code = dict[str, list[str]]
"""Module → [path, from the working folder if inside it; digest of its source]."""

_library_files: set[str] = set()
"""Files of modules that an earlier run of this process found to be no user's."""

_TOKENS = re.compile(
    rb'("""[\s\S]*?"""|\'\'\'[\s\S]*?\'\'\'|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\')'
    rb"|^[ \t]*(?:#[^\n]*)?\r?\n|[ \t]*(?:#[^\n]*)?(?=\r?\n)",
    re.MULTILINE,
)
"""String literals, which are kept; or a comment, an empty line, blanks at a line's end."""


def library_versions(then: Iterable[str] = ()) -> dict[str, str]:
    """Return the versions of Python and of the relevant libraries, by name.

    Args:
        then: further names: those in a checkpoint, loaded now or not.
    """
    found = {"python": platform.python_version()}
    loaded = [name for name in IF_LOADED if name in sys.modules]
    for name in dict.fromkeys((*LIBRARIES, *loaded, *then)):
        version = getattr(sys.modules.get(name), "__version__", None)
        if name != "python" and (version := version or _installed(name)):
            found[name] = str(version)
    return found


def _installed(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return ""


def find_user_code() -> Code:
    """Return the loaded modules that belong to the user: no library's, Python's or Shoal's.

    Returns:
        the file and digest of each; the script itself is `__main__`.
    """
    theirs = [sysconfig.get_paths()[key] for key in ("stdlib", "platstdlib")]
    outside = tuple(f"{os.path.realpath(path)}{os.sep}" for path in (*theirs, str(PACKAGE)))
    found: Code = {}
    known: dict[str, str] = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or not file.endswith(".py") or file in _library_files:
            continue
        path = _resolve(file, known)
        if path.startswith(outside) or "site-packages" in path or "dist-packages" in path:
            _library_files.add(file)
            continue
        if digest := source_digest(Path(path)):
            inside = os.path.relpath(path)
            found[name] = [path if inside.startswith("..") else inside, digest]
    return found


def _resolve(path: str, known: dict[str, str]) -> str:
    """Return `os.path.realpath(path)`, with one system call for each folder on the way.

    Args:
        path: path of one of some two thousand modules in three hundred folders.
        known: cache of folders: path → real path.
    """
    folder, name = os.path.split(path)
    if name in ("", ".", "..") or os.path.islink(path):
        return os.path.realpath(path)
    if folder not in known:
        known[folder] = _resolve(folder, known)
    return os.path.join(known[folder], name)


def source_digest(path: Path) -> str:
    """Hash a source file without comments and empty lines; "" if unreadable."""
    try:
        text = path.read_bytes()
    except OSError:
        return ""
    said = _TOKENS.sub(lambda found: found[1] or b"", text)
    return hashlib.blake2b(said, digest_size=12).hexdigest()


def find_changed_code(
    then: Mapping[str, list[str]], now: Mapping[str, list[str]] | None
) -> list[str]:
    """List the files whose source changed; modules present only once do not count.

    Args:
        then: the code of a checkpoint.
        now: `find_user_code()`; None: the files are read at their old paths.
    """
    changed = []
    for name, (path, digest) in then.items():
        known = now.get(name) if now is not None else [path, source_digest(Path(path))]
        if known is not None and known[1] not in ("", digest):
            changed.append(known[0])
    return sorted(set(changed))
