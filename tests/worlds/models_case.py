"""The catalogue's models, one of transformers among them, on a world of processes."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import cases
from shoal.fabric import World
from shoal.models.catalog import build, find_default_loss
from shoal.proof import Battery, TrialSide
from shoal.trainer.step.optimizer_step import StepResult

FOREIGN = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32,
    "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 61, "max_position_embeddings": 12,
    "attention_dropout": 0.1,
}  # fmt: skip
ARGUMENTS: dict[str, dict[str, Any]] = {
    "gpt": {"dim": 32, "layers": 2, "dropout": 0.1},
    # a loss that depends on the micro-batch, and experts that some of them leave idle
    "moe": {"dim": 32, "layers": 2, "experts": 6, "hidden": 24, "balance": 0.1, "dropout": 0.1},
    "vit": {"dim": 32, "layers": 2, "dropout": 0.1},
    "foreign": {},
}


def make(case: str) -> nn.Module:
    """The module, under the seed that was set by whoever builds."""
    if case == "vit":
        return build("vit", ARGUMENTS[case])
    if case != "foreign":
        return build(case, ARGUMENTS[case], vocabulary=61, sequence=12)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(FOREIGN))
        return build(f"hf:{path}", {}, vocabulary=61, sequence=12)


def train(case: str, side: TrialSide) -> Iterator[tuple[str, StepResult]]:
    """What both sides do."""
    run = side.parallelize(
        lambda: make(case),
        find_default_loss(case),
        batch=cases.BATCH,
        micro_batch=cases.MICRO_BATCH,
    )
    loader = run.loader(cases.dataset("cnn" if case == "vit" else "llama"))
    while True:
        for batch in loader:
            yield "", run.step(batch)


def prove(world: World, case: str, layout: str) -> dict[str, Any]:
    """This rank's report: three steps in float64 against one process."""
    torch.set_num_threads(1)
    battery = Battery(functools.partial(train, case), precision="fp64", steps=3)
    return battery.prove(world, {"strategy": layout})
