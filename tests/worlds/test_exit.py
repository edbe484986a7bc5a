"""Leaving: after `close` nothing of gloo is alive that could abort the interpreter's exit."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

SCRIPT = """
import sys, torch
from pathlib import Path
from torch import nn
import shoal
run = shoal.parallelize(nn.Linear(4, 2), lambda p: torch.optim.SGD(p, lr=0.1), batch=8)
class Data:
    def __len__(self): return 16
    def __getitem__(self, i): return torch.randn(4), torch.tensor(i % 2)
for batch in run.loader(Data()):
    run.step(batch)
run.close()
names = [p.read_text().strip() for p in Path("/proc/self/task").glob("*/comm")]
sys.exit(7 if any("gloo" in n for n in names) else 0)
"""


def start(script: str) -> list[int]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(2):
        env = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
        }
        processes.append(subprocess.Popen([sys.executable, "-c", script], env=env))
    return [p.wait(60) for p in processes]


def test_close_ends_every_gloo_thread() -> None:
    assert start(SCRIPT) == [0, 0], "7: a gloo thread outlived close; -6: the exit aborted"


def test_a_script_that_forgets_close_leaves_cleanly_too() -> None:
    forgets = SCRIPT.replace("run.close()", "import atexit; atexit.unregister").replace(
        "sys.exit(7 if any", "report = (7 if any"
    )
    assert start(forgets + "\nassert report == 7, 'gloo should still be there'") == [0, 0]
