"""The simulated device for tests: built once, then named in the environment of the processes they start.

Without a compiler, or with another torch, everything here is skipped with a line that says why.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
DEADLINE_S = 400.0
sys.path.insert(0, str(HERE))

from ranks import on_cpu  # noqa: E402

from forks import Forks, Running  # noqa: E402

IMPORTS = (
    *("torch._dynamo", "torch.fx.experimental.proxy_tensor", "torch.distributed.fsdp"),
    *("shoal.trainer.parallelize", "shoal.parallel.offload", "shoal.proof.start_proof"),
)

collect_ignore = [str(one) for one in HERE.rglob("*.py") if not one.name.startswith("test_")]
"""Programs that run on the device: nothing of them can be imported without it."""


@pytest.fixture(scope="session")
def library() -> str:
    """The built library."""
    from simulated import build

    try:
        return str(build.library())
    except build.CannotBuild as why:
        pytest.skip(str(why))


@pytest.fixture(scope="session")
def environ(library: str) -> dict[str, str]:
    """In which a process's `cuda` is the simulated device."""
    paths = (HERE / "site", ROOT / "src", os.environ.get("PYTHONPATH", ""))
    return {
        **os.environ,
        "SIM_LIBRARY": library,
        "SIM_DEVICES": "4",
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
    }


class Here(Forks):
    """Programs of this folder: run("planted.py", "all", SIM_MODE="lazy")."""

    def __init__(self, environ: dict[str, str]) -> None:
        super().__init__(environ, IMPORTS)

    def start(self, words: Sequence[str], environ: Mapping[str, str]) -> Running:
        """A program with its arguments; environ: what its own is to differ by."""
        return super().start([str(HERE / words[0]), *words[1:]], environ, HERE)

    def run(self, *words: str, **settings: str) -> subprocess.CompletedProcess[str]:
        """The same, waited for."""
        running = self.start(words, settings)
        out, error = running.communicate()
        return subprocess.CompletedProcess(words, running.returncode, out, error)


@pytest.fixture(scope="session")
def forks(environ: dict[str, str]) -> Iterator[Forks]:
    """Programs on simulated devices, forked from one that has imported all."""
    made = Here(environ)
    yield made
    made.close()


@pytest.fixture(scope="session")
def cpu_forks() -> Iterator[Forks]:
    """The same without a device."""
    made = Here(on_cpu())
    yield made
    made.close()


Run = Callable[..., subprocess.CompletedProcess]


@pytest.fixture(scope="session")
def run(environ: dict[str, str]) -> Run:
    """Runs a program of this folder in a process of its own: run("planted.py", "all", SIM_MODE="lazy")."""

    def start(*words: str, **settings: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, str(HERE / words[0]), *words[1:]],
            env={**environ, **settings},
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )

    return start
