"""How near to the bandwidth bound islands add up their numbers over slow links, codec by codec.

Three islands in network namespaces of this machine, one process and one thread each, their links
shaped by `tc tbf` in both directions (`tests/worlds/netns.py`). An exchange is both halves of a sum
of 50 MB of fp32, with a gathering of a few bytes between them, as a commit needs:

    theory   2(R−1)/R × coded bytes per island, scales included
    bound    theory / rate
    time     of the slowest island, from a gathering at which all begin to its own sum
    wire     bytes that left an island's interface meanwhile, all headers and heartbeats included

`in one piece` is the same exchange without chunks: code all, send all, add up all, send all.

    python benchmarks/island_links.py [--rates 100] [--exchanges 5] [--connections 2]

Needs root, `ip` and `tc`. Prints a table; raw times go to `results/island-links.json`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from processes import machine

from shoal.fabric.compressed.codecs import find_codec
from shoal.fabric.islands import compressed_all_reduce
from shoal.fabric.islands.inter_island_group import connect_islands, join_island_store

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "tests" / "worlds"))

import netns  # noqa: E402

CODECS = "none,bf16,int8,e3m0"
ELEMENTS, ISLANDS, DEADLINE_S = 12_500_000, 3, 120.0
TIME_LIMIT, WIRE_LIMIT = 1.25, 1.05
GATED = ("int8", "e3m0")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--rates", default="100", help="Mbit/s, separated by commas")
    parser.add_argument("--codecs", default=CODECS)
    parser.add_argument("--exchanges", type=int, default=5)
    parser.add_argument("--connections", type=int, default=2)
    parser.add_argument("--chunks-only", action="store_true", help="not in one piece")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "island-links.json")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    load = [os.getloadavg()[0]]
    for rate in map(float, options.rates.split(",")):
        rows += measure(rate, options)
    report(rows)
    measured = {
        "machine": machine(),
        "load_before_and_after": [*load, os.getloadavg()[0]],
        "islands": ISLANDS,
        "elements": ELEMENTS,
        "connections": options.connections,
        "burst_bytes": netns.BURST_BYTES,
        "queue_ms": netns.QUEUE_MS,
        "rows": rows,
    }
    options.out.write_text(json.dumps(measured, indent=1) + "\n")


def measure(rate_mbit: float, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of one rate: one set of islands serves all codecs."""
    fork = multiprocessing.get_context("fork")
    with netns.Net(ISLANDS, rate_mbit) as net:
        started = []
        for index in range(ISLANDS):
            receiver, sender = fork.Pipe(duplex=False)
            process = fork.Process(target=island, args=(index, net, options, sender))
            process.start()
            sender.close()
            started.append((process, receiver))
        try:
            told = [receiver.recv() for _, receiver in started]
        finally:
            for process, _ in started:
                process.join(5)
                process.kill()
    rows = []
    for of_islands in zip(*told, strict=True):
        first = of_islands[0]
        theory = 2 * (ISLANDS - 1) / ISLANDS * first["coded_bytes"]
        times_s = [max(one) for one in zip(*(r["times_s"] for r in of_islands), strict=True)]
        wire = [max(one) for one in zip(*(r["wire_bytes"] for r in of_islands), strict=True)]
        bound_s = theory * 8 / rate_mbit / 1e6
        rows.append(
            {
                "rate_mbit": rate_mbit,
                "codec": first["codec"],
                "in_one_piece": first["in_one_piece"],
                "chunk_elements": first["chunk_elements"],
                "settings": first["settings"],
                "theory_bytes": theory,
                "wire_bytes": wire,
                "wire_ratio": max(wire) / theory,
                "bound_s": bound_s,
                "times_s": times_s,
                "time_ratio": statistics.median(times_s) / bound_s,
            }
        )
    return rows


def island(index: int, net: netns.Net, options: argparse.Namespace, answer: Any) -> None:
    """One island's process."""
    torch.set_num_threads(1)
    net.enter(index)
    host = net.addresses[0]
    store = join_island_store(f"{host}:29400", index, ISLANDS, deadline_s=DEADLINE_S)
    links = {"connections": options.connections, "host": host, "deadline_s": DEADLINE_S}
    plane = connect_islands(store, "0", index, ISLANDS, **links)
    flat = torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(index))
    rows = []
    for in_one_piece in (False,) if options.chunks_only else (False, True):
        for name in options.codecs.split(","):
            codec = find_codec(name, torch.float32)
            row: dict[str, Any] = {
                "codec": name,
                "in_one_piece": in_one_piece,
                "coded_bytes": codec.size_bytes(ELEMENTS),
                "settings": netns.settings(),
                "times_s": [],
                "wire_bytes": [],
            }
            chunk = ELEMENTS if in_one_piece else compressed_all_reduce.chunk_elements(codec)
            row["chunk_elements"] = chunk
            with mock.patch.object(compressed_all_reduce, "chunk_elements", return_value=chunk):
                exchange(plane, flat, codec)  # memory that is new to the process
                for _ in range(options.exchanges):
                    time.sleep(0.1)  # the token buckets fill: their burst counts once per exchange
                    plane.gather(b"", deadline_s=DEADLINE_S)
                    before, began_s = netns.counters()[1], time.perf_counter()
                    exchange(plane, flat, codec)
                    row["times_s"].append(time.perf_counter() - began_s)
                    plane.gather(b"", deadline_s=DEADLINE_S)
                    row["wire_bytes"].append(netns.counters()[1] - before)
            rows.append(row)
    plane.gather(b"", deadline_s=DEADLINE_S)
    answer.send(rows)
    plane.close()


def exchange(plane: Any, flat: torch.Tensor, codec: Any) -> None:
    """Both halves, and what stands between them."""
    arrived = plane.start_compressed_all_reduce(
        flat, codec, feedback=None, tag="0", deadline_s=DEADLINE_S
    )
    plane.gather(json.dumps(arrived.gram).encode(), deadline_s=DEADLINE_S)
    arrived.finish([1.0] * plane.count, float(plane.count), deadline_s=DEADLINE_S)


def report(rows: list[dict[str, Any]]) -> None:
    """The table, and whether the gates hold."""
    print(
        "| Mbit/s | codec | way | bound s | time s (min … max) | × bound | wire × theory | gate |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        times_s = row["times_s"]
        way = "in one piece" if row["in_one_piece"] else "chunks"
        gate = ""
        if not row["in_one_piece"] and row["codec"] in GATED:
            kept = row["time_ratio"] <= TIME_LIMIT and row["wire_ratio"] <= WIRE_LIMIT
            gate = "pass" if kept else "FAIL"
        print(
            f"| {row['rate_mbit']:g} | {row['codec']} | {way} | {row['bound_s']:.3f} "
            f"| {statistics.median(times_s):.3f} ({min(times_s):.3f} … {max(times_s):.3f}) "
            f"| {row['time_ratio']:.3f} | {row['wire_ratio']:.4f} | {gate} |"
        )


if __name__ == "__main__":
    main()
