"""Workers that are forked from one process that has imported what all of them need."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.launch import RunOutcome, supervise
from shoal.launch.processes import (
    ForkServer,
    Guardian,
    SharedForkServer,
    can_fork,
    make_shared_environment,
)

pytestmark = pytest.mark.skipif(not can_fork(), reason="workers are programs on this system")

TELL = """
import json, os, sys, time
from pathlib import Path
folder, rank = Path(os.environ["SHOAL_RUN_FOLDER"]), os.environ["RANK"]
attempt = os.environ["SHOAL_ATTEMPT"]
def tell(**facts):
    path = folder / f"seen-{attempt}-{rank}"
    path.with_suffix(".half").write_text(json.dumps(facts))
    path.with_suffix(".half").rename(path)
"""
IMPORTED = """
from pathlib import Path
import os
with open(Path(__file__).with_name("imported"), "a") as file:
    file.write(f"{os.getpid()}\\n")
"""


def forked(
    folder: Path, body: str, *, imports: str = "costly", processes: int = 2, restarts: int = 1
) -> tuple[RunOutcome, list[dict[str, Any]]]:
    """How a run of `body` on forked workers ended, and its events."""
    (folder / "script.py").write_text(TELL + body)
    if not (folder / "costly.py").exists():
        (folder / "costly.py").write_text(IMPORTED)
    events: list[dict[str, Any]] = []
    outcome = supervise(
        [sys.executable, "-m", "script", "one", "two"],
        processes=processes,
        folder=folder,
        restarts=restarts,
        emit=lambda event, **fields: events.append({"event": event, **fields}),
        environ={**os.environ, "PYTHONPATH": str(folder), "RANK": "7", "KEPT": "of the caller"},
        imports=imports.split(),
    )
    return outcome, events


def seen(folder: Path) -> dict[str, dict[str, Any]]:
    return {path.name[5:]: json.loads(path.read_text()) for path in folder.glob("seen-*")}


def test_what_all_need_is_imported_once_for_all_workers_and_their_restarts(tmp_path: Path) -> None:
    outcome, events = forked(
        tmp_path,
        """
import costly
here = f"/proc/{os.getpid()}"
tell(argv=sys.argv[1:], name=__name__, main=__file__, environ=dict(os.environ),
     comm=Path(here, "comm").read_text().strip(), session=os.getsid(0) == os.getpid(),
     files=sorted(int(n) for n in os.listdir(f"{here}/fd") if os.path.exists(f"{here}/fd/{n}")),
     pid=os.getpid(), parent=os.getppid())
time.sleep(0.3)
sys.exit(attempt == "0" and rank == "1")
""",
    )
    assert (outcome.status, outcome.attempts) == ("finished", 2)
    told = seen(tmp_path)
    assert sorted(told) == ["0-0", "0-1", "1-0", "1-1"]
    assert not (tmp_path / "logs" / "import.log").exists()  # nothing was printed
    (server,) = {worker["parent"] for worker in told.values()}
    assert (tmp_path / "imported").read_text().split() == [str(server)]
    started = [
        (e["rank"], e["attempt"], e["pid"]) for e in events if e["event"] == "worker_started"
    ]
    for place, worker in told.items():
        attempt, rank = map(int, place.split("-"))
        assert (rank, attempt, worker["pid"]) in started
        assert (worker["argv"], worker["name"]) == (["one", "two"], "__main__")
        assert worker["main"] == str(tmp_path / "script.py")
        assert (worker["comm"], worker["session"]) == (f"shoal rank {rank}", True)
        environ = worker["environ"]
        assert (environ["RANK"], environ["KEPT"]) == (str(rank), "of the caller")
        assert worker["files"] == [0, 1, 2]  # nothing of the server's


def test_workers_draw_other_numbers_than_each_other_and_than_before(tmp_path: Path) -> None:
    draws = """
import random, numpy
tell(numpy=numpy.random.rand(), python=random.random())
while len([*folder.glob(f"seen-{attempt}-?")]) < 2:  # the end of one is the other's
    time.sleep(0.01)
