"""What the default micro-batch costs beside the share given, an eighth given, and the best size.

    python benchmarks/default_micro_batch.py demo      the demo's step under six layouts: default,
                                                       the share given, default again (A/A), eighth
    python benchmarks/default_micro_batch.py words     the demo's step under what a user may say
    python benchmarks/default_micro_batch.py loader    run.loader beside a plain loop, MLP and CNN
    python benchmarks/default_micro_batch.py models    12 models × single, ddp, fsdp: the default
                                                       beside every size that divides the share

Every run of the demo is a process of its own, runs take turns, and a figure is the median of its
rounds. `--json FILE` keeps all of it. Two cores: about 12, 1 and 15 minutes. `models --clock
processor` takes processor seconds of rank 0, which a busy machine disturbs less than wall time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from processes import SOURCE, machine, run_together
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

BATCH, STEPS, WARM = 16, 14, 4
GIVEN = f"train.batch={BATCH} train.micro_batch="  # alone it would make a batch of eight
LAYOUTS = {
    "single": (1, 16),
    "ddp": (2, 8),
    "fsdp": (2, 8),
    "tp": (2, 16),
    "cp": (2, 16),
    "pp": (2, 4),
}
"""Processes, and the whole share (in a pipeline two passes for each stage), by layout."""


def demo(rounds: int, only: str = "") -> list[dict[str, Any]]:
    """Step times of `shoal train` as it comes, and with sizes that are given."""
    found = []
    for layout in only.split(",") if only else LAYOUTS:
        processes, share = LAYOUTS[layout]
        variants = {"default": "", "share": f"{GIVEN}{share}", "again": "",
                    "eighth": f"{GIVEN}2"}  # fmt: skip
        times_s: dict[str, list[float]] = {name: [] for name in variants}
        for _ in range(rounds):
            for name, words in variants.items():
                times_s[name].append(_trained_s(layout, processes, words))
        row = {name: statistics.median(values) for name, values in times_s.items()}
        found.append({"layout": layout, "seconds": times_s, **row})
        print(
            f"{layout:7} default {row['default'] * 1e3:7.0f} ms  ÷ share "
            f"{row['default'] / row['share']:.3f}  A/A {row['again'] / row['default']:.3f}  "
            f"÷ eighth {row['default'] / row['eighth']:.3f}",
            flush=True,
        )
    return found


def _trained_s(layout: str, processes: int, words: str) -> float:
    """The median step of a short run, after its first ones."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, "-m", "shoal", "train", f"layout.strategy={layout}"),
            *(f"launch.processes={processes}", f"train.steps={STEPS}", "train.prove=off"),
            *(f"run.folder={folder}", "run.name=a", "train.validate_samples=8", *words.split()),
        ]
        env = {**os.environ, "PYTHONPATH": f"{SOURCE}:{os.environ.get('PYTHONPATH', '')}"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=env)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
        rows = [
            json.loads(line) for line in Path(folder, "a/metrics.jsonl").read_text().splitlines()
        ]
    return statistics.median(row["step_s"] for row in rows[WARM:])


WORDS = {
    "one pass a step, ddp on 2 processes": ("ddp", 2, ""),
    "micro-batches of an eighth": ("ddp", 2, f"{GIVEN}2"),
    "one process with the threads of both cores": ("single", 1, ""),
    "fsdp": ("fsdp", 2, ""),
    "zero1": ("zero1", 2, ""),
    "tp": ("tp", 2, ""),
    "pp": ("pp", 2, ""),
    "train.compile=blocks": ("ddp", 2, "train.compile=blocks"),
    "precision.compute=bf16": ("ddp", 2, "precision.compute=bf16"),
    "the speed mode": (
        "ddp", 2, "precision.compute=bf16 precision.residual=bf16 train.compile=blocks",
    ),
    "memory.recompute=full": ("ddp", 2, "memory.recompute=full"),
    "data.workers=1": ("ddp", 2, "data.workers=1"),
}  # fmt: skip
"""What a user may say of the demo, beside the first."""


def words(rounds: int, only: str = "") -> list[dict[str, Any]]:
    """Step times of the demo under single keys, in turns, beside its step as it comes."""
    first, *others = WORDS
    times_s: dict[str, list[float]] = {
        n: [] for n in (first, *(only.split(",") if only else others))
    }
    for _ in range(rounds):
        for name in times_s:
            layout, processes, said = WORDS[name]
            times_s[name].append(_trained_s(layout, processes, said))
    usual_s, *_ = (statistics.median(values) for values in times_s.values())
    found = []
    for name, values in times_s.items():
        found.append(
            {"name": name, "seconds": values, "ratio": statistics.median(values) / usual_s}
        )
        print(f"{name:38} {statistics.median(values) * 1e3:7.0f} ms  {found[-1]['ratio']:.2f}")
    return found


