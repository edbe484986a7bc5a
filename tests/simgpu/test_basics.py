"""The simulated device keeps its promises: numbers, memory, streams, pinned memory, generators."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def test_promises(forks) -> None:
    done = forks.run("basics.py")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert len(told["checks"]) >= 13
    assert not told["wrong"], "\n".join(f"{k}: {v}" for k, v in told["wrong"].items())


def test_rooms_of_the_source_know_a_device(forks) -> None:
    """What trains nothing: abilities, memory, measurements, refusals, pinned copies, loaded states."""
    done = forks.run("rooms.py")
    told = json.loads(done.stdout.splitlines()[-1])
    assert not told["wrong"], "\n".join(f"{k}: {v}" for k, v in told["wrong"].items())
    assert done.returncode == 0, done.stderr


def test_a_seed_repeats_exactly(forks, run) -> None:
    """In a program of its own and in forks, which are the same to the device."""
    first, again, other = (
        start("basics.py", "digest", SIM_SEED=seed).stdout.strip()
        for start, seed in ((run, "3"), (forks.run, "3"), (forks.run, "4"))
    )
    assert first
    assert first == again
    assert first != other


def test_what_it_measures_is_kept_apart_from_this_machine(
    environ: dict[str, str], library: str
) -> None:
    """Else a program run by hand leaves facts of a GPU that is not there for `auto` to plan with."""
    bare = {name: value for name, value in environ.items() if name != "SHOAL_CACHE"}
    code = "from shoal.base.runlog.atomic_files import cache_folder; print(cache_folder())"
    for said, folder in (({}, Path(library).parent / "shoal-cache"), ({"SHOAL_CACHE": "/x"}, "/x")):
        told = subprocess.check_output(
            [sys.executable, "-c", code], env={**bare, **said}, text=True
        )
        assert told.strip() == str(folder)


def test_without_a_compiler_it_says_so(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(HERE / "simulated" / "build.py")],
        env={**os.environ, "CXX": "no-such-compiler", "SHOAL_SIMGPU_CACHE": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert done.stderr.strip() == (
        "the simulated device needs a C++17 compiler (no-such-compiler); none is here"
    )
