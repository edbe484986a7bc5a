"""Step time of Shoal's layouts against hand-written loops, Accelerate, Fabric and DeepSpeed.

Two processes with one thread each hold every program at once. A pair is one step of Shoal and one
step of the other, one right after the other, in alternating order; before each step all ranks meet
at a barrier, and the slowest rank's wall-clock time counts. Beside the peers stands A/A: two
instances of the same Shoal program; where its own interval is wider than ±2 %, more pairs are
needed before any ratio means something. Before timing, every program's losses must agree.

    python benchmarks/ddp_speed.py --quick      a smoke test of a minute
    python benchmarks/ddp_speed.py              the claim: 100 pairs; use a machine that is idle
    python benchmarks/ddp_speed.py --family sharded     zero1, zero2, fsdp against their peers

Writes benchmarks/results/ddp-speed-DATE.json with every raw time, loss and the machine.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from processes import machine, run_together
from ratios import ratio

HERE = Path(__file__).resolve().parent
LIMIT, NOISE_LIMIT = 1.05, 0.02
PROCESSES, WARM_UP = 2, 3
MICRO_BATCH = {"small": 4, "large": 2}
SIZES: dict[str, dict[str, Any]] = {
    "small": {"vocabulary": 2048, "sequence": 256, "dim": 256, "layers": 4},
    "large": {"vocabulary": 8192, "sequence": 256, "dim": 512, "layers": 6},
}
for _size in SIZES.values():
    _size["heads"], _size["kv_heads"] = _size["dim"] // 64, _size["dim"] // 128
    _size["hidden"] = -(-8 * _size["dim"] // (3 * 64)) * 64
LIBRARIES = {
    "accelerate": "accelerate",
    "fabric": "lightning",
    "fabric_fsdp": "lightning",
    **{f"deepspeed_{stage}": "deepspeed" for stage in range(4)},
}
PEERS = {
    "ddp": "ddp,ddp_compiled,accelerate,fabric",
    "sharded": "fsdp2,fsdp2_compiled,fabric_fsdp,deepspeed_1,deepspeed_2,deepspeed_3",
}
STAGES = {"deepspeed_1": "shoal_zero1", "deepspeed_2": "shoal_zero2"}
"""Which of our layouts a peer is compared with; the others of the sharded family with fsdp."""


def main() -> None:
    options = _options()
    peers = [p for p in options.peers.split(",") if _installed(p)]
    cases = _cases(options)
    record: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", "benchmarks/ddp_speed.py", *sys.argv[1:]]),
        "machine": machine(),
        "processes": PROCESSES,
        "cases": [],
    }
    for case in cases:
        job = {
            "case": case,
            "pairs": options.pairs,
            "comparisons": _comparisons(case, peers, options.family),
        }
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "times.json"
            job["out"] = str(out)
            worker = str(HERE / "timed_steps.py")
            run_together([worker, json.dumps(job)], PROCESSES, deadline_s=options.deadline)
            measured = json.loads(out.read_text())
        record["cases"].append(report(measured))
    record["machine"]["load_average_after"] = machine()["load_average"]
    if options.quick and not options.out:
        return
    name = f"{options.family}-speed-{time.strftime('%Y%m%d-%H%M%S')}.json"
    path = Path(options.out) if options.out else HERE / "results" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record) + "\n")
    print(f"raw times, losses and machine: {path}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--pairs", type=int, default=100, help="timed pairs per comparison")
    parser.add_argument("--sizes", default="small,large")
    parser.add_argument("--precision", default="fp32,bf16")
    parser.add_argument("--family", default="ddp", choices=PEERS)
    parser.add_argument("--peers", default="", help="comma-separated; default: all of the family")
    parser.add_argument("--no-defaults", action="store_true", help="equal settings only")
    parser.add_argument("--no-accumulation", action="store_true", help="skip accumulate 2")
    parser.add_argument("--quick", action="store_true", help="small, 4 pairs: does it all work?")
    parser.add_argument("--deadline", type=float, default=3 * 3600, help="seconds per case")
    parser.add_argument("--out", help="where the JSON goes")
    options = parser.parse_args()
    if options.quick:
        options.pairs, options.sizes = 4, "small"
    options.peers = options.peers or PEERS[options.family]
    options.defaults = not options.no_defaults
    return options


def _installed(peer: str) -> bool:
    found = find_spec(LIBRARIES.get(peer.removesuffix("_compiled"), "torch")) is not None
    if not found:
        print(f"{peer}: not installed, skipped (pip install -r benchmarks/requirements.txt)")
    return found


def _cases(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every size in every precision; accumulation 2 once, on the first of them."""
    cases = [
        {
            "size": size,
            "arguments": SIZES[size],
            "precision": precision,
            "micro_batch": MICRO_BATCH[size],
            "accumulate": 1,
            # everyone's default is fp32
            "defaults": options.defaults and precision == "fp32" and size == "small",
        }
        for size in options.sizes.split(",")
        for precision in options.precision.split(",")
    ]
    if not options.no_accumulation:
        cases.insert(1, {**cases[0], "accumulate": 2, "defaults": False})
    return cases


