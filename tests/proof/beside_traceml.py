"""The verdict beside TraceML's, on the same planted costs in two ranks of a plain loop.

    python tests/proof/beside_traceml.py [--only NAME,NAME] [--out proof/results/traceml.json]

Model, data and sleeps are those of `worlds/planted_costs.py`. TraceML watches a loop in plain
PyTorch with DistributedDataParallel and DistributedSampler, Shoal a loop with `shoal.parallelize`.
The cost is taken out of a third run, so that the step without it stands beside what each foretold.
TraceML is installed into an environment of its own under build/, with this environment's torch.
Rows that --out has of this source are kept, so a run may be stopped and started again.
Nothing here can fail but a run: the page lists what both print.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT / "benchmarks"), str(HERE.parent / "worlds"), str(HERE.parent)]

from processes import machine  # noqa: E402
from source import source_hash  # noqa: E402

from cli_run import outside  # noqa: E402
from shoal.report.verdict import find_verdict  # noqa: E402
from shoal.report.verdict.run_verdict import read_replay  # noqa: E402

VENV = ROOT / "build" / "traceml"
PACKAGE = "traceml-ai"
SEED, STEPS, LIMIT_S = 4444, 120, 400
EACH_S = {"data": 0.001, "forward": 0.04, "backward": 0.05, "optimizer": 0.002}
HEAD = """
import os, sys, torch
import planted_costs
from torch import nn
torch.set_num_threads(1)
STEPS = int(os.environ["STEPS"])
torch.manual_seed(0)
model = planted_costs.build()
"""
OURS = (
    HEAD
    + """
import shoal
run = shoal.parallelize(
    model, lambda p: torch.optim.AdamW(p, lr=1e-3),
    lambda y, t: (nn.functional.cross_entropy(y, t, reduction="sum"), len(t)),
    layout="ddp", batch=4, micro_batch=2, folder="runs/run", precision="fp32")
for batch in run.loader(planted_costs.Samples()):
    run.step(batch)
    if run.step_count == STEPS:
        break
run.close()
"""
)
THEIRS = (
    HEAD
    + """
import torch.distributed as dist
import traceml_ai as traceml
traceml.init(mode="auto", on_missing_aggregator="raise")
dist.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = planted_costs.Samples()
sampler = torch.utils.data.DistributedSampler(data, shuffle=False)
loader = torch.utils.data.DataLoader(data, batch_size=2, sampler=sampler)
for step, (x, t) in enumerate(loader):
    with traceml.trace_step(model):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), t)
        loss.backward()
        optimizer.step()
    if step + 1 == STEPS:
        break
dist.barrier()
dist.destroy_process_group()
"""
)


def planted(seed: int) -> dict[str, list[dict[str, Any]]]:
    """Return costs by name: what each step of which rank takes longer, drawn by a seed."""
    drawn = random.Random(seed)

    def cost(part: str, rank: int | None = None) -> list[dict[str, Any]]:
        size = round(drawn.uniform(0.04, 0.06), 4)
        return [{"part": part, "s": size, **({} if rank is None else {"rank": rank})}]

    return {
        "nothing": [],
        "data of one rank": cost("data", drawn.randrange(2)),
        "data of all ranks": cost("data"),
        "forward pass of one rank": cost("forward", drawn.randrange(2)),
        "backward pass of one rank": cost("backward", drawn.randrange(2)),
        "optimizer of one rank": cost("optimizer", drawn.randrange(2)),
    }


def install() -> Path:
    """Return the Python of an environment with TraceML, and with this one's torch."""
    python = VENV / "bin" / "python"
    if not python.exists():
        venv.create(VENV, with_pip=True)
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        site = VENV / "lib" / version / "site-packages"
        (site / "torch_of_the_project.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    words = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", PACKAGE]
    subprocess.run([python, *words], check=True)
    return python


