"""Step time of tensor and pipeline parallelism against the same layout written by hand.

Two processes with one thread each hold every program at once, as in `ddp_speed.py`: pairs of steps
in alternating order between barriers, the slowest rank's time, ratio of medians with a bootstrap
interval. Beside the peers stand both A/A rows: ours against ours, theirs against theirs.

    python benchmarks/tensor_pipe.py --check    every program against one process, in float64
    python benchmarks/tensor_pipe.py --quick    a smoke test of the timing
    python benchmarks/tensor_pipe.py            the claim: 100 pairs; use a machine that is idle

`--check` compares losses, gradient norms and (of what is written by hand) every gradient with the
whole model in one process: a peer that computes something else is no peer. Timing writes
benchmarks/results/tensor-pipe-speed-DATE.json with every raw time, loss and the machine.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
import warnings
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ddp_speed import PROCESSES, SIZES, WARM_UP, report
from processes import machine, run_together

HERE = Path(__file__).resolve().parent
MICRO_BATCHES = {"tp": 1, "pp": 8}
MICRO_BATCH = {"tp": {"small": 4, "large": 2}, "pp": {"small": 1, "large": 1}}
"""How many in a step, and samples in each: for tp a step has as many tokens as a rank of ddp_speed,
for pp the micro-batches are as small as they get, so that what a schedule costs itself is seen."""

ROWS = {
    "tp": [
        ("shoal_tp", "shoal_tp_twin"),
        ("tp", "tp_twin"),
        ("shoal_tp", "tp"),
        ("shoal_tp", "tp_whole_head"),
        ("shoal_tp", "tp_sequence"),
        ("shoal_tp_off", "tp"),
    ],
    "pp": [
        ("shoal_1f1b", "shoal_1f1b_twin"),
        ("pp_1f1b", "pp_1f1b_twin"),
        ("shoal_1f1b", "pp_1f1b"),
        ("shoal_1f1b", "pp_1f1b_halves"),
        ("shoal_gpipe", "pp_gpipe"),
    ],
}
"""ours / theirs; the first of all is what the gate is about."""

SAME_IN_SMALL = ("pp_1f1b_halves",)
"""Peers that are another one's twin in the small size: halves of its blocks weigh the same."""

CHECK_CASES = {
    axis: {
        "size": "check",
        "arguments": {
            "vocabulary": 96,
            "sequence": 16,
            "dim": 32,
            "layers": 3,
            "heads": 4,
            "kv_heads": 2,
            "hidden": 64,
        },
        "precision": "fp64",
        "micro_batch": 2,
        "accumulate": MICRO_BATCHES[axis],
    }
    for axis in ROWS
}
CHECK_STEPS, EQUAL = 3, 1e-10
"""Largest difference from one process, relative to the whole gradient's norm, or to the loss."""


def main() -> None:
    options = _options()
    if options.rank_of:
        work(json.loads(options.rank_of))
        return
    if options.check:
        for axis in options.layouts:
            names = list(dict.fromkeys(n for pair in rows(axis, options) for n in pair))
            names = [name for name in names if not name.endswith("_twin")]
            _together({"case": CHECK_CASES[axis], "check": names}, options)
        return
    record: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", "benchmarks/tensor_pipe.py", *sys.argv[1:]]),
        "machine": machine(),
        "processes": PROCESSES,
        "cases": [],
    }
    for axis in options.layouts:
        for size in options.sizes.split(","):
            case = _case(axis, size)
            print(f"\n{axis} = {PROCESSES}", end="")
            job = {"case": case, "pairs": options.pairs, "comparisons": rows(axis, options, size)}
            measured = report(_together(job, options))
            _say_gate(measured)
            record["cases"].append({"layout": axis, **measured})
    record["machine"]["load_average_after"] = machine()["load_average"]
    if options.quick and not options.out:
        return
    name = f"tensor-pipe-speed-{time.strftime('%Y%m%d-%H%M%S')}.json"
    path = Path(options.out) if options.out else HERE / "results" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record) + "\n")
    print(f"raw times, losses and machine: {path}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--pairs", type=int, default=100, help="timed pairs per comparison")
    parser.add_argument("--layouts", default="tp,pp")
    parser.add_argument("--sizes", default="small,large")
    parser.add_argument("--peers-only", action="store_true", help="leave Shoal's programs out")
    parser.add_argument("--check", action="store_true", help="equal to one process? no timing")
    parser.add_argument("--quick", action="store_true", help="small, 4 pairs: does it all work?")
    parser.add_argument("--deadline", type=float, default=3 * 3600, help="seconds per case")
    parser.add_argument("--out", help="where the JSON goes")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.layouts = options.layouts.split(",")
    if unknown := [axis for axis in options.layouts if axis not in ROWS]:
        parser.error(f"--layouts {','.join(unknown)}: one of {', '.join(ROWS)} is wanted")
    if options.quick:
        options.pairs, options.sizes = 4, "small"
    return options


def rows(axis: str, options: argparse.Namespace, size: str = "") -> list[tuple[str, str]]:
    """The comparisons; of peers alone: each against the first of them."""
    chosen = [pair for pair in ROWS[axis] if size != "small" or pair[1] not in SAME_IN_SMALL]
    if not options.peers_only:
        return chosen
    first, twin = chosen[1]
    others = dict.fromkeys(theirs for _, theirs in chosen[2:] if theirs != first)
    return [(first, twin), *((first, theirs) for theirs in others)]


def _case(axis: str, size: str) -> dict[str, Any]:
    return {
        "size": size,
        "arguments": SIZES[size],
        "precision": "fp32",
        "micro_batch": MICRO_BATCH[axis][size],
        "accumulate": MICRO_BATCHES[axis],
    }


