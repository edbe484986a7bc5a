"""Worlds that begin and end, many times: does each end, and as it should?

    python tests/proof/endings.py worlds   [--trials 200]   meet, a few steps of DDP by hand, leave
    python tests/proof/endings.py nodes    [--trials 200]   the same on two "machines", one of which comes later
    python tests/proof/endings.py sharded  [--trials 200]   an own loop under fsdp, `run.close()`
    python tests/proof/endings.py differ   [--trials 200]   a pipeline whose ranks have other data
    python tests/proof/endings.py closed   [--trials 200]   an island is killed in mid-exchange

Each process is a fork of this one, which has imported everything, and one world runs at a time.
A machine that is busy must not look like a world that hangs, so the kernel's own account decides
(`/proc/…/schedstat`: how long threads ran, and how long they were ready but got no core):

    hung   for QUIET_S no thread of the world ran or wanted to run; its stacks are printed before
    slow   it still wants a core after SLOW_S: not counted as an end, and the program fails too
    late   (closed) a survivor noticed the death more than LATE_S after the kernel had closed the
           victim's files, what it waited for a core taken off
    busy   (closed) somebody waited longer than BUSY_S for a core: no trial, it is made again

Of `closed` the program also tells where a survivor noticed by asking only ("well, asked"): these had
waited for their deadline before islands asked.
Source of the questions: docs/lab-log.md, "A world that did not end", "A closed connection".
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import importlib
import json
import multiprocessing
import os
import random
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any
from unittest import mock

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "benchmarks"), str(HERE.parent / "worlds")]

import torch  # noqa: E402
from processes import machine  # noqa: E402
from source import source_hash  # noqa: E402
from torch import nn  # noqa: E402

import plane_case  # noqa: E402
import shoal  # noqa: E402
from shoal.base.errors import ShoalError  # noqa: E402
from shoal.fabric import start_world  # noqa: E402
from shoal.fabric._torch import post_unreceived_byte  # noqa: E402
from shoal.fabric.islands import inter_island_links  # noqa: E402
from shoal.fabric.islands.heartbeat import HeartbeatThread  # noqa: E402
from shoal.launch.processes import PrivateStore, free_port  # noqa: E402

SIZE, QUIET_S, SLOW_S, STACKS_S = 2, 20.0, 120.0, 15.0
DEADLINE_S, LATE_S, BUSY_S = 5.0, 1.0, 2.5
LATER_S = 0.5
IDLE = 0.1
"""Share of a core that a world at a standstill takes: gloo's loops look round every 10 ms."""
NAMED, THREADS_LEFT = 5, 7
"""Exit codes: the mistake was named · a thread of gloo outlived its group."""
EARLY = (
    "msgspec", "numpy.typing", "psutil", "torch._dynamo", "torch.distributed.fsdp",
    "torch.profiler._cupti_monitor", "shoal.trainer.parallelize", "shoal.parallel.data_parallel.fsdp",
    "shoal.parallel.pipeline", "shoal.trainer.jobs.run_end",
)  # fmt: skip
"""What a world would import by itself, seconds in every fork."""
noticed_s: list[float] = []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("what", choices=["worlds", "nodes", "sharded", "differ", "closed"])
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=1500.0, help="begin none after that")
    parser.add_argument("--out", help="add what came out to this JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for early in EARLY:
        importlib.import_module(early)
    gc.collect()
    gc.freeze()  # what is imported is nobody's garbage: a fork's end would touch all of it
    trial = {
        "worlds": lambda number: world_of(by_hand),
        "nodes": lambda number: world_of(at_once(by_hand), nodes=True),
        "sharded": lambda number: world_of(sharded),
        "differ": lambda number: world_of(at_once(differ), [NAMED]),
        "closed": killed_island,
    }[options.what]
    began_s, source = time.monotonic(), source_hash()
    counted: Counter[str] = Counter()
    while counted.total() - counted["busy"] < options.trials:
        took_s = time.monotonic() - began_s
        if took_s > options.seconds:
            break
        counted[trial(counted.total())] += 1
        if counted.total() % 20 == 0:
            print(dict(counted), f"{took_s:.0f} s", flush=True)
    told: dict[str, Any] = {"ended": dict(counted), "seconds": round(time.monotonic() - began_s)}
    if noticed_s:
        noticed_s.sort()
        told["noticed_s"] = {f"p{k}": noticed_s[len(noticed_s) * k // 100] for k in (50, 90, 99)}
        told["noticed_s"]["largest"] = noticed_s[-1]
    print(json.dumps({options.what: told}))
    told |= {"source": source, "machine": machine()}
    if options.out:
        file = Path(options.out)
        record = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps({**record, options.what: told}, indent=1) + "\n")
    sys.exit(bool(set(counted) - {"well", "well, asked", "busy"}))


def by_hand() -> None:
    """What `benchmarks/memory.py` did when one of its worlds did not end."""
    world = start_world()
    world.barrier()
    model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
    world.gather_json({"rank": world.rank})
    world.barrier()
    world.close()


class Rows:
    """Sixteen samples; `seed` makes them this rank's own."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        generator = torch.Generator().manual_seed(self.seed + index)
        return torch.randn(4, generator=generator), torch.tensor(index % 2)


def blocks() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)))


def sharded() -> None:
    """A script's own loop under fsdp; the model lives until the interpreter ends."""
    torch.manual_seed(0)
    net = blocks()
    globals()["kept"] = net
    run = shoal.parallelize(net, lambda p: torch.optim.SGD(p, lr=0.1), layout="fsdp", batch=8)
    for batch in run.loader(Rows()):
        run.step(batch)
    run.close()
    if any("gloo" in name.read_text() for name in Path("/proc/self/task").glob("*/comm")):
        sys.exit(THREADS_LEFT)


def differ() -> None:
    """A pipeline whose ranks drew their data without a seed: is that said, and do all end?"""
    torch.manual_seed(0)
    net = blocks()
    data = Rows(int.from_bytes(os.urandom(4)))
    try:
        run = shoal.parallelize(
            net,
            lambda p: torch.optim.SGD(p, lr=0.1),
            layout="pp",
            batch=8,
            micro_batch=2,
            sample=lambda: torch.utils.data.default_collate([data[0], data[1]]),
        )
        for batch in run.loader(data):
            run.step(batch)
        run.close()
    except ShoalError as said:
        sys.exit(NAMED if "differ" in str(said) else str(said))


def at_once(work: Callable[[], None]) -> Callable[[], None]:
    """The same, and the process leaves without an interpreter's end, where that is not the question."""

    def leave() -> None:
        code: Any = 0
        try:
            work()
        except SystemExit as left:
            code = left.code
        except BaseException:
            traceback.print_exc()
            code = 1
        if isinstance(code, str):
            print(code, file=sys.stderr)
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)

    return leave


def world_of(
    work: Callable[[], None], right: Collection[int] = (0,), *, nodes: bool = False
) -> str:
    """One world of SIZE processes, and how it ended.

    nodes   each is alone on its machine, as torchrun says it, and they come up to LATER_S apart
    """
    with contextlib.closing(PrivateStore()) as store:
        return watched(start(work, store, nodes=nodes), right)


def watched(pids: list[int], right: Collection[int]) -> str:
    """How a world of these processes ends."""
    began_s = quiet_s = time.monotonic()
    wanted_s = 0.0
    ended: dict[int, int] = {}
    while len(ended) < len(pids):
        now_s = time.monotonic()
        for pid in set(pids) - set(ended):
            done, code = os.waitpid(pid, os.WNOHANG)
            if done:
                ended[pid] = os.waitstatus_to_exitcode(code)
        alive = [pid for pid in pids if pid not in ended]
        if (wants_s := sum(wanted(pid) for pid in alive)) > wanted_s + IDLE * (now_s - quiet_s):
            wanted_s, quiet_s = wants_s, now_s
        problem = "slow" if now_s - began_s > SLOW_S else ""
        problem = "hung" if now_s - quiet_s > QUIET_S else problem
        if problem:
            for pid in alive:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            return problem
        time.sleep(0.01)
    bad = [code for code in ended.values() if code not in right]
    return f"status {bad[0]}" if bad else "well"


def wanted(pid: int | str) -> float:
    """Seconds that a process's threads ran or were ready to run, by the kernel's account."""
    return sum(sum(one) for one in accounts(pid)) / 1e9


def delayed() -> float:
    """Seconds that this process's threads were ready to run and got no core."""
    return sum(one[1] for one in accounts("self")) / 1e9


def accounts(pid: int | str) -> list[tuple[int, int]]:
    """(ran, waited for a core) of each living thread, in nanoseconds."""
    found = []
    for file in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        try:
            ran, waited, _ = file.read_text().split()
        except OSError:  # the thread has ended meanwhile
            continue
        found.append((int(ran), int(waited)))
    return found


def start(work: Callable[[], None], store: PrivateStore, *, nodes: bool) -> list[int]:
    """Fork one world; gives its processes."""
    port = str(free_port())
    pids = []
    for rank in range(SIZE):
        pid = os.fork()
        if pid:
            pids.append(pid)
            continue
        place = {"RANK": rank, "WORLD_SIZE": SIZE, "LOCAL_RANK": 0 if nodes else rank}
        place["LOCAL_WORLD_SIZE"] = 1 if nodes else SIZE
        os.environ.update({key: str(value) for key, value in place.items()})
        if nodes:
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
            time.sleep(random.Random(os.getpid()).random() * LATER_S)
        else:
            os.environ.update(SHOAL_STORE=store.path)
        faulthandler.dump_traceback_later(STACKS_S)
        work()
        sys.exit(0)
    return pids


def killed_island(number: int) -> str:
    """Three islands, of which one is killed in the second half of an exchange.

    number   of the trial: the victim dies before each chunk of its sums in turn
    """
    victim, before = 1, delayed()
    at = plane_case.CHUNKS * plane_case.ISLANDS + 1 + number % plane_case.CHUNKS
    meet_at = f"127.0.0.1:{plane_case.free_port()}"
    fork = multiprocessing.get_context("fork")
    started = []
    for index in range(plane_case.ISLANDS):
        receiver, sender = fork.Pipe(duplex=False)
        codec = plane_case.Deadly(signal.SIGKILL, at) if index == victim else plane_case.Raw()
        process = fork.Process(target=survive, args=(index, meet_at, codec, sender))
        process.start()
        sender.close()
        started.append((process, receiver))
    os.waitid(os.P_PID, started[victim][0].pid, os.WEXITED | os.WNOWAIT)
    dead_s = time.monotonic()  # its files were closed before
    told = []
    for index, (_, receiver) in enumerate(started):
        if index != victim:
            told.append(receiver.recv() if receiver.poll(2 * DEADLINE_S) else None)
    busy_s = delayed() - before
    for process, _ in started:
        process.kill()
        process.join()
    if None in told:
        return "said nothing"
    if max(busy_s, *(one["delayed_s"] for one in told)) > BUSY_S:
        return "busy"
    noticed_s.extend(one["at_s"] - dead_s for one in told)
    waited_s = [one["at_s"] - dead_s - one["delayed_s"] for one in told]
    if max(waited_s) > LATE_S:
        return "late"
    return "well, asked" if any(one["asked"] for one in told) else "well"


def survive(index: int, meet_at: str, codec: Any, answer: Any) -> None:
    """An exchange that fails: tells when that was noticed, and waits until it is killed.

    Whose fault it was is not asked: that takes seconds, and a survivor that ends would free others.
    """
    torch.set_num_threads(1)
    size = plane_case.ISLANDS * plane_case.CHUNKS * plane_case.SMALL_CHUNK
    flat, weights = plane_case.message(index, size), [1.0] * plane_case.ISLANDS

    refused: list[int] = []

    def asking(group: Any, place: int) -> None:
        try:
            post_unreceived_byte(group, place)
        except RuntimeError:
            refused.append(place)
            raise

    def blame(*_: Any) -> tuple[tuple[int, ...], str]:
        times = {"at_s": time.monotonic(), "delayed_s": delayed() - before}
        answer.send({**times, "asked": bool(refused)})
        time.sleep(10 * DEADLINE_S)
        return (), ""

    with (
        plane_case.small_chunks(),
        plane_case.joined(index, plane_case.ISLANDS, meet_at) as plane,
        mock.patch.object(HeartbeatThread, "blame", blame),
        mock.patch.object(inter_island_links, "post_unreceived_byte", asking),
    ):
        before = delayed()
        plane_case.both(plane, flat, codec, weights, deadline_s=DEADLINE_S)


if __name__ == "__main__":
    main()
