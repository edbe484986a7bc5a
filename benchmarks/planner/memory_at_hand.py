"""Foreseen beside measured memory of larger models on two processes of this machine's cores.

Every layout trains in fresh processes: a step, then steps that are looked at. Two figures of the
fullest rank: what torch's allocator holds at most over all threads (weights, gradients, optimizer,
and what a step needs beside them), and what the process has resident at most, less what it had
before its model was there. Foreseen are `allocated_bytes` and the same with the allocator's own
part, from facts that are traced as a run's prediction traces them.

    python benchmarks/planner/memory_at_hand.py [--models llama,gpt2] [--layouts ddp,tp]

Writes benchmarks/planner/results/memory-at-hand.json. Gate: allocated within 10 % in every row.
Linux only (/proc); about 1.5 GiB per process.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from processes import machine, run_together  # noqa: E402

import shoal  # noqa: E402
from shoal.base.estimates.cluster import Cluster, Device, Link  # noqa: E402
from shoal.base.estimates.estimate import MemoryEstimate, ModelFacts, PlanningCase  # noqa: E402
from shoal.base.layouts.layout import Layout  # noqa: E402
from shoal.base.plans.plan import Plan  # noqa: E402
from shoal.fabric import start_world  # noqa: E402
from shoal.forecast.fit.peak_memory import predict_memory  # noqa: E402
from shoal.machine.process_memory import peak_memory_bytes, reset_peak_memory  # noqa: E402
from shoal.machine.states import count_state_bytes, measure_peak_bytes  # noqa: E402
from shoal.models.catalog import build  # noqa: E402
from shoal.models.loss import token_loss  # noqa: E402
from shoal.trace.costs.traced_facts import trace_facts  # noqa: E402

GATE, PROCESSES, DEADLINE_S = 0.10, 2, 600
LAYOUTS = "ddp,zero1,zero2,fsdp,tp,pp"
ROUNDS, ROWS, SEQUENCE, VOCABULARY = 2, 2, 128, 8192
LINK = Link("wire", 1e-6, 1e9)


class Mixer(nn.Module):
    """Layers over channels and over patches in turn (Tolstikhin et al. 2021), and a head."""

    def __init__(self, width: int = 768, patches: int = 64, depth: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(192, width)
        self.blocks = nn.ModuleList(MixerBlock(width, patches) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 100)

    def forward(self, x: Tensor) -> Tensor:  # [batch, patches, 192]
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


class MixerBlock(nn.Module):
    """One layer over patches, one over channels."""

    def __init__(self, width: int, patches: int) -> None:
        super().__init__()
        self.one, self.two = nn.LayerNorm(width), nn.LayerNorm(width)
        self.over = nn.Sequential(nn.Linear(patches, 256), nn.GELU(), nn.Linear(256, patches))
        self.wide = nn.Sequential(nn.Linear(width, 3072), nn.GELU(), nn.Linear(3072, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.over(self.one(x).transpose(1, 2)).transpose(1, 2)
        return x + self.wide(self.two(x))


def gpt2() -> nn.Module:
    """transformers' own GPT-2, narrower than the published one."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 640, "n_layer": 10, "n_head": 10, "n_positions": SEQUENCE}
    drop = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return Logits(GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **sizes, **drop)))


class Logits(nn.Module):
    """What a transformers model gives, as a tensor."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, tokens: Tensor) -> Tensor:
        return self.inner(input_ids=tokens, use_cache=False).logits


def encoder() -> nn.Module:
    """torch's own encoder over patches."""
    layer = nn.TransformerEncoderLayer(640, 10, 2560, dropout=0.0, batch_first=True)
    inner = nn.TransformerEncoder(layer, 10, enable_nested_tensor=False)
    return nn.Sequential(nn.Linear(192, 640), inner, Mean(), nn.Linear(640, 100))


class Mean(nn.Module):
    """Over positions."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


def llama() -> nn.Module:
    """Shoal's own, of 78M parameters."""
    given = {"dim": 768, "layers": 10, "heads": 12, "kv_heads": 12}
    return build("llama", given, vocabulary=VOCABULARY, sequence=SEQUENCE)


def wide() -> nn.Module:
    """Few large layers in a row."""
    middle = [part for _ in range(6) for part in (nn.Linear(3072, 3072), nn.ReLU())]
    return nn.Sequential(nn.Linear(192, 3072), *middle, nn.Linear(3072, 100))


def tokens(count: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a language model."""
    drawn = torch.randint(0, VOCABULARY, (count, SEQUENCE))
    return drawn, drawn


def patches(count: int, *shape: int) -> tuple[Tensor, Tensor]:
    """Patches and classes, each as a number per class."""
    return torch.randn(count, *shape, 192), torch.randn(count, 100)


def squares(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss per element."""
    return (outputs - targets) ** 2


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any], Any]] = {
    "llama": (llama, tokens, token_loss),
    "gpt2": (gpt2, tokens, token_loss),
    "encoder": (encoder, lambda count: patches(count, 64), squares),
    "mixer": (Mixer, lambda count: patches(count, 64), squares),
    "wide": (wide, patches, squares),
}


