"""Worlds that begin and end, many times: does each end, and with status 0?

    python tests/proof/endings.py worlds  [--trials 200]   meet, a few steps of DDP by hand, leave
    python tests/proof/endings.py sharded [--trials 200]   an own loop under fsdp, `run.close()`
    python tests/proof/endings.py closed  [--trials 200]   an island is killed in mid-exchange

Each process is a fork of this one, which has imported torch, and leaves as every interpreter does.
A world that has not ended after 60 s counts as hung, and prints its stacks; of islands the time
counts after which the survivors noticed. Some worlds run side by side, so that cores are contended.
Source of the questions: docs/lab-log.md, "A world that did not end", "A closed connection".
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import json
import os
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "benchmarks"), str(HERE.parent / "worlds")]

import torch  # noqa: E402
from processes import machine  # noqa: E402
from torch import nn  # noqa: E402

import plane_case  # noqa: E402
import shoal  # noqa: E402
from shoal.fabric import start_world  # noqa: E402

SIZE, BESIDE, STACKS_S, HUNG_S = 2, 4, 40, 60
DEADLINE_S = 10.0
"""Of an exchange of islands: far beyond what noticing takes on busy cores."""
noticed_s: list[float] = []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("what", choices=["worlds", "sharded", "closed"])
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=150.0, help="begin none after that")
    parser.add_argument("--out", help="write the JSON there too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for early in ("torch._dynamo", "torch.distributed.fsdp"):  # seconds in every fork otherwise
        importlib.import_module(early)
    began_s = time.monotonic()
    counted: Counter[str] = Counter()
    trials = 0
    batch = {"closed": killed_islands, "worlds": ends(by_hand), "sharded": ends(sharded)}
    while trials < options.trials and time.monotonic() - began_s < options.seconds:
        counted.update(batch[options.what]())
        trials += BESIDE
        print(trials, dict(counted), f"{time.monotonic() - began_s:.0f} s", flush=True)
    told = {"what": options.what, "trials": trials, "ended": dict(counted)}
    if noticed_s:
        noticed_s.sort()
        told["noticed_s"] = {f"p{k}": noticed_s[len(noticed_s) * k // 100] for k in (50, 90, 99)}
        told["noticed_s"]["largest"] = noticed_s[-1]
    print(json.dumps(told))
    told["machine"] = machine()
    if options.out:
        Path(options.out).write_text(json.dumps(told, indent=1) + "\n")
    sys.exit(set(counted) != {"well"})


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
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(4, generator=generator), torch.tensor(index % 2)


def sharded() -> None:
    """A script's own loop under fsdp; the model lives until the interpreter ends."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    globals()["kept"] = net
    run = shoal.parallelize(net, lambda p: torch.optim.SGD(p, lr=0.1), layout="fsdp", batch=8)
    for batch in run.loader(Rows()):
        run.step(batch)
    run.close()
    if any("gloo" in name.read_text() for name in Path("/proc/self/task").glob("*/comm")):
        sys.exit(7)


def ends(work: Callable[[], None]) -> Callable[[], list[str]]:
    """Worlds of SIZE processes, BESIDE of them at a time, and how each ended."""

    def batch() -> list[str]:
        worlds = [start(work) for _ in range(BESIDE)]
        until_s = time.monotonic() + HUNG_S
        return [outcome(pids, until_s) for pids in worlds]

    return batch


def start(work: Callable[[], None]) -> list[int]:
    """Fork one world; gives its processes."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    port = str(listener.getsockname()[1])
    pids = []
    for rank in range(SIZE):
        pid = os.fork()
        if pid:
            pids.append(pid)
            continue
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": SIZE, "LOCAL_WORLD_SIZE": SIZE}
        os.environ.update({key: str(value) for key, value in place.items()})
        os.environ.update(SHOAL_STORE_PORT=port, SHOAL_STORE_FD=str(listener.fileno()))
        if rank:
            listener.close()
        faulthandler.dump_traceback_later(STACKS_S)
        work()
        sys.exit(0)
    listener.close()
    return pids


def outcome(pids: list[int], until_s: float) -> str:
    """ "well", "hung", or the first status that is not 0."""
    found = []
    for pid in pids:
        status = None
        while status is None:
            done, code = os.waitpid(pid, os.WNOHANG)
            if done:
                status = str(os.waitstatus_to_exitcode(code))
            elif time.monotonic() > until_s:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                status = "hung"
            else:
                time.sleep(0.01)
        found.append(status)
    bad = [status for status in found if status != "0"]
    return "hung" if "hung" in bad else bad[0] if bad else "well"


def killed_islands() -> list[str]:
    """Three islands, one killed in the second half of an exchange, BESIDE times at once."""
    plane_case.FAULT_DEADLINE_S = DEADLINE_S
    island = plane_case.fault(1, signal.SIGKILL, 2)
    running = [
        plane_case.run_islands(f"127.0.0.1:{plane_case.free_port()}", island) for _ in range(BESIDE)
    ]
    until_s = time.monotonic() + 3 * DEADLINE_S
    found = []
    for started in running:
        told = plane_case.collect([started[0], started[2]], until_s)
        plane_case.collect([started[1]], 0.0)
        said = [one for one in told if isinstance(one, dict)]
        noticed_s.extend(one["after_s"] for one in said)
        late = len(said) < len(told) or any(one["after_s"] >= DEADLINE_S for one in said)
        wrong = any(one["islands"] != (1,) for one in said)
        found.append("late" if late else "wrong island" if wrong else "well")
    return found


if __name__ == "__main__":
    main()