def loader(rounds: int) -> list[dict[str, Any]]:
    """A step of `run.loader` as it comes beside a plain loop with a DataLoader; one process."""
    import shoal

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    found = []
    for name, build, shape in (("MLP", _mlp, (32,)), ("CNN", _cnn, (3, 32, 32))):
        data = TensorDataset(torch.randn(1280, *shape), torch.randint(0, 10, (1280,)))
        ours_s, plain_s = [], []
        mine = build()
        run = shoal.parallelize(
            mine, torch.optim.SGD(mine.parameters(), lr=0.01),
            shoal.mean_of_samples(nn.CrossEntropyLoss()), "single", batch=64,
        )  # fmt: skip
        plain, measure = build(), nn.CrossEntropyLoss()
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
        for _ in range(max(4, rounds)):
            began_s = time.perf_counter()
            for batch in run.loader(data):
                run.step(batch)
            ours_s.append((time.perf_counter() - began_s) / 20)
            began_s = time.perf_counter()
            for x, y in DataLoader(data, 64, shuffle=True):
                optimizer.zero_grad()
                loss = measure(plain(x), y)
                loss.backward()
                optimizer.step()
                loss.item()
            plain_s.append((time.perf_counter() - began_s) / 20)
        size = run.plan.micro_batch
        run.close()
        ratio = statistics.median(ours_s[1:]) / statistics.median(plain_s[1:])
        found.append({"model": name, "micro_batch": size, "ours_s": ours_s, "plain_s": plain_s})
        print(f"{name}: {size} a pass, {ratio:.2f} × a plain loop's step", flush=True)
    return found


def _mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    )


def _layer(inputs: int, outputs: int, stride: int) -> nn.Module:
    convolution = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU())


def _cnn() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        _layer(3, 16, 1), _layer(16, 32, 2), _layer(32, 32, 1), _layer(32, 64, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


class Recurrent(nn.Module):
    """Two layers of LSTM over 64 positions, the last state decides."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.lstm = nn.Embedding(1000, 128), nn.LSTM(128, 256, 2, batch_first=True)
        self.head = nn.Linear(256, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.table(x))[0][:, -1])


class UNet(nn.Module):
    """Two levels down and up again; a class for each image."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.middle = _layer(3, 16, 1), _layer(16, 32, 2), _layer(32, 64, 2)
        self.up2, self.up1 = _layer(64 + 32, 32, 1), _layer(32 + 16, 16, 1)
        self.head = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one = self.down1(x)
        two = self.down2(one)
        low = F.interpolate(self.middle(two), scale_factor=2.0)
        up = self.up2(torch.cat((low, two), 1))
        up = self.up1(torch.cat((F.interpolate(up, scale_factor=2.0), one), 1))
        return self.head(up.mean((2, 3)))


class Encoder(nn.Module):
    """torch's own transformer encoder over tokens."""

    def __init__(self, layers: int = 4, width: int = 128, vocabulary: int = 1000) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, layers)
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.table(x)).mean(1))


class Bag(nn.Module):
    """A large table of embeddings, and little behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(50_000, 64), nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(x).mean(1))


class Experts(nn.Module):
    """Four experts, each with a part of every sample by its gate."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.gate = nn.Linear(64, 256), nn.Linear(256, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)) for _ in range(4)
        )
        self.head = nn.Linear(256, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        gates = self.gate(x).softmax(-1)
        return self.head(sum(gates[:, n, None] * one(x) for n, one in enumerate(self.experts)))


class Patches(nn.Module):
    """A small ViT."""

    def __init__(self) -> None:
        super().__init__()
        self.cut, self.blocks = nn.Conv2d(3, 128, 4, 4), Encoder(4, 128).blocks
        self.head = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.cut(x).flatten(2).transpose(1, 2)).mean(1))


class HfLlama(nn.Module):
    """transformers' Llama, its last position's logits."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaModel

        self.body = LlamaModel(
            LlamaConfig(
                vocab_size=1000, hidden_size=128, intermediate_size=344, num_hidden_layers=4,
                num_attention_heads=4, use_cache=False,
            )
        )  # fmt: skip
        self.head = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).last_hidden_state[:, -1])


class Residual(nn.Module):
    """A deep stack of small residual blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 128)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(128), nn.Linear(128, 128), nn.GELU()) for _ in range(24)
        )
        self.head = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def _wide() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 1024), *(
        layer for _ in range(3) for layer in (nn.Linear(1024, 1024), nn.ReLU())
    ), nn.Linear(1024, 10))  # fmt: skip


