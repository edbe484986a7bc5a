"""Which threads' collectives are kept: the training thread's, and those of a device's backward pass."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from shoal.trainer.guards.collective_log import ALIKE, ANY_SHAPE, ROOTED

PROGRAM = """
import _thread, threading
import torch
import torch.distributed as dist
from shoal.wire.watch_page import PAGE_VARIABLE, WatchPage
from shoal.launch.watch.page_reader import OwnedPage
from shoal.trainer.guards.collective_log import CollectiveRecorder

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
watched = OwnedPage("test")
page = WatchPage.open({PAGE_VARIABLE: watched.path})
CollectiveRecorder(page, 1)
dist.all_reduce(torch.ones(2))
dist.all_gather_into_tensor(torch.ones(4), torch.ones(4))
dist.reduce_scatter_tensor(torch.ones(6), torch.ones(6))
dist.all_to_all_single(torch.ones(7), torch.ones(7))
saver = threading.Thread(target=lambda: dist.all_reduce(torch.ones(3)))
saver.start()
saver.join()
done = threading.Event()


def backward() -> None:  # as a thread that Python's threading did not start
    dist.all_reduce(torch.ones(5))
    done.set()


_thread.start_new_thread(backward, ())
done.wait(20)
page.record_step_end(1)
print(watched.calls(())[1].decode())
"""


def test_a_devices_backward_pass_is_kept_and_a_saver_is_not(programs: Any) -> None:
    """Without it a rank that has no sample in a step seems to make another collective."""
    done = programs.run("-c", PROGRAM, timeout=300)
    assert done.returncode == 0, done.stderr
    kept = [line.split("\t")[1:3] for line in done.stdout.strip().splitlines()]
    assert kept == [
        ["all_reduce", "2 float32"],
        ["all_gather", "4 float32"],
        ["reduce_scatter", "6 float32"],
        ["all_to_all", ""],
        ["all_reduce", "5 float32"],
    ]


def test_every_collective_that_torch_calls_on_a_group_is_logged() -> None:
    """A new version may call a group's methods by new names; their calls would go unnoticed."""
    text = Path(distributed_c10d.__file__).read_text(encoding="utf-8")
    called = set(re.findall(r"\bgroup\.(\w+)\(", text)) & set(vars(dist.ProcessGroup))
    quiet = {
        "rank",
        "size",
        "send",
        "recv",
        "recv_anysource",
        "_start_coalescing",
        "_end_coalescing",
    }
    assert called - quiet - {"_get_backend"} <= {*ALIKE, *ANY_SHAPE, *ROOTED}
