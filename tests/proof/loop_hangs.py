"""Forty hangs of loops of one's own, most in the first steps: one cause, the right one, in time?

    python tests/proof/loop_hangs.py [--seconds 3000] [--out proof/results/loop-hangs.json] [--only ddp]

Kinds × layouts × steps, two or three ranks that nobody's launcher started, so that the process
beside them watches. A trial counts as well when standard error of all ranks has one line of a
cause, which names the rank and its call, at most `LATEST_S` after the trouble began (by the clock
in `began`), all processes have ended with a status of their own, events.jsonl has the same cause
and `shoal diagnose` names it first. Controls: ranks that are slow, or make calls that all need not
make; nothing may be told of them. It can be stopped and started again (`kept_trials.py`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "benchmarks"), str(HERE.parent)]

from kept_trials import run_trials  # noqa: E402

from shoal.launch.processes import free_port  # noqa: E402

TARGET = HERE.parents[1] / "proof" / "results" / "loop-hangs.json"
LATEST_S, DEADLINE_S = 10.0, 90.0
LOOP = """
import os, sys, time
import torch, shoal
from torch import nn

rank, asked = int(os.environ["RANK"]), {asked!r}
mine = rank == asked["rank"]
torch.manual_seed(0)
block = lambda: nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8))
model = nn.Sequential(nn.Linear(4, 8), block(), block(), nn.Linear(8, 2))
torch.manual_seed(rank if isinstance(asked["layout"], str) else 7)  # tp: all ranks have one batch
sample = (torch.randn(6, 4), torch.randn(6, 2))
loss = lambda outputs, targets: (outputs - targets) ** 2
run = shoal.parallelize(model, lambda p: torch.optim.SGD(p, lr=0.1), loss, asked["layout"],
                        sample=sample, folder="run")
sys.stderr.write("-- the run is open\\n")

def began():
    with open("began.tmp", "w") as file:
        file.write(str(time.time()))
    os.replace("began.tmp", "began")

def passes(batch, backwards=1, updates=True):
    for micro in run.micro_batches(batch):
        outputs = run.model(micro.inputs)
        for _ in range(backwards):
            run.backward(loss(outputs, micro.targets).sum(), 12, retain_graph=True)
    if updates:
        run.update()

def trouble(kind):
    began()
    if kind == "model":
        run.model(sample[0])
    if kind == "save":
        run.save()
    if kind == "tagged save":
        run.save(tag="best")
    if kind == "evaluate":
        run.evaluate([sample])
    if kind == "predict":
        list(run.predict([sample[0]]))
    if kind == "state_dict":
        run.state_dict()
    if kind == "restore":
        run.restore()
    if kind == "one step more":
        run.step(sample)
    if kind == "barrier":
        torch.distributed.barrier()
    if kind == "all_reduce":
        torch.distributed.all_reduce(torch.ones(3))
    if kind == "broadcast":
        torch.distributed.broadcast_object_list([None], src=1 - rank)
    if kind == "break":
        torch.distributed.barrier()
        sys.exit()
    if kind == "backward twice":
        passes(sample, backwards=2)
    if kind == "no backward":
        passes(sample, backwards=0)
    if kind == "no update":
        passes(sample, updates=False)
    if kind == "total":
        run.total(4)
    if kind == "slow":
        time.sleep(20)
    if kind == "own model":
        nn.Linear(4, 2)(sample[0])

own = asked["kind"] in ("backward twice", "no backward", "no update")
swallows = asked["kind"] == "swallowed"
if mine and asked["kind"] == "restore first":
    began()
    run.restore()
if not asked["step"]:
    x, y = torch.randn(64, 4), torch.randn(64, 2)
    for batch in run.loader(torch.utils.data.TensorDataset(x, y)):
        run.step(batch)
for step in range(1, asked["step"] + 3):
    if mine and step == asked["step"] and not swallows:
        trouble(asked["kind"])
        if own:
            continue
    if mine and step == asked["step"] and swallows:
        began()
        try:
            run.step((sample[0], sample[1][:, :1].repeat(1, 3)))
        except Exception:
            continue
    passes(sample) if own else run.step(sample)
