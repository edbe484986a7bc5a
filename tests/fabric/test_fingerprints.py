"""Which threads' collectives are kept: the training thread's, and those of a device's backward pass."""

from __future__ import annotations

from typing import Any

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
    kept = [line.split("\t")[2] for line in done.stdout.strip().splitlines()]
    assert kept == ["2 float32", "5 float32"]
