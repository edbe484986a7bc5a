"""Models of which a micro-batch runs some blocks only, as their own users write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WIDE = 6


class Block(nn.Module):
    def __init__(self, out: int = WIDE) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDE, 8), nn.Linear(8, out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).tanh())


class Trunk(nn.Module):
    """Three blocks on numbers [batch, 6], and a head that no block holds."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.ModuleList(Block() for _ in range(3))
        self.out = nn.Linear(WIDE, 3)

    def forward(self, x: torch.Tensor, task: torch.Tensor) -> torch.Tensor:
        for block in self.trunk:
            x = x + block(x)
        return self.out(x)


class HeadsByTask(Trunk):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleDict({"a": Block(3), "b": Block(3)})

    def forward(self, x: torch.Tensor, task: torch.Tensor) -> torch.Tensor:
        for block in self.trunk:
            x = x + block(x)
        return self.heads["ab"[int(task[0]) % 2]](x)


class LayerDrop(Trunk):
    """Blocks left out at random, by torch's generator; the first one on bare inputs."""

    def forward(self, x: torch.Tensor, task: torch.Tensor) -> torch.Tensor:
        for block in self.trunk:
            if not self.training or float(torch.rand(())) > 0.4:
                x = x + block(x)
        return self.out(x)


class StochasticDepth(nn.Module):
    """A small residual network with BatchNorm; deeper blocks are skipped more often."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv1d(1, 4, 3, padding=1)
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Conv1d(4, 4, 3, padding=1), nn.BatchNorm1d(4), nn.ReLU())
            for _ in range(3)
        )
        self.out = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, task: torch.Tensor) -> torch.Tensor:
        x = self.stem(x[:, None])
        for depth, stage in enumerate(self.stages):
            if not self.training or float(torch.rand(())) > 0.2 * (depth + 1):
                x = F.relu(x + stage(x))
        return self.out(x.mean(-1))


class ImagesOnSomeRanks(nn.Module):
    """Text with images in some micro-batches; the tower is registered after the text's blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.patch = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)
        self.text = nn.ModuleList(Block() for _ in range(2))
        self.tower = nn.ModuleList(Block() for _ in range(2))
        self.out = nn.Linear(WIDE, 3)

    def images(self, x: torch.Tensor) -> torch.Tensor:
        image = self.patch(x.flip(-1))
        for block in self.tower:
            image = image + block(image)
        return image

    def forward(self, x: torch.Tensor, task: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(x)
        if bool((task > 1).any()):
            hidden = hidden + self.images(x)
        for block in self.text:
            hidden = hidden + block(hidden)
        return self.out(hidden)


class FrozenTower(ImagesOnSomeRanks):
    """The same with a tower that is frozen, and run without gradients."""

    def __init__(self) -> None:
        super().__init__()
        for part in (self.patch, self.tower):
            part.requires_grad_(False)

    def images(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return super().images(x)


class ExpertsAsUnits(Trunk):
    """Experts of which a micro-batch runs those that have tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDE, 3)

    def forward(self, x: torch.Tensor, task: torch.Tensor) -> torch.Tensor:
        weights = self.gate(x).softmax(-1)
        chosen = task % 3
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.trunk):
            (rows,) = torch.where(chosen == number)
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * weights[rows, number, None])
        return self.out(x + out)


class EarlyExit(Trunk):
    """The first block's confidence decides whether the others run; each exit has a head."""

    def __init__(self) -> None:
        super().__init__()
        self.exits = nn.ModuleList(Block(3) for _ in range(3))

    def forward(self, x: torch.Tensor, task: torch.Tensor) -> dict[str, torch.Tensor]:
        for block, leave in zip(self.trunk, self.exits, strict=True):
            x = x + block(x)
            answer = leave(x)
            if int(task[0]) == 2 or float(answer.detach().abs().mean()) > 0.35:
                break
        return {"logits": answer}


class OrderByInput(Trunk):
    """Two orders of the same blocks."""

    def forward(self, x: torch.Tensor, task: torch.Tensor) -> torch.Tensor:
        for place in ((0, 1, 2), (1, 0, 2))[int(task[0]) % 2]:
            x = x + self.trunk[place](x)
        return self.out(x)


class DepthByInput(nn.Module):
    """One block that a micro-batch runs once, twice or three times."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again = nn.Linear(WIDE, WIDE), nn.ModuleList([Block(), Block()])
        self.out = nn.Linear(WIDE, 3)

    def forward(self, x: torch.Tensor, task: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(1 + int(task[0]) % 3):
            x = x + self.again[0](x)
        return self.out(x + self.again[1](x))


class AdaptersByTask(Trunk):
    """A frozen trunk, and a small block for each task after each of its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk.requires_grad_(False)
        self.adapters = nn.ModuleList(
            nn.ModuleDict({"a": Block(), "b": Block()}) for _ in self.trunk
        )

    def forward(self, x: torch.Tensor, task: torch.Tensor) -> torch.Tensor:
        for block, adapters in zip(self.trunk, self.adapters, strict=True):
            x = x + block(x)
            x = x + adapters["ab"[int(task[0]) % 2]](x)
        return self.out(x)


class OwnCheckpoints(Trunk):
    """Blocks that the model recomputes itself, and leaves out by the first sample's task."""

    def forward(self, x: torch.Tensor, task: torch.Tensor) -> torch.Tensor:
        for place, block in enumerate(self.trunk):
            if int(task[0]) != place:
                x = x + checkpoint(block, x, use_reentrant=False)
        return self.out(x).div_(2)  # writes into what the model returns


class TwoTowers(Trunk):
    """Queries and documents in one model, each by its own blocks, then a shared one."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.ModuleList(Block() for _ in range(2))
        self.documents = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor, task: torch.Tensor) -> torch.Tensor:
        for block in self.queries if int(task[0]) % 2 else self.documents:
            x = x + block(x)
        return self.out(x + self.trunk[0](x))


class Wav2Vec2(nn.Module):
    """The encoder of transformers' Wav2Vec2, which asks whether fsdp shards it before it drops."""

    def __init__(self) -> None:
        from transformers import Wav2Vec2Config
        from transformers.models.wav2vec2.modeling_wav2vec2 import Wav2Vec2Encoder

        super().__init__()
        config = Wav2Vec2Config(
            hidden_size=8, num_hidden_layers=3, num_attention_heads=2, intermediate_size=8,
            layerdrop=0.4, num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2,
            hidden_dropout=0.0, attention_dropout=0.0, activation_dropout=0.0,
        )  # fmt: skip
        self.frames, self.encoder = nn.Linear(2, 8), Wav2Vec2Encoder(config)
        self.out = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, task: torch.Tensor) -> torch.Tensor:
        hidden = self.encoder(self.frames(x.unflatten(1, (3, 2)))).last_hidden_state
        return self.out(hidden.mean(1))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "heads by task": HeadsByTask,
    "layer drop": LayerDrop,
    "stochastic depth": StochasticDepth,
    "images on some ranks": ImagesOnSomeRanks,
    "frozen tower": FrozenTower,
    "experts as units": ExpertsAsUnits,
    "early exit": EarlyExit,
    "order by input": OrderByInput,
    "depth by input": DepthByInput,
    "adapters by task": AdaptersByTask,
    "own checkpoints": OwnCheckpoints,
    "two towers": TwoTowers,
    "wav2vec2": Wav2Vec2,
}


def build(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[kind]().double()


def samples(count: int = 48) -> list[tuple[dict[str, Any], torch.Tensor]]:
    drawn = torch.Generator().manual_seed(1)
    numbers = torch.randn(count, WIDE, generator=drawn, dtype=torch.float64)
    tasks = torch.randint(3, (count,), generator=drawn)
    return [({"x": x, "task": task}, 2 * x[:3]) for x, task in zip(numbers, tasks, strict=True)]
