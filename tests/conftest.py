"""For all tests: Ctrl-C as at a terminal, and compiled sources for the processes that tests start.

A background job of a non-interactive shell starts with SIGINT ignored; the supervisor rightly keeps
such a choice, and its tests of Ctrl-C would wait in vain.

What a machine was measured to be is said beforehand, for all commands of a session
(`known_machine.py`), and what they learn of it is not kept for the next one.

One thread computes: two lanes have two cores, and threads that wait for a core spin meanwhile.

What is imported and collected is no garbage: a million objects that were looked at again and again.

Under PYTHONDONTWRITEBYTECODE each of some 300 processes would compile Shoal anew: 1.1 CPU-seconds.
"""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))

from file_times import FileTimes
from forks import Forks, shared
from guard_off import switch_off
from known_machine import write_machine

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

switch_off()
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

os.environ["SHOAL_CACHE"] = tempfile.mkdtemp(prefix="shoal-tests-cache-")
atexit.register(shutil.rmtree, os.environ["SHOAL_CACHE"], ignore_errors=True)
write_machine(Path(os.environ["SHOAL_CACHE"]))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let `make proof PART=…` choose tests by the part that their mark names."""
    parser.addoption("--part", default="", help='tests marked `pytest.mark.proof("PART")` alone')


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests of other parts."""
    if part := config.getoption("--part"):
        marks = {item: item.get_closest_marker("proof") for item in items}
        items[:] = [item for item, mark in marks.items() if mark and part in mark.args]


def pytest_configure(config: pytest.Config) -> None:
    """Keep how long each file took."""
    gc.disable()
    if not os.environ.get("SIM_LIBRARY"):  # on simulated devices a test of another file runs them
        config.pluginmanager.register(FileTimes())


def pytest_collection_finish() -> None:
    """Let the collector of garbage begin, with what tests make."""
    gc.enable()
    gc.freeze()


@pytest.fixture(scope="session")
def programs() -> Forks:
    """Programs forked from one process with all imports: programs.run("-m", "shoal", "prove")."""
    return shared()