run.close()
"""
SHARDS = {"fsdp": "fsdp", "tp": {"tp": 2}}
CALLS = {
    "save": "run.save", "tagged save": "run.save", "evaluate": "run.evaluate",
    "restore first": "run.restore", "predict": "run.predict", "state_dict": "run.state_dict", "restore": "run.restore",
    "one step more": "run.step", "barrier": "torch.distributed.barrier", "total": "run.total",
    "all_reduce": "torch.distributed.all_reduce", "break": "torch.distributed.barrier",
    "broadcast": "torch.distributed.broadcast_object_list",
}  # fmt: skip
"""What the line must say of the rank that makes another call."""


def trials() -> list[dict[str, Any]]:
    """Every trial; layouts in turns, so that each kind meets several."""
    found = []
    layouts: list[Any] = ["ddp", "fsdp", "zero1", "zero2", {"tp": 2}]
    for number, kind in enumerate(one for one in CALLS if one != "restore first"):
        for more in range(3):
            layout = layouts[(number + 2 * more) % len(layouts)]
            step = (1, 3, 60)[(number + more) % 3]
            found.append({"kind": kind, "layout": layout, "step": step, "rank": more % 2})
    for step, rank in ((1, 0), (4, 1), (60, 0)):
        found.append({"kind": "model", "layout": "fsdp", "step": step, "rank": rank})
    for kind in ("backward twice", "no backward", "no update", "swallowed"):
        found.append({"kind": kind, "layout": "fsdp", "step": 3, "rank": 1})
    found.append({"kind": "swallowed", "layout": "ddp", "step": 3, "rank": 0})
    found.append({"kind": "swallowed", "layout": "ddp", "step": 60, "rank": 1})
    found.append({"kind": "swallowed", "layout": "fsdp", "step": 60, "rank": 0})
    found.append({"kind": "restore first", "layout": "ddp", "step": 0, "rank": 0})
    found.append({"kind": "restore first", "layout": "fsdp", "step": 0, "rank": 1})
    found.append({"kind": "slow", "layout": "ddp", "step": 3, "rank": 1})
    found.append({"kind": "slow", "layout": "fsdp", "step": 4, "rank": 0})
    found.append({"kind": "own model", "layout": "fsdp", "step": 3, "rank": 0})
    found.append({"kind": "model", "layout": "ddp", "step": 3, "rank": 0})
    return found


def name_of(trial: dict[str, Any]) -> str:
    layout = trial["layout"] if isinstance(trial["layout"], str) else "tp"
    return f"{trial['kind']}, {layout}, step {trial['step']}, rank {trial['rank']}"


def is_control(trial: dict[str, Any]) -> bool:
    return trial["kind"] in ("slow", "own model") or (trial["kind"], trial["layout"]) == (
        "model", "ddp",
    )  # fmt: skip


def one(trial: dict[str, Any]) -> dict[str, Any]:
    """Do a trial; what came out, `wrong` being empty where all is well."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "loop.py").write_text(LOOP.format(asked=trial))
        meets = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
        began_s = time.monotonic()
        ranks = [
            subprocess.Popen(
                [sys.executable, "loop.py"], cwd=folder, text=True, stderr=subprocess.PIPE,
                env={**os.environ, **meets, "RANK": f"{k}", "LOCAL_RANK": f"{k}",
                     "OMP_NUM_THREADS": "1"},
            )
            for k in range(2)
        ]  # fmt: skip
        said, codes = [], []
        for rank in ranks:
            try:
                said.append(rank.communicate(timeout=DEADLINE_S)[1])
            except subprocess.TimeoutExpired:
                for other in ranks:
                    other.kill()
                said.append(rank.communicate()[1])
            codes.append(rank.returncode)
        passed_s = time.monotonic() - began_s
        time.sleep(0.5)  # what watches outlives the ranks for a moment
        told = [
            line
            for text in said
            # What a start prints is no cause.
            for line in text.rpartition("-- the run is open\n")[2].splitlines()
            if "shoal: " in line or "Error: " in line
        ]
        return {
            "trial": trial,
            "codes": codes,
            "passed_s": round(passed_s, 1),
            "told": told,
        } | judge(trial, folder, codes, told)


def judge(trial: dict[str, Any], folder: Path, codes: list[int], told: list[str]) -> dict[str, Any]:
    """What is wrong with it, and after how long it was told."""
    log = folder / "run" / "events.jsonl"
    events = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    causes = [e for e in events if e["event"] in ("hang", "collectives_differ", "worker_died")]
    if is_control(trial):
        lines = [line for line in told if "has waited" not in line]
        return {"wrong": "" if not (causes or lines or any(codes)) else f"told: {lines or causes}"}
    if not (folder / "began").exists():
        return {"after_s": None, "wrong": f"it never began: {told} {causes} {codes}"}
    after_s = causes[0]["time_s"] - float((folder / "began").read_text()) if causes else None
    found = {"after_s": after_s and round(after_s, 1)}
    call = f"rank {trial['rank']} called {CALLS.get(trial['kind'], 'run.')}"
    if trial["kind"] == "swallowed":
        call = f"rank {trial['rank']} caught an error of run.step"
    lines = [line for line in told if "another rank ended" not in line]
    died = any(code < 0 for code in codes)  # gloo aborts where sizes differ, before anybody waits
    if died and trial["kind"] == "all_reduce":
        call = f"rank {trial['rank']} "
    first, cause = diagnosed(folder), causes[0] if causes else {}
    text = (
        cause.get("text", "").partition("; try: ")[0]
        or cause.get("traceback")
        or cause.get("how")
        or "nothing"
    )
    in_time = after_s is not None and after_s <= LATEST_S
    wrong = [
        "" if len(lines) == 1 else f"{len(lines)} causes",
        "" if any(call in line for line in lines) else "rank or call",
        "" if len(causes) == 1 else f"{len(causes)} events",
        "" if in_time else f"after {after_s} s",
        "" if codes == [2, 2] or died else f"codes {codes}",
        "" if " ".join(text.split()) in first else f"diagnose: {first}",
    ]
    return found | {"wrong": "; ".join(filter(None, wrong))}


def diagnosed(folder: Path) -> str:
    """The first finding of `shoal diagnose`."""
    done = subprocess.run(
        [sys.executable, "-m", "shoal", "diagnose", "run"], cwd=folder, text=True,
        capture_output=True, timeout=60, check=False,
    )  # fmt: skip
    return " ".join(done.stdout.split())


def more(trials: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """How late the latest was."""
    late = [one["after_s"] for one in trials.values() if one.get("after_s")]
    return {"latest_s": max(late, default=None)}


if __name__ == "__main__":
    sys.exit(run_trials(__doc__, TARGET, trials(), name_of, one, more))
