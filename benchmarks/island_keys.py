"""What encryption costs islands that come and go: MB/s of a link, and share of time in training.

    link     one process fetches BYTES from another over loopback, plain and with keys in turn:
             MB/s, and CPU seconds of both processes for each GB
    share    three islands in network namespaces, their links shaped by `tc tbf` in both directions
             (`tests/worlds/netns.py`); real members, whose inner steps sleep; seconds of inner
             steps over seconds of rounds, after the first round

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
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "tests" / "worlds"), str(HERE.parent / "src")]

from processes import machine  # noqa: E402

import netns  # noqa: E402
from shoal.cli.island_key import make_key  # noqa: E402

ISLANDS, PERIOD, STEP_S, PORT = 3, 100, 0.1, 29400
BYTES, TRIES = 256 << 20, 5
WIDTH = 8192


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("what", nargs="*", default=["link", "share"])
    parser.add_argument("--rates", default="10,50,200", help="Mbit/s, separated by commas")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=2, help="runs of each kind, in turn")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "island-keys.json")
    options = parser.parse_args()
    if options.what[0] == "member":
        member(json.loads(options.what[1]))
        return
    found: dict[str, Any] = {"machine": machine(), "load": [os.getloadavg()[0]]}
    with tempfile.TemporaryDirectory() as folder:
        keys = make_keys(Path(folder))
        if "link" in options.what:
            found["link"] = measure_link(keys)
        if "share" in options.what:
            rates = map(float, options.rates.split(","))
            found["share"] = [measure_share(rate, options, keys) for rate in rates]
    found["load"].append(os.getloadavg()[0])
    report(found)
    options.out.write_text(json.dumps(found, indent=1) + "\n")


def make_keys(folder: Path) -> dict[str, str]:
    """islands.key and islands.keys of all islands."""
    lines = [make_key(folder / f"{index}.key", f"island {index}").line for index in range(ISLANDS)]
    (folder / "all.pub").write_text("\n".join(lines) + "\n")
    return {"key": str(folder / "{index}.key"), "keys": str(folder / "all.pub")}


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
    from shoal.fabric.islands.member_links import MemberLinks

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
    from shoal.fabric.islands.member_links import MemberLinks

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
    from shoal.wire.member_keys import open_member_keys

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
    """Runs of both kinds in turn at one rate."""
    row: dict[str, Any] = {"rate_mbit": rate, "plain": [], "keys": []}
    with netns.Net(ISLANDS, rate) as net:
        for pair in range(options.pairs):
            for kind in ("plain", "keys"):
                own = keys if kind == "keys" else {"key": "", "keys": ""}
                row[kind].append(run_once(net, options.rounds, own, PORT + pair))
    return row


def run_once(net: netns.Net, rounds: int, keys: dict[str, str], port: int) -> float:
    """Three islands; the mean share of time in training."""
    with tempfile.TemporaryDirectory() as folder:
        at = ",".join(f"{address}:{port}" for address in net.addresses)
        job = {"at": at, "rounds": rounds, "folder": folder, **keys}
        token = "the token of this benchmark"
        environ = {**os.environ, "SHOAL_TOKEN": token, "OMP_NUM_THREADS": "1"}
        started = []
        for index in range(ISLANDS):
            words = [sys.executable, __file__, "member", json.dumps({**job, "index": index})]
            started.append(subprocess.Popen([*net.inside(index), *words], env=environ))
        if any(one.wait(900) for one in started):
            raise RuntimeError("an island failed; its lines are above")
        return statistics.mean(
            float((Path(folder) / f"{index}.share").read_text()) for index in range(ISLANDS)
        )


def member(job: dict[str, Any]) -> None:
    """One island's process."""
    import torch
    from torch import nn

    import shoal
    from shoal.base.layouts.island_options import IslandsPolicy
    from shoal.trainer.islands.island_join import join_islands
    from shoal.trainer.islands.member_job import open_member_rounds, train_turns

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))
    data = [(torch.randn(64), k % 10) for k in range(4096)]
    folder = Path(job["folder"])
    run = shoal.parallelize(
        model, torch.optim.SGD(model.parameters(), 0.01), nn.CrossEntropyLoss(),
        batch=2, seed=3, folder=folder / f"island-{job['index']}",
    )  # fmt: skip
    policy = IslandsPolicy(
        "diloco", count=ISLANDS, period=PERIOD, least=2, pace="equal", at=job["at"],
        index=job["index"], key=job["key"], keys=job["keys"],
    ).resolved()  # fmt: skip
    joined = join_islands(run, policy)
    rounds = open_member_rounds(run, joined, run.loader(data), job["rounds"] * PERIOD, {})
    step = run.step

    def slowly(batch: Any) -> Any:
        until_s = time.monotonic() + STEP_S
        result = step(batch)
        time.sleep(max(0.0, until_s - time.monotonic()))
        return result

    run.step = slowly
    if not train_turns(rounds):
        raise SystemExit("stopped")
    rounds.ranks.finish(10.0)
    events = map(json.loads, (folder / f"island-{job['index']}" / "events.jsonl").open())
    turns = [one for one in events if one["event"] == "round_committed"][1:]
    share = sum(one["compute_s"] for one in turns) / sum(one["seconds"] for one in turns)
    (folder / f"{job['index']}.share").write_text(str(share))
    sys.stdout.flush()
    os._exit(0)


def report(found: dict[str, Any]) -> None:
    print(f"load {found['load'][0]:.1f} … {found['load'][1]:.1f}")
    for kind, rows in found.get("link", {}).items():
        speed = statistics.median(row["mb_per_s"] for row in rows)
        cost = statistics.median(row["cpu_s_per_gb"] for row in rows)
        print(f"link   {kind:6} {speed:6.0f} MB/s  {cost:5.2f} CPU s per GB")
    for row in found.get("share", ()):
        plain, keys = statistics.mean(row["plain"]), statistics.mean(row["keys"])
        points = 100 * (keys - plain)
        print(
            f"share  {row['rate_mbit']:4.0f} Mbit/s  plain {plain:.2%}  keys {keys:.2%}  "
            f"{points:+.2f} points; plain {row['plain']}, keys {row['keys']}"
        )
    peak_mb = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    print(f"largest process {peak_mb:.0f} MiB")


if __name__ == "__main__":
    main()