sys.exit(attempt == "0")
"""
    outcome, _ = forked(tmp_path, draws, imports="numpy random")
    assert outcome.status == "finished"
    for kind in ("numpy", "python"):
        assert len({worker[kind] for worker in seen(tmp_path).values()}) == 4


def test_an_import_that_fails_is_told_by_the_workers_in_their_own_words(tmp_path: Path) -> None:
    (tmp_path / "costly.py").write_text("raise ImportError('libfoo.so.7 is missing')")
    outcome, events = forked(
        tmp_path,
        """
from shoal.launch import run_worker
def main():
    import costly
sys.exit(run_worker(main))
""",
        restarts=0,
    )
    assert outcome.exit_code == 1
    assert "ImportError: libfoo.so.7 is missing" in outcome.message
    assert "libfoo.so.7" in (tmp_path / "logs" / "import.log").read_text()
    assert [e["rank"] for e in events if e["event"] == "worker_started"] == [0, 1]


def test_imports_that_open_a_device_make_workers_programs(tmp_path: Path) -> None:
    (tmp_path / "costly.py").write_text(
        "import sys\n"
        "from shoal.launch import processes\n"
        "if '-m' in sys.orig_argv and 'shoal.launch.fork_server' in sys.orig_argv:\n"
        "    sys.modules['__main__'].DEVICES = ('/dev/zero',)\n"
        "    kept = open('/dev/zero')\n"
    )
    outcome, _ = forked(tmp_path, "tell(parent=os.getppid())\n")
    assert outcome.status == "finished"
    assert {worker["parent"] for worker in seen(tmp_path).values()} == {os.getpid()}


def test_a_killed_server_takes_its_workers_with_it_and_all_start_again(tmp_path: Path) -> None:
    outcome, events = forked(
        tmp_path,
        """
import signal
tell(parent=os.getppid())
if attempt == "0":
    if rank == "0":
        time.sleep(0.2)
        os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(30)
""",
    )
    assert (outcome.status, outcome.attempts) == ("finished", 2)
    (death,) = [e for e in events if e["event"] == "worker_died"]
    assert death["how"] == "killed by SIGKILL"
    parents = {place: worker["parent"] for place, worker in seen(tmp_path).items()}
    assert parents["0-0"] != parents["1-0"] == parents["1-1"]


def test_a_stop_while_it_imports_ends_the_run_at_once(tmp_path: Path) -> None:
    (tmp_path / "costly.py").write_text(
        f"import os, signal, time\nos.kill({os.getpid()}, signal.SIGTERM)\ntime.sleep(60)\n"
        + IMPORTED
    )
    outcome, events = forked(tmp_path, "")
    assert (outcome.status, outcome.exit_code) == ("stopped", 128 + signal.SIGTERM)
    assert not (tmp_path / "imported").exists(), "not when the import was over"
    assert not [e for e in events if e["event"] == "worker_started"]


def test_a_worker_s_traceback_and_exit_code_are_its_own(tmp_path: Path) -> None:
    outcome, _ = forked(
        tmp_path,
        "if rank == '1':\n    raise ValueError('of rank 1')\ntime.sleep(30)\n",
        restarts=0,
    )
    assert outcome.exit_code == 1
    assert "ValueError: of rank 1" in (tmp_path / "logs" / "rank-1.log").read_text()


def test_one_process_without_a_restart_is_a_program(tmp_path: Path) -> None:
    forked(tmp_path, "tell(parent=os.getppid())\n", processes=1, restarts=0)
    assert seen(tmp_path)["0-0"]["parent"] == os.getpid()


def test_a_fork_that_the_system_refuses_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "poor.py").write_text(
        "import os\ndef fork():\n    raise BlockingIOError(11, 'no process left')\nos.fork = fork\n"
    )
    environ = make_shared_environment({**os.environ, "PYTHONPATH": str(tmp_path)}, 2)
    server = ForkServer(["poor"], environ, tmp_path)
    try:
        while not server.ready:
            server.poll(1.0)
            assert not server.cannot
        with (tmp_path / "log").open("ab") as log, pytest.raises(OSError, match="no process left"):
            server.fork(
                [sys.executable, "-m", "poor"], {**environ, "RANK": "0"}, log.fileno(), print
            )
    finally:
        server.close()


SUPERVISOR = """
import sys
from pathlib import Path
from shoal.launch import supervise
sys.exit(supervise([sys.executable, "-m", "script"], processes=1, folder=Path(sys.argv[1]), restarts=0,
                   emit=lambda *_, **__: None, imports=["costly"], fork_channel=int(sys.argv[2])).exit_code)
