"""Draws compositions: `shoal train` commands of a layout, a model and every policy, by a seed.

A composition is a dict of words, {"layout.tp": "2", …}; what it is equal to in one process is the
same dict without the words that only several processes can hear.
"""

from __future__ import annotations

import json
import random
from array import array
from pathlib import Path

Words = dict[str, str]


def degrees(words: Words) -> dict[str, int]:
    """Degree of every axis that the words ask for."""
    size = int(words["launch.processes"])
    found = {axis: int(words.get(f"layout.{axis}", "1")) for axis in ("tp", "cp", "pp", "ep")}
    shard, replicate = (int(words.get(f"layout.dp_{n}", "1")) for n in ("shard", "replicate"))
    strategy = words.get("layout.strategy", "")
    if strategy in ("tp", "cp"):
        found[strategy] = size
    elif strategy in ("ddp", "ep"):
        replicate = size
        found["ep"] = size if strategy == "ep" else found["ep"]
    elif strategy == "hsdp":
        replicate, shard = 2, size // 2
    elif strategy:
        shard = size
    return {**found, "dp_shard": shard, "dp_replicate": replicate}


def data_ranks(words: Words) -> int:
    """Ranks that draw different samples."""
    found = degrees(words)
    return found["dp_shard"] * found["dp_replicate"]


BASE: Words = {
    "data.source": "tokens:tokens",
    "data.sequence": "16",
    "data.validation": "0",
    "train.batch": "8",
    "train.steps": "3",
    "checkpoint.every": "1",
    "checkpoint.keep": "5",
    "optimizer.warmup_steps": "1",
}
"""What all have: three steps, each of which is saved; nothing is held out."""

HELD_OUT: Words = {"data.validation": "0.05", "train.validate_samples": "7"}
"""What those have too that validate: samples that no number of ranks shares evenly."""

SMALL = {"model.dim": "32", "model.layers": "4", "model.heads": "4", "model.hidden": "48"}
MODELS: dict[str, Words] = {
    "llama": {"model.name": "llama", **SMALL, "model.kv_heads": "2"},
    "gpt": {"model.name": "gpt", **SMALL},
    "moe": {
        "model.name": "moe", **SMALL, "model.kv_heads": "2", "model.experts": "4",
        "model.top_k": "2", "model.balance": "0.01",
    },
    "hf": {"model.name": "hf:tiny"},
    "own": {"model.build": "own_module:build", "model.width": "32"},
}  # fmt: skip

VOCABULARY = 300
PIPES = ("gpipe", "1f1b", "interleaved", "zero-bubble", "zbv", "dualpipe")
CONTEXTS = ("auto", "ring", "ulysses", "gather")

OWN = '''"""A user's own model: post-norm blocks, a positional table, a tied head, a buffer of its own."""

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width, dropout):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.back = nn.Linear(width, width)
        self.wide = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x):
        batch, seq, width = x.shape
        q, k, v = self.qkv(x).view(batch, seq, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = self.norm(x + self.dropout(self.back(mixed.transpose(1, 2).reshape(x.shape))))
        return x + self.scale * self.wide(x)


class Model(nn.Module):
    def __init__(self, width, dropout):
        super().__init__()
        self.tokens = nn.Embedding(300, width)
        self.places = nn.Parameter(torch.randn(16, width) * 0.02)
        self.layers = nn.ModuleList(Block(width, dropout) for _ in range(4))
        self.head = nn.Linear(width, 300, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids):
        x = self.tokens(ids) + self.places[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def build(width=32, dropout=0.0):
    return Model(width, dropout)
'''

KILL = '''"""A hook that kills its own process, once, after a step, when a checkpoint is complete."""

import json
import os
import signal
import time
from pathlib import Path

from shoal.base.runlog.atomic_files import list_saved_steps


def at(event):
    told = json.loads(os.environ.get("COMPOSITION_KILL", "null"))
    if told and event["event"] == "step" and os.environ.get("SHOAL_ATTEMPT") == "0":
        if [event["rank"], event["step"]] == told:
            until_s = time.monotonic() + 30
            while not list_saved_steps(Path(os.environ["SHOAL_RUN_FOLDER"])):
                if time.monotonic() > until_s:
                    raise RuntimeError("no checkpoint was complete 30 s after its save began")
                time.sleep(0.005)
            os.kill(os.getpid(), signal.SIGKILL)
'''

FOREIGN = {
    "llama": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32,
        "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 300, "max_position_embeddings": 64,
    },
    "gpt2": {
        "model_type": "gpt2", "n_embd": 32, "n_layer": 4, "n_head": 4, "vocab_size": 300,
        "n_positions": 64, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    },
}  # fmt: skip


def furnish(folder: Path) -> None:
    """The files that compositions name: tokens, a transformers configuration, modules."""
    (folder / "tokens").mkdir(parents=True, exist_ok=True)
    dice = random.Random(7)
    words = [dice.choices(range(VOCABULARY), k=dice.randint(1, 5)) for _ in range(400)]
    drawn = dice.choices(words, weights=range(400, 0, -1), k=2000)
    tokens = array("H", [token for word in drawn for token in word])
    (folder / "tokens" / "train.bin").write_bytes(tokens.tobytes())
    (folder / "tokens" / "meta.json").write_text(json.dumps({"vocabulary": VOCABULARY}))
    (folder / "tiny").mkdir(exist_ok=True)
    (folder / "tiny" / "config.json").write_text(json.dumps(FOREIGN["llama"]))
    (folder / "own_module.py").write_text(OWN)
    (folder / "kill_hook.py").write_text(KILL)


