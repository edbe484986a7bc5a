"""Nothing outlives the supervisor; workers are told their place, and meet elsewhere each time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from shoal.base.estimates import facts
from shoal.base.estimates.facts import usable_cores
from shoal.fabric.rendezvous.process_info import read_process_info
from shoal.launch import supervise
from shoal.launch.processes import make_shared_environment, make_worker_environment

PARENT = """
import os, sys
from pathlib import Path
from shoal.launch import supervise
os.environ["PYTHONPATH"] = sys.argv[2]
supervise([sys.executable, "-m", Path(sys.argv[1]).stem], processes=2,
          folder=Path(sys.argv[2]), restarts=0, emit=lambda *_, **__: None,
          imports=sys.argv[3].split())
"""
WITH_GRANDCHILD = """
import os, subprocess, sys, time
from pathlib import Path
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
path = Path(os.environ["SHOAL_RUN_FOLDER"], "pids-" + os.environ["RANK"])
path.with_suffix(".tmp").write_text(f"{os.getpid()} {child.pid}")
path.with_suffix(".tmp").rename(path)
time.sleep(60)
"""


def lives(pid: int) -> bool:
    """Whether a process runs; one that waits to be collected (a zombie) does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def wait_until(condition: Any, limit_s: float) -> bool:
    deadline_s = time.monotonic() + limit_s
    while time.monotonic() < deadline_s:
        if condition():
            return True
        time.sleep(0.02)
    return bool(condition())


def start_family(folder: Path, imports: str = "") -> tuple[subprocess.Popen[bytes], list[int]]:
    """A supervisor in its own process, and the ids of its workers and their children."""
    script = folder / "script.py"
    script.write_text(WITH_GRANDCHILD)
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(script), str(folder), imports])
    files = [folder / "pids-0", folder / "pids-1"]
    assert wait_until(lambda: all(file.exists() for file in files), 15)
    return parent, [int(pid) for file in files for pid in file.read_text().split()]


def children_of(pid: int) -> list[int]:
    return [int(n) for n in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("imports", ["", "json"])
def test_sigkill_of_the_supervisor_leaves_no_process(tmp_path: Path, imports: str) -> None:
    parent, pids = start_family(tmp_path, imports)
    pids += [pid for pid in children_of(parent.pid) if pid not in pids]
    # Two workers, a child of each, the guardian; and the process that forks.
    assert len(pids) == 5 + len(imports.split())
    parent.kill()
    parent.wait()
    assert wait_until(lambda: not any(map(lives, pids)), 3), [p for p in pids if lives(p)]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="parent-death signal")
def test_workers_die_with_the_supervisor_even_without_the_guardian(tmp_path: Path) -> None:
    parent, pids = start_family(tmp_path)
    workers = pids[::2]
    (guardian,) = [pid for pid in children_of(parent.pid) if pid not in workers]
    os.kill(guardian, signal.SIGKILL)
    parent.kill()
    parent.wait()
    try:
        assert wait_until(lambda: not any(map(lives, workers)), 3)
    finally:
        for pid in pids[1::2]:
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("end", ["time.sleep(30)", "sys.exit(0)"])
def test_what_a_worker_started_ends_with_it(tmp_path: Path, end: str) -> None:
    body = (
        WITH_GRANDCHILD.replace("time.sleep(60)\n", "")
        + f"""
if os.environ["RANK"] == "1":
    time.sleep(0.3)
    os.kill(os.getpid(), 9)
{end}
"""
    )
    supervise([sys.executable, "-c", body], processes=2, folder=tmp_path, restarts=0,
              emit=lambda *_, **__: None)  # fmt: skip
    pids = [int(pid) for k in (0, 1) for pid in (tmp_path / f"pids-{k}").read_text().split()]
    assert wait_until(lambda: not any(map(lives, pids)), 3)


