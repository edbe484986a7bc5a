"""What `run.loader` costs beside torch's DataLoader, over the same samples.

One process with one thread: whole passes over a dataset that lies in memory, in turns, in
micro-batches of an eighth of the batch against torch's one batch; no step in between. Beside it the
same of torch against itself, and the first batch of a dataset of 10¹² samples.

What is freed stays with the process: glibc gives a batch of 20 MB back to the system or keeps it as
the heap happens to lie, which is 0 to 48,000 page faults a pass, on either side.

    python benchmarks/loading.py                  about four minutes
    python benchmarks/loading.py --pairs 2        does it work?
    python benchmarks/loading.py "text 64 x 512"  rows of this data only

Gate: upper end of each ratio ≤ 1.15; first batch ≤ 10 ms.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from processes import machine
from ratios import ratio
from torch.utils.data import DataLoader, Dataset

import shoal

LIMIT, FIRST_LIMIT_S, BATCH = 1.15, 0.010, 64
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


class Rows(Dataset[Any]):
    """Sample i is a row of a tensor and of its targets, `batches` batches of them."""

    def __init__(self, inputs: torch.Tensor, targets: torch.Tensor, batches: int) -> None:
        self.inputs, self.targets = inputs, targets
        self.samples = batches * BATCH

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        place = index % len(self.inputs)
        return self.inputs[place], self.targets[place]


def text(batches: int) -> Rows:
    """Windows of 512 tokens, and the tokens after them."""
    tokens = torch.randint(50_000, (4096, 513))
    return Rows(tokens[:, :-1], tokens[:, 1:], batches)


def images(batches: int) -> Rows:
    """Floats of 3 × 160 × 160, and a class."""
    return Rows(torch.rand(512, 3, 160, 160), torch.randint(1000, (512,)), batches)


def seconds(batches: Iterable[Any]) -> float:
    """What one pass takes."""
    began = time.perf_counter()
    for _ in batches:
        pass
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("data", nargs="*", help="rows that are measured; default: all")
    parser.add_argument("--workers", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--json", action="store_true", help="one JSON line after the table")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for parameter in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD):
        ctypes.CDLL(None).mallopt(parameter, 2**30)
    run = shoal.parallelize(
        torch.nn.Linear(1, 1),
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda y, t: ((y - t) ** 2).sum(1),
        batch=BATCH,
        micro_batch=BATCH // 8,
    )
    record: dict[str, Any] = {"machine": machine(), "pairs": options.pairs, "rows": []}
    makers: dict[str, tuple[Callable[[int], Rows], int]] = {
        "text 64 x 512": (text, 300),
        "images 64 x 3 x 160 x 160": (images, 40),
    }
    for name in options.data or makers:
        make, batches = makers[name]
        data = make(batches)
        for workers in options.workers:
            record["rows"].append(measured(run, data, name, batches, workers, options.pairs))
    endless = text(10**12 // BATCH)
    began = time.perf_counter()
    next(iter(run.loader(endless)))
    record["first_batch_s"] = time.perf_counter() - began
    verdict = "pass" if record["first_batch_s"] <= FIRST_LIMIT_S else "FAIL"
    print(f"first of 10^12 samples: {record['first_batch_s'] * 1e3:.2f} ms {verdict}")
    if options.json:
        print(json.dumps(record))


def measured(
    run: shoal.Run, data: Rows, name: str, batches: int, workers: int, pairs: int
) -> dict[str, Any]:
    """Ratios of one dataset: ours to torch's, and torch's to itself."""
    torchs = DataLoader(data, BATCH, shuffle=True, num_workers=workers)
    ours = run.loader(data, workers=workers)
    seconds(ours)
    found: dict[str, list[float]] = {"ours": [], "torch": [], "again": []}
    sides = {"ours": ours, "torch": torchs, "again": torchs}
    for pair in range(pairs):
        for side in sides if pair % 2 else reversed(sides):
            found[side].append(seconds(sides[side]) / batches * 1e3)
    ours_to, same = ratio(found["ours"], found["torch"]), ratio(found["again"], found["torch"])
    told = "{0.value:.3f} [{0.low:.3f}, {0.high:.3f}]".format
    print(
        f"{name:26} {workers} workers  {min(found['ours']):6.2f} ms a batch, torch "
        f"{min(found['torch']):6.2f}  {told(ours_to)} {ours_to.verdict(LIMIT)}  A/A {told(same)}",
        flush=True,
    )
    return {
        "data": name,
        "workers": workers,
        "ms": found,
        "ratio": vars(ours_to),
        "same": vars(same),
        "verdict": ours_to.verdict(LIMIT),
    }


if __name__ == "__main__":
    main()
