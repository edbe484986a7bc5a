"""Guard of the user's files while a script is proven: writes outside of the copy are refused.

Python reports each opened, removed, renamed or made file to an audit hook, whichever function opens
it. `torch.save` and safetensors write their files in native code, so their functions are wrapped.
The script sees a PermissionError; the report names the line and the path.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

from shoal.base.attribute_patch import patch_attribute
from shoal.base.text.user_frames import user_line_of_frame

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

CHANGED_PATHS = {
    "os.remove": (0,),
    "os.rmdir": (0,),
    "os.mkdir": (0,),
    "os.rename": (0, 1),
    "os.link": (1,),
    "os.symlink": (1,),
    "os.truncate": (0,),
    "os.chmod": (0,),
    "os.utime": (0,),
}
"""Audit event → positions of the paths that it changes."""

OF_HOME = (".cache", ".triton", ".config", ".local", ".nv")
"""Folders of the home folder in which libraries keep caches."""

_active: list[WriteGuard] = []
_state = {"installed": False}


class WriteRefusedError(PermissionError):
    """Error in the place of a write outside of the script's folder."""


class WriteGuard:
    """Refuses writes outside of some folders.

    Attributes:
        roots: real paths of the folders to which the script may write.
        refused: one line for each refused write, once.
    """

    def __init__(self, roots: Iterable[str]) -> None:
        caches = [os.path.expanduser(f"~/{name}") for name in OF_HOME]
        caches += [os.environ.get("XDG_CACHE_HOME", ""), os.environ.get("SHOAL_CACHE", "")]
        every = [*roots, tempfile.gettempdir(), *filter(None, caches), "/dev", "/proc"]
        self.roots = tuple(os.path.realpath(root) for root in every)
        self.refused: dict[str, None] = {}

    def check(self, path: Any, *, follows: bool = True) -> None:
        """Raise WriteRefusedError if a path lies outside of the folders.

        Args:
            path: any path; numbers and None are open files.
            follows: the operation follows a link, as opening a file does.
        """
        if isinstance(path, bytes):
            path = os.fsdecode(path)
        if not isinstance(path, str | os.PathLike):
            return
        text = os.path.abspath(os.fspath(path))
        folder, name = os.path.split(text)
        real = os.path.realpath(text) if follows else os.path.join(os.path.realpath(folder), name)
        if any(real == root or real.startswith(root + os.sep) for root in self.roots):
            return
        where = user_line_of_frame(sys._getframe(1)) or "the script"
        self.refused[f"{where} writes {os.fspath(path)}"] = None
        raise WriteRefusedError(
            f"{os.fspath(path)}: outside of the script's folder, to which a proof writes nothing; "
            f"try: a path below the script's folder"
        )


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    """Check one event of Python's audit hooks."""
    if not _active:
        return
    if event == "open":
        path, mode, flags = arguments
        writes = any(letter in mode for letter in "wax+") if isinstance(mode, str) else False
        if writes or (not isinstance(mode, str) and int(flags or 0) & WRITING):
            _active[-1].check(path)
    elif event in CHANGED_PATHS:
        for position in CHANGED_PATHS[event]:
            _active[-1].check(arguments[position], follows=event in ("os.truncate", "os.chmod"))


@contextmanager
def guard_writes(guard: WriteGuard) -> Iterator[None]:
    """Refuse writes outside of the guard's folders while it is open."""
    import safetensors.torch
    import torch

    if not _state["installed"]:
        sys.addaudithook(_audit)  # for the life of the process; without a guard it does nothing
        _state["installed"] = True
    with ExitStack() as stack:
        for module, name in ((torch, "save"), (safetensors.torch, "save_file")):
            checked = _checked(getattr(module, name), guard)
            stack.enter_context(patch_attribute(module, name, checked))
        _active.append(guard)
        stack.callback(_active.pop)
        yield


def _checked(save: Callable[..., Any], guard: WriteGuard) -> Callable[..., Any]:
    """Wrap a function that writes the file of its second argument."""

    @wraps(save)
    def checked(*arguments: Any, **named: Any) -> Any:
        path = named.get("f", named.get("filename"))
        if path is None and len(arguments) > 1:
            path = arguments[1]
        if isinstance(path, str | Path):
            guard.check(path)
        return save(*arguments, **named)

    return checked
