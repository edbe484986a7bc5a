"""Find the script that a command line names after `--`, or propose the nearest one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from shoal.base.errors import ConfigError, nearest_word


def find_script(words: Sequence[str], command: str) -> Path:
    """Return the script of a command, which exists.

    Args:
        words: after `--`: the script, and its own arguments.
        command: before them, for messages.

    Raises:
        ConfigError: there is none; the line proposes the nearest file.
    """
    if not words:
        raise ConfigError(f"{command}: no script after --; try: {command} -- train.py")
    script, others = Path(words[0]), [word for word in words[1:] if word.endswith(".py")]
    if script.is_file():
        return script
    if others and Path(others[0]).is_file():  # as in `-- python train.py`
        tried = f"{command} -- {others[0]}"
    else:
        tried = _nearest_script(script) or "the path of a Python script, as in -- src/train.py"
    what = "this is a folder" if script.is_dir() else "there is no such script"
    raise ConfigError(f"{script}: {what}; try: {tried}")


def _nearest_script(script: Path) -> str:
    """Return the path of the script whose name is most similar, in its folder or near it; or ""."""
    folder = script if script.is_dir() else script.parent
    for pattern in ("*.py", "*/*.py"):
        for near in (folder, Path()):
            paths = {path.name: path for path in sorted(near.glob(pattern))}
            name = nearest_word(script.name, paths) or nearest_word(f"{script.name}.py", paths)
            if name or len(paths) == 1:
                return str(paths[name] if name else next(iter(paths.values())))
    return ""
