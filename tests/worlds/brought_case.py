"""Models as people bring them, in a world: with a cache that is on, with parts that cannot be cut."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from own_passes_case import end
from shoal.fabric import World
from shoal.trainer.parallelize import parallelize

STEPS = 3


def trained(world: World, model: nn.Module, data: list[Any], loss: Any, **settings: Any) -> Any:
    """Losses, and what the run had to say."""
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
    told: list[str] = []
    run.hear(lambda record: told.append(str(record.get("text"))) if "text" in record else None)
    losses = []
    for batch in run.loader(data):
        losses.append(run.step(batch).loss)
        if len(losses) == STEPS:
            break
    end(run)
    return losses


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

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.inner, self.outer = nn.Linear(16, 2, bias=False), nn.Linear(2, 8, bias=False)
        self.magnitude = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        unit = torch.eye(16, dtype=x.dtype)
        weight = self.down.weight + self.outer(self.inner(unit)).T
        scale = self.magnitude / weight.norm(dim=1).detach()
        hidden = functional.gelu(self.up(x))
        return x + scale * (self.down(hidden) + self.outer(self.inner(hidden)))


def adapted(world: World, layout: Any) -> list[float]:
    """Blocks with the pattern of DoRA: the unit matrix is as wide as what ranks would cut."""
    torch.manual_seed(0)
    plain = (nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(2))
    model = nn.Sequential(*(Adapted() for _ in range(2)), *plain).double()
    drawn = torch.rand(12, 4, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs - targets).square().flatten(1).sum(1)

    return trained(world, model, [(row, row.flip(0)) for row in drawn], loss, layout=layout)


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
