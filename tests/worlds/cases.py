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
    """A user's module: reads a dict, has a frozen layer, a parameter that nothing uses, and two
    that only some micro-batches use, one of them a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.drop = nn.Dropout(0.1)
        self.frozen = nn.Linear(16, 16)
        self.frozen.requires_grad_(False)
        self.never = nn.Parameter(torch.ones(5))
        self.sometimes = nn.Parameter(torch.ones(16))
        self.gate = nn.Parameter(torch.tensor(0.9))
        self.last = nn.Linear(16, 1)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        h = self.drop(torch.tanh(self.first(batch["x"])))
        h = torch.tanh(self.frozen(h))
        if float(batch["x"][0, 0]) > 0.5:  # data decides: ranks disagree about which are used
            h = h * self.sometimes * self.gate
        return self.last(h).squeeze(-1)


class Couples:
    """Two views of one thing, for a model of two towers."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(4000 + index)
        left = torch.randn(6, generator=generator)
        return {"left": left, "right": left.flip(0) + 0.1 * torch.randn(6, generator=generator)}


class Pairs:
    """(noise, real) for a GAN; whole steps only, as its runs call each other's models."""

    def __len__(self) -> int:
        return 2 * BATCH

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(5000 + index)
        noise, real = torch.randn(2, 4, generator=generator, dtype=torch.float64)
        return noise, real[:2].cumsum(0)


class GPTBlock(nn.Module):
    """Attention and a GELU perceptron, each after a LayerNorm, with dropout in all places."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, sequence, dim = x.shape
        cut = self.qkv(self.norm1(x)).view(batch, sequence, 3, self.heads, dim // self.heads)
        q, k, v = cut.permute(2, 0, 3, 1, 4)
        kept = 0.1 if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=kept, is_causal=True)
        x = x + self.drop(self.out(mixed.transpose(1, 2).reshape(batch, sequence, dim)))
        return x + self.drop(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    """GPT as people write it: learned positions, and a head that is the embedding again."""

    def __init__(self, vocabulary: int = 61, dim: int = 24, layers: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, dim)
        self.positions = nn.Embedding(12, dim)
        self.blocks = nn.ModuleList(GPTBlock(dim, 3) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Towers(nn.Module):
    """Two encoders and a temperature; every sample's loss depends on its micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 8))
        self.right = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8))
        self.scale = nn.Parameter(torch.zeros(1))  # of one element: FSDP2 cuts no scalars

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        left = F.normalize(self.left(batch["left"]), dim=-1)
        right = F.normalize(self.right(batch["right"]), dim=-1)
        return self.scale.exp() * left @ right.T


def contrastive(scores: torch.Tensor, batch: dict[str, torch.Tensor]):
    """(sum, count) of the cross-entropy of each sample against its micro-batch."""
    targets = torch.arange(len(scores), device=scores.device)
    return F.cross_entropy(scores, targets, reduction="sum"), len(scores)


def maker() -> nn.Module:
    """Turns noise into points."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))


def judge() -> nn.Module:
    """Tells real points from made ones."""
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))


def judged(outputs: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(outputs, real, reduction="none")


def judge_batch(value, make: nn.Module):
    """Half real, half made, of one micro-batch."""
    noise, real = value
    where = next(make.parameters()).device  # outside a run nobody moves a batch
    with torch.no_grad():
        made = make(noise.to(where)).to(real.device)
    labels = torch.cat([torch.ones_like(real[:, :1]), torch.zeros_like(real[:, :1])])
    return torch.cat([real, made]), labels


def maker_batch(value):
    """Noise that shall pass for real."""
    noise, real = value
    return noise, torch.ones_like(real[:, :1])


def weighted_squares(outputs: torch.Tensor, batch: dict[str, torch.Tensor]):
    """(sum, count) with weights that make counts differ between micro-batches."""
    return (batch["weight"] * (outputs - batch["y"]) ** 2).sum(), batch["weight"].sum()


WITHOUT_DROPOUT = "llama without dropout"
"""A model whose losses differ by no draw."""
WIDE = "wide llama"
"""A model beside which ballots have no size."""


def build(name: str) -> nn.Module:
    """A float32 module with fixed weights."""
    torch.manual_seed(7)
    if name in ("mlp", "gpt", "towers"):
        return {"mlp": PlainMLP, "gpt": GPT, "towers": Towers}[name]()
    from shoal.models.catalog import build as catalog

    if name == "cnn":
        return catalog("resnet", {"channels": 4, "stages": 2}, vocabulary=None, sequence=None)
    dropout, dim = 0.0 if name == WITHOUT_DROPOUT else 0.1, 320 if name == WIDE else 32
    arguments = {"dim": dim, "layers": 2, "heads": 4, "kv_heads": 2, "dropout": dropout}
    return catalog("llama", arguments, vocabulary=61, sequence=12)


def dataset(name: str):
    """The data that goes with a model."""
    data = {"mlp": Dicts, "cnn": Images, "gpt": Tokens, "towers": Couples}
    return data.get(name, Tokens)()


def loss(name: str):
    """Its loss; None is the default."""
    return {"mlp": weighted_squares, "towers": contrastive}.get(name)


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
