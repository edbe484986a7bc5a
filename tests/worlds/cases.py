"""Models and data for the equality battery: small, but with every trap that peers fall into."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

SAMPLES = 53  # batch 24: steps of 24, 24 and 5 samples, so some of 4 ranks have none in the last
BATCH, MICRO_BATCH = 24, 2  # accumulation 3 at 4 ranks, 6 at 2


class Tokens:
    """Token sequences whose targets are ignored in unequal numbers per sample."""

    draws_nothing = True

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(1000 + index)
        tokens = torch.randint(0, 61, (13,), generator=generator)
        targets = tokens[1:].clone()
        targets[: index % 11] = -100
        return tokens[:-1], targets


class Images:
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(2000 + index)
        image = torch.randn(1, 8, 8, generator=generator)
        noise = 0.1 * torch.randn(1, 8, 8)  # augmentation: drawn from (seed, epoch, index)
        return image + noise, torch.tensor(index % 10)


class Dicts:
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(3000 + index)
        x = torch.randn(6, generator=generator)
        return {"x": x, "y": x.sum() + x[0] ** 2, "weight": torch.tensor(float(index % 4))}


class PlainMLP(nn.Module):
    """A user's module: reads a dict, has a frozen layer, a parameter that nothing uses, and one
    that only some micro-batches use."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.drop = nn.Dropout(0.1)
        self.frozen = nn.Linear(16, 16)
        self.frozen.requires_grad_(False)
        self.never = nn.Parameter(torch.ones(5))
        self.sometimes = nn.Parameter(torch.ones(16))
        self.last = nn.Linear(16, 1)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        h = self.drop(torch.tanh(self.first(batch["x"])))
        h = torch.tanh(self.frozen(h))
        if float(batch["x"][0, 0]) > 0.5:  # data decides: ranks disagree about which are used
            h = h * self.sometimes
        return self.last(h).squeeze(-1)


def weighted_squares(outputs: torch.Tensor, batch: dict[str, torch.Tensor]):
    """(sum, count) with weights that make counts differ between micro-batches."""
    return (batch["weight"] * (outputs - batch["y"]) ** 2).sum(), batch["weight"].sum()


def build(name: str) -> nn.Module:
    """A float32 module with fixed weights."""
    torch.manual_seed(7)
    if name == "mlp":
        return PlainMLP()
    from shoal.models.catalog import build as catalog

    if name == "cnn":
        return catalog("resnet", {"channels": 4, "stages": 2}, vocabulary=None, sequence=None)
    arguments = {"dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "dropout": 0.1}
    return catalog("llama", arguments, vocabulary=61, sequence=12)


def dataset(name: str):
    """The data that goes with a model."""
    return {"mlp": Dicts, "cnn": Images, "llama": Tokens}[name]()


def loss(name: str):
    """Its loss; None is the default."""
    return weighted_squares if name == "mlp" else None


def plain_loss(name: str, model: nn.Module, batch):
    """(sum, count) as a person writes it by hand, for the reference loop."""
    if name == "mlp":
        return weighted_squares(model(batch), batch)
    inputs, targets = batch
    outputs = model(inputs)
    logits = outputs.logits() if hasattr(outputs, "logits") else outputs
    total = F.cross_entropy(
        logits.flatten(0, -2), targets.flatten(), reduction="sum", ignore_index=-100
    )
    return total, (targets != -100).sum()
