"""Atomic writes of small files; cache folders; steps of saved checkpoints."""

from __future__ import annotations

import atexit
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path


def cache_folder() -> Path:
    """Return the folder for caches between runs: $SHOAL_CACHE, else $XDG_CACHE_HOME/shoal.

    Without both it is ~/.cache/shoal; without a home (a container's unnamed user) it is this user's
    folder below the temporary one. It need not exist, and is not created here.
    """
    own, shared = os.environ.get("SHOAL_CACHE"), os.environ.get("XDG_CACHE_HOME")
    try:
        if own:
            return Path(own).expanduser()
        return (Path(shared) if shared else Path.home() / ".cache") / "shoal"
    except RuntimeError:  # no HOME, and no entry for this user
        return Path(tempfile.gettempdir()) / f"shoal-cache-{os.getuid()}"


def check_cache_folder(folder: Path) -> str:
    """Return why a cache folder, created if missing, is unusable; "" if it is usable.

    >>> check_cache_folder(Path("/dev/null/cache"))
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


def make_temporary_cache() -> Path:
    """Create a cache folder that this process deletes at exit; forked processes do not."""
    own, pid = tempfile.mkdtemp(prefix="shoal-cache-"), os.getpid()

    def remove() -> None:
        if os.getpid() == pid:
            shutil.rmtree(own, ignore_errors=True)

    atexit.register(remove)
    return Path(own)


def find_unusable_compiler_caches() -> list[tuple[str, Path, str]]:
    """Return the unusable cache folders of torch's compiler.

    torch creates the first one when it imports its compiler, even without compiling, and fails if
    it cannot.

    Returns:
        (environment variable, folder, reason) of each.
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
    return [(name, folder, why) for name, folder in found if (why := check_cache_folder(folder))]


def replace_compiler_caches(make: Callable[[], Path] = make_temporary_cache) -> list[str]:
    """Set other cache folders for torch's compiler, for this process and its children.

    Args:
        make: returns their parent folder; called if one is needed.

    Returns:
        A line for the user for each.
    """
    lines = []
    for name, folder, why in find_unusable_compiler_caches():
        os.environ[name] = str(make() / name.partition("_")[0].lower())
        lines.append(
            f"torch's compiler: cache folder {folder}: {why}; compiled code is kept for this "
            f"run alone; try: {name}=another folder"
        )
    return lines


def write_atomically(path: Path, text: str) -> None:
    """Write a text file atomically: into a new file beside `path`, renamed over it.

    Raises:
        OSError: the write failed or the folder is missing; the file at `path` then stays.
    """
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fresh.write_text(text, encoding="utf-8")
        os.replace(fresh, path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise


def list_saved_steps(folder: Path) -> list[int]:
    """List the steps of which a run folder has a complete checkpoint (a manifest), ascending.

    Checkpoints are not verified; a folder without checkpoints gives [].
    """
    manifests = (folder / "checkpoints").glob("step-*/manifest.json")
    names = [re.fullmatch(r"step-([0-9]+)", manifest.parent.name) for manifest in manifests]
    return sorted(int(name[1]) for name in names if name)
