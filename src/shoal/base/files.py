"""Small files written whole or not at all; where what is slow to make is kept; what was saved."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path


def cache_folder() -> Path:
    """Returns the folder for what is kept between runs: $SHOAL_CACHE, else $XDG_CACHE_HOME/shoal.

    Without both it is ~/.cache/shoal, and where there is no home (a container's unnamed user) a
    folder of this user's below the temporary one. It need not exist, and is not made here.
    """
    own, shared = os.environ.get("SHOAL_CACHE"), os.environ.get("XDG_CACHE_HOME")
    try:
        if own:
            return Path(own).expanduser()
        return (Path(shared) if shared else Path.home() / ".cache") / "shoal"
    except RuntimeError:  # no HOME, and no entry for this user
        return Path(tempfile.gettempdir()) / f"shoal-cache-{os.getuid()}"


def cache_trouble(folder: Path) -> str:
    """Return why nothing can be kept in a folder, made if it is missing; "" where it can.

    >>> cache_trouble(Path("/dev/null/cache"))
    'Not a directory'
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(4096))  # a full disk takes names, and no bytes
            file.flush()
        os.listdir(folder)
    except FileExistsError:
        return "a file is in its place"
    except OSError as failure:
        return failure.strerror or type(failure).__name__
    return ""


def write_whole(path: Path, text: str) -> None:
    """Write a text file whole or not at all: into a new file beside `path`, renamed over it.

    Errors   OSError, also where the folder is missing; what was at `path` then stays
    """
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fresh.write_text(text, encoding="utf-8")
        os.replace(fresh, path)
    finally:
        fresh.unlink(missing_ok=True)


def saved_steps(folder: Path) -> list[int]:
    """List the steps of which a run folder holds a complete checkpoint (a manifest), ascending.

    Nothing in them is verified; a folder without checkpoints gives [].
    """
    manifests = (folder / "checkpoints").glob("step-*/manifest.json")
    names = [re.fullmatch(r"step-([0-9]+)", manifest.parent.name) for manifest in manifests]
    return sorted(int(name[1]) for name in names if name)
