"""A loop of one's own without a micro-batch, on one simulated device with a limit on its memory.

    python default_cut.py NAME MICRO_BATCH    a model of `benchmarks/default_micro_batch.py`; 0: open

Prints {"micro_batch", "reserved_bytes", "told"}; a pass that does not fit ends in torch's error. A
limit binds what the allocator has reserved: in segments of 2 and 20 MiB, most of a small model.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from default_micro_batch import MODELS

import shoal

BATCH = 32


def main() -> None:
    name, size = sys.argv[1], int(sys.argv[2])
    build, shape, is_tokens = MODELS[name]
    torch.manual_seed(1)
    x = torch.randint(0, 1000, (64, *shape)) if is_tokens else torch.randn(64, *shape)
    data = TensorDataset(x, torch.randint(0, 10, (64,)))
    given = {"micro_batch": size} if size else {}
    run = shoal.parallelize(
        build, lambda p: torch.optim.AdamW(p, lr=1e-3), layout="single", batch=BATCH, **given
    )
    assert run.world.device.type == "cuda"
    told: list[str] = []
    run.recorder.notice = told.append  # type: ignore[method-assign]
    for batch in run.loader(data):
        run.step(batch)
    reserved = torch.cuda.max_memory_reserved()
    size = run.plan.micro_batch
    print(json.dumps({"micro_batch": size, "reserved_bytes": reserved, "told": told}))


if __name__ == "__main__":
    main()
