"""What the checkpoint tests share: a small state with every kind of tensor, and its save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from shoal.base.plans.tensor_shards import Shard
from shoal.checkpoint.save.write import Piece, SavedCheckpoint, save
from shoal.fabric import World
from shoal.fabric.rendezvous.process_info import ProcessInfo

RECORD = {"position": 4096, "seed": 7, "lr": 0.1, "betas": [0.9, 0.95], "note": "größer"}


class Heard:
    """An `emit` that remembers."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, event: str, *, step: int | None = None, **fields: Any) -> None:
        self.events.append((event, {"step": step, **fields}))

    def named(self, name: str) -> list[dict[str, Any]]:
        """Fields of all events of one name."""
        return [fields for event, fields in self.events if event == name]


def alone() -> World:
    """A world of one process."""
    return World(ProcessInfo(), torch.device("cpu"), None)


def state(step: int) -> dict[str, torch.Tensor]:
    """Tensors whose values tell their step; odd sizes, all kinds of dtype, scalar and empty."""
    generator = torch.Generator().manual_seed(step)
    return {
        "model.up.weight": torch.randn(5, 7, generator=generator),
        "model.norm.weight": torch.randn(7, generator=generator).bfloat16(),
        "model.tokens": torch.randint(-9, 9, (3, 2, 4), generator=generator),
        "model.mask": torch.rand(9, generator=generator) > 0.5,
        "model.small": torch.randn(3, generator=generator).to(torch.float8_e4m3fn),
        "optimizer.step": torch.tensor(float(step), dtype=torch.float64),
        "optimizer.count": torch.tensor(step, dtype=torch.int32),
        "optimizer.empty": torch.zeros(0, 4),
        "optimizer.wave": torch.randn(2, dtype=torch.complex64, generator=generator),
    }


def whole(name: str, tensor: torch.Tensor) -> Shard:
    """The shard that is all of a tensor."""
    return Shard.whole(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def pieces(tensors: dict[str, torch.Tensor]) -> list[Piece]:
    """Whole tensors as one rank offers them."""
    return [Piece(whole(name, tensor), tensor) for name, tensor in tensors.items()]


def save_step(
    root: Path, step: int, emit: Any = None, *, keep: int = 9, **more: Any
) -> SavedCheckpoint:
    """Save `state(step)` from a world of one."""
    return save(
        root, step, pieces(state(step)), RECORD, alone(), emit or Heard(), keep=keep, **more
    )


def wanted_all(manifest: Any) -> list[Shard]:
    """Every tensor of a manifest, whole."""
    return [Shard.whole(n, t.shape, t.dtype) for n, t in manifest.tensors.items()]


def assert_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Equal names, dtypes, shapes and bits."""
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype, name
        assert got[name].shape == tensor.shape, name
        flat = tensor.contiguous().reshape(-1).view(torch.uint8)
        assert torch.equal(got[name].reshape(-1).view(torch.uint8), flat), name


def cut(tensor: torch.Tensor, degree: int, rank: int, dim: int = 0) -> tuple[Any, torch.Tensor]:
    """Box and data of rank's share when a dim is cut in `degree` parts, the first ones larger."""
    n = tensor.shape[dim]
    edges = [n * r // degree for r in range(degree + 1)]
    box = [(0, size) for size in tensor.shape]
    box[dim] = (edges[rank], edges[rank + 1])
    return tuple(box), tensor.narrow(dim, edges[rank], edges[rank + 1] - edges[rank])
