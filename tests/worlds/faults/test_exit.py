"""Leaving: after `close` nothing of gloo is alive that could abort the interpreter's exit."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from cli_run import lines
from forks import shared
from shoal.checkpoint.format.listing import list_checkpoints, verify

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


def end_well(script: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(2):
        env = {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "SHOAL_TEST_EXIT": "1",
        }
        processes.append(shared().start(["-c", script], env))
    words = [p.communicate(timeout=300)[1] for p in processes]
    codes = [p.returncode for p in processes]
    assert not any(codes), f"7: a gloo thread outlived close; -6: the exit aborted; {codes} {words}"


AGAIN = """
run = shoal.parallelize(nn.Linear(4, 2), lambda p: torch.optim.SGD(p, lr=0.1), batch=8, layout="fsdp")
for batch in run.loader(Data()):
    run.step(batch)
run.close()
names = """
"""FSDP keeps groups with the model, which lives on, and DTensor's caches keep the mesh for ever."""

FORGETS = """
if any("gloo" in n for n in names):
    sys.exit(7)
run = shoal.parallelize(nn.Linear(4, 2), lambda p: torch.optim.SGD(p, lr=0.1), batch=8, folder=FOLDER)
for batch in run.loader(Data()):
    run.step(batch)
run.save(wait=False)
"""


def test_worlds_one_after_another_in_the_same_processes(tmp_path: Path) -> None:
    """k-fold: close, then parallelize again under one launcher: plain, sharded, and never closed.

    Old addresses must not be met, and no gloo thread of a closed world, nor of its saves, is left.
    What was not closed still saves, and tells.
    """
    first, last = tmp_path / "first", tmp_path / "last"
    closes, _, _ = SCRIPT.replace("batch=8)", f"batch=8, folder={str(first)!r})").partition(
        "sys.exit"
    )
    closes = closes.replace("run.close()", "run.save(wait=False)\nrun.close()")
    end_well(closes.replace("names = ", AGAIN) + FORGETS.replace("FOLDER", repr(str(last))))
    for folder in (first, last):
        (saved,) = list_checkpoints(folder / "checkpoints")
        assert verify(saved.path) == []
        assert [line["event"] for line in lines(folder / "events.jsonl")].count(
            "checkpoint_saved"
        ) == 1


@pytest.mark.proof
@pytest.mark.parametrize("layout", ["auto", "fsdp"])
def test_close_ends_every_gloo_thread(layout: str) -> None:
    end_well(SCRIPT.replace("batch=8)", f"layout={layout!r}, batch=8)"))


@pytest.mark.proof
def test_a_script_that_forgets_close_leaves_cleanly_too() -> None:
    forgets = SCRIPT.replace("run.close()", "import atexit; atexit.unregister").replace(
        "sys.exit(7 if any", "report = (7 if any"
    )
    end_well(forgets + "\nassert report == 7, 'gloo should still be there'")
