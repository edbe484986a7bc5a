"""Data ranks as threads of one process, for loaders that talk to each other in every step."""

from __future__ import annotations

import threading
from typing import Any

from shoal.data.streams.stream_loader import ShardedLoader, gather_places


class Ranks:
    """Data ranks as threads of this process, one at work at a time: they share its generators."""

    def __init__(self, degree: int, shards: list[Any], **settings: Any) -> None:
        self.words: list[Any] = [None] * degree
        self.barrier = threading.Barrier(degree, timeout=60)
        self.at_work = threading.Lock()
        given: dict[str, Any] = {"batch": 8, "micro_batch": 2, "seed": 3, **settings}
        self.loaders = [
            ShardedLoader(one, gather=self.teller(rank), rank=rank, degree=degree, **given)
            for rank, one in enumerate(shards)
        ]

    def teller(self, rank: int) -> Any:
        def gather(word: Any) -> list[Any]:
            self.words[rank] = word
            self.at_work.release()
            try:
                self.barrier.wait()
                told = list(self.words)
                self.barrier.wait()
            finally:
                self.at_work.acquire()
            return told

        return gather

    def epoch(self, steps: int = 1000) -> list[list[Any]]:
        """The step batches of each rank, to the end of the epoch or so many."""
        taken: list[list[Any]] = [[] for _ in self.loaders]

        def run(rank: int) -> None:
            with self.at_work:
                for batch in self.loaders[rank]:
                    taken[rank].append(batch)
                    if len(taken[rank]) == steps:
                        return

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(taken))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert len({len(one) for one in taken}) == 1
        return taken


def alone(word: Any) -> list[Any]:
    """What one rank hears of all."""
    return [word]


def in_order(taken: list[list[Any]]) -> list[Any]:
    """(index, start, stop, values) of the micro-batches of all ranks, as they lie in the stream."""
    found = [
        (m.index, m.start, m.stop, m.value.tolist())
        for batches in taken
        for batch in batches
        for m in batch.micro_batches
    ]
    return sorted(found, key=lambda m: m[1])


def numbers(taken: list[list[Any]]) -> list[int]:
    return [int(value[0]) for *_, values in in_order(taken) for value in values]


def merged(states: list[dict[str, Any]]) -> dict[str, Any]:
    """What a checkpoint keeps of the ranks' states, as `RunLoaders.gathered` does."""
    words = [state["iterable"].get("places", {}) for state in states]
    return gather_places(states[0], lambda _: words)
