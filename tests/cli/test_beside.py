"""The watch of ranks on two nodes, with ranks that need no torch: who hangs, who says so, who is ended."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from shoal.wire.watch_page import PAGE_VARIABLE

STEPS, TROUBLE_AT = 60, 30
WATCH = """
import sys
from shoal.launch.watch import blamed_rank, hang_watch, remote_nodes, silence_deadlines
silence_deadlines.MARGIN_S, hang_watch.ANSWER_S = 1.5, 0.7  # in the place of 5 and 1.5; steps take 0.02 s
blamed_rank.AWAY_S = remote_nodes.AWAY_S = 2.0
from shoal.launch import watchdog
remote_nodes.REST_S = watchdog.REST_S = 1.0
sys.exit(watchdog.main())
"""
RANKS = """
import ctypes, os, signal, time
from pathlib import Path
from shoal.wire.phases import DATA, PASSES
from shoal.wire.stack_dumps import start_stack_thread
from shoal.wire.watch_page import WatchPage
rank, size, folder = int(os.environ["RANK"]), 2, Path(os.environ["FOLDER"])
page = WatchPage.open()
start_stack_thread(page)

def forever():
    while True:
        time.sleep(0.005)

def meet(name):
    (folder / f"{name}-{rank}").touch()
    while not all((folder / f"{name}-{one}").exists() for one in range(size)):
        time.sleep(0.002)

for step in range(1, STEPS + 1):
    page.record_part(DATA)
    time.sleep(0.02)
    page.record_part(PASSES)
    if eval(os.environ["WHEN"]):
        exec(os.environ["TROUBLE"])
    page.record_collective_start("all_reduce", 64)
    page.record_wait_start()
    meet(step)
    page.record_wait_end(1)
    page.record_step_end(step)
page.close()
if rank == int(os.environ["LINGERS"]):
    time.sleep(4)