def measure(name: str, layout: str, out: Path) -> None:
    """One row, in every process; rank 0 writes it."""
    torch.set_num_threads(1)
    make, data, loss = MODELS[name]
    world = start_world()
    torch.manual_seed(0)
    inputs, targets = data(2)
    facts = trace_facts(make, (inputs,), kernels="cpu", loss=loss, targets=targets)
    gc.collect()
    before = peak_before()
    degrees: Any = {"tp": 2} if layout == "tp" else {"pp": 2} if layout == "pp" else layout
    data_degree = 1 if layout in ("tp", "pp") else world.size
    run = shoal.parallelize(
        make,
        lambda p: torch.optim.AdamW(p, lr=1e-4),
        loss,
        layout=degrees,
        batch=ROUNDS * ROWS * data_degree,
        micro_batch=ROWS,
        sample=data(ROWS),
        world=world,
    )
    torch.manual_seed(run.program.data.rank)  # each data rank its own samples
    batch = data(ROUNDS * ROWS)
    run.step(batch)
    reset_peak_memory(world.device)
    run.step(batch)
    resident = peak_memory_bytes(world.device) - before
    run.forward_backward(batch)
    states = count_state_bytes(run)
    run.update()
    extra = measure_peak_bytes(lambda: run.step(batch), world.device, times=5)
    rows = world.gather_json(
        {
            "states": {
                "weights": states.weights,
                "gradients": states.gradients,
                "optimizer": states.optimizer,
            },
            "extra": extra,
            "resident": resident,
        }
    )
    if not world.is_first:
        return
    foreseen = foresee(facts, name, run.plan)
    held = max(sum(row["states"].values()) + row["extra"] for row in rows)
    answer = {
        "model": name,
        "layout": layout,
        "parameters": run.plan.parameters,
        "allocated": held,
        "foreseen": foreseen.allocated_bytes,
        "off": foreseen.allocated_bytes / held - 1,
        "resident": max(row["resident"] for row in rows),
        "when": foreseen.when,
        "parts": foreseen.parts,
        "ranks": rows,
    }
    out.write_text(json.dumps(answer))


def foresee(facts: ModelFacts, name: str, plan: Plan) -> MemoryEstimate:
    """Of the fullest stage."""
    device = Device("cpu", 1e12, {}, 1e10, kind="cpu")
    cluster = Cluster(device, 1, plan.layout.processes, LINK, LINK)
    case = PlanningCase(facts, cluster, plan, loss="chunked" if name == "llama" else "full")
    told = [predict_memory(case, stage) for stage in range(plan.layout.pp)]
    return max(told, key=lambda one: one.allocated_bytes)


PLANS = {
    "ddp": Layout(dp_replicate=2),
    "zero1": Layout(dp_shard=2, zero=1),
    "zero2": Layout(dp_shard=2, zero=2),
    "fsdp": Layout(dp_shard=2, zero=3),
    "tp": Layout(tp=2),
    "pp": Layout(pp=2, schedule="1f1b"),
}


def foresee_again(path: Path) -> None:
    """Put today's prediction beside measurements that are stored."""
    document = json.loads(path.read_text())
    for name in {row["model"] for row in document["rows"]}:
        make, data, loss = MODELS[name]
        inputs, targets = data(2)
        facts = trace_facts(make, (inputs,), kernels="cpu", loss=loss, targets=targets)
        for row in (row for row in document["rows"] if row["model"] == name):
            layout = PLANS[row["layout"]]
            plan = Plan(layout, ROUNDS * ROWS * layout.data_degree, ROWS, ROUNDS, compute="fp32")
            found = foresee(facts, name, plan)
            row |= {"foreseen": found.allocated_bytes, "when": found.when, "parts": found.parts}
            row["off"] = found.allocated_bytes / row["allocated"] - 1
            print(f"{name:8} {row['layout']:6} {row['off']:+.1%}")
    path.write_text(json.dumps(document, indent=1))


def peak_before() -> int:
    """Resident before there is a model."""
    reset_peak_memory(torch.device("cpu"))
    return peak_memory_bytes(torch.device("cpu"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--layouts", default=LAYOUTS)
    parser.add_argument("--out", default=str(HERE / "results" / "memory-at-hand.json"))
    parser.add_argument("--row", nargs=3, metavar=("MODEL", "LAYOUT", "FILE"))
    parser.add_argument("--again", action="store_true", help="foresee the stored rows anew")
    options = parser.parse_args()
    if options.again:
        foresee_again(Path(options.out))
        return 0
    if options.row:
        measure(options.row[0], options.row[1], Path(options.row[2]))
        return 0
    rows, failed = [], []
    for name in options.models.split(","):
        for layout in options.layouts.split(","):
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / "row.json"
                words = [str(HERE / "memory_at_hand.py"), "--row", name, layout, str(file)]
                try:
                    run_together(words, PROCESSES, deadline_s=DEADLINE_S)
                except RuntimeError as failure:
                    failed.append({"model": name, "layout": layout, "why": str(failure)})
                    continue
                row = json.loads(file.read_text())
            rows.append(row)
            line = f"{name:8} {layout:6} {row['parameters'] / 1e6:6.1f}M "
            line += f"{row['allocated'] / 2**20:8.1f} MiB, foreseen {row['foreseen'] / 2**20:8.1f}"
            print(f"{line} ({row['off']:+.1%}); resident {row['resident'] / 2**20:.1f}", flush=True)
    document = {"machine": machine(), "gate": GATE, "rows": rows, "failed": failed}
    Path(options.out).write_text(json.dumps(document, indent=1))
    worst = max((abs(row["off"]) for row in rows), default=1.0)
    print(f"worst {worst:.1%}, gate {GATE:.0%}; {len(failed)} rows did not run")
    return 0 if worst <= GATE else 1


if __name__ == "__main__":
    raise SystemExit(main())
