"""Set this process up as Python would for a script: arguments, module paths, working folder.

A proof (`side_process.py`) and a replay (`replay/script_replay.py`) run a user's script so, in a
copy of its folder.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def enter_script(script: str, words: Sequence[str], cwd: str) -> Iterator[None]:
    """Set `sys.argv`, `sys.path` and the working folder for a script while the context is open.

    Args:
        script: path of the script.
        words: its arguments.
        cwd: its working folder.
    """
    argv, path, before = sys.argv, list(sys.path), os.getcwd()
    sys.argv = [script, *words]
    sys.path.insert(0, str(Path(script).parent))
    os.chdir(cwd)
    try:
        yield
    finally:
        os.chdir(before)
        sys.argv, sys.path[:] = argv, path