"""
DIFFER = r"""
page.write_calls(1, step, b"0:0,1\tall_reduce\t%d float32\thanging.py:%d" % (4 + rank, 7))
"""
SLOW = "time.sleep(0.02 * rank)"
TROUBLES = {
    "stopped": ("os.kill(os.getpid(), signal.SIGSTOP)", "its process is stopped (SIGSTOP)"),
    "lock": ("ctypes.PyDLL(None).sleep(60)", "Python does not answer: a call into C keeps"),
    "loop": ("forever()", "it is in no collective"),
}


class TwoNodes:
    """A rank on each of two nodes and the process beside it; all on this machine, none a launcher's.

    mine, trouble   which rank has a trouble, and its code · disks  each node has a folder of its own
    """

    def __init__(self, folder: Path, trouble: str, mine: int, *, disks: bool = False) -> None:
        (folder / "meet").mkdir()
        self.disks = [folder / (f"disk{node}" if disks else "run") for node in (0, 1)]
        self.own, self.trouble, self.mine, self.folder = disks, trouble, mine, folder
        self.lingers, self.steps = -1, STEPS
        self.when = f"(step, rank) == ({TROUBLE_AT}, {mine})"
        self.watches: list[subprocess.Popen[str]] = []
        self.ranks: list[subprocess.Popen[bytes]] = []
        self.logs = [folder / f"node{node}.log" for node in (0, 1)]

    def start(self) -> None:
        """Start all."""
        paths, at = [], None
        for node in (0, 1):
            with self.logs[node].open("w") as log:
                one = subprocess.Popen(
                    [sys.executable, "-c", WATCH, "1", *(["127.0.0.1"] if node == 0 else [])],
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
                )  # fmt: skip
            self.watches.append(one)
            assert one.stdout is not None
            told = json.loads(one.stdout.readline())
            paths += told["paths"]
            at = at or told["at"]
        for rank in (0, 1):
            environ = {**os.environ, PAGE_VARIABLE: paths[rank], "RANK": str(rank)}
            environ |= {"FOLDER": str(self.folder / "meet"), "WHEN": self.when}
            environ |= {"LINGERS": str(self.lingers)}
            words = [sys.executable, "-c", RANKS.replace("STEPS", str(self.steps))]
            self.ranks.append(subprocess.Popen(words, env=environ | {"TROUBLE": self.trouble}))
        nodes = [
            {"ranks": [rank], "pids": [self.ranks[rank].pid], "host": f"host{rank}"}
            for rank in (0, 1)
        ]
        self.port = at[1] if at else 0
        for node in (0, 1):
            words = {"number": node, "nodes": nodes, "folder": str(self.disks[node])}
            self.say(node, words | {"token": "t" * 64, "at": ["127.0.0.1", self.port]})
        if self.own:
            self.say(1, {"keeps": True})
        self.wait("self.connected()")

    def connected(self) -> bool:
        """Whether node 1's watch has found node 0's."""
        found = psutil.Process(self.watches[1].pid).net_connections("tcp")
        return any(one.status == psutil.CONN_ESTABLISHED for one in found)

    def say(self, node: int, words: dict[str, Any]) -> None:
        stdin = self.watches[node].stdin
        assert stdin is not None
        stdin.write(json.dumps(words) + "\n")
        stdin.flush()

    def told(self, node: int = 0, event: str = "hang") -> list[dict[str, Any]]:
        path = self.disks[node] / "events.jsonl"
        rows = path.read_text().splitlines() if path.exists() else []
        return [one for row in rows if (one := json.loads(row))["event"] == event]

    def wait(self, what: str, limit_s: float = 30.0) -> None:
        until_s = time.monotonic() + limit_s
        while not eval(what, {"self": self}):
            assert time.monotonic() < until_s, [log.read_text() for log in self.logs]
            time.sleep(0.05)

    def close(self) -> None:
        for one in (*self.ranks, *self.watches):
            one.kill()
            one.wait()
            for pipe in (one.stdin, one.stdout):
                if pipe is not None:
                    pipe.close()


@pytest.fixture
def nodes(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[TwoNodes]:
    kind, mine, more = request.param
    made = TwoNodes(tmp_path, TROUBLES[kind][0] if kind else "pass", mine, **more)
    yield made
    made.close()


def case(kind: str, mine: int, **more: Any) -> Any:
    return pytest.param((kind, mine, more), id=" ".join([kind or "none", str(mine), *more]))


@pytest.mark.parametrize(
    "nodes",
    [
        case("stopped", 0), case("stopped", 1, disks=True), case("lock", 1), case("loop", 0),
        pytest.param(("lock", 0, {}), marks=pytest.mark.proof, id="lock 0"),
        pytest.param(("loop", 1, {}), marks=pytest.mark.proof, id="loop 1"),
    ],
    indirect=True,
)  # fmt: skip
def test_the_rank_that_hangs_is_told_by_its_own_node(nodes: TwoNodes) -> None:
    """And what does not come back is ended on both; who is only busy is left alone."""
    nodes.start()
    nodes.wait("self.told()")
    (told,) = nodes.told()
    why = next(why for code, why in TROUBLES.values() if code == nodes.trouble)
    assert (told["rank"], told["host"]) == (
        nodes.mine,
        f"host{nodes.mine}" if nodes.mine else os.uname().nodename,
    )
    assert told["why"].startswith(why)
    assert told["waited_s"] < 30, "not when a trouble of 60 s ends by itself"
    assert told["deadline_s"] < 10, "learnt"
    ends = told["ends_in_s"] == 0
    assert ends == (why == TROUBLES["stopped"][1])
    if ends:
        nodes.wait("all(one.poll() is not None for one in self.ranks)")
        assert nodes.ranks[nodes.mine].returncode == -signal.SIGKILL
        nodes.wait("all(one.poll() is not None for one in self.watches)")
    line = f"rank {nodes.mine} on {told['host']} (pid {nodes.ranks[nodes.mine].pid})"
    nodes.wait(f"all({line!r} in log.read_text() for log in self.logs[: 1 + {nodes.mine}])")
    assert (line in nodes.logs[1].read_text()) == (nodes.mine == 1), "its own node says it"
    accounts = Path(told["stacks"]).read_text()
    assert "rank 0 (pid" in accounts
    assert "rank 1 (pid" in accounts
    assert "in meet" in accounts, "where the other one waits"
    if nodes.own:
        (there,) = nodes.told(1)
        assert {key: there[key] for key in ("rank", "why")} == {
            key: told[key] for key in ("rank", "why")
        }
        assert (nodes.disks[1] / "logs" / Path(told["stacks"]).name).read_text() == accounts


@pytest.mark.parametrize("nodes", [case("", 0, disks=True)], indirect=True)
@pytest.mark.parametrize("lingers", [pytest.param(0, marks=pytest.mark.proof), 1])
def test_who_goes_on_is_not_told_of_and_a_stranger_changes_nothing(
    nodes: TwoNodes, lingers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor who has more to do after the last step than the others; each disk has its devices."""
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '0, NVIDIA H200, 83, 1024, 143771, [N/A], 61'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    nodes.lingers = lingers
    for disk in nodes.disks:  # as the ranks of a run make them
        disk.mkdir(exist_ok=True)
    nodes.start()
    with socket.create_connection(("127.0.0.1", nodes.port)) as stranger:
        stranger.sendall(b"\0" * 64 + b'{"node": 1}')
        nodes.wait("all(one.poll() is not None for one in self.ranks)")
    assert [one.returncode for one in nodes.ranks] == [0, 0]
    nodes.wait("all(one.poll() == 0 for one in self.watches)")
    for node in (0, 1):
        assert nodes.told(node) == []
        assert nodes.told(node, "notice") == []
    assert "it does not know the token" in nodes.logs[0].read_text()
    files = [(disk / "devices.jsonl").read_text().splitlines() for disk in nodes.disks]
    samples = [[json.loads(line) for line in lines] for lines in files]
    hosts = [{one["host"] for one in own} for own in samples]
    assert hosts == [{os.uname().nodename, "host1"}, {"host1"}], "node 0 has both"
    assert samples[0][0].keys() == {"time_s", "host", "devices"}
    assert {one["devices"][0]["utilisation"] for own in samples for one in own} == {0.83}


