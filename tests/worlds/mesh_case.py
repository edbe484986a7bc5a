"""A contrastive loss that gathers over `run.mesh`, with gradients: on ranks, and in plain torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.nn import functional as F

import shoal
from guards import Lines
from shoal.fabric import World

ROWS, TOKENS, STEPS = 8, 16, 3


class Block(nn.Module):
    """A block of a transformer, whose attention sees all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, tokens, _ = x.shape
        heads = self.qkv(self.norm(x)).reshape(rows, tokens, 3, 2, 4).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(heads[0], heads[1], heads[2])
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, tokens, 8))
        return x + self.down(F.gelu(self.up(x)))


class Encoder(nn.Module):
    """Token ids to one vector per sample."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(31, 8)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 6)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.table(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden.mean(1))


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = Encoder().double()
    return net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def tokens_of(step: int) -> torch.Tensor:
    return torch.randint(31, (ROWS, TOKENS), generator=torch.Generator().manual_seed(step))


def contrast(own: torch.Tensor, keys: torch.Tensor, first: int) -> tuple[torch.Tensor, int]:
    """Return the sum over own samples: each is told from all others by the square of its key."""
    scores = F.normalize(own, dim=-1) @ F.normalize(keys.square() + keys, dim=-1).T / 0.2
    places = first + torch.arange(len(own))
    return F.cross_entropy(scores, places, reduction="sum"), len(own)


def plain(world: World) -> dict[str, Any]:
    net, optimizer = made()
    losses = []
    for step in range(STEPS):
        out = net(tokens_of(step))
        total, count = contrast(out, out, 0)
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()
        losses.append(float(total / count))
    weights = {name: one.flatten().tolist() for name, one in net.state_dict().items()}
    return {"losses": losses, "weights": weights}


def trained(world: World, layout: Any) -> dict[str, Any]:
    """Train under a layout; the loss gathers over all of its data-parallel axes."""
    net, optimizer = made()
    axes: tuple[str, ...] = ()

    def loss(out: torch.Tensor, _targets: Any) -> Any:
        if not axes:
            return contrast(out, out, 0)
        parts = DTensor.from_local(out, mesh[axes], [Shard(0)] * len(axes))
        keys = parts.full_tensor(grad_placements=[Partial()] * len(axes))
        place = 0
        for axis in axes:
            place = place * mesh[axis].size() + mesh.get_local_rank(axis)
        return contrast(out, keys, place * len(out))

    with Lines() as heard:
        whole = tokens_of(0)
        run = shoal.parallelize(
            net, optimizer, loss, layout, world=world, precision="fp64", coupled=True,
            batch=ROWS, micro_batch=ROWS // world_shares(layout), sample=(whole, whole),
        )  # fmt: skip
        mesh = run.mesh
        axes = tuple(axis for axis in mesh.mesh_dim_names or () if axis.startswith("dp"))
        losses = []
        for step in range(STEPS):
            own = tokens_of(step).chunk(run.program.data.size)[run.program.data.rank]
            losses.append(run.step((own, own)).loss)
        weights = {name: one.flatten().tolist() for name, one in run.state_dict().items()}
    run.guards.close()
    for undo in run.program.on_close:
        undo()
    return {"losses": losses, "weights": weights, "lines": heard.lines}


def world_shares(layout: dict[str, int]) -> int:
    return layout.get("dp_replicate", 1) * layout.get("dp_shard", 1)
