"""Models as people bring them, in a world: with a cache that is on, with parts that cannot be cut."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn import functional

from own_passes_case import end
from shoal.fabric import World
from shoal.trainer.metrics_recorder import MetricsRecorder
from shoal.trainer.parallelize import parallelize

STEPS = 3


def trained(world: World, model: nn.Module, data: list[Any], loss: Any, **settings: Any) -> Any:
    """Losses of some steps."""
    run = parallelize(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        loss,
        batch=4,
        micro_batch=1,
        precision="fp64",
        sample=torch.utils.data.default_collate(data[:2]),
        world=world,
        **settings,
    )
    losses = []
    for batch in run.loader(data):
        losses.append(run.step(batch).loss)
        if len(losses) == STEPS:
            break
    end(run)
    return losses


def heard(
    world: World, model: nn.Module, data: list[Any], loss: Any, layout: Any
) -> dict[str, Any]:
    """Losses of some steps, and what the run had to say."""
    told: list[str] = []
    with mock.patch.object(MetricsRecorder, "notice", lambda _, text: told.append(text)):
        losses = trained(world, model, data, loss, layout=layout)
    return {"losses": losses, "told": told}


def of_transformers(world: World, layout: Any) -> dict[str, Any]:
    """A Llama whose configuration was left as it is: its layers are given a cache to write into."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    model = LlamaForCausalLM(config).double()
    drawn = torch.randint(61, (12, 17), generator=torch.Generator().manual_seed(1))
    data = [({"input_ids": row[:-1]}, row[1:]) for row in drawn]

    def loss(outputs: Any, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
        logits = outputs["logits"].flatten(0, 1)
        return functional.cross_entropy(logits, targets.flatten(), reduction="sum"), targets.numel()

    losses = trained(world, model, data, loss, layout=layout, call="kwargs")
    return {"losses": losses, "cache": model.config.use_cache}


class Adapted(nn.Module):
    """A feed-forward block with an adapter, which it also asks for what it makes of a unit matrix."""

    def __init__(self, unit: str) -> None:
        super().__init__()
        self.unit = unit
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.inner, self.outer = nn.Linear(16, 2, bias=False), nn.Linear(2, 8, bias=False)
        self.magnitude = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        unit = torch.eye(16, dtype=x.dtype)
        if self.unit == "computed":
            unit = torch.diag(torch.ones(16, dtype=x.dtype))
        weight = self.down.weight + self.outer(self.inner(unit)).T
        scale = self.magnitude / weight.norm(dim=1).detach()
        hidden = functional.gelu(self.up(x))
        return x + scale * (self.down(hidden) + self.outer(self.inner(hidden)))


def adapted(world: World, layout: Any, unit: str) -> dict[str, Any]:
    """Blocks with the pattern of DoRA: the unit matrix is as wide as what ranks would cut."""
    torch.manual_seed(0)
    plain = (nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(2))
    model = nn.Sequential(*(Adapted(unit) for _ in range(2)), *plain).double()
    drawn = torch.rand(12, 4, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs - targets).square().flatten(1).sum(1)

    return heard(world, model, [(row, row.flip(0)) for row in drawn], loss, layout)


class Modulated(nn.Module):
    """A block that scales its input by what its own table makes of it, as in diffusion models."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 8))
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled = x * (1 + self.table(x.mean(1, keepdim=True)))
        return x + self.down(functional.gelu(self.up(scaled)))


class Conditioned(nn.Module):
    """Blocks of which the first lends a part of itself to the model around it (diffusers' DiT)."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Modulated() for _ in range(4))
        self.head = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden) * (1 + self.blocks[0].table(x.mean(1, keepdim=True)))


def conditioned(world: World, layout: Any) -> list[float]:
    """A part of a block is called from outside of it."""
    torch.manual_seed(0)
    model = Conditioned().double()
    drawn = torch.rand(12, 4, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs - targets).square().flatten(1).sum(1)

    return trained(world, model, [(row, row.flip(0)) for row in drawn], loss, layout=layout)


class Kept:
    """Keys of the layers before, by layer: what a model hands its layers to write into."""

    def __init__(self) -> None:
        self.keys: dict[int, torch.Tensor] = {}

    def update(self, layer: int, keys: torch.Tensor) -> torch.Tensor:
        """Keep them, and give those of all times."""
        before = self.keys.get(layer)
        self.keys[layer] = keys if before is None else torch.cat([before, keys], dim=1)
        return self.keys[layer]


@dataclasses.dataclass
class Told:
    """What a model hands its layers beside hidden states, in a class of its own."""

    scale: torch.Tensor


@dataclasses.dataclass
class Numbered:
    """The same, of a number."""

    number: float


class Mixer(nn.Module):
    """Knows something beside its input: `how` says from where."""

    def __init__(self, layer: int, how: str, shared: nn.Linear) -> None:
        super().__init__()
        self.layer, self.how, self.number, self.shared = layer, how, 1.0, [shared]
        self.key, self.out = nn.Linear(8, 8), nn.Linear(8, 8)
        self.noted = torch.ones(1, 1, 1, dtype=torch.float64)

    def forward(self, x: torch.Tensor, handed: Any) -> torch.Tensor:
        keys = self.key(x)
        if self.how == "written":
            keys = handed.update(self.layer, keys)
        elif self.how == "read":
            keys = keys * handed.scale
        elif self.how == "counted":
            keys = keys * handed.number
        elif self.how == "another's":
            keys = keys + self.shared[0](x)
        keys = keys * self.noted * self.number
        if self.how == "left":
            self.last = keys.square().mean((1, 2), keepdim=True)
        return self.out(torch.tanh(keys))


class Handed(nn.Module):
    """A mixer and a feed-forward layer."""

    def __init__(self, *how: Any) -> None:
        super().__init__()
        self.mixer = Mixer(*how)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x: torch.Tensor, handed: Any) -> torch.Tensor:
        x = x + self.mixer(x, handed)
        return x + self.mlp(x)


class Handing(nn.Module):
    """Blocks that the model around them tells something else in every pass, beside their input."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.passes = how, 0
        self.shared, self.head = nn.Linear(8, 8), nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Handed(layer, how, self.shared) for layer in range(2))
        self.told, self.numbered = Told(torch.ones(1, 1, 1, dtype=torch.float64)), Numbered(1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ours = {"written": Kept(), "read": self.told, "counted": self.numbered}
        handed: Any = ours.get(self.how)
        scale = x.mean((1, 2), keepdim=True)
        self.passes += 1
        if self.how == "read":
            handed.scale = scale
        elif self.how == "counted":
            handed.number = 1 / self.passes
        for block in self.blocks:
            if self.how == "noted":
                block.mixer.noted = scale
            elif self.how == "number":
                block.mixer.number = 1 / self.passes
        hidden = self.shared(x)
        for block in self.blocks:
            hidden = block(hidden, handed)
        if self.how == "written":
            hidden = hidden + handed.keys[0] + handed.keys[1]
        elif self.how == "left":
            hidden = hidden * sum(block.mixer.last for block in self.blocks)
        return self.head(hidden)


HOW = ("written", "read", "counted", "another's", "noted", "number", "left")
"""From where blocks know what is neither a parameter nor a tensor that they are called with."""


def handing(world: World, layout: Any, how: str) -> dict[str, Any]:
    """What a graph of tensors does not tell."""
    torch.manual_seed(0)
    model = Handing(how).double()
    drawn = torch.rand(12, 4, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs - targets).square().flatten(1).sum(1)

    return heard(world, model, [(row, row.flip(0)) for row in drawn], loss, layout)