@pytest.mark.parametrize("nodes", [case("", 0, disks=True)], indirect=True)
@pytest.mark.parametrize("away", [0, pytest.param(1, marks=pytest.mark.proof)])
def test_a_node_that_is_not_heard_is_told_of_by_the_other(nodes: TwoNodes, away: int) -> None:
    """All of its processes stand still, as seen from the other one its machine does."""
    nodes.start()
    nodes.wait(
        "(self.folder / 'meet' / '10-0').exists() and (self.folder / 'meet' / '10-1').exists()"
    )
    for one in (nodes.ranks[away], nodes.watches[away]):
        one.send_signal(signal.SIGSTOP)
    here = 1 - away
    nodes.wait(f"self.told({here})")
    (told,) = nodes.told(here)
    assert (told["rank"], told["host"], told["pid"]) == (
        away, told["host"], nodes.ranks[away].pid,
    )  # fmt: skip
    assert told["host"] == ("host1" if away else "host0")
    assert told["why"] == "nothing is heard from its machine: it is down, or the link to it"
    assert told["waited_s"] < 8, "two seconds here, and two questions"
    assert f"rank {away} on {told['host']}" in nodes.logs[here].read_text()
    assert nodes.ranks[here].poll() is None, "it may come back"
    for one in (nodes.ranks[away], nodes.watches[away]):
        one.send_signal(signal.SIGCONT)
    nodes.wait("all(one.poll() == 0 for one in self.ranks)")


