"""The speed mode beside compiled PyTorch by hand and beside Accelerate's compiled step, on CPUs.

    python benchmarks/speed_mode.py --quick      a smoke test: small, 4 pairs, nothing written
    python benchmarks/speed_mode.py              the claim: 100 pairs; use a machine that is idle
    python benchmarks/speed_mode.py --budget 60  60 s of timed steps a case, 20 pairs at least

The mode is `train.compile=blocks` with fused AdamW and the loss in chunks; in bf16 also
`precision.residual=bf16`, where this source has it. Two processes with one thread each hold all
programs and step in turn, as in `ddp_speed.py`, whose tables these are.

    ours               theirs
    fsdp               FSDP2, every block compiled · FSDP2, the whole model compiled
    ddp                DDP, the whole model compiled
    ddp, hf: Llama     Accelerate's own torch.compile plugin (needs accelerate)

Limits: 1.00 in fp32, 0.93 in bf16, 1.00 with transformers' Llama. bf16 is left out where the
processor has no instructions for it. Writes benchmarks/results/speed-mode-DATE.json, after every
case. The compiler keeps its kernels in TORCHINDUCTOR_CACHE_DIR: a second run starts sooner.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ddp_speed import MICRO_BATCH, PROCESSES, SIZES, report
from processes import SOURCE, machine, run_together

HERE = Path(__file__).resolve().parent
LIMITS = {"fp32": 1.0, "bf16": 0.93}
HF_LIMIT = 1.0


def main() -> None:
    options = _options()
    name = f"speed-mode-{time.strftime('%Y%m%d-%H%M%S')}.json"
    path = Path(options.out) if options.out else HERE / "results" / name
    record: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", "benchmarks/speed_mode.py", *sys.argv[1:]]),
        "machine": machine(),
        "processes": PROCESSES,
        "cases": [],
    }
    for size in options.sizes.split(","):
        for precision in formats(options.precision):
            for family in options.families.split(","):
                comparisons = chosen(FAMILIES[family](precision), options.rows)
                if not comparisons:
                    continue
                measured = measure(size, precision, comparisons, options)
                limit = HF_LIMIT if family == "hf" else LIMITS[precision]
                record["cases"].append(report(measured, limit))
                record["machine"]["load_average_after"] = machine()["load_average"]
                if options.out or not options.quick:
                    path.write_text(json.dumps(record) + "\n")
    if path.exists():
        print(f"raw times, losses and machine: {path}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--pairs", type=int, default=100, help="timed pairs per comparison")
    parser.add_argument("--sizes", default="small,large", help="3.5M, 21.9M parameters")
    parser.add_argument("--precision", default="fp32,bf16")
    parser.add_argument("--families", default="own,hf", help="own: our Llama; hf: transformers'")
    parser.add_argument("--quick", action="store_true", help="small, 4 pairs: does it all work?")
    parser.add_argument("--deadline", type=float, default=3 * 3600, help="seconds per case")
    parser.add_argument("--budget", type=float, default=1e9, help="seconds of timed steps per case")
    parser.add_argument("--rows", default="", help="of these peers, such as fsdp2_blocks")
    parser.add_argument("--out", help="where the JSON goes")
    options = parser.parse_args()
    if options.quick:
        options.pairs, options.sizes = 4, "small"
    return options


def formats(asked: str) -> list[str]:
    """The formats that this processor multiplies in."""
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    narrow = "avx512_bf16" in flags or "amx_bf16" in flags
    if "bf16" in asked and not narrow:
        print("bf16: left out, this processor has no instructions for it")
    return [one for one in asked.split(",") if narrow or one != "bf16"]


def residual(precision: str) -> str:
    """What a name of ours ends with if residuals are narrow."""
    sys.path.insert(0, str(SOURCE))
    from shoal.base.layouts.policies import POLICIES

    if precision == "bf16" and "residual" not in POLICIES:
        print("precision.residual: this source has no such key, residuals are fp32")
    return "_residual" if precision == "bf16" and "residual" in POLICIES else ""


def own_rows(precision: str) -> list[tuple[str, str]]:
    """Our Llama beside the same model by hand."""
    narrow = residual(precision)
    fsdp, ddp = f"shoal_fsdp_blocks{narrow}", f"shoal_blocks{narrow}"
    return [
        (fsdp, f"{fsdp}_twin"),
        (fsdp, "fsdp2_blocks"),
        (fsdp, "fsdp2_compiled"),
        (ddp, f"{ddp}_twin"),
        (ddp, "ddp_compiled"),
    ]


def hf_rows(precision: str) -> list[tuple[str, str]]:
    """Transformers' Llama in both."""
    if find_spec("accelerate") is None:
        print("hf: accelerate is not installed (pip install -r benchmarks/requirements.txt)")
        return []
    ours = f"shoal_hf_blocks{residual(precision)}"
    return [(ours, f"{ours}_twin"), (ours, "accelerate_hf_compiled")]


def chosen(rows: list[tuple[str, str]], words: str) -> list[tuple[str, str]]:
    """The rows whose peers are named, and their A/A; all of them if none is.

    >>> chosen([("a", "a_twin"), ("a", "x"), ("b", "b_twin"), ("b", "y")], "y")
    [('b', 'b_twin'), ('b', 'y')]
    """
    wanted = [row for row in rows if not words or row[1] in words.split(",")]
    ours = {one for one, _ in wanted}
    return [row for row in rows if row in wanted or (row[1] == f"{row[0]}_twin" and row[0] in ours)]


FAMILIES = {"own": own_rows, "hf": hf_rows}


def measure(
    size: str, precision: str, comparisons: list[tuple[str, str]], options: argparse.Namespace
) -> dict[str, Any]:
    """Times and losses of one case, from a world of its own."""
    case = {
        "size": size,
        "arguments": SIZES[size],
        "precision": precision,
        "micro_batch": MICRO_BATCH[size],
        "accumulate": 1,
    }
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "times.json"
        job = {"case": case, "pairs": options.pairs, "comparisons": comparisons, "out": str(out)}
        job["budget_s"] = options.budget
        worker = str(HERE / "timed_steps.py")
        run_together([worker, json.dumps(job)], PROCESSES, deadline_s=options.deadline)
        found: dict[str, Any] = json.loads(out.read_text())
    return found


if __name__ == "__main__":
    main()
