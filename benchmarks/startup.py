"""How long tensor parallelism takes to start: to trace, label and check the layers of a Llama.

Two processes with one thread each call `shoal.parallelize` and take one step, whose inputs have
other shapes than the sample. Functions are timed where they stand, the slowest rank counts, and
nothing of the model's own cost is in the sum: building 0.4 B weights, cutting and comparing them,
and the step itself are told beside it. Then the same in new processes with the same cache folder.

    python benchmarks/startup.py                          32 layers of hidden 1024
    python benchmarks/startup.py --layers 2 --dim 64      does it work?
    python benchmarks/startup.py --command                `shoal train` of 76 M parameters, ddp × 2:
                                                          CPU seconds from exec to step 0
    python benchmarks/startup.py --command --source DIR   the same of another checkout
    python benchmarks/startup.py --pairs DIR              this checkout and another one in turn: CPU
                                                          seconds from exec to the first committed
                                                          step, caches empty, torch's import apart

Gates: ≤ 10 s with an empty cache, ≤ 4 s with what the first start left there; of the command ≤ 0.4
of the CPU seconds of 2fb53a4 (22 November 2026), in both starts; of pairs with 3d0447f ≤ 0.7 for
tp 2 × pp 2 and ≤ 0.95 for the demo.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from command_start import STARTS, first_step_s, import_torch_s, start_of_command
from processes import machine, run_together
from ratios import ratio

HERE = Path(__file__).resolve().parent
LIMITS_S = {"cold": 10.0, "from cache": 4.0}
PROCESSES, MICRO_BATCH, SEQUENCE, VOCABULARY = 2, 4, 64, 8192
COUNTED = (
    ("record the model", "shoal.trace.flow.forward_record", "as_cheaply"),
    ("find the tables", "shoal.trace.find.vocabulary_tables", "find_tables"),
    ("plan the model", "shoal.parallel.spmd.model_split", "plan_split"),
    ("split a layer", "shoal.parallel.spmd.split_block", "split_block"),
    ("  for other inputs", "shoal.parallel.spmd.split_block", "again"),
    ("  trace", "shoal.trace.graph.layer_graph", "trace"),
    ("check the layers", "shoal.parallel.spmd.block_check", "checked"),
)
"""What, module, function: these make the sum, each second once, though one calls another."""

NEEDED = {"cold": ("plan the model", "check the layers"), "from cache": ("for other inputs",)}
"""Without these a start is not what the gates are about; the cache is there to do without most."""

BESIDE = (
    ("parallelize, all of it", "shoal.trainer.parallelize", "parallelize"),
    ("build the model", "shoal.trainer.parallelize", "build_module"),
    ("compare weights", "shoal.parallel.compare_weights", "apply"),
    ("cut and install", "shoal.parallel.tensor_parallel.cut_weights", "apply_split"),
)
"""The rest of a start, for orientation."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--dim", type=int, default=1024)
    parser.add_argument("--deadline", type=float, default=900, help="seconds per start")
    parser.add_argument("--json", action="store_true", help="one JSON line after the tables")
    parser.add_argument("--command", action="store_true", help="the whole command, 76 M parameters")
    parser.add_argument("--source", type=Path, default=HERE.parent, help="of --command: a checkout")
    parser.add_argument("--pairs", type=Path, help="the other checkout")
    parser.add_argument("--rounds", type=int, default=8, help="of --pairs")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        work(json.loads(options.rank_of))
        return
    if options.pairs:
        _pairs(options.pairs, options.rounds, options.deadline)
        return
    if options.command:
        _command(options.source, options.deadline)
        return
    job: dict[str, Any] = {"layers": options.layers, "dim": options.dim}
    record: dict[str, Any] = {"machine": machine(), "processes": PROCESSES, **job}
    with tempfile.TemporaryDirectory() as folder:
        cache, out = Path(folder) / "cache", Path(folder) / "times.json"
        os.environ["SHOAL_CACHE"] = str(cache)
        for start, limit_s in LIMITS_S.items():
            command = [__file__, "--rank-of", json.dumps({**job, "out": str(out)})]
            run_together(command, PROCESSES, deadline_s=options.deadline)
            record[start] = json.loads(out.read_text())
            _report(start, limit_s, record[start])
            kept = [p for p in cache.rglob("*") if p.is_file()]
            size_kib = sum(p.stat().st_size for p in kept) / 1024
            print(f"the cache folder now has {len(kept)} files, {size_kib:.0f} KiB\n")
    if options.json:
        print(json.dumps(record))


def _commit(source: Path) -> str:
    asked = ["git", "-C", str(source), "describe", "--always", "--dirty"]
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()


def _command(source: Path, deadline_s: float) -> None:
    """Two starts of the command, the second with the cache that the first one left."""
    record: dict[str, Any] = {"machine": machine(), "commit": _commit(source)}
    with tempfile.TemporaryDirectory() as cache:
        for start in ("first", "second"):
            record[start] = row = start_of_command(source, Path(cache), deadline_s)
            print(f"{start} start: {row['cpu_s']:.1f} CPU-s to step 0, {row['wall_s']:.1f} s")
            for name, cpu_s in row["cpu_s_by_phase"].items():
                print(f"  {name:40}{cpu_s:8.2f}")
    print(json.dumps(record))