def _resnet() -> nn.Module:
    from shoal.models.catalog import build

    return build("resnet", {}, vocabulary=None, sequence=None)


TOKENS, IMAGES, NUMBERS = (64,), (3, 32, 32), (64,)
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], bool]] = {
    "CNN with BatchNorm": (_cnn, IMAGES, False),
    "ViT": (Patches, IMAGES, False),
    "LSTM": (Recurrent, TOKENS, True),
    "U-Net": (UNet, IMAGES, False),
    "hf Llama": (HfLlama, TOKENS, True),
    "experts": (Experts, NUMBERS, False),
    "large embeddings": (Bag, TOKENS, True),
    "MLP": (_wide, NUMBERS, False),
    "encoder": (Encoder, TOKENS, True),
    "residual": (Residual, NUMBERS, False),
    "deep encoder": (lambda: Encoder(8, 64), TOKENS, True),
    "CNN, plain": (lambda: nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3, 2), nn.ReLU(), nn.Flatten(),
        nn.Linear(64 * 14 * 14, 10)), IMAGES, False),
}  # fmt: skip


def models(rounds: int, clock: str = "wall") -> list[dict[str, Any]]:
    """The default's step beside that of every size that divides the share, batch 32."""
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for layout, processes in (("single", 1), ("ddp", 2), ("fsdp", 2)):
            out = Path(folder, f"{layout}.json")
            job = {"layout": layout, "out": str(out), "rounds": rounds, "clock": clock}
            run_together([__file__, "--rank-of", json.dumps(job)], processes, deadline_s=1800)
            found += json.loads(out.read_text())
    good = sum(row["over_best"] <= 1.05 for row in found)
    print(f"default ÷ best ≤ 1.05 in {good} of {len(found)}")
    return found


def work(job: dict[str, Any]) -> None:
    """One rank: every model under one layout, sizes in turns."""
    import shoal
    from shoal.fabric import start_world

    torch.set_num_threads(1)
    world, rows, now = start_world(), [], CLOCKS[job["clock"]]
    for name, (build, shape, is_tokens) in MODELS.items():
        torch.manual_seed(1)
        x = torch.randint(0, 1000, (256, *shape)) if is_tokens else torch.randn(256, *shape)
        data = TensorDataset(x, torch.randint(0, 10, (256,)))
        share = 32 // world.size
        sizes = [0, *(n for n in range(1, share + 1) if share % n == 0)]
        runs = {}
        for size in sizes:
            torch.manual_seed(0)
            given = {"micro_batch": size} if size else {}
            runs[size] = shoal.parallelize(
                build(), lambda p: torch.optim.SGD(p, lr=0.01), None, job["layout"], batch=32,
                world=start_world() if world.size > 1 else world, **given,
            )  # fmt: skip
        times_s: dict[int, list[float]] = {size: [] for size in sizes}
        for _ in range(job["rounds"] + 1):
            for size in sizes:
                for batch in runs[size].loader(data):
                    began_s = now()
                    runs[size].step(batch)
                    times_s[size].append(now() - began_s)
        chosen = runs[0].plan.micro_batch
        medians = {size: statistics.median(values[8:]) for size, values in times_s.items()}
        # The default and its size given are one computation: apart, the best of so many noisy
        # medians would often be the other one of the two.
        own = statistics.median([*times_s[0][8:], *times_s[chosen][8:]])
        best = min(own, *(value for size, value in medians.items() if size not in (0, chosen)))
        rows.append({
            "model": name, "layout": job["layout"], "chosen": chosen,
            "over_best": own / best, "step_s": medians, "same": medians[0] / medians[chosen],
        })  # fmt: skip
        if world.is_first:
            told = "  ".join(f"{size}: {value * 1e3:.1f}" for size, value in medians.items())
            print(f"{job['layout']:6} {name:19} chosen {chosen:2}  ÷ best {own / best:.3f}  "
                  f"A/A {rows[-1]['same']:.3f}  ms {told}", flush=True)  # fmt: skip
    if world.is_first:
        Path(job["out"]).write_text(json.dumps(rows))
    world.barrier()


CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}
PARTS = ("demo", "words", "loader", "models")


def main() -> None:
    if len(sys.argv) == 3 and sys.argv[1] == "--rank-of":
        return work(json.loads(sys.argv[2]))
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default="", help="of `words`, by name; of `demo`, layouts")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="of `models` alone")
    options = parser.parse_args()
    if options.part == "models":
        found = models(options.rounds, options.clock)
    elif options.part == "loader":
        found = loader(options.rounds)
    else:
        found = {"demo": demo, "words": words}[options.part](options.rounds, options.only)
    if options.json:
        record = {"machine": machine(), "part": options.part, "clock": options.clock, "rows": found}
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