"""
WAITS = """
parent = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1]
tell(pid=os.getpid(), parent=os.getppid(), server=int(parent))
while not (folder / "end").exists():
    time.sleep(0.01)
"""


class Sharing:
    """Supervisors of one worker each that share a fork server; their workers run WAITS."""

    def __init__(self, folder: Path, server: SharedForkServer) -> None:
        (folder / "script.py").write_text(TELL + WAITS)
        self.folder, self.server = folder, server
        paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        base = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        self.environ = make_shared_environment(base, 1)
        self.supervisors: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str) -> dict[str, int]:
        """Start a supervisor; return what its worker tells."""
        own = self.folder / name
        (own / "logs").mkdir(parents=True)
        with contextlib.ExitStack() as files:
            channel = self.server.open_channel(self.environ, own)
            assert channel is not None
            number = files.enter_context(channel).fileno()
            self.supervisors[name] = subprocess.Popen(
                [sys.executable, "-c", SUPERVISOR, str(own), str(number)],
                env=self.environ, pass_fds=(number,),
            )  # fmt: skip
        assert within(lambda: seen(own)), (own / "logs" / "rank-0.log").read_text()
        return seen(own)["0-0"]

    def end(self, name: str) -> int:
        """Let a worker end; return its supervisor's exit code."""
        (self.folder / name / "end").touch()
        return self.supervisors[name].wait(30)


@pytest.fixture
def sharing(tmp_path: Path) -> Iterator[Sharing]:
    (tmp_path / "costly.py").write_text(IMPORTED)
    with (
        contextlib.closing(Guardian()) as guardian,
        contextlib.closing(SharedForkServer(["costly"], guardian)) as server,
    ):
        yield Sharing(tmp_path, server)


def within(condition: Any, limit_s: float = 30.0) -> bool:
    until_s = time.monotonic() + limit_s
    while not (found := bool(condition())) and time.monotonic() < until_s:
        time.sleep(0.01)
    return found


def lives(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def test_supervisors_share_one_import_and_nothing_else(sharing: Sharing) -> None:
    one, other = sharing.start("one"), sharing.start("other")
    imported = (sharing.folder / "imported").read_text().split()
    assert imported == [str(one["server"])] == [str(other["server"])]
    assert one["parent"] != other["parent"]
    sharing.supervisors["one"].kill()
    assert within(lambda: not (lives(one["pid"]) or lives(one["parent"])))
    assert lives(other["pid"])
    assert sharing.end("other") == 0
    assert within(lambda: not lives(other["parent"]))


def test_a_killed_shared_server_ends_all_workers_and_is_started_anew(sharing: Sharing) -> None:
    one = sharing.start("one")
    os.kill(one["server"], signal.SIGKILL)
    assert sharing.supervisors["one"].wait(30) == 1
    assert not lives(one["pid"])
    again = sharing.start("again")
    assert again["server"] not in (one["server"], os.getpid())
    assert sharing.end("again") == 0


@pytest.mark.parametrize(
    "body",
    [
        "import os\ndef fork():\n    raise BlockingIOError(11, 'no process left')\nos.fork = fork\n",
        "raise ImportError('libfoo.so.7 is missing')\n",
    ],
)
def test_a_shared_server_that_cannot_fork_leaves_programs(sharing: Sharing, body: str) -> None:
    (sharing.folder / "costly.py").write_text(body)
    for name in ("one", "another"):
        assert sharing.start(name)["parent"] == sharing.supervisors[name].pid
        assert sharing.end(name) == 0
