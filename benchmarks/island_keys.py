"""What encryption costs islands that come and go: MB/s of a link, and share of time in training.

    link     one process fetches BYTES from another over loopback, plain and with keys in turn:
             MB/s, and CPU seconds of both processes for each GB
    share    three islands in network namespaces, their links shaped by `tc tbf` in both directions
             (`tests/worlds/netns.py`); real members, whose inner steps sleep; seconds of inner
             steps over seconds of rounds, after the first round; both kinds run at the same time

    python benchmarks/island_keys.py [link] [share] [--rates 10,50,200] [--rounds 4] [--pairs 2]

The share needs root, `ip` and `tc`. Prints a table; raw figures go to `results/island-keys.json`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / one) for one in ("tests", "tests/worlds", "src")]

import torch  # noqa: E402
from processes import machine, pace_steps  # noqa: E402
from torch import nn  # noqa: E402

import netns  # noqa: E402
import shoal  # noqa: E402
from made_keys import key_settings, make_keys  # noqa: E402
from shoal.base.layouts.island_options import IslandsPolicy  # noqa: E402
from shoal.fabric.islands.member_links import MemberLinks  # noqa: E402
from shoal.trainer.islands.island_join import join_islands  # noqa: E402
from shoal.trainer.islands.member_job import open_member_rounds, train_turns  # noqa: E402
from shoal.wire.member_keys import open_member_keys  # noqa: E402

ISLANDS, PERIOD, STEP_S, PORT = 3, 100, 0.1, 29400
BYTES, TRIES = 256 << 20, 5
WIDTH = 8192


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("what", nargs="*", default=["link", "share"])
    parser.add_argument("--rates", default="10,50,200", help="Mbit/s, separated by commas")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=2, help="pairs of runs")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "island-keys.json")
    options = parser.parse_args()
    os.environ["SHOAL_TOKEN"] = "the token of this benchmark"
    found: dict[str, Any] = {"machine": machine(), "load": [os.getloadavg()[0]]}
    with tempfile.TemporaryDirectory() as folder:
        make_keys(Path(folder), ISLANDS)
        keys = key_settings(Path(folder))
        if "link" in options.what:
            found["link"] = measure_link(keys)
        if "share" in options.what:
            rates = map(float, options.rates.split(","))
            found["share"] = [measure_share(rate, options, keys) for rate in rates]
    found["load"].append(os.getloadavg()[0])
    report(found)
    options.out.write_text(json.dumps(found, indent=1) + "\n")


def measure_link(keys: dict[str, str]) -> dict[str, list[dict[str, float]]]:
    """Fetches of both kinds in turn."""
    found: dict[str, list[dict[str, float]]] = {"plain": [], "keys": []}
    for _ in range(TRIES):
        for kind, rows in found.items():
            rows.append(fetch_once(keys if kind == "keys" else {"key": "", "keys": ""}))
    return found


def fetch_once(keys: dict[str, str]) -> dict[str, float]:
    """One fetch: MB/s and CPU seconds."""
    fork = multiprocessing.get_context("fork")
    mine, its = fork.Pipe()
    server = fork.Process(target=serve_bytes, args=(keys, its))
    server.start()
    address = mine.recv()
    opened = open_keys(keys, 0)
    links = MemberLinks(
        0, 1, {0: free_address(), 1: address}, b"", ignore, nothing, print, opened
    )  # fmt: skip
    links.fetch(1, "short")
    began_s, cpu_s = time.perf_counter(), time.process_time()
    got = links.fetch(1, "long")
    wall_s, cpu_s = time.perf_counter() - began_s, time.process_time() - cpu_s
    assert got is not None
    assert len(got) == BYTES
    links.close()
    mine.send("end")
    cpu_s += mine.recv()
    server.join()
    return {"mb_per_s": BYTES / wall_s / 1e6, "cpu_s_per_gb": cpu_s / BYTES * 1e9}


def serve_bytes(keys: dict[str, str], pipe: Any) -> None:
    """The other process."""
    data = memoryview(os.urandom(1 << 20) * (BYTES >> 20))

    def provide(key: str, offset: int, length: int) -> tuple[int, bytes]:
        size = BYTES if key == "long" else 1
        return size, bytes(data[offset : min(size, offset + length)])

    address = free_address()
    links = MemberLinks(1, 1, {1: address}, b"", ignore, provide, print, open_keys(keys, 1))
    began_s = time.process_time()
    pipe.send(address)
    pipe.recv()
    pipe.send(time.process_time() - began_s)
    links.close()


def open_keys(keys: dict[str, str], index: int) -> Any:
    return open_member_keys(keys["key"], keys["keys"], index, print)


def free_address() -> str:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"


def ignore(name: int, address: str, message: Any) -> None:
    """No message counts here."""


def nothing(key: str, offset: int, length: int) -> None:
    """Nothing to give."""


def measure_share(rate: float, options: argparse.Namespace, keys: dict[str, str]) -> dict[str, Any]:
    """Runs of both kinds at one rate, at the same time: what else the machine does hits both."""
    row: dict[str, Any] = {"rate_mbit": rate, "plain": [], "keys": [], "bytes": []}
    kinds = {"plain": {"key": "", "keys": ""}, "keys": keys}
    with netns.Net(ISLANDS, rate) as one, netns.Net(ISLANDS, rate) as other:
        for pair in range(options.pairs):
            nets = dict(zip(kinds, [one, other] if pair % 2 else [other, one], strict=True))
            before = {kind: count_bytes(net) for kind, net in nets.items()}
            for kind, shares in run_pair(nets, kinds, options.rounds, PORT + pair).items():
                row[kind].append(statistics.mean(shares))
            row["bytes"].append({kind: count_bytes(nets[kind]) - before[kind] for kind in kinds})
            print(f"{rate:.0f} Mbit/s, load {os.getloadavg()[0]:.1f}: {row}", flush=True)
    return row


def count_bytes(net: netns.Net) -> int:
    """Bytes that left all islands, all headers included."""
    return sum(map(net.sent_bytes, range(ISLANDS)))


def run_pair(
    nets: dict[str, netns.Net], kinds: dict[str, dict[str, str]], rounds: int, port: int
) -> dict[str, list[float]]:
    """Three islands of each kind; the share of time in training of each island."""
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for kind, net in nets.items():
            at = ",".join(f"{address}:{port}" for address in net.addresses)
            job = {"at": at, "rounds": rounds, "folder": f"{folder}/{kind}", **kinds[kind]}
            for index in range(ISLANDS):
                process = fork.Process(target=member, args=(net, {**job, "index": index}))
                process.start()
                started.append(process)
        for process in started:
            process.join(1500)
        if any(codes := [process.exitcode for process in started]):
            raise RuntimeError(f"islands ended with {codes}; their lines are above")
        return {
            kind: [
                float((Path(folder) / kind / f"{index}.share").read_text())
                for index in range(ISLANDS)
            ]
            for kind in kinds
        }


def member(net: netns.Net, job: dict[str, Any]) -> None:
    """One island's process."""
    net.enter(job["index"])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))
    data = [(torch.randn(64), k % 10) for k in range(4096)]
    folder = Path(job["folder"])
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    run = shoal.parallelize(
        model, optimizer, shoal.mean_of_samples(nn.CrossEntropyLoss()),
        batch=2, seed=3, folder=folder / f"island-{job['index']}",
    )  # fmt: skip
    policy = IslandsPolicy(
        "diloco", count=ISLANDS, period=PERIOD, least=2, pace="equal", at=job["at"],
        index=job["index"], key=job["key"], keys=job["keys"],
    ).resolved()  # fmt: skip
    joined = join_islands(run, policy)
    rounds = open_member_rounds(run, joined, run.loader(data), job["rounds"] * PERIOD, {})
    pace_steps(run, STEP_S)
    if not train_turns(rounds):
        raise SystemExit("stopped")
    rounds.ranks.finish(10.0)
    events = map(json.loads, (folder / f"island-{job['index']}" / "events.jsonl").open())
    turns = [one for one in events if one["event"] == "round_committed"][1:]
    share = sum(one["compute_s"] for one in turns) / sum(one["seconds"] for one in turns)
    (folder / f"{job['index']}.share").write_text(str(share))
    joined.close()
    run.close()


def report(found: dict[str, Any]) -> None:
    print(f"load {found['load'][0]:.1f} … {found['load'][1]:.1f}")
    for kind, rows in found.get("link", {}).items():
        speed = statistics.median(row["mb_per_s"] for row in rows)
        cost = statistics.median(row["cpu_s_per_gb"] for row in rows)
        print(f"link   {kind:6} {speed:6.0f} MB/s  {cost:5.2f} CPU s per GB")
    for row in found.get("share", ()):
        plain, keys = statistics.mean(row["plain"]), statistics.mean(row["keys"])
        points = 100 * (keys - plain)
        sent = [sum(one[kind] for one in row["bytes"]) for kind in ("plain", "keys")]
        print(
            f"share  {row['rate_mbit']:4.0f} Mbit/s  plain {plain:.2%}  keys {keys:.2%}  "
            f"{points:+.2f} points  bytes × {sent[1] / sent[0]:.4f}"
        )
    peak_mb = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    print(f"largest process {peak_mb:.0f} MiB")


if __name__ == "__main__":
    main()
