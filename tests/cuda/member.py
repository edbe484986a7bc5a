"""One rank of these checks: as `worlds/member.py`, on a device of its own or on a shared one."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import torch.distributed as dist

from device import ON_GPU

HERE = Path(__file__).resolve().parent


def main() -> None:
    found = importlib.util.spec_from_file_location("any_member", HERE.parent / "worlds/member.py")
    any_member = importlib.util.module_from_spec(found)
    found.loader.exec_module(any_member)
    if os.environ.get("SHOAL_TEST_SHARED") != "1":
        any_member.main()
        return
    from host_group import start_shared_world

    any_member.main(start_shared_world)
    if ON_GPU:
        os._exit(0)  # the group is a Python object: who frees it last is not for the exit to find
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