def _pairs(other: Path, rounds: int, deadline_s: float) -> None:
    """Ratios of this checkout's CPU seconds to another one's, and to its own for comparison."""
    record: dict[str, Any] = {
        "machine": machine(),
        "commits": [_commit(HERE.parent), _commit(other)],
    }
    for name, words in STARTS.items():
        taken: dict[str, list[float]] = {"ours": [], "theirs": [], "ours again": [], "torch": []}
        for source in (HERE.parent, other):  # leaves byte code, as an installation does
            first_step_s(source, words, deadline_s)
        for turn in range(rounds):
            order = list(taken) if turn % 2 else list(taken)[::-1]
            for one in order:
                source = other if one == "theirs" else HERE.parent
                cpu_s = (
                    import_torch_s() if one == "torch" else first_step_s(source, words, deadline_s)
                )
                taken[one].append(cpu_s)
        apart_s = statistics.median(taken["torch"])
        ours, theirs, again = ([s - apart_s for s in taken[k]] for k in list(taken)[:3])
        told = {"ours / theirs": ratio(ours, theirs), "A/A": ratio(ours, again)}
        record[name] = {**taken, **{what: vars(one) for what, one in told.items()}}
        print(
            f"{name}: {statistics.median(ours):.2f} of {statistics.median(theirs):.2f} CPU-s",
            end="",
        )
        print("".join(f"; {k} {r.value:.3f} [{r.low:.3f}, {r.high:.3f}]" for k, r in told.items()))
    print(json.dumps(record))


def _report(start: str, limit_s: float, measured: dict[str, Any]) -> None:
    print(f"{start}: {measured['parameters'] / 1e6:.0f} M parameters, tp = {PROCESSES}")
    for what, (seconds, calls) in measured["phases"].items():
        told = f"{seconds:9.2f} s in {calls:3} calls" if calls else "not called".rjust(11)
        print(f"  {what:26}{told}")
    verdict = "pass" if measured["sum_s"] <= limit_s else "FAIL"
    called = {what.strip(): calls for what, (_, calls) in measured["phases"].items()}
    left_out = [what for what in NEEDED[start] if not called[what]]
    if left_out:
        verdict = f"open: it did not {' or '.join(left_out)}"
    print(f"  {'trace + solve + check':26}{measured['sum_s']:9.2f} s   {verdict} (≤ {limit_s:g} s)")
    print(f"  {'import torch.export, …':26}{measured['imports_s']:9.2f} s   not in the sum")
    print(f"  {'first step':26}{measured['first_step_s']:9.2f} s   second {measured['step_s']:.2f}")


@dataclass
class Watch:
    """Seconds and calls of functions, and the seconds in which any counted one ran."""

    phases: dict[str, tuple[float, int]] = field(default_factory=dict)
    sum_s: float = 0.0
    depth: int = 0

    def install(self, what: str, where: str, name: str, *, counted: bool) -> None:
        """Time a function wherever shoal's modules refer to it; a missing one is told."""
        self.phases[what] = (0.0, 0)
        try:
            function = getattr(importlib.import_module(where), name)
        except (ImportError, AttributeError) as missing:
            print(f"{what.strip()}: not timed, {missing}", file=sys.stderr)
            return
        timed = self._timed(what, function, counted)
        for module in [m for n, m in sys.modules.items() if n.split(".")[0] == "shoal"]:
            for key, value in list(vars(module).items()):
                if value is function and isinstance(module, ModuleType):
                    setattr(module, key, timed)

    def _timed(self, what: str, function: Any, counted: bool) -> Any:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            began_s = time.perf_counter()
            self.depth += counted
            try:
                return function(*args, **kwargs)
            finally:
                took_s = time.perf_counter() - began_s
                self.depth -= counted
                if counted and self.depth == 0:
                    self.sum_s += took_s
                seconds, calls = self.phases[what]
                self.phases[what] = (seconds + took_s, calls + 1)

        return timed


def work(job: dict[str, Any]) -> None:
    """One rank."""
    import torch

    from shoal.fabric import start_world
    from shoal.models.llama import Llama

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    world = start_world()
    began_s = time.perf_counter()
    for name in ("pipeline", "tensor_parallel"):
        importlib.import_module(f"shoal.parallel.{name}")
    watch = Watch()
    for row in COUNTED:
        watch.install(*row, counted=True)
    imports_s = time.perf_counter() - began_s
    for row in BESIDE:
        watch.install(*row, counted=False)
    from shoal.trainer.parallelize import parallelize  # the timed one

    heads, hidden = max(1, job["dim"] // 64), job["dim"] * 11 // 4  # 1024: 16 heads, 2816
    tokens = torch.arange(MICRO_BATCH * SEQUENCE).view(MICRO_BATCH, SEQUENCE) % VOCABULARY
    world.barrier()
    run = parallelize(
        lambda: Llama(
            vocabulary=VOCABULARY,
            sequence=SEQUENCE,
            dim=job["dim"],
            layers=job["layers"],
            heads=max(2, heads),
            kv_heads=max(2, heads),
            hidden=hidden,
        ),
        lambda p: torch.optim.SGD(p, lr=1e-3),
        layout={"tp": PROCESSES},
        batch=MICRO_BATCH,
        micro_batch=MICRO_BATCH,
        precision="fp32",
        sample=(tokens, tokens),
        world=world,
    )
    steps_s = [_step_s(run, tokens) for _ in range(2)]
    mine = {
        "parameters": run.plan.parameters,
        "phases": watch.phases,
        "sum_s": watch.sum_s,
        "imports_s": imports_s,
        "first_step_s": steps_s[0],
        "step_s": steps_s[1],
    }
    everyone = world.gather_json(mine)
    if world.is_first:
        slowest = max(everyone, key=lambda row: row["sum_s"])
        Path(job["out"]).write_text(json.dumps(slowest))
    run.close()


def _step_s(run: Any, tokens: Any) -> float:
    began_s = time.perf_counter()
    run.step((tokens, tokens))
    return time.perf_counter() - began_s


if __name__ == "__main__":
    main()
