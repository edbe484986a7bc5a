"""Verdicts on planted costs and faults: is the cause named, and is its cure foreseen?

    python tests/proof/verdicts.py [--seconds 3000] [--out proof/results/verdicts.json]

Each cost is planted in a run of two ranks on this machine by sleeps of a drawn length
(`worlds/planted_costs.py`), and taken out of another run: by the verdict's own command where a
setting cures it, else by taking the sleep out. The two are run by turns, `REPEATS` times each.
A trial counts as well when each planted run is told its kind and its rank or part, and the mean
step measured after the cure is within 15 % of the mean that the verdicts foretold. Faults count
by kind and words. Clean runs, every second with one core busy, must be told "nothing", or that the
machine is busy, since other work may run beside them. In two trials the verdict's share is compared with torch.profiler's trace of the
same run. It can be stopped and started again (`kept_trials.py`).
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "benchmarks")]
sys.path[:0] = [str(HERE.parent / "worlds"), str(HERE.parent)]

from kept_trials import run_trials  # noqa: E402

from cli_run import CommandLine, outside  # noqa: E402
from forks import shared  # noqa: E402
from shoal.report.verdict import Verdict, find_verdict  # noqa: E402
from shoal.report.verdict.run_verdict import read_replay  # noqa: E402
from shoal.report.verdict.step_seconds import OTHER  # noqa: E402

TARGET = HERE.parents[1] / "proof" / "results" / "verdicts.json"
SEED, REPEATS, WITHIN = 4646, 2, 0.15
CLEAN = 20
ARGUMENTS = [
    "model.build=planted_costs:build", "data.source=planted_costs:data",
    "data.collate=planted_costs:collate", "train.on=planted_costs:hook", "train.batch=4",
    "train.micro_batch=2", "train.steps=70", "precision.compute=fp32", "train.prove=off",
    "launch.processes=2", "layout.strategy=ddp", "checkpoint.every=1000",
]  # fmt: skip
EACH_S = {"data": 0.001, "forward": 0.04, "backward": 0.05, "optimizer": 0.002}
IDLE_S = {**EACH_S, "forward": 0.0, "backward": 0.0}
STAGES = {"divided": True, "calls": {"data": 4, "forward": 2, "backward": 2}}
PIPELINE = ["layout.strategy=auto", "layout.pp=2"]
LOOP = """
import json, os, time, torch, shoal
import planted_costs
torch.manual_seed(0)
model = planted_costs.build()
run = shoal.parallelize(
    model, lambda p: torch.optim.AdamW(p, lr=1e-3),
    lambda y, t: (torch.nn.functional.cross_entropy(y, t, reduction="sum"), len(t)),
    layout="ddp", batch=4, micro_batch=2, folder="runs/run", precision="fp32")
while run.step_count < 70:
    for batch in run.loader(planted_costs.Samples()):
        run.step(batch)
        planted_costs.spend("loop")
        if run.step_count >= 70:
            break
