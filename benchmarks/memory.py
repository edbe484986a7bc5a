"""Peak memory of Shoal's `ddp` against a hand-written DDP loop, and of the loss head alone.

Training: 2 fresh processes per program. Baseline = resident memory once torch and shoal are
imported and the processes have met; then the kernel's peak mark is reset, the program is built and
takes a few steps; its memory is the peak minus the baseline, the larger of both ranks. `shoal`
trains Shoal's Llama, `shoal_plain` the peers' plain model: what the engine alone takes.
Head: bytes that torch's own allocator reports, live at most during forward and backward, beyond the
two gradients that must be returned; in units of one chunk of fp32 logits.

    python benchmarks/memory.py [--programs shoal,shoal_plain,ddp] [--json]

Linux only (/proc). The training gate is ≤ 1.03 × the hand-written loop, the head's ≤ 1 chunk.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from processes import machine, run_together

HERE = Path(__file__).resolve().parent
LIMIT, HEAD_LIMIT = 1.03, 1.01
PROCESSES, STEPS, DEADLINE_S = 2, 2, 300
STACKS_AFTER_S = 40
PROGRAMS = "shoal,shoal_plain,ddp"
CASE: dict[str, Any] = {
    "size": "memory",
    "arguments": {
        "vocabulary": 8192,
        "sequence": 128,
        "dim": 512,
        "layers": 8,
        "heads": 8,
        "kv_heads": 4,
        "hidden": 1408,
    },
    "precision": "fp32",
    "micro_batch": 2,
    "accumulate": 1,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--programs", default=PROGRAMS)
    parser.add_argument("--json", action="store_true", help="one JSON line instead of a table")
    parser.add_argument("--out", help="also write the JSON with the machine's description there")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        train(options.rank_of, Path(options.result))
        return
    measured: dict[str, Any] = {
        name: in_fresh_processes(name) for name in options.programs.split(",")
    }
    measured["head"] = {precision: head(precision) for precision in ("fp32", "bf16")}
    if options.json:
        print(json.dumps(measured))
    else:
        report(measured)
    if options.out:
        record = {"date": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "machine": machine(), **measured}
        Path(options.out).write_text(json.dumps(record, indent=1) + "\n")


def in_fresh_processes(name: str) -> dict[str, int]:
    """Baseline and peak of the rank that took more, in bytes."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "memory.json"
        command = [str(HERE / "memory.py"), "--rank-of", name, "--result", str(out)]
        run_together(command, PROCESSES, deadline_s=DEADLINE_S)
        answer: dict[str, int] = json.loads(out.read_text())
        return answer


def train(name: str, out: Path) -> None:
    """One rank: build the program, take a few steps, tell how far memory rose."""
    import torch
    from peers import Case, make

    from shoal.fabric import start_world

    # A rank that hangs says where: see docs/lab-log.md, "a world that did not end".
    faulthandler.dump_traceback_later(STACKS_AFTER_S, exit=True)
    importlib.import_module("torch._dynamo")  # optimizers do when first made; it is no one's memory
    torch.set_num_threads(1)
    world = start_world()
    world.barrier()
    baseline = reset_peak()
    torch.manual_seed(0)
    case = Case(**CASE)
    program = make(name, case, world)
    rows = case.micro_batch * case.accumulate
    shape = (rows, case.arguments["sequence"])
    torch.manual_seed(100 + world.rank)  # each rank its own samples
    for _ in range(STEPS):
        tokens = torch.randint(case.arguments["vocabulary"], shape)
        program.step(tokens, tokens)
    peak = status_bytes("VmHWM")
    everyone = world.gather_json({"baseline_bytes": baseline, "peak_bytes": peak - baseline})
    if world.is_first:
        out.write_text(json.dumps(max(everyone, key=lambda row: row["peak_bytes"])))
    world.barrier()
    world.close()


def reset_peak() -> int:
    """Resident bytes now; the kernel's peak mark starts again from here.

    Without the right to reset it, a mark above the present size would count as the program's.
    """
    Path("/proc/self/clear_refs").write_text("5")
    return status_bytes("VmRSS")


def status_bytes(key: str) -> int:
    """A line of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status: no {key}")


def head(
    precision: str, rows: int = 2048, dim: int = 256, vocabulary: int = 8192
) -> dict[str, float]:
    """What the loss head holds at most beyond the gradients it must return, in bytes and chunks."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    import shoal
    from shoal.models.loss import default_chunk_rows

    hidden = torch.randn(rows, dim, requires_grad=True)
    weight = torch.randn(vocabulary, dim, requires_grad=True)
    targets = torch.randint(vocabulary, (rows,))
    with (
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded,
        torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"),
    ):
        total, _ = shoal.linear_cross_entropy(hidden, weight, targets)
        total.backward()
    moves = [
        (event.start_ns(), event.nbytes())
        for event in recorded.profiler.kineto_results.events()
        if event.name() == "[memory]"
    ]
    live = peak = 0
    for _, moved_bytes in sorted(moves, key=lambda move: move[0]):
        live += moved_bytes
        peak = max(peak, live)
    gradients = 4 * (hidden.numel() + weight.numel())
    if live < gradients:
        raise RuntimeError("the allocator's record is incomplete: the gradients are not in it")
    chunk = 4 * vocabulary * default_chunk_rows(vocabulary, "cpu", narrow=precision == "bf16")
    extra = peak - gradients
    return {"extra_bytes": extra, "chunk_bytes": chunk, "chunks": extra / chunk}


def report(measured: dict[str, Any]) -> None:
    """The table."""
    base = measured.get("ddp")
    print(f"{'program':14}{'baseline':>12}{'above it':>12}{'ratio to ddp':>14}")
    for name, row in measured.items():
        if name == "head":
            continue
        ratio = row["peak_bytes"] / base["peak_bytes"] if base else float("nan")
        gate = (
            ""
            if name == "ddp" or not base
            else f"   {'pass' if ratio <= LIMIT else 'fail'} (≤ {LIMIT})"
        )
        print(
            f"{name:14}{row['baseline_bytes'] / 2**20:8.1f} MiB{row['peak_bytes'] / 2**20:8.1f} MiB"
            f"{ratio:14.3f}{gate}"
        )
    for precision, row in measured["head"].items():
        print(f"loss head, {precision}: {row['chunks']:.3f} chunks of fp32 logits")


if __name__ == "__main__":
    if sys.platform != "linux":
        sys.exit("memory.py reads /proc, which only Linux has")
    main()
