"""Flower beside Shoal: two changed lines of its quickstart, and the processor seconds of a simulation.

    python tests/proof/flower_quickstart.py numbers     the app's clients, plain and on two ranks
    python tests/proof/flower_quickstart.py strategies  merges beside Flower's, in float64
    python tests/proof/flower_quickstart.py cost        100 clients, 50 rounds, a fifth drawn

    numbers   the train messages of two rounds for each client go through the app's ClientApp, as
              Flower's runtime calls it; FedAvg of the replies by their examples; gate: the weights
              differ by 1e-6 at most, under ddp × 2 and other layouts
    strategies  flower_strategies.py: distance ≤ 1e-12 where Flower follows the papers
    cost      Flower's simulation (Ray) of the same app, images, epochs and draws per round as
              `shoal train … islands.concurrent=2`; gates: processor seconds ≤ 0.5 of Flower's and
              ≤ 300; memory of all processes of Shoal's ≤ 1 GiB (proportional set size, each 0.5 s)

Telemetry of Flower and Ray is off. Seconds are those of all processes of each side: orphans are
adopted and waited for. Results: proof/results/flower.json.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT / "benchmarks")]

import psutil  # noqa: E402
from flower_strategies import GATE as STRATEGY_GATE  # noqa: E402
from flower_strategies import NO_GATE, compare_strategies  # noqa: E402
from processes import machine  # noqa: E402
from source import source_hash  # noqa: E402

APP = ROOT / "tests" / "neighbours" / "flower_app"
TARGET = ROOT / "proof" / "results" / "flower.json"
CHANGED = {
    "from flwr.clientapp import ClientApp": "from shoal.neighbours.flower import ClientApp",
    "from task import train as train_fn": "from shoal.neighbours.flower import train as train_fn",
}
"""The two lines of the app's client_app.py, before and after."""
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
LAYOUTS, CLIENTS, ROUNDS = ("ddp", "zero1", "fsdp"), 3, 2
GATE, SHARE, MOST_CPU_S, MOST_BYTES = 1e-6, 0.5, 300.0, 2**30
COST = {"clients": 100, "rounds": 50, "share": 0.2, "epochs": 5, "batch": 16, "lr": 0.1}
DEADLINE_S = 3600.0
SUBREAPER = 36
"""PR_SET_CHILD_SUBREAPER of prctl(2)."""


def make_changed_app(folder: Path) -> Path:
    """Copy the app with its two lines changed."""
    shutil.copytree(APP, folder)
    path = folder / "client_app.py"
    lines = path.read_text().splitlines()
    assert sum(line in CHANGED for line in lines) == len(CHANGED)
    path.write_text("\n".join(CHANGED.get(line, line) for line in lines) + "\n")
    return folder


def numbers() -> dict[str, Any]:
    """Weights after each round, plain and changed; the largest difference by layout."""
    os.environ |= QUIET
    import torch
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1  # as its runtime sets it
    with tempfile.TemporaryDirectory() as folder:
        sys.path.insert(0, str(APP))
        task = importlib.import_module("task")
        plain = importlib.import_module("client_app").app
        del sys.modules["client_app"]
        sys.path.insert(0, str(make_changed_app(Path(folder) / "app")))
        changed = importlib.import_module("client_app").app
        torch.manual_seed(0)
        first = task.Net().state_dict()
        wanted = federate(plain, first, {})
        differences = {}
        for layout in LAYOUTS:
            found = federate(changed, first, {"shoal-processes": 2, "shoal-layout": layout})
            differences[layout] = max(float((wanted[n] - found[n]).abs().max()) for n in wanted)
            print(layout, differences[layout], flush=True)
        moved = max(float((wanted[n] - first[n]).abs().max()) for n in wanted)
    return {"largest_difference": differences, "moved": moved, "clients": CLIENTS, "rounds": ROUNDS}