def start(
    folder: Path,
    script: str,
    costs: list[dict[str, Any]],
    words: list[str],
    more: dict[str, str] | None = None,
) -> str:
    """Run a script in a folder with costs planted; return what it printed."""
    shutil.copy(HERE.parent / "worlds" / "planted_costs.py", folder)
    asked = {"each_s": EACH_S, "calls": {"data": 2}, "costs": costs}
    (folder / "planted.json").write_text(json.dumps(asked))
    (folder / "loop.py").write_text(script)
    environ = {**outside(), "STEPS": str(STEPS), "OMP_NUM_THREADS": "1"}
    environ |= {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": f"{ROOT / 'src'}:{folder}"}
    environ |= more or {}
    done = subprocess.run(
        words,
        cwd=folder,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
    )
    if done.returncode:
        raise SystemExit(
            f"{' '.join(words)}: exit status {done.returncode}:\n{done.stdout[-3000:]}"
        )
    return done.stdout


def ours(costs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return Shoal's verdict on a run with these costs, and its step."""
    with tempfile.TemporaryDirectory(prefix="beside-") as place:
        folder = Path(place)
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "loop.py"]
        start(folder, OURS, costs, [sys.executable, *torchrun])
        run = folder / "runs" / "run"
        verdict, found = find_verdict(run), read_replay(run)
        assert found is not None
        step_s = found[1].mean_s(found[1].step_s)
        told = {"kind": verdict.kind, "told": verdict.line(), "step_s": round(step_s, 5)}
        return told | {"without_s": verdict.without_s and round(verdict.without_s, 5)}


def theirs(python: Path, costs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return TraceML's verdict on a run with these costs.

    `traceml run` gives its aggregator 15 s to start, which a busy machine exceeds: it is started
    apart, and the ranks by torchrun.
    """
    with tempfile.TemporaryDirectory(prefix="beside-") as place, socket.socket() as free:
        folder = Path(place)
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        words = ["serve", "--aggregator-port", str(port), "--nproc-per-node=2", "--run-name=it"]
        with (folder / "serve.txt").open("wb") as output:
            serve = subprocess.Popen(
                [python.parent / "traceml", *words],
                cwd=folder,
                env={**outside(), "OMP_NUM_THREADS": "1"},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            try:
                wait_for_port(serve, port)
                torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
                own = {"TRACEML_AGGREGATOR_HOST": "127.0.0.1", "TRACEML_AGGREGATOR_PORT": str(port)}
                start(folder, THEIRS, costs, [str(python), *torchrun, "loop.py"], own)
                serve.send_signal(signal.SIGINT)
                serve.wait(LIMIT_S)
            finally:
                if serve.poll() is None:
                    serve.kill()
                serve.wait()
        found = folder / "logs" / "it" / "final_summary.txt"
        if not found.exists():
            raise SystemExit(f"no summary of TraceML:\n{(folder / 'serve.txt').read_text()}")
        text = found.read_text()
    return {"told": verdict_of(text), "text": text.splitlines()}


def wait_for_port(process: subprocess.Popen[bytes], port: int) -> None:
    """Wait until a process listens."""
    until_s = time.monotonic() + LIMIT_S
    while process.poll() is None and time.monotonic() < until_s:
        with socket.socket() as one:
            if one.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.2)
    raise SystemExit(f"traceml serve does not listen: exit status {process.poll()}")


def verdict_of(text: str) -> str:
    """Return the verdict's lines of TraceML's summary as one line."""
    lines = [line.strip("|+- \t") for line in text.splitlines()]
    place = next((at for at, line in enumerate(lines) if "Verdict" in line), None)
    if place is None:
        return " ".join(filter(None, lines))[:300]
    until = next((at for at in range(place, len(lines)) if not lines[at]), len(lines))
    return re.sub(r"\s+", " ", " ".join(lines[place:until]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path, default=ROOT / "proof/results/traceml.json")
    asked = parser.parse_args()
    python = install()
    shown = subprocess.run(
        [python, "-m", "pip", "show", PACKAGE], check=True, capture_output=True, text=True
    ).stdout
    version = next(line for line in shown.splitlines() if line.startswith("Version:")).split()[-1]
    costs = planted(SEED)
    names = [name for name in asked.only.split(",") if name] or list(costs)
    source = source_hash()
    kept = json.loads(asked.out.read_text()) if asked.out.exists() else {}
    rows: dict[str, Any] = kept.get("rows", {}) if kept.get("source") == source else {}
    for name in names:
        rows[name] = {"costs": costs[name], "shoal": ours(costs[name])}
        rows[name]["traceml"] = theirs(python, costs[name])
        both = {tool: rows[name][tool]["told"] for tool in ("shoal", "traceml")}
        print(json.dumps({name: both}, indent=1), flush=True)
        result = {"traceml": version, "seed": SEED, "steps": STEPS, "each_s": EACH_S, "rows": rows}
        result |= {"source": source, "machine": machine(), "cores": os.cpu_count()}
        asked.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
