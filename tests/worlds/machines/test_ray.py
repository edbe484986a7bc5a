"""A loop of one's own under Ray Train: the process group that is there is adopted, a death is survived."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli_run import OWN_LOOP, final_hashes, trajectory

pytestmark = pytest.mark.proof
HERE = Path(__file__).resolve().parents[1]
SCRIPT = (
    OWN_LOOP
    + """
run.restore()
loader = run.loader(data)
while run.step_count < 60:
    for batch in loader:
        run.step(batch)
        time.sleep(0.02)
        if run.step_count % 10 == 0:
            run.save()
        if run.step_count == 60:
            break
run.close()
"""
)


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder whose name is short: Ray's sockets lie in it."""
    folder = Path(tempfile.mkdtemp(dir="/tmp", prefix="r"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def under_ray(folder: Path, kill: int, after: int) -> str:
    folder.mkdir()
    (folder / "own.py").write_text(SCRIPT)
    paths = os.pathsep.join((str(HERE), os.environ.get("PYTHONPATH", "")))
    done = subprocess.run(
        [sys.executable, str(HERE / "under_ray.py"), "own.py", str(kill), str(after)],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


def test_a_worker_that_ray_restarts_goes_on_bit_for_bit(short: Path) -> None:
    """Worker 1 is killed after step 33: Ray starts both again, the run goes on from step 30."""
    pytest.importorskip("ray")
    under_ray(short / "a", -1, 0)
    under_ray(short / "b", 1, 33)
    assert (short / "b" / "killed").exists()
    assert [step for step, *_ in trajectory(short / "b" / "run")] == list(range(1, 61))
    assert trajectory(short / "b" / "run") == trajectory(short / "a" / "run")
    assert final_hashes(short / "b" / "run") == final_hashes(short / "a" / "run")