def layouts() -> dict[str, tuple[int, Words]]:
    """Name → (processes, words): every layout of 2 and 4 ranks."""
    found: dict[str, tuple[int, Words]] = {}
    for size in (2, 4):
        for name in ("ddp", "zero1", "zero2", "fsdp", "tp", "cp", "ep"):
            found[f"{name}{size}"] = size, {"layout.strategy": name}
        for schedule in PIPES:
            words = {"layout.pp": str(size), "layout.schedule": schedule}
            found[f"pp{size} {schedule}"] = size, words
    found["hsdp4"] = 4, {"layout.strategy": "hsdp"}
    data = {
        "ddp": {"layout.dp_replicate": "2"},
        **{f"zero{zero}": {"layout.dp_shard": "2", "layout.zero": str(zero)} for zero in (1, 2, 3)},
    }
    for name, words in data.items():
        for axis in ("tp", "cp", "pp"):
            found[f"{axis}2 {name}"] = 4, {f"layout.{axis}": "2", **words}
    found["ep2 ddp"] = 4, {"layout.ep": "2", "layout.dp_replicate": "4"}
    found["ep2 cp2"] = 4, {"layout.ep": "2", "layout.dp_replicate": "2", "layout.cp": "2"}
    for one, other in (("tp", "pp"), ("tp", "cp"), ("cp", "pp")):
        found[f"{one}2 {other}2"] = 4, {f"layout.{one}": "2", f"layout.{other}": "2"}
    return found


ONLY_SEVERAL = (
    *("layout.", "launch.", "train.defer_sync", "train.compile", "memory.", "train.prove"),
    *("data.workers", "precision.reduce"),
)
"""Words without which one process computes the same; the rest decides what is computed."""


def alone(words: Words) -> Words:
    """The same in one process, without recompute, compile and what only several can do.

    In fp16 compiled code stays: it rounds less often, so that a step overflows in one and not in
    the other, which then differ by a step. In float64 it goes as elsewhere.
    """
    kept = {key: value for key, value in words.items() if not key.startswith(ONLY_SEVERAL)}
    if words["precision.compute"] == "fp16" and "train.compile" in words:
        kept["train.compile"] = words["train.compile"]
    return {**kept, "layout.strategy": "single", "launch.processes": "1"}


def draw(dice: random.Random) -> tuple[str, Words]:
    """(its name, its words).

    Where no stages are to be filled, a step has two micro-batches on every rank, or what was drawn.
    """
    known = layouts()
    layout = dice.choice(list(known))
    processes, words = known[layout]
    model = dice.choice(["moe"] if "ep" in layout.split()[0] else list(MODELS))
    words = {**BASE, **MODELS[model], **words, "launch.processes": str(processes)}

    def maybe(key: str, chance: float, *values: str) -> None:
        chosen = dice.choice(values)  # drawn either way: one policy more moves no other's dice
        if dice.random() < chance:
            words[key] = chosen

    words["precision.compute"] = dice.choice(["fp64", "fp64", "fp32", "bf16", "fp16"])
    words["train.prove"] = dice.choice(["off", "off", "quick"])
    words["train.micro_batch"] = dice.choice(["1", "2", "2"])
    maybe("train.batch", 0.2, "12", "16")
    maybe("memory.recompute", 0.5, "full", "selective")
    maybe("train.compile", 0.06, "blocks")
    maybe("optimizer.name", 0.6, "sgd", "sgd", "lion", "lamb", "muon", "Adam")
    maybe("optimizer.clip", 0.4, "0", "0.1")
    maybe("optimizer.average", 0.25, "0.9")
    maybe("optimizer.schedule", 0.5, "wsd", "one-cycle", "linear", "constant")
    maybe("train.defer_sync", 0.25, "true")
    maybe("train.deterministic", 0.1, "true")
    maybe("memory.offload", 0.08, "activations", "optimizer", "parameters")
    maybe("data.workers", 0.1, "1")
    maybe("precision.reduce", 0.1, "bf16", "fp32")
    maybe("layout.compress", 0.08, "int8", "powersgd:2", "topk:0.1")
    maybe("model.dropout", 0.0 if model == "hf" else 0.35, "0.1")
    maybe("data.sequence", 0.1, "12", "10")
    maybe("train.validate_every", 0.2, "2")
    maybe("layout.context", 0.7 if "cp" in layout else 0.02, *CONTEXTS[1:])
    maybe("layout.sequence_parallel", 0.5 if "tp" in layout else 0.02, "on", "off")
    maybe("layout.schedule", 0.7 if "pp2 " in layout + " " and " " in layout else 0.0, *PIPES)
    if words.get("layout.schedule") == "interleaved":
        maybe("layout.chunks", 0.3, "2", "4")
    if words["precision.compute"] == "bf16":
        maybe("precision.residual", 0.5, "bf16")
    if "train.validate_every" in words:
        words |= HELD_OUT
    if words["train.batch"] == BASE["train.batch"] and degrees(words)["pp"] == 1:
        words["train.batch"] = str(2 * int(words["train.micro_batch"]) * data_ranks(words))
    return layout, words