run.close()
"""


class Trial(dict[str, Any]):
    """A planted cost: `asked` of planted_costs.py, arguments, and what the verdict must say.

    kind, words   of the verdict · parts of its text
    cure          arguments instead of taking the costs out; "command": what the verdict says
    """


def costs(seed: int = SEED) -> list[Trial]:
    """Return the planted costs and faults, with sizes drawn by a seed."""
    drawn = random.Random(seed)

    def size(least: float, most: float) -> float:
        return round(drawn.uniform(least, most), 4)

    def rank() -> int:
        return drawn.randrange(2)

    found: list[Trial] = []

    def plant(
        name: str, kind: str, words: str, asked: dict[str, Any], *arguments: str, **more: Any
    ) -> None:
        told = {"kind": kind, "words": words, "asked": asked, "arguments": list(arguments)}
        found.append(Trial(name=name, **told, **more))

    def one(part: str, words: str, least: float = 0.03, most: float = 0.06, **more: Any) -> None:
        who = rank()
        cost = {"part": part, "rank": who, "s": size(least, most)}
        plant(
            f"{part} of one rank", "slow_rank", f"rank {who}'s {words}", {"costs": [cost]}, **more
        )

    def all_ranks(part: str, kind: str, words: str, *arguments: str, **more: Any) -> None:
        cost = {"part": part, "s": size(0.03, 0.06), **more.pop("cost", {})}
        plant(f"{part} of all ranks", kind, words, {"costs": [cost]}, *arguments, **more)

    one("data", "data")
    all_ranks("data", "input", "wait for data", cure="command", trace=True)
    all_ranks("collate", "input", "wait for data")
    all_ranks("loop", "callbacks", "own code between two steps", loop=True)
    one("hooks", "callbacks")
    all_ranks("hooks", "callbacks", "callbacks of all ranks")
    one("forward", "forward pass")
    one("backward", "backward pass")
    one("optimizer", "optimizer update")
    all_ranks("sum", "communication", "communication")
    late = {"part": "forward", "rank": rank(), "s": size(0.03, 0.06)}
    plant(
        "late stage", "late_stage", f"stage {late['rank']}", {**STAGES, "costs": [late]}, *PIPELINE
    )
    each = {"part": "forward", "s": size(0.004, 0.01), "each_call": True}
    plant(
        "small micro-batches", "micro_batch", "8 micro-batches of 1",
        {"each_s": IDLE_S, "calls": {"data": 16}, "costs": [each]},
        "train.batch=16", "train.micro_batch=1", cure="command",
    )  # fmt: skip
    plant(
        "recompute", "memory", "recompute (full) without need",
        {"in_blocks": True, "calls": {"forward": 4},
         "each_s": {**EACH_S, "forward": size(0.03, 0.06)}},
        "memory.recompute=full", cure="command",
    )  # fmt: skip
    plant(
        "frequent validation", "validation", "validation",
        {"validation_s": size(0.1, 0.3)}, "train.validate_every=5", cure=["train.validate_every=0"],
    )  # fmt: skip
    plant(
        "small kernels", "small_kernels", "launching",
        {"ops": drawn.randrange(180, 300), "each_s": {**IDLE_S, "optimizer": 0.04}}, trace=True,
    )  # fmt: skip
    all_ranks("data", "input", "wait for data", cost={"every": 10, "s": size(0.1, 0.2)})
    found[-1]["name"] = "data of every tenth step"
    flip = {"part": "forward", "s": size(0.03, 0.06), "flips": drawn.randrange(1000)}
    plant("lateness that flips", "slow_rank", "the machine is busy", {"costs": [flip]})
    nan = {"kind": "nan", "share": 0.04, "seed": drawn.randrange(1000)}
    plant("skipped steps", "fault", "skipped steps", {"fault": nan})
    ends: dict[str, Any] = {"rank": rank(), "step": drawn.randrange(40, 60), "part": "forward"}
    who = f"rank {ends['rank']}"
    once = "launch.restarts=0"
    plant("hang", "fault", who, {"fault": {**ends, "kind": "hang"}}, once, "launch.patience_s=0")
    plant("killed rank", "fault", f"{who} ", {"fault": {**ends, "kind": "kill"}}, once)
    rate = f"optimizer.lr={size(100, 300)}"
    plant("divergence", "fault", "non-finite", {}, "optimizer.name=sgd", rate, "optimizer.clip=0")
    plant("damaged checkpoint", "fault", "damaged", {}, damage=True)
    for number in range(CLEAN):
        asked = {"each_s": {**EACH_S, "forward": size(0.01, 0.03)}}
        plant(f"clean {number}", "nothing", "", asked, busy=number % 2 == 1)
    return found


def run_once(trial: Trial, asked: dict[str, Any], arguments: list[str], folder: Path) -> Path:
    """Do a run; return its folder."""
    shutil.copy(HERE.parent / "worlds" / "planted_costs.py", folder)
    told = {"each_s": EACH_S, "calls": {"data": 2}, **asked}
    (folder / "planted.json").write_text(json.dumps(told))
    if trial.get("loop"):
        (folder / "loop.py").write_text(LOOP)
        words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "loop.py"]
        subprocess.run(
            [sys.executable, *words], cwd=folder, env=outside(), check=True, capture_output=True
        )
        return folder / "runs" / "run"
    with busy_core() if trial.get("busy") else no_core():
        command = CommandLine(folder, *ARGUMENTS, *arguments)
        command.finish(300)
    if trial.get("damage"):
        for part in command.run.glob("checkpoints/*/rank-0.safetensors"):
            raw = bytearray(part.read_bytes())
            raw[-5] ^= 255
            part.write_bytes(raw)
        again = CommandLine(folder, "--resume", str(command.run), "train.steps=120")
        again.finish(120)
    return command.run


@contextmanager
def busy_core() -> Iterator[None]:
    """Keep one core busy."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


@contextmanager
def no_core() -> Iterator[None]:
    """Keep no core busy."""
    yield


def measured_s(run: Path) -> float:
    """Return the mean seconds of a run's step, with pauses."""
    found = read_replay(run)
    assert found is not None, run
    times, replay = found
    return replay.mean_s(replay.step_s) + float(times.seconds[:, :, OTHER].mean())