REPORT_PLACE = """
import json, os, sys, time
from pathlib import Path
attempt, rank = os.environ["SHOAL_ATTEMPT"], os.environ["RANK"]
seen = {"cwd": os.getcwd(), "session": os.getsid(0) == os.getpid(), "env": dict(os.environ)}
store = os.stat(os.environ["SHOAL_STORE"])
seen["store"] = [store.st_dev, store.st_ino, store.st_mode & 0o77]
Path(os.environ["SHOAL_RUN_FOLDER"], f"seen-{attempt}-{rank}").write_text(json.dumps(seen))
if attempt == "0":
    other = Path(os.environ["SHOAL_RUN_FOLDER"], f"seen-0-{1 - int(rank)}")
    while not other.exists():  # else its writer may be ended before it has written
        time.sleep(0.01)
    sys.exit(1)
"""


def test_workers_are_told_their_place_and_each_attempt_meets_elsewhere(tmp_path: Path) -> None:
    environ = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    outcome = supervise([sys.executable, "-c", REPORT_PLACE + "time.sleep(0.3)"],
                        processes=2, folder=tmp_path, restarts=1, environ=environ,
                        emit=lambda *_, **__: None)  # fmt: skip
    assert outcome.status == "finished"
    first, second = (json.loads((tmp_path / f"seen-{k}-0").read_text()) for k in (0, 1))
    peer = json.loads((tmp_path / "seen-1-1").read_text())
    assert first["store"][:2] != second["store"][:2], "each attempt has a store of its own"
    assert peer["store"] == second["store"]
    assert not os.path.exists(second["env"]["SHOAL_STORE"]), "it ends with the run"
    assert peer["session"]
    assert peer["cwd"] == os.getcwd()
    assert peer["env"]["OMP_NUM_THREADS"] == str(max(1, usable_cores() // 2))
    assert peer["env"]["GLOO_SOCKET_IFNAME"] == "lo"
    assert peer["env"]["SHOAL_RUN_FOLDER"] == str(tmp_path)
    place = read_process_info(second["env"])
    assert (place.rank, place.size, place.local_rank, place.local_size) == (0, 2, 0, 2)
    assert place.file == second["env"]["SHOAL_STORE"]
    assert place.started_by == "shoal"
    assert place.attempt == "1"
    assert read_process_info(peer["env"]).rank == 1


def test_what_the_user_set_is_kept(tmp_path: Path) -> None:
    base = {"OMP_NUM_THREADS": "5", "GLOO_SOCKET_IFNAME": "eth7", "SHOAL_STORE": "another run's"}
    environ = make_worker_environment(
        make_shared_environment(base, 2),
        rank=1,
        processes=2,
        attempt=0,
        folder=tmp_path,
        store="here",
    )
    assert environ["OMP_NUM_THREADS"] == "5"
    assert environ["GLOO_SOCKET_IFNAME"] == "eth7"
    assert environ["SHOAL_STORE"] == "here"


def test_ranks_ask_for_huge_pages_where_nobody_said_otherwise(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Workers by their environment; a script's ranks when they import shoal."""
    name, there = "THP_MEM_ALLOC_ENABLE", tmp_path / "enabled"
    monkeypatch.setattr(facts, "HUGE_PAGES", there)
    assert name not in make_shared_environment({}, 2), "Linux gives none here"
    there.touch()
    assert make_shared_environment({}, 2)[name] == "1"
    assert make_shared_environment({name: "0"}, 2)[name] == "0"
    if not Path("/sys/kernel/mm/transparent_hugepage/enabled").exists():
        return
    program = f"import os, shoal; print(os.environ.get({name!r}))"
    outside = {k: v for k, v in os.environ.items() if k not in (name, "WORLD_SIZE")}
    for more, said in (
        ({"WORLD_SIZE": "2"}, "1"),
        ({"WORLD_SIZE": "2", name: "0"}, "0"),
        ({"WORLD_SIZE": "1"}, "None"),
        ({}, "None"),
    ):
        told = subprocess.run(
            [sys.executable, "-c", program], env={**outside, **more},
            capture_output=True, text=True, timeout=300, check=True,
        ).stdout  # fmt: skip
        assert told.strip() == said
