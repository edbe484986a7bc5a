"""A loop of one's own, as torchrun starts it on two nodes; it writes down what it does.

    python elastic_loop.py STEPS PAUSE_S LOG_FOLDER RUN_FOLDER [open]

It pauses after each step, alone longer than with another, until LOG_FOLDER has a file `fast`.
Each process has a file of its own in LOG_FOLDER: where it started, then for each step its loss and
this rank's samples. Everything is float64, so sums differ by their order alone. `open` leaves the
micro-batch to Shoal, of batches of 24 of 120 samples, and the model has BatchNorm and dropout.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

import shoal

SAMPLES, BATCH, SAVE_EVERY = 64, 8, 4


def samples(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(its own number and seven random ones, their sum) of each sample."""
    inputs = torch.randn(count, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    inputs[:, 0] = torch.arange(count)
    return [(row, row[1:].sum().reshape(1)) for row in inputs]


def main(steps: int, pause_s: float, logs: Path, folder: str, is_open: bool) -> None:
    """Train to the end, or to the next restart."""
    torch.manual_seed(0)
    batch_size, count = (24, 120) if is_open else (BATCH, SAMPLES)
    more = [nn.BatchNorm1d(16), nn.Dropout(0.1)] if is_open else []
    model = nn.Sequential(nn.Linear(8, 16), *more, nn.Tanh(), nn.Linear(16, 1)).double()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    size = None if is_open else 1
    run = shoal.parallelize(
        model, optimizer, lambda o, t: (o - t) ** 2, batch=batch_size, micro_batch=size,
        folder=folder,
    )  # fmt: skip
    data = samples(count)
    run.restore()
    start = run.step_count
    with (logs / f"{time.time()}-{os.getpid()}.jsonl").open("w", buffering=1) as log:

        def tell(**fields: object) -> None:
            log.write(json.dumps(fields) + "\n")

        place = {"rank": run.world.rank, "size": run.world.size}
        place["micro_batch"] = run.plan.micro_batch
        tell(start=start, **place, meets=os.environ.get("MASTER_PORT", ""))
        for _ in run.epochs(steps * batch_size // count):
            for batch in run.loader(data):
                result = run.step(batch)
                seen = [int(n) for one in batch.micro_batches for n in one.value[0][:, 0].tolist()]
                tell(step=run.step_count, loss=float(result.loss), samples=seen)
                if not (logs / "fast").exists():
                    time.sleep(pause_s * (3 if run.world.size == 1 else 1))
                if run.step_count % SAVE_EVERY == 0:
                    run.save()
        run.close()
        tell(done=run.step_count)


if __name__ == "__main__":
    words = sys.argv[1:]
    main(int(words[0]), float(words[1]), Path(words[2]), words[3], words[4:] == ["open"])
