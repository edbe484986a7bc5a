"""A training script of a hundred lines, as a user writes it, whose proof is timed.

python tests/proof/hundred_lines.py --layout ddp --steps 4     under any launcher
shoal prove --layouts ddp,fsdp -- tests/proof/hundred_lines.py
"""

import argparse
import csv
import math
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import shoal

WORDS, LENGTH = 64, 24


class Sums(Dataset):
    """Rows of tokens: each is the sum of the two before it, with some noise."""

    def __init__(self, first: int, count: int) -> None:
        self.first, self.count = first, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        draws = torch.Generator().manual_seed(self.first + index)
        row = torch.randint(WORDS, (2,), generator=draws).tolist()
        while len(row) < LENGTH + 1:
            row.append((row[-1] + row[-2]) % WORDS)
        tokens = torch.tensor(row)
        flipped = torch.rand(LENGTH + 1, generator=draws) < 0.02
        tokens = torch.where(flipped, torch.zeros_like(tokens), tokens)
        return tokens[:-1], tokens[1:]


class Block(nn.Module):
    """Attention and a gated layer, each behind a norm."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, nn.Dropout(dropout)
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 8 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.before(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).flatten(-2)))
        wide, gate = self.up(self.between(x)).chunk(2, -1)
        return x + self.dropout(self.down(wide * F.silu(gate)))


class Model(nn.Module):
    """A small decoder."""

    def __init__(self, width: int = 64, depth: int = 4, dropout: float = 0.1) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(WORDS, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, 4, dropout) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, WORDS, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def smoothed(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Cross-entropy with smoothed labels: (sum, count)."""
    flat = logits.flatten(0, 1), targets.flatten()
    return F.cross_entropy(*flat, label_smoothing=0.1, reduction="sum"), targets.numel()


def make_optimizer(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    """AdamW without decay of norms and biases."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95))


def rise_and_fall(steps: int) -> Callable[[int], float]:
    """Five steps of warm-up, then a cosine."""

    def factor(step: int) -> float:
        fallen = 0.5 * (1 + math.cos(math.pi * min(1.0, step / steps)))
        return min(1.0, (step + 1) / 5) * fallen

    return factor


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layout", default="ddp")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rate", type=float, default=3e-3)
    words = parser.parse_args()
    torch.manual_seed(0)
    model = Model()
    optimizer = make_optimizer(model, words.rate)
    run = shoal.parallelize(
        model,
        optimizer,
        smoothed,
        words.layout,
        batch=32,
        micro_batch=4,
        clip=1.0,
        folder="runs/sums",
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(run.optimizer, rise_and_fall(words.steps))
    best = math.inf
    while run.step_count < words.steps:
        for batch in run.loader(Sums(0, 512)):
            result = run.step(batch)
            scheduler.step()
            if run.rank == 0:
                with Path("losses.csv").open("a") as file:
                    csv.writer(file).writerow([result.step, result.loss, result.grad_norm])
            if result.step % 20 == 0:
                held = run.evaluate(Sums(10_000, 64))["loss"]
                best = min(best, held)
                run.save()
            if run.step_count >= words.steps:
                break
    run.print(f"step {run.step_count}: loss {result.loss:.4f}, best {best:.4f}")
    run.close()


if __name__ == "__main__":
    main()
