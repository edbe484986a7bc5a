"""What the tests of compositions run on every member of a world: cold, warm, resumed, alone."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from shoal.base.errors import PlanError
from shoal.fabric import World
from shoal.fabric.rendezvous.process_info import ProcessInfo
from shoal.models.catalog import build
from shoal.parallel import compiling
from shoal.trainer.parallelize import parallelize
from shoal.trainer.run import Run

VOCABULARY, SEQUENCE, MICRO_BATCH = 31, 8, 2
ROWS = (4, 3)
"""Of the batches of two steps: full micro-batches, then a short one, whose graph is made late."""

ONLY = ("precision", "residual", "clip", "loss_scale")
"""What decides numbers in one process too."""

SIZES = {"dim": 32, "layers": 2, "heads": 4, "hidden": 48}
MORE = {"moe": {"experts": 4, "kv_heads": 2}, "llama": {"kv_heads": 2}, "gpt": {}}


class Block(nn.Module):
    """A user's own: fused projection, post-norm, a buffer."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(32), nn.Linear(32, 96)
        self.back, self.drop = nn.Linear(32, 32), nn.Dropout(dropout)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        """[batch, seq, 32] to the same."""
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.norm(x + self.scale * self.drop(self.back(mixed.transpose(1, 2).flatten(2))))


class Own(nn.Module):
    """A tied head and a table of positions."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 32)
        self.places = nn.Parameter(torch.randn(SEQUENCE, 32) * 0.1)
        self.layers = nn.ModuleList(Block(dropout) for _ in range(2))
        self.head = nn.Linear(32, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        """[batch, seq] to logits."""
        x = self.tokens(ids) + self.places
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits


def model_of(name: str, dropout: float, layers: int) -> nn.Module:
    """A small one by name, perhaps with a word on its weights: untied, frozen, lora."""
    name, _, how = name.partition(" ")
    if name == "own":
        return Own(dropout)
    sizes = {**SIZES, **MORE[name], "dropout": dropout, "layers": layers}
    sizes |= {"tied": False} if how == "untied" else {}
    made = build(name, sizes, vocabulary=VOCABULARY, sequence=SEQUENCE)
    if how == "frozen":
        made.embedding.requires_grad_(False)
        made.blocks[0].requires_grad_(False)
        made.blocks[1].mlp_norm.requires_grad_(False)
    if how == "lora":
        from peft import LoraConfig, get_peft_model

        layers_of_blocks = ["q", "k", "v", "o", "gate", "up", "down"]
        made = get_peft_model(
            made,
            LoraConfig(r=4, lora_alpha=8, target_modules=layers_of_blocks, init_lora_weights=False),
        )
    return made


def fate(world: World, folder: str, model: str, words: dict[str, Any]) -> dict[str, Any]:
    """Steps of a cold start, of a warm one that goes on from its checkpoint, and of one process."""
    torch.set_num_threads(1)
    words = dict(words)
    layers = words.pop("layers", SIZES["layers"])
    micro_batch = words.pop("micro_batch", MICRO_BATCH)
    told = dict(model=model, layers=layers, dropout=words.pop("dropout", 0.0), words=words)
    told["micro_batch"] = micro_batch
    only = {k: v for k, v in words.items() if k in ONLY}
    # What is done to graphs of a backward pass takes seconds, so only where it is what is asked.
    backend = "aot_eager" if "schedule" in words["layout"] else "eager"
    uncompiled = mock.patch.object(compiling, "_compile", partial(_without_kernels, backend))
    # Flushes the processor's caches after each graph, to log how long its guards take.
    unmeasured = mock.patch("torch._dynamo.guards.profile_guard_manager", return_value=0.0)
    with mock.patch.dict(os.environ, {"SHOAL_CACHE": f"{folder}/cache"}), uncompiled, unmeasured:
        try:
            cold = _steps(world, Path(folder) / "run", **told)
            warm = _steps(world, Path(folder) / "run", resume=True, **told)
        except PlanError as refusal:
            return {"refused": str(refusal)}
    if not world.is_first:
        return {"cold": cold, "warm": warm}
    alone = World(ProcessInfo(), world.device, None)
    right = _steps(alone, None, **{**told, "words": {**only, "layout": "single"}})
    return {"cold": cold, "warm": warm, "alone": right}


def _without_kernels(backend: str, function: Any) -> Any:
    """Traced by the compiler, whose kernels would take a minute to build: `make proof` does."""
    return torch.compile(function, backend=backend)


def _steps(
    world: World,
    folder: Path | None,
    *,
    model: str,
    layers: int,
    dropout: float,
    micro_batch: int,
    words: dict[str, Any],
    resume: bool = False,
) -> list[tuple[float, float]]:
    """(loss, gradient norm) of both steps, or of the second after the first was restored."""
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randint(0, VOCABULARY, (n, SEQUENCE), generator=generator) for n in ROWS]
    run = parallelize(
        lambda: model_of(model, dropout, layers),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        batch=ROWS[0],
        micro_batch=micro_batch,
        sample=(batches[0], batches[0]),
        folder=folder,
        world=world,
        **words,
    )
    try:
        if resume and not run.restore():
            raise AssertionError("nothing was saved")
        found = []
        for batch in batches[1:] if resume else batches:
            found.append(_step(run, batch))
            if folder is not None and not resume and len(found) == 1:
                run.save()
        return found
    finally:
        for undo in run.program.on_close:  # as `run.close`, but the world stays for others
            undo()
        run.checkpoint_saver.wait_pending()


def _step(run: Run, batch: Tensor) -> tuple[float, float]:
    size = run.plan.layout.data_degree
    own = batch if size == 1 else batch.tensor_split(size)[run.program.data.rank]
    told = run.step((own, own))
    return float(told.loss), float(told.grad_norm)