def cured(trial: Trial, verdict: Verdict) -> tuple[dict[str, Any], list[str]]:
    """Return what is asked of the run without the cause, and its arguments."""
    asked, cure = trial["asked"], trial.get("cure")
    if cure == "command":
        return asked, [*trial["arguments"], verdict.command]
    if cure:
        return asked, [*trial["arguments"], *cure]
    asked = {**asked, "costs": []}
    asked.pop("ops", None)
    asked.pop("fault", None)
    return asked, trial["arguments"]


def one(trial: Trial) -> dict[str, Any]:
    """Do a trial; what came out, `wrong` being empty where all is well."""
    said: list[Verdict] = []
    after_s: list[float] = []
    trace: dict[str, Any] = {}
    predicts = trial["kind"] not in ("fault", "nothing") or trial["name"] == "skipped steps"
    for number in range(REPEATS if predicts else 1):
        with tempfile.TemporaryDirectory(prefix="verdict-") as place:
            traced = ["train.trace=61:68"] if trial.get("trace") and not number else []
            run = run_once(trial, trial["asked"], [*trial["arguments"], *traced], Path(place))
            said.append(find_verdict(run))
            if traced:
                trace = read_trace(run, said[-1])
        if predicts and said[-1].kind == trial["kind"]:
            with tempfile.TemporaryDirectory(prefix="verdict-") as place:
                asked, arguments = cured(trial, said[-1])
                after_s.append(measured_s(run_once(trial, asked, arguments, Path(place))))
    verdict = said[-1]
    found: dict[str, Any] = {
        "planted": trial["kind"],
        "size": trial["asked"].get("costs") or trial["asked"].get("fault") or trial["asked"],
        "told": [one.line() for one in said],
        "evidence": list(verdict.evidence),
        "busy": trial.get("busy", False),
        **({"trace": trace} if trace else {}),
    }
    predicted = [one.without_s for one in said if one.without_s is not None]
    if after_s and predicted:
        mean_s, mean_after_s = sum(predicted) / len(predicted), sum(after_s) / len(after_s)
        found |= {
            "before_s": [round(one.step_s or 0.0, 5) for one in said],
            "predicted_s": [round(one, 5) for one in predicted],
            "measured_s": [round(one, 5) for one in after_s],
            "error": round(mean_s / mean_after_s - 1, 4),
        }
    return {**found, "wrong": judge(trial, said, found)}


def judge(trial: Trial, said: list[Verdict], found: dict[str, Any]) -> str:
    """Return what is wrong with a trial; "" for nothing."""
    wrong = []
    for verdict in said:
        words = " ".join((verdict.cause, *verdict.evidence))
        if trial["kind"] == "nothing" and "machine is busy" in words:
            continue  # true: other work runs here
        if verdict.kind != trial["kind"] or trial["words"] not in words:
            wrong.append(f"{verdict.kind}: {verdict.line()}")
    if abs(found.get("error", 0.0)) > WITHIN:
        wrong.append(f"foretold {found['predicted_s']}, measured {found['measured_s']}")
    if found.get("trace", {}).get("wrong"):
        wrong.append(found["trace"]["wrong"])
    return "; ".join(wrong)


def read_trace(run: Path, verdict: Verdict) -> dict[str, Any]:
    """Compare a verdict with torch.profiler's trace of rank 0's steps."""
    (path,) = run.glob("traces/steps-*-rank-0.json")
    events = json.loads(path.read_text())["traceEvents"]
    steps = sorted(
        (one["ts"], one["ts"] + one["dur"])
        for one in events
        if str(one.get("name", "")).startswith("step ") and one.get("cat") == "user_annotation"
    )
    period = steps[-1][0] - steps[0][0]
    gaps = sum(after[0] - before[1] for before, after in zip(steps, steps[1:], strict=False))
    inside = [one for one in events if one.get("cat") == "cpu_op"]
    launched = len(inside) / len(steps)
    found = {"between_steps": round(gaps / period, 3), "operations_per_step": round(launched)}
    if verdict.kind == "input":
        share = verdict.share or 0.0
        found["wrong"] = "" if abs(gaps / period - share) < 0.1 else f"trace: {gaps / period:.0%}"
    if verdict.kind == "small_kernels":
        found["wrong"] = "" if launched > 500 else f"trace: {launched:.0f} operations a step"
    return found


def name_of(trial: Trial) -> str:
    return str(trial["name"])


def more(done: dict[str, Any]) -> dict[str, Any]:
    """Return figures over all trials that are done."""
    errors = [abs(one["error"]) for one in done.values() if "error" in one]
    return {
        "seed": SEED,
        "repeats": REPEATS,
        "arguments": ARGUMENTS,
        "cores": os.cpu_count(),
        "largest_error": max(errors, default=None),
    }


if __name__ == "__main__":
    shared()  # imports once
    sys.exit(run_trials(__doc__, TARGET, costs(), name_of, one, more))
