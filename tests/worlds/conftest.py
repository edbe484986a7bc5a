"""Fixtures: a world of 2 and a world of 4 processes, each started at its first use."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent / "faults"))
sys.path.insert(0, str(Path(__file__).parent / "resumes"))

from worlds import Islands, Members, close_all


class Worlds:
    """Gives the world of a size, starting it when first asked; a broken one is started anew."""

    def __init__(self, log_folder: Path) -> None:
        self.log_folder = log_folder
        self.by_size: dict[int, Members] = {}

    def __call__(self, size: int) -> Members:
        world = self.by_size.get(size)
        if world is None or any(p.poll() is not None for p in world.processes):
            self.by_size[size] = world = Members(size, self.log_folder)
        return world


@pytest.fixture(scope="session")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worlds]:
    made = Worlds(tmp_path_factory.mktemp("worlds"))
    yield made
    close_all(list(made.by_size.values()))


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """As in the processes of a world: sums in the same order, and none that spins beside them."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def planted(worlds: Worlds) -> Callable[..., list[dict[str, Any]]]:
    """Gives every rank's report on a planted bug: trained once for all who read of it."""
    known: dict[str, list[dict[str, Any]]] = {}

    def ask(size: int, call: str, **asked: Any) -> list[dict[str, Any]]:
        key = f"{size} {call} {sorted(asked.items())}"
        if key not in known:
            known[key] = worlds(size).call(call, **asked)
        return known[key]

    return ask


@pytest.fixture(scope="session")
def islands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int, int], Islands]]:
    """Gives so many islands of so many processes, starting them when first asked."""
    made: dict[tuple[int, int | tuple[int, ...]], Islands] = {}

    def ask(count: int, size: int | tuple[int, ...] = 1) -> Islands:
        if (count, size) not in made:
            made[count, size] = Islands(count, size, tmp_path_factory.mktemp("islands"))
        return made[count, size]

    yield ask
    close_all([world for one in made.values() for world in one.worlds])