def federate(app: Any, weights: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Return the weights after some rounds of FedAvg over the replies of an app."""
    from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict

    for _ in range(ROUNDS):
        replies = []
        for client in range(CLIENTS):
            config = ConfigRecord({"lr": 0.05, "epochs": 1, "batch-size": 32})
            content = RecordDict({"arrays": ArrayRecord(weights), "config": config})
            message = Message(content=content, dst_node_id=1, message_type="train")
            message.metadata.__dict__["_message_id"] = "m"
            place = {"partition-id": client, "num-partitions": CLIENTS}
            context = SimpleNamespace(run_config=settings, node_config=place)
            reply = app(message, context).content
            count = reply["metrics"]["num-examples"]
            replies.append((count, reply["arrays"].to_torch_state_dict()))
        total = sum(count for count, _ in replies)
        weights = {n: sum(count * one[n] for count, one in replies) / total for n in weights}
    return weights


def measure_program(words: list[str], folder: Path, environ: dict[str, str]) -> tuple[float, int]:
    """Run a program in a child that adopts all its orphans.

    Returns:
        Processor seconds of all its processes; the most bytes that they held together, as the sum
        of proportional set sizes, looked at twice a second.
    """
    began_s = time.monotonic()
    child = os.fork()
    if not child:
        ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)
        with (folder / "log").open("w") as log:
            done = subprocess.run(
                words, cwd=folder, env={**os.environ, **environ}, stdout=log, stderr=log,
                timeout=DEADLINE_S, check=False,
            )  # fmt: skip
        if done.returncode:  # Ray's daemons would outlive a start that failed
            for orphan in psutil.Process().children(recursive=True):
                orphan.kill()
        with suppress(ChildProcessError):
            while True:
                os.wait()
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        (folder / "cpu").write_text(str(used.ru_utime + used.ru_stime))
        os._exit(done.returncode)
    most_bytes = 0
    while not (done := os.waitpid(child, os.WNOHANG))[0]:
        most_bytes = max(most_bytes, count_bytes(child))
        time.sleep(0.5)
    if done[1]:
        raise SystemExit((folder / "log").read_text()[-3000:])
    print(words[0], f"{time.monotonic() - began_s:.0f} s", flush=True)
    return float((folder / "cpu").read_text()), most_bytes


def count_bytes(process: int) -> int:
    """Return the sum of the proportional set sizes of a process' descendants."""
    total = 0
    with suppress(psutil.Error):
        for one in psutil.Process(process).children(recursive=True):
            with suppress(psutil.Error):
                total += one.memory_full_info().pss
    return total


def cost() -> dict[str, Any]:
    """Processor seconds of both simulations, and the accuracy of each is left to them."""
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        asked = json.dumps({**COST, "cpus": 1})
        words = [sys.executable, str(APP / "simulate.py"), str(APP), str(folder / "w.pt"), asked]
        theirs, their_bytes = measure_program(words, folder, {**QUIET, "HOME": text})
        ours, our_bytes = measure_program(
            [
                sys.executable, "-m", "shoal", "train", "data.source=digits", "data.split=even",
                "data.validation=0", "model.build=task:Net", "islands.data=own",
                "islands.method=fedavg", f"islands.count={COST['clients']}",
                f"islands.sample={COST['share']}", "islands.concurrent=2",
                f"islands.period={COST['epochs']} epochs", f"train.batch={COST['batch']}",
                f"train.epochs={COST['epochs'] * COST['rounds']}", f"optimizer.lr={COST['lr']}",
                "optimizer.name=sgd", "optimizer.momentum=0.9", "optimizer.weight_decay=0",
                "optimizer.clip=0", "optimizer.schedule=constant", "launch.processes=1",
            ],
            folder, {**QUIET, "PYTHONPATH": f"{ROOT / 'src'}:{APP}"},
        )  # fmt: skip
    return {
        "asked": COST, "flower_cpu_s": theirs, "shoal_cpu_s": ours, "ratio": ours / theirs,
        "flower_bytes": their_bytes, "shoal_bytes": our_bytes,
    }  # fmt: skip


def main() -> int:
    """Measure the parts that the command line names, write them, judge."""
    kinds = {"numbers": numbers, "strategies": compare_strategies, "cost": cost}
    parts = sys.argv[1:] or [*kinds]
    record = json.loads(TARGET.read_text()) if TARGET.exists() else {}
    for part in parts:
        record[part] = {**kinds[part](), "source": source_hash(), "machine": machine()}
        TARGET.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(record, indent=1))
    apart = max(record.get("numbers", {}).get("largest_difference", {}).values(), default=0.0)
    distances = record.get("strategies", {}).get("largest_distance", {})
    far = [name for name, one in distances.items() if one > STRATEGY_GATE and name != NO_GATE]
    spent = record.get("cost", {})
    limits = {"ratio": SHARE, "shoal_cpu_s": MOST_CPU_S, "shoal_bytes": MOST_BYTES}
    return int(
        apart > GATE or bool(far) or any(spent.get(name, 0) > most for name, most in limits.items())
    )


if __name__ == "__main__":
    sys.exit(main())
