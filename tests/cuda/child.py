"""Runs one part: `child.py MODULE:FUNCTION ROWS`; each row lands in the file ROWS when it is done.

A part is a function that takes a `Sheet` and checks one thing per row. A row that fails is kept
with its traceback, and the next one runs; what a time limit cuts off keeps the rows before it.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class Sheet:
    """The rows of one part, on disk as soon as each is done."""

    def __init__(self, path: Path) -> None:
        self.path, self.failed = path, 0

    @contextmanager
    def row(self, name: str) -> Iterator[dict[str, Any]]:
        """One check; figures put into the dictionary stand in the row, also of one that fails."""
        told: dict[str, Any] = {}
        began_s, error = time.perf_counter(), None
        try:
            yield told
        except Exception:
            error = traceback.format_exc()[-4000:]
            self.failed += 1
        line = {"row": name, "ok": error is None, **told}
        line["seconds"] = round(time.perf_counter() - began_s, 2)
        if error:
            line["error"] = error
        with self.path.open("a") as file:
            file.write(json.dumps(line, default=str) + "\n")
        mark = "ok" if error is None else "FAILED: " + error.strip().splitlines()[-1]
        print(f"  {name}: {mark}", flush=True)


def main() -> None:
    module, name = sys.argv[1].split(":")
    sheet = Sheet(Path(sys.argv[2]))
    with sheet.row("import"):
        work = getattr(importlib.import_module(module), name)
    if not sheet.failed:
        work(sheet)
    sys.stdout.flush()
    os._exit(1 if sheet.failed else 0)  # a library's exit handlers are no part of what is checked


if __name__ == "__main__":
    main()
