"""Small files written whole or not at all; where what is slow to make is kept; what was saved."""

from __future__ import annotations

import atexit
import os
import re
import shutil
import tempfile
from collections.abc import Callable
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


def temporary_cache() -> Path:
    """Make a cache folder that goes with this process; those that it forks leave it."""
    own, pid = tempfile.mkdtemp(prefix="shoal-cache-"), os.getpid()

    def remove() -> None:
        if os.getpid() == pid:
            shutil.rmtree(own, ignore_errors=True)

    atexit.register(remove)
    return Path(own)


def unusable_compiler_caches() -> list[tuple[str, Path, str]]:
    """Find the cache folders of torch's compiler that cannot be used.

    torch makes the first one when it imports its compiler, compiled or not, and fails if it cannot.

    Returns:
        (environment variable, folder, why) of each.
    """
    from getpass import getuser

    inductor = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if inductor is None:
        try:
            user = getuser()
        except (KeyError, OSError):
            user = f"uid_{os.getuid()}"
        name = re.sub(r'[\\/:*?"<>|]', "_", user)
        inductor = os.path.join(tempfile.gettempdir(), f"torchinductor_{name}")
    folders = {
        "TORCHINDUCTOR_CACHE_DIR": inductor,
        "TRITON_CACHE_DIR": os.environ.get("TRITON_CACHE_DIR"),
    }
    found = [(name, Path(folder)) for name, folder in folders.items() if folder]
    return [(name, folder, why) for name, folder in found if (why := cache_trouble(folder))]


def replace_compiler_caches(make: Callable[[], Path] = temporary_cache) -> list[str]:
    """Give torch's compiler other cache folders, for this process and those that it starts.

    Args:
        make: the folder below which they lie; called where one is wanted.

    Returns:
        A line for the user for each.
    """
    lines = []
    for name, folder, why in unusable_compiler_caches():
        os.environ[name] = str(make() / name.partition("_")[0].lower())
        lines.append(
            f"torch's compiler: cache folder {folder}: {why}; compiled code is kept for this "
            f"run alone; try: {name}=another folder"
        )
    return lines


def write_whole(path: Path, text: str) -> None:
    """Write a text file whole or not at all: into a new file beside `path`, renamed over it.

    Raises:
        OSError: also where the folder is missing; what was at `path` then stays.
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
