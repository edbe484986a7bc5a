"""Slow ranks of the real command: is the right rank told with its part, and none that is not slow?

    python tests/proof/slow_ranks.py [--seconds 600] [--out proof/results/slow-ranks.json] [--only ddp]

Twenty trials for each part of a step and layout (`worlds/dawdling.py` does them), each in a run of
its own on this machine: one rank sleeps for 30 % of a step, from a step on. A trial counts as well
when the first that is told is that rank with that part, within 50 steps. Trials without a sleep, in
which ranks sleep or compute alike for the same time, must stay silent. It can be stopped and
started again (`kept_trials.py`).
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "benchmarks")]
sys.path[:0] = [
    str(HERE.parent / "worlds"),
    str(HERE.parent / "worlds" / "faults"),
    str(HERE.parent),
]

from kept_trials import run_trials  # noqa: E402

from cli_run import lines  # noqa: E402
from forks import shared  # noqa: E402
from test_slow_ranks import AFTER, ARGUMENTS, dawdle  # noqa: E402

TARGET = HERE.parents[1] / "proof" / "results" / "slow-ranks.json"
LAYOUTS = {
    # arguments, seconds of a step in which nobody is slow, as measured
    "ddp": (["layout.strategy=ddp"], 0.040),
    "fsdp": (["layout.strategy=fsdp"], 0.048),
    "tp": (["layout.tp=2"], 0.045),
    "pp": (["layout.pp=2"], 0.062),
}
DIVIDED = {"tp": {"passes": 2, "samples": 4}, "pp": {"passes": 2, "samples": 4, "heavy": 0}}
"""What dawdling.py is to know of layouts in which both ranks work on all samples of a step. Of the
pipeline's stages the first has twice as much to do in its passes."""
PARTS = ("data", "forward", "backward", "optimizer")
TRIALS, WITHIN, SHARE = 20, 50, 0.3
CLEAN_STEPS = 500


def trials() -> list[dict[str, Any]]:
    """Every trial, in an order in which the first ones already hold some of everything."""
    found = []
    for number in range(TRIALS):
        for layout in LAYOUTS:
            for part in PARTS:
                found.append({"layout": layout, "part": part, "number": number})
            if number < TRIALS // 2:
                busy = number % 2 == 0
                found.append({"layout": layout, "part": "", "busy": busy, "number": number})
    return found


def name_of(trial: dict[str, Any]) -> str:
    kind = trial["part"] or ("clean, busy" if trial["busy"] else "clean, asleep")
    return f"{trial['layout']}, {kind}, {trial['number']}"


def one(trial: dict[str, Any], multiply_s: float) -> dict[str, Any]:
    """Do a trial; what came out, `wrong` being empty where all is well."""
    number, slow = trial["number"], bool(trial["part"])
    arguments, step_s = LAYOUTS[trial["layout"]]
    after = AFTER + number
    asked = {
        **{"part": trial["part"], "rank": number % 2, "after": after},
        **{"extra_s": SHARE * step_s if slow else 0.0},
        **{"busy": trial.get("busy", False), "multiply_s": multiply_s},
        **DIVIDED.get(trial["layout"], {}),
    }
    steps = after + WITHIN + 10 if slow else CLEAN_STEPS
    with tempfile.TemporaryDirectory(prefix="slow-") as folder:
        try:
            command, _ = dawdle(Path(folder), asked, *arguments, f"train.steps={steps}")
        except AssertionError as failure:
            return {"wrong": f"no end: {str(failure)[-400:]}"}
        told = command.events("slow_rank")
        done = lines(command.run / "metrics.jsonl")
    kept = ("rank", "phase", "step", "extra_s", "share")
    found = {
        "steps": len(done),
        "sleep_s": asked["extra_s"],
        "step_s": round(sorted(row["step_s"] for row in done)[len(done) // 2], 4),
        "told": [{key: event[key] for key in kept} for event in told],
    }
    return {**found, "after": after, "wrong": verdict(asked, told)}


def verdict(asked: dict[str, Any], told: list[dict[str, Any]]) -> str:
    """What is wrong with a trial; "" for nothing."""
    wanted = [(asked["rank"], asked["part"])] if asked["part"] else []
    found = [(event["rank"], event["phase"]) for event in told]
    if found != wanted:
        return f"told {found}, not {wanted}"
    if told and not asked["after"] < told[0]["step"] <= asked["after"] + WITHIN:
        return f"told at step {told[0]['step']}, slow after {asked['after']}"
    return ""


def multiplied_s() -> float:
    """Seconds of a product of matrices of dawdling.py, in one thread."""
    import torch

    torch.set_num_threads(1)
    matrix, best_s = torch.ones(64, 64), 1.0
    for _ in range(20):
        began_s = time.perf_counter()
        for _ in range(200):
            matrix @ matrix
        best_s = min(best_s, (time.perf_counter() - began_s) / 200)
    return best_s


def main() -> int:
    shared()  # imports once
    multiply_s = multiplied_s()

    def more(done: dict[str, Any]) -> dict[str, Any]:
        clean = sum(found.get("steps", 0) for name, found in done.items() if "clean" in name)
        return {"clean_steps": clean, "arguments": ARGUMENTS}

    return run_trials(
        __doc__, TARGET, trials(), name_of, lambda trial: one(trial, multiply_s), more
    )


if __name__ == "__main__":
    sys.exit(main())
