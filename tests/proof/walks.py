"""Which files a step enters: the third one of a small run, as Python's profiler sees rank 0.

    python tests/proof/walks.py

For one process, fsdp with recomputation, and tp on two ranks: the files of Shoal that compute, pass on or
record, in the order in which they are entered. Guards are counted apart, with all that they call:
they stand in one list (`trainer/guards/__init__.py`). The exit status is 1 where a guard is entered
between the first micro-batch and the optimizer's step though it is not due, or where a walk enters more
files than `WALKS` allows.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from types import FrameType
from typing import Any

WALKS: dict[str, tuple[int, Any, dict[str, Any], int]] = {
    "one process": (1, "single", {}, 16),
    "fsdp, recomputed": (2, "fsdp", {"recompute": "full"}, 20),
    "tp": (2, {"tp": 2}, {}, 28),
}
"""By name: processes, layout, policies, and the largest number of files."""
GUARDS = "trainer/guards/"


def main() -> int:
    """Trace each walk in processes of its own."""
    if len(sys.argv) > 1:
        return walk(sys.argv[1])
    wrong = 0
    for name, (processes, *_) in WALKS.items():
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        words = [sys.executable, *(launch if processes > 1 else []), __file__, name]
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        wrong |= subprocess.run(words, env=environ, check=False, timeout=300).returncode
    return wrong


def walk(name: str) -> int:
    """Take three steps; on rank 0 print which files the third one entered."""
    import torch
    from torch import nn

    import shoal

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(torch.relu(self.up(x)))

    _, layout, more, most = WALKS[name]
    shared = isinstance(layout, dict)  # ranks of tp see the same samples
    seed = 0 if shared else int(os.environ.get("RANK", "0"))
    x, y = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(seed))
    run = shoal.parallelize(
        lambda: nn.Sequential(*(Block() for _ in range(3))),
        lambda p: torch.optim.AdamW(p, lr=1e-3),
        lambda outputs, targets: ((outputs - targets) ** 2).sum(1),
        layout, clip=1.0, **more, **({"sample": (x[:4], y[:4])} if shared else {}),
    )  # fmt: skip
    for _ in range(2):
        run.step((x, y))
    resting = {id(one) for one in run.guards.all if not one.due(3)}
    files, guards, early = dict[str, None](), dict[str, None](), list[str]()

    def enter(frame: FrameType, event: str, _argument: object) -> None:
        path = frame.f_code.co_filename
        if event != "call" or "/shoal/" not in path:
            return
        file = path.rpartition("/shoal/")[2]
        (guards if file.startswith(GUARDS) or by_guard(frame) else files).setdefault(file)
        called = frame.f_locals.get("self")
        if id(called) in resting and frame.f_code.co_name not in ("due", "__init__"):
            early.append(f"{type(called).__name__}.{frame.f_code.co_name}")

    gc.disable()  # a finalizer is no part of a step
    sys.setprofile(enter)
    run.step((x, y))
    sys.setprofile(None)
    if run.world.is_first:
        told = {"walk": name, "files": len(files), "with guards": len({**files, **guards})}
        print(
            json.dumps(told), *files, *(f"not due: {one}" for one in early), sep="\n  ", flush=True
        )
    run.close()
    return 1 if early or len(files) > most else 0


def by_guard(frame: FrameType) -> bool:
    """Tell whether a guard called, at whatever distance; the log of calls is around all of a step."""
    above = frame.f_back
    while above is not None:
        path = above.f_code.co_filename
        if f"/{GUARDS}" in path and not path.endswith("/call_log.py"):
            return "around" not in above.f_code.co_name
        above = above.f_back
    return False


if __name__ == "__main__":
    raise SystemExit(main())
