"""Mark in a shared file which blocks of Shoal a process executes, from its first import on.

`touch_map.py` makes an environment in which every Python imports this first. Where SHOAL_TOUCH names a file,
sources are compiled with a store at the beginning of each block (`touch_blocks.py`). The file is mapped
shared, so forks mark it as well, and what a killed process has marked stays. Coverage.py was weighed:
it writes when a process ends, and most ranks of these tests are killed or forked.

Other files of the repository that a process opens (pages, results, tables) are marked too.
"""

from __future__ import annotations

import ast
import builtins
import functools
import importlib.machinery
import marshal
import mmap
import os
import runpy
import sys
import types
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CELL = "__shoal_touched__"
"""The name in `builtins` of the mapped file: one byte a block."""


@functools.cache
def offsets() -> dict[str, int]:
    """Return path → number of its first block, or its own number for another file."""
    with open(os.environ["SHOAL_TOUCH_INDEX"], encoding="utf-8") as index:
        rows = (line.split(maxsplit=1) for line in index.read().splitlines())
        return {path: int(at) for at, path in rows}


def compiled(path: str) -> types.CodeType | None:
    """Return a marked source's code; None for a file that is not ours."""
    name = os.path.relpath(os.path.realpath(path), ROOT)
    if name.startswith("..") or not name.endswith(".py") or name not in offsets():
        return None
    kept = Path(os.environ["SHOAL_TOUCH_INDEX"] + ".code") / (name.replace("/", "-") + "c")
    if kept.exists():
        code = marshal.loads(kept.read_bytes())
        assert isinstance(code, types.CodeType)
        return code
    import touch_blocks as blocks  # only where a source is compiled for the first time

    tree, text = blocks.read(Path(path))
    base = offsets()[name]

    def statement(number: int) -> ast.stmt:
        return ast.parse(f"{CELL}[{base + number}] = 1").body[0]

    blocks.mark(tree, blocks.divide(tree, text), statement)
    code = compile(tree, path, "exec", dont_inherit=True)
    kept.parent.mkdir(exist_ok=True)
    part = kept.with_suffix(f".{os.getpid()}")
    part.write_bytes(marshal.dumps(code))
    part.replace(kept)
    return code


def install() -> None:
    """Map the file, and mark from now on."""
    with open(os.environ["SHOAL_TOUCH"], "r+b") as file:
        touched = mmap.mmap(file.fileno(), 0)
    setattr(builtins, CELL, touched)
    original = importlib.machinery.SourceFileLoader.get_code

    def get_code(self: Any, fullname: str) -> types.CodeType | None:
        return compiled(self.get_filename(fullname)) or original(self, fullname)

    importlib.machinery.SourceFileLoader.get_code = get_code  # type: ignore[method-assign]
    plain: Any = runpy._get_code_from_file  # type: ignore[attr-defined]

    def from_file(*words: Any) -> Any:
        code = compiled(os.fspath(words[-1]))  # the last argument is the path in each version
        return plain(*words) if code is None else (code, os.fspath(words[-1])) if _pair() else code

    runpy._get_code_from_file = from_file  # type: ignore[attr-defined]
    others = {
        os.path.join(ROOT, name): at for name, at in offsets().items() if not name.endswith(".py")
    }

    def opened(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], str):
            path = arguments[0]
            at = others.get(path if path[:1] == "/" else os.path.join(os.getcwd(), path))
            if at is not None:
                touched[at] = 1

    sys.addaudithook(opened)


def _pair() -> bool:
    """Return whether this Python's runpy wants (code, path): up to 3.11."""
    return sys.version_info < (3, 12)


if os.environ.get("SHOAL_TOUCH"):
    install()
