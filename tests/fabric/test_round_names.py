"""Workers that torchrun starts again meet under a name of their own in its agents' store."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from shoal.base.errors import ClusterError
from shoal.fabric.rendezvous.launcher_environment import die_with_agent
from shoal.fabric.rendezvous.process_info import ProcessInfo, read_process_info
from shoal.fabric.rendezvous.rendezvous_store import agree_on_name


def named(store: dist.Store, size: int, timeout_s: float = 10.0) -> list[str]:
    """The names that `size` ranks agree on, by rank."""
    names = [""] * size

    def ask(rank: int) -> None:
        place = ProcessInfo(rank=rank, size=size)
        names[rank] = agree_on_name(store, place, timedelta(seconds=timeout_s))

    threads = [threading.Thread(target=ask, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return names


def test_each_round_has_a_name_whoever_died_in_the_one_before() -> None:
    store = dist.HashStore()
    store.set("asks/1", "a word of a rank that died before it was answered")
    first = named(store, 3)
    assert len(set(first)) == 1
    second = named(store, 2)
    assert len(set(second)) == 1
    assert first[0] != second[0]


def test_who_stays_away_is_named() -> None:
    store = dist.HashStore()
    store.set("asks/1", "a word of a rank that died")
    with pytest.raises(ClusterError) as caught:
        agree_on_name(
            store, ProcessInfo(rank=0, size=3, started_by="torchrun"), timedelta(seconds=0.2)
        )
    assert str(caught.value) == (
        "ranks 1, 2 of 3 did not come to 127.0.0.1:0 within 0.2 s (torchrun); look at what they print"
    )


def test_torchruns_own_counts_of_restarts_name_no_meeting() -> None:
    """An agent that came later has counted none; a JobSet's count is the same for all."""
    env = {"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RESTART_COUNT": "3"}
    assert read_process_info(env).attempt == "3"
    assert read_process_info({**env, "TORCHELASTIC_RUN_ID": "j1"}).attempt == ""


@pytest.mark.skipif(sys.platform != "linux", reason="the parent-death signal is Linux's")
@pytest.mark.parametrize("started_by_agent", [True, False])
def test_a_worker_ends_with_its_agent(started_by_agent: bool) -> None:
    """The control is a process that a shell started, which may go on without it."""
    told, tell = os.pipe()
    agent = os.fork()
    if agent == 0:
        if os.fork() == 0:
            die_with_agent({"TORCHELASTIC_RUN_ID": "job"} if started_by_agent else {})
            os.write(tell, f"{os.getpid()}\n".encode())
        time.sleep(60)
        os._exit(0)
    worker = int(os.read(told, 32))
    os.kill(agent, signal.SIGKILL)
    os.waitpid(agent, 0)
    until_s = time.monotonic() + (10 if started_by_agent else 0.3)
    while _lives(worker) and time.monotonic() < until_s:
        time.sleep(0.01)
    assert _lives(worker) is not started_by_agent
    if not started_by_agent:
        os.kill(worker, signal.SIGKILL)
    os.close(told)
    os.close(tell)


def _lives(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"
