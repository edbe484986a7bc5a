"""What the tests of the live lines share: a stream that claims to be a terminal, a worker's phases."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path


class Terminal(io.StringIO):
    """Claims to be a terminal."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def busy(folder: Path, *phases: tuple[str, int, int, float]) -> None:
    """What a first worker would have told: (name, done, of, seconds ago)."""
    now_s = time.time()
    rows = [
        {"name": name, "done": done, "of": of, "began_s": now_s - ago_s}
        for name, done, of, ago_s in phases
    ]
    (folder / "phase.json").write_text(json.dumps({"time_s": now_s, "phases": rows}))
