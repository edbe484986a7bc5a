"""How fast codecs code and decode, on one core.

Each codec codes a vector of fp32 that fits in no cache, decodes it, and adds what it decodes to
another vector. A repetition runs all of them once, in turn, so that a machine that slows down
slows all; what counts is the median, in GB of fp32 per second. Beside them: a plain copy, which is
the memory's own speed, and int8 by the same operations over the whole vector at once.

    python benchmarks/codecs.py [--mib 64] [--repetitions 41]      about a minute; an idle machine

Prints a table and the gates (int8 ≥ 3 GB/s, e3m0 ≥ 1.5 GB/s of input); writes every raw time and
the machine to benchmarks/results/codecs.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from processes import machine

from shoal.fabric.compressed.codecs import CODECS, find_codec

TARGET = Path(__file__).resolve().parent / "results" / "codecs.json"
GATES = {"int8 encode": 3.0, "e3m0 encode": 1.5}
"""Least GB of fp32 per second."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--mib", type=int, default=64, help="of the vector")
    parser.add_argument("--repetitions", type=int, default=41)
    options = parser.parse_args()
    torch.set_num_threads(1)
    before = machine()
    size_bytes = options.mib * 2**20
    works = make(size_bytes // 4)
    times_s: dict[str, list[float]] = {name: [] for name in works}
    for repetition in range(-1, options.repetitions):
        for name, work in works.items():
            began_s = time.perf_counter()
            work()
            if repetition >= 0:
                times_s[name].append(time.perf_counter() - began_s)
    speeds = {name: size_bytes / statistics.median(t) / 1e9 for name, t in times_s.items()}
    for name, speed in speeds.items():
        quartiles = statistics.quantiles(times_s[name], n=4)
        low, high = (size_bytes / t / 1e9 for t in (quartiles[2], quartiles[0]))
        print(f"{name:16} {speed:6.2f} GB/s   middle half {low:6.2f} … {high:6.2f}")
    answer = {"machine": before, "fp32_bytes": size_bytes, "gb_per_s": speeds, "times_s": times_s}
    TARGET.write_text(json.dumps(answer, indent=1) + "\n")
    failed = [name for name, least in GATES.items() if speeds[name] < least]
    for name, least in GATES.items():
        print(
            f"{name}: {speeds[name]:.2f} GB/s, at least {least}: {'NO' * (name in failed) or 'ok'}"
        )
    sys.exit(bool(failed))


def make(elements: int) -> dict[str, Callable[[], object]]:
    """Everything that is timed, by name."""
    numbers = torch.randn(elements, generator=torch.Generator().manual_seed(0))
    room = torch.zeros(elements)
    works: dict[str, Callable[[], object]] = {"copy": lambda: room.copy_(numbers)}
    for name in CODECS:
        codec = find_codec(name, torch.float32)
        packed = torch.zeros(codec.size_bytes(elements), dtype=torch.uint8)
        works[f"{name} encode"] = lambda c=codec, p=packed: c.encode(numbers, p)
        works[f"{name} decode"] = lambda c=codec, p=packed: c.decode(p, room)
        works[f"{name} add"] = lambda c=codec, p=packed: c.decode(p, room, weight=0.5, add=True)
    works["int8 at once"] = lambda: at_once(numbers.view(-1, 65_536))
    return works


def at_once(rows: torch.Tensor) -> torch.Tensor:
    """int8 codes as one would write them, without a thought of caches."""
    scale = rows.abs().amax(1, keepdim=True) / 127
    return (rows / scale).round().to(torch.int8)


if __name__ == "__main__":
    main()