def _comparisons(case: dict[str, Any], peers: list[str], family: str) -> list[tuple[str, str]]:
    if family == "sharded":
        rows = [(STAGES.get(peer, "shoal_fsdp"), peer) for peer in peers]
        if case.pop("defaults"):
            plain = [peer for peer in peers if not peer.endswith("_compiled")]
            rows += [(STAGES.get(peer, "shoal_fsdp"), f"{peer}_default") for peer in plain]
        return [("shoal_fsdp", "shoal_fsdp_twin"), *rows]
    # A peer's model is compiled whole, ours by blocks: like is compared with like.
    ours = {peer: "shoal_blocks" if peer.endswith("_compiled") else "shoal" for peer in peers}
    pairs = [("shoal", "shoal_twin"), *((ours[peer], peer) for peer in peers)]
    if "ddp" in peers:
        pairs.append(("shoal_plain", "ddp"))
    if case.pop("defaults"):
        plain = [peer for peer in peers if not peer.endswith("_compiled")]
        pairs += [("shoal", f"{peer}_default") for peer in plain]
    return pairs


def report(measured: dict[str, Any], limit: float = LIMIT) -> dict[str, Any]:
    """Print one case's table; return the record with the ratios added."""
    case, rows = measured["case"], measured["comparisons"]
    print(
        f"\n{case['size']} · {measured['parameters'] / 1e6:.1f} M parameters · {case['precision']}"
        f" · micro-batch {case['micro_batch']} × {case['arguments']['sequence']} tokens"
        f" · accumulate {case['accumulate']} · {PROCESSES} processes"
    )
    print(
        f"{'ours / theirs':28}{'ours':>10}{'theirs':>10}{'ratio and 95 % interval':>26}{'CPU':>8}"
        f"{'losses':>18}"
    )
    for row in rows:
        wall = ratio(row["ours_s"], row["theirs_s"])
        cpu = ratio(row["ours_cpu_s"], row["theirs_cpu_s"])
        row["ratio"], row["cpu_ratio"] = asdict(wall), asdict(cpu)
        row["verdict"] = _verdict(row, wall, limit)
        ours, theirs = sorted(row["ours_s"]), sorted(row["theirs_s"])
        middle = len(ours) // 2
        losses = [measured["final_losses"][row[side]] for side in ("ours", "theirs")]
        print(
            f"{row['ours'] + ' / ' + row['theirs']:28}{ours[middle] * 1e3:8.1f}ms"
            f"{theirs[middle] * 1e3:8.1f}ms{wall.value:10.3f}  [{wall.low:.3f}, {wall.high:.3f}]"
            f"{cpu.value:8.3f}{losses[0]:9.4f} {losses[1]:8.4f}  {row['verdict']}"
        )
    print(f"losses agree before timing: largest difference {measured['loss_difference']:.1e}")
    return measured


def _verdict(row: dict[str, Any], wall: Any, limit: float) -> str:
    if row["theirs"].endswith("_twin"):
        enough = wall.half_width <= NOISE_LIMIT
        return "A/A" if enough else f"A/A ±{wall.half_width:.1%}: add pairs"
    if row["theirs"].endswith("_default"):
        return "(their default)"
    return f"{wall.verdict(limit)} (≤ {limit})" if len(row["ours_s"]) >= 100 else "too few pairs"


if __name__ == "__main__":
    main()
