"""The launcher of several islands on one machine, piece by piece; whole runs are in worlds/."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.cli import islands


@pytest.mark.parametrize(("asked", "code"), [(True, 143), (False, -signal.SIGTERM)])
def test_a_stop_before_an_island_listens_is_a_stop(tmp_path: Path, asked: bool, code: int) -> None:
    """While it imports it dies by the signal; what ended the run is the island that refused."""
    guardian: Any = SimpleNamespace(tell=lambda *_: None)
    island = islands._Island(tmp_path, guardian)
    island.process = subprocess.Popen(["sleep", "60"])
    if asked:
        island.ask_to_stop()
    else:
        island.process.terminate()
    assert island.ended() == code
    assert (code in islands.STOPPED) == asked
