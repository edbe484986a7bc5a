"""Statistics of tensors under every layout: what a rank trains, and what one process records."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch

import shoal
from shoal.fabric import World
from shoal.models.catalog import build

VOCABULARY, SEQUENCE, BATCH, MICRO_BATCH, SAMPLES = 31, 8, 8, 2, 22
SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"dim": 16, "layers": 2, "heads": 4, "kv_heads": 2, "hidden": 24}),
    "gpt": ("gpt", {"dim": 16, "layers": 2, "heads": 4, "dropout": 0.1}),
    "deep": ("llama", {"dim": 16, "layers": 4, "heads": 4, "kv_heads": 2, "hidden": 24}),
    "large": ("llama", {"dim": 128, "layers": 6, "heads": 4, "kv_heads": 2, "hidden": 256}),
    "moe": ("moe", {"dim": 16, "layers": 2, "heads": 2, "kv_heads": 2, "experts": 4, "hidden": 8}),
}


def rows() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Tokens and targets; the last step of an epoch has fewer samples than the others."""
    drawn = torch.Generator().manual_seed(3)
    whole = torch.randint(0, VOCABULARY, (SAMPLES, SEQUENCE + 1), generator=drawn)
    return [(one[:-1], one[1:]) for one in whole]


def open_run(world: World, folder: str, layout: Any, model: str, **policies: Any) -> shoal.Run:
    """Open a run under a layout in float64; its optimizer is SGD, unless `optimizer` says AdamW."""
    torch.set_num_threads(1)
    name, sizes = SIZES[model]
    kind = policies.pop("optimizer", "sgd")
    torch.manual_seed(0)
    whole = build(name, sizes, vocabulary=VOCABULARY, sequence=SEQUENCE)
    sample = tuple(map(torch.stack, zip(*rows()[:MICRO_BATCH], strict=True)))

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        if kind == "adamw":
            return torch.optim.AdamW(parameters, lr=1e-3)
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    settings = {"precision": "fp64", "clip": 0.5, "statistics": 3, **policies}
    return shoal.parallelize(
        whole, optimizer, layout=layout, batch=BATCH, micro_batch=MICRO_BATCH, sample=sample,
        folder=folder, world=world, prove="off", **settings,
    )  # fmt: skip


def train(
    world: World, folder: str, layout: Any, model: str = "llama", steps: int = 4, **policies: Any
) -> dict[str, Any]:
    """Train under a layout; return rank 0's lines, and every rank's CPU seconds by step.

    The folder may hold no checkpoints.
    """
    run, data = open_run(world, folder, layout, model, **policies), rows()
    seconds: list[float] = []
    while run.step_count < steps:
        for batch in run.loader(data):
            began_s = time.process_time()
            run.step(batch)
            seconds.append(time.process_time() - began_s)
            if run.step_count == steps:
                break
    for undo in run.program.on_close:
        undo()
    found: dict[str, Any] = {"cpu_s": seconds, "lines": [], "rows": []}
    if world.is_first:
        for key, file in (("lines", "statistics.jsonl"), ("rows", "metrics.jsonl")):
            path = Path(folder) / file
            text = path.read_text() if path.exists() else ""
            found[key] = [json.loads(line) for line in text.splitlines()]
    return found


def train_all(world: World, folder: str, layouts: dict[str, list[Any]]) -> dict[str, Any]:
    """Train under several layouts: name → [layout, model, policies]; return what each recorded."""
    return {
        name: train(world, f"{folder}/{name}", layout, model, **policies)
        for name, (layout, model, policies) in layouts.items()
    }


def differences(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> dict[str, float]:
    """Return the largest difference of each statistic, as a share of its largest value.

    Raises:
        AssertionError: steps, names or missing numbers differ.
    """
    assert [one["step"] for one in found] == [one["step"] for one in expected]
    most: dict[str, float] = {}
    for here, there in zip(found, expected, strict=True):
        assert here.keys() == there.keys()
        for key in here.keys() - {"step"}:
            assert here[key].keys() == there[key].keys(), key
            known = {name: value for name, value in there[key].items() if value is not None}
            assert {name for name, value in here[key].items() if value is not None} == set(known)
            scale = max(map(abs, known.values()))
            for name, value in known.items():
                gap = abs(here[key][name] - value) / scale
                most[key] = max(most.get(key, 0.0), gap)
    return most