def _together(job: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Both ranks; gives what they measured."""
    with tempfile.TemporaryDirectory() as folder:
        job["out"] = str(Path(folder) / "times.json")
        command = [str(HERE / "tensor_pipe.py"), "--rank-of", json.dumps(job)]
        run_together(command, PROCESSES, deadline_s=options.deadline)
        measured: dict[str, Any] = json.loads(Path(job["out"]).read_text())
    return measured


def _say_gate(measured: dict[str, Any]) -> None:
    """The row that decides: against the fastest of what is written by hand."""
    if measured["cuts"]:
        cuts = (f"{name} {cut}" for name, cut in measured["cuts"].items() if "twin" not in name)
        print(f"blocks of the first stage: {', '.join(cuts)}")
    decided = measured["comparisons"][0]["ours"]
    against = [
        row
        for row in measured["comparisons"]
        if row["ours"] == decided and not row["theirs"].endswith("_twin")
    ]
    if decided.startswith("shoal"):
        fastest = min(against, key=lambda row: statistics.median(row["theirs_s"]))
        measured["gate"] = {"ours": fastest["ours"], "theirs": fastest["theirs"]}
        print(f"the fastest written by hand is {fastest['theirs']}: {fastest['verdict']}")


def work(job: dict[str, Any]) -> None:
    """One rank."""
    import torch
    from peers import Case

    from shoal.fabric import start_world
    from shoal.models.llama import Llama

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    world = start_world()
    case = Case(**job["case"])
    torch.manual_seed(0)
    source = Llama(**case.arguments)
    weights = {name: tensor.clone() for name, tensor in source.state_dict().items()}
    measured = _check(job, case, world, weights) if "check" in job else None
    if measured is None:
        measured = _measure(job, case, world, weights)
        measured["parameters"] = sum(p.numel() for p in source.parameters())
    if world.is_first:
        Path(job["out"]).write_text(json.dumps(measured))
    world.barrier()
    sys.stdout.flush()
    os._exit(0)  # exit handlers of several libraries would use a group that is gone


def _measure(job: dict[str, Any], case: Any, world: Any, weights: Any) -> dict[str, Any]:
    """Build every program, see that they agree, time them in pairs."""
    from divided_peers import make
    from timed_steps import AGREE, LAST, advance, batches, largest_difference, time_pairs

    names = list(dict.fromkeys(name for pair in job["comparisons"] for name in pair))
    programs = {name: make(name, case, world, weights) for name in names}
    data = batches(case, 0)  # nobody is data-parallel: all ranks see all samples
    for name in names:
        for _ in range(WARM_UP):
            advance(programs[name], data)
    early = {name: losses_of(program, world) for name, program in programs.items()}
    difference = largest_difference(early, AGREE[case.precision])
    comparisons = time_pairs(programs, job, data, world)
    ends = WARM_UP + job["pairs"]
    losses = {name: losses_of(program, world) for name, program in programs.items()}
    return {
        "case": job["case"],
        "loss_difference": difference,
        "cuts": {name: p.cut for name, p in programs.items() if hasattr(p, "cut")},
        "final_losses": {n: statistics.fmean(x[:ends][-LAST:]) for n, x in losses.items()},
        "losses": losses,
        "comparisons": comparisons,
    }


def losses_of(program: Any, world: Any) -> list[float]:
    """Every step's mean loss, as the last rank has it: of a pipeline's stages only that one can."""
    import torch

    mine = torch.tensor([float(x) for x in program.losses], dtype=torch.float64)
    told: list[float] = world.all_gather(mine)[-1].tolist()
    return told


def _check(job: dict[str, Any], case: Any, world: Any, weights: Any) -> dict[str, Any]:
    """Every program against one process; raises SystemExit with the first that differs."""
    from divided_peers import ByHand, make
    from timed_steps import batches

    weights = {name: tensor.double() for name, tensor in weights.items()}
    # norm weights of 1 would hide what forgets them
    for name in sorted(weights):
        if "norm" in name:
            weights[name] += 0.1 * weights[name].cumsum(0).sin()
    data = batches(case, 0)
    one = make("one", case, world, weights)
    one.gradients(*data[0])
    true = {name: grad.clone() for name, grad in one.whole_gradients().items()}
    scale = sum(float(grad.square().sum()) for grad in true.values()) ** 0.5
    one.clear()
    for step in range(CHECK_STEPS):
        one.step(*data[step])
    for name in job["check"]:
        program = make(name, case, world, weights)
        worst: dict[str, float] = {}
        if isinstance(program, ByHand):
            program.gradients(*data[0])
            found = program.whole_gradients()
            for key, grad in found.items():
                worst[f"gradient of {key}"] = float((grad - true[key]).norm()) / scale
            seen = {key for held in world.gather_json(list(found)) for key in held}
            if seen != set(true):
                raise SystemExit(f"{name}: no gradient of {sorted(set(true) - seen)}")
            program.clear()
        for step in range(CHECK_STEPS):
            program.step(*data[step])
        for step, loss in enumerate(losses_of(program, world)):
            worst[f"loss of step {step}"] = abs(loss / float(one.losses[step]) - 1)
            norm = float(program.norms[step])
            worst[f"norm of step {step}"] = abs(norm / float(one.norms[step]) - 1)
        value, key = max(world.gather_json(_largest(worst)))
        if value > EQUAL:
            raise SystemExit(f"{name} differs from one process by {value:.1e}: {key}")
        if world.is_first:
            print(f"{name:18} equals one process: at most {value:.1e} ({key})", flush=True)
    return {}


def _largest(errors: dict[str, float]) -> tuple[float, str]:
    """The worst of them; what is not a number is infinitely wrong."""
    return max((e if math.isfinite(e) else math.inf, key) for key, e in errors.items())


if __name__ == "__main__":
    main()
