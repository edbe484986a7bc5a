"""Whole tensors from every rank's part: in however many messages, and whoever holds nothing."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from shoal.base.plans.tensor_shards import Shard
from shoal.parallel.build import full_state
from shoal.parallel.build.full_state import assemble_tensors

RANKS = 3


class Together:
    """What the ranks, threads of this process, say to each other."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(RANKS, timeout=20)
        self.said: list[Any] = [None] * RANKS
        self.messages: list[int] = []

    def all(self, rank: int, what: Any) -> list[Any]:
        self.said[rank] = what
        self.barrier.wait()
        told = list(self.said)
        self.barrier.wait()
        return told


class Rank:
    """As much of a `World` as is asked for."""

    device = torch.device("cpu")
    size = RANKS

    def __init__(self, rank: int, together: Together) -> None:
        self.rank, self.together = rank, together
        self.is_first = rank == 0

    def gather_json(self, message: Any) -> list[Any]:
        return self.together.all(self.rank, message)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.rank == 0:
            self.together.messages.append(tensor.numel())
        return torch.stack(self.together.all(self.rank, tensor))

    def gather(self, tensor: torch.Tensor) -> torch.Tensor | None:
        rows = self.all_gather(tensor)
        return rows if self.is_first else None


WHOLE = {
    "rows": torch.arange(21.0).reshape(7, 3),
    "column": torch.arange(12.0).reshape(3, 4) + 100,
    "equal": torch.arange(5.0) + 200,
    "one rank's": torch.arange(4.0) + 300,
    "twice": torch.arange(6.0) + 400,
    "narrow": torch.arange(6, dtype=torch.int32),
}
Boxes = tuple[tuple[tuple[int, int], ...], ...]
HELD: dict[str, list[Boxes | None]] = {
    "rows": [(((0, 3), (0, 3)),), (((3, 6), (0, 3)),), (((6, 7), (0, 3)),)],
    # Rank 1 holds two slices, rank 2 none of it.
    "column": [(((0, 3), (1, 2)),), (((0, 3), (0, 1)), ((0, 3), (2, 4))), ()],
    "equal": [(((0, 5),),), (((0, 5),),), (((0, 5),),)],
    "one rank's": [None, (((0, 4),),), None],
    "twice": [(((0, 3),),), (((0, 3),),), (((3, 6),),)],
    "narrow": [(((0, 2),),), (((2, 4),),), (((4, 6),),)],
}


def parts_of(rank: int) -> dict[str, tuple[torch.Tensor, Shard]]:
    found = {}
    for name, tensor in WHOLE.items():
        boxes = HELD[name][rank]
        if boxes is None:
            continue
        cut = [tensor[tuple(slice(*span) for span in box)].reshape(-1) for box in boxes]
        part = torch.cat(cut) if cut else tensor.new_empty(0)
        kind = str(tensor.dtype).removeprefix("torch.")
        found[name] = (part, Shard(name, tuple(tensor.shape), kind, boxes))
    return found


@pytest.mark.parametrize("only_first", [False, True])
@pytest.mark.parametrize(("message_bytes", "messages"), [(2**20, 2), (100, 3), (1, 5)])
def test_every_rank_gets_all_of_it_or_the_first_alone(
    monkeypatch: pytest.MonkeyPatch, message_bytes: int, messages: int, only_first: bool
) -> None:
    monkeypatch.setattr(full_state, "MESSAGE_BYTES", message_bytes)
    together = Together()
    found: list[dict[str, torch.Tensor]] = [{} for _ in range(RANKS)]

    def work(rank: int) -> None:
        world: Any = Rank(rank, together)
        found[rank] = assemble_tensors(parts_of(rank), world, only_first=only_first)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for rank in range(RANKS):
        if rank and only_first:
            assert found[rank] == {}
            continue
        assert set(found[rank]) == set(WHOLE)
        for name, tensor in WHOLE.items():
            assert torch.equal(found[rank][name], tensor), (rank, name)
    assert len(together.messages) == messages, "what all hold alike does not travel"


def test_of_equal_replicas_one_rank_sends() -> None:
    """Rank 0 holds of "twice" what rank 1 holds: a message is no longer than one rank's part."""
    together = Together()
    names = ("twice",)

    def work(rank: int) -> None:
        assemble_tensors({n: parts_of(rank)[n] for n in names}, Rank(rank, together))  # type: ignore[arg-type]

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert together.messages == [3]
