"""The first samples of a dataset, to look at, without taking them from the run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset

from shoal.data.loading.sample_inspection import first_samples


class Counted(IterableDataset):  # type: ignore[type-arg]
    """A stream that knows its length, as many have; torch gives it a `__getitem__` that raises."""

    def __init__(self) -> None:
        self.at = 0

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.at < len(self):
            self.at += 1
            yield torch.tensor(self.at)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def test_a_stream_with_a_length_is_read_and_put_back() -> None:
    stream = Counted()
    assert first_samples(stream, None).tolist() == [1, 2, 3, 4]
    assert stream.at == 0