@pytest.mark.parametrize("nodes", [case("", 0, disks=True)], indirect=True)
@pytest.mark.parametrize("gone", [0, pytest.param(1, marks=pytest.mark.proof)])
def test_a_watch_that_has_ended_blames_nobody(nodes: TwoNodes, gone: int) -> None:
    """It was killed: the run goes on, one line says that nobody watches it."""
    nodes.trouble = "time.sleep(5)"  # longer than the deadline
    nodes.start()
    nodes.wait("(self.folder / 'meet' / '10-0').exists()")
    nodes.watches[gone].kill()
    nodes.wait("all(one.poll() == 0 for one in self.ranks)")
    here = 1 - gone
    (line,) = nodes.told(here, "notice")
    host = "host1" if gone else "host0"
    assert line["text"].endswith(f"not watched from now on: the watch on {host} has ended")
    assert nodes.told(here) == []


@pytest.mark.parametrize("nodes", [case("", 0)], indirect=True)
def test_ranks_of_two_nodes_are_compared_as_those_of_one(nodes: TwoNodes) -> None:
    """The one that is slow is told; unlike collectives end all, as their sums are wrong."""
    nodes.trouble, nodes.when = (
        SLOW + f"\nif step == 55:{DIFFER.replace(chr(10), chr(10) + ' ')}",
        "1",
    )
    nodes.steps = 1000  # its ranks never get to their end before they are killed
    nodes.start()
    nodes.wait("self.told(event='slow_rank')")
    (slow,) = nodes.told(event="slow_rank")
    assert (slow["rank"], slow["host"], slow["phase"]) == (1, "host1", "forward and backward")
    nodes.wait("self.told(event='collectives_differ')")
    (unlike,) = nodes.told(event="collectives_differ")
    assert unlike["text"].startswith(
        "step 55: rank 0 calls all_reduce of 4 float32 at hanging.py:7, rank 1 all_reduce of 5"
    )
    nodes.wait("all(one.poll() is not None for one in self.ranks)")
    assert -signal.SIGKILL in [one.returncode for one in nodes.ranks]
    assert nodes.told() == []


ALONE = """
import os, signal
from shoal.wire.watch_page import WatchPage
page = WatchPage.open()
for step in range(1, 8):
    page.record_step_end(step)
input()
TROUBLE
"""


@pytest.mark.parametrize(
    ("trouble", "how", "words"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "killed by SIGKILL after step 7, in data", ""),
        (
            "os._exit(0)",
            "exit code 0",
            "left after step 7, in data: something in it calls os._exit",
        ),
        ("page.close(); os._exit(1)", "", ""),
    ],
)
def test_a_rank_that_ends_without_a_word_is_told(
    tmp_path: Path, trouble: str, how: str, words: str
) -> None:
    """Where nobody of ours started it; one that has left its page has come to its end, or said why."""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    watch = subprocess.Popen(
        [sys.executable, "-m", "shoal.launch.watchdog", "1"], stderr=subprocess.PIPE, **pipes
    )
    assert watch.stdout is not None
    assert watch.stdin is not None
    (path,) = json.loads(watch.stdout.readline())["paths"]
    code = ALONE.replace("TROUBLE", trouble)
    rank = subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, PAGE_VARIABLE: path}, **pipes
    )
    node = {"ranks": [0], "pids": [rank.pid], "host": "here"}
    asked = {"number": 0, "nodes": [node], "folder": str(tmp_path), "token": "t", "at": None}
    watch.stdin.write(json.dumps(asked) + "\n")
    watch.stdin.flush()
    until_s = time.monotonic() + 20
    while not (tmp_path / "logs").exists() and time.monotonic() < until_s:
        time.sleep(0.02)
    assert rank.stdin is not None
    rank.stdin.write("go\n")
    rank.stdin.flush()
    os.waitid(os.P_PID, rank.pid, os.WEXITED | os.WNOWAIT)  # as its launcher finds it
    _, said = watch.communicate(timeout=120)
    rank.communicate(timeout=120)
    log = tmp_path / "events.jsonl"
    found = [json.loads(line) for line in log.open()] if log.exists() else []
    assert [(one["event"], one["rank"]) for one in found] == [("worker_died", 0)] * bool(how)
    for one in found:
        assert one["how"] == how
        assert one["traceback"] == words
        assert f"shoal: rank 0 (pid {rank.pid}): {how}" in said
