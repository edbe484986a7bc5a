"""How a batch is cut along its samples: lists, objects, shared tensors, and what is refused."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch

from shoal.base.errors import ConfigError
from shoal.trainer.batches.batch_split import (
    batch_length,
    read_columns,
    split_into_micro_batches,
    target_length,
)
from shoal.trainer.step.call_contract import mean_of_samples, split_batch


def images(count: int, channels: int = 3) -> list[torch.Tensor]:
    return [torch.full((channels, 2 + n, 4), float(n)) for n in range(count)]


def boxes(*counts: int) -> list[dict[str, torch.Tensor]]:
    return [{"boxes": torch.zeros(one, 4), "id": torch.tensor(one)} for one in counts]


def split(batch: Any, size: int, known: Any = None) -> list[Any]:
    return list(split_into_micro_batches(batch, size, known))


def refusal(batch: Any, size: int = 2) -> str:
    with pytest.raises(ConfigError) as caught:
        split(batch, size)
    assert "\n" not in str(caught.value)
    return str(caught.value)


class Samples:
    """As a user writes it: samples and a table that all of them share."""

    def __init__(self, x: torch.Tensor, table: torch.Tensor) -> None:
        self.x, self.table = x, table

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, rows: slice) -> Any:
        return {"x": self.x[rows], "table": self.table}, self.x[rows]


def test_a_list_with_an_item_per_sample_is_cut() -> None:
    parts = split((images(5), torch.arange(5)), 2)
    assert [len(inputs) for inputs, _ in parts] == [2, 2, 1]
    assert [inputs[0].shape[1] for inputs, _ in parts] == [2, 4, 6]
    assert [targets.tolist() for _, targets in parts] == [[0, 1], [2, 3], [4]]


def test_a_list_of_columns_is_cut_inside() -> None:
    """As torch's collate function makes of samples that are tuples, and of two crops."""
    x = torch.arange(8.0).reshape(8, 1)
    for batch in ([[x, x + 1], x], ([x, torch.zeros(8, 3, 4)], x), {"crops": [x, x], "y": x}):
        parts = split(batch, 3)
        assert [batch_length(one) for one in parts] == [3, 3, 2]
    assert len(split([[x, x + 1], x], 3)[0][0]) == 2
    # two samples and two crops: columns, as before there were lists of samples
    (first, _), (second, _) = split([[x[:2], x[2:4]], x[:2]], 1)
    assert [one.tolist() for one in (*first, *second)] == [[[0]], [[2]], [[1]], [[3]]]


def test_targets_of_a_detector_are_a_list_of_dicts() -> None:
    parts = split((images(3), boxes(3, 3, 3)), 2)  # three rows everywhere: the dicts decide
    assert [(len(inputs), len(targets)) for inputs, targets in parts] == [(2, 2), (1, 1)]
    assert [one["id"].item() for one in split((images(2), boxes(1, 4)), 1)[1][1]] == [4]
    assert split(([], []), 2) == []
    same = boxes(2, 1, 5)
    assert split((same, same), 2)[0][0] == same[:2]
    assert target_length(boxes(2, 1, 5)) == 3
    loss = mean_of_samples(lambda _, targets: torch.ones(()))
    assert loss(None, boxes(2, 1)) == (torch.tensor(2.0), 2)


def test_a_list_that_fits_both_ways_is_read_as_in_another_batch() -> None:
    batch = (images(3), torch.arange(3))
    assert len(split(batch, 3)) == 1
    line = refusal(batch)
    assert line.startswith(
        "batch: a list of 3 tensors of 3 rows each in batch[0] may be 3 samples, or 3 columns of "
        "all samples; try: a tuple for columns; for samples a batch of a class with __len__"
    )
    known: dict[str, str] = {}
    split((images(5), torch.arange(5)), 2, known)
    assert known == {"[0]": "samples"}
    assert [len(inputs) for inputs, _ in split(batch, 2, known)] == [2, 1]
    columns = split((tuple(torch.zeros(3, n) for n in range(3)), torch.arange(3)), 2)
    assert [one[0][2].shape for one in columns] == [(2, 2), (1, 2)]


def test_an_object_says_its_samples_and_what_they_share() -> None:
    batch = Samples(torch.arange(8.0).reshape(8, 1), torch.zeros(8, 2))
    assert batch_length(batch) == 8
    for inputs, targets in split(batch, 4):
        assert inputs["table"].shape == (8, 2)
        assert torch.equal(inputs["x"], targets)
    assert split_batch(batch) == (batch, batch)
    pair = split((batch, torch.arange(8)), 3)
    assert [len(targets) for _, targets in pair] == [3, 3, 2]


def test_a_first_dim_of_one_is_of_all_samples() -> None:
    """As torch broadcasts it: a mask or a bias of attention."""
    bias, x = torch.zeros(1, 2, 2), torch.zeros(5, 2)
    assert [one["bias"].shape[0] for one in split({"bias": bias, "x": x}, 2)] == [1, 1, 1]
    assert "samples along dim 0" in refusal((x, torch.zeros(1)))
    assert "samples along dim 0" in refusal((x, torch.zeros(1, 2)))  # targets of a pair
    assert [one["x"].shape[0] for one in split({"bias": bias, "x": x[:1]}, 2)] == [1]


def test_batches_whose_samples_cannot_be_told() -> None:
    x = torch.zeros(8, 3)
    line = refusal({"x": x, "table": torch.zeros(11, 3)})
    assert "tensors of 8 and 11 samples along dim 0 (shape [11, 3]) in batch['table']" in line
    assert line.endswith("returns those samples and what all of them share")
    assert "a list of 5 in batch[0] beside 8 samples" in refusal((images(5), x))
    assert "lists of 5 in batch[0], 3 in batch[1] have no number of samples in common" in refusal(
        (images(5, 4), boxes(1, 2, 4))
    )
    packed = torch.nn.utils.rnn.pack_sequence([x[:3], x[:1]])
    assert "samples along dim 0" in refusal((packed, x[:2]))
    assert "batch: 8 samples, and 3 in batch[1]" in refusal((Samples(x, x), x[:3]))


def test_an_object_that_cannot_be_cut_is_named() -> None:
    class Rows:
        def __len__(self) -> int:
            return 4

        def __getitem__(self, place: int) -> int:
            return range(4)[int(place)]

    line = refusal((Rows(), torch.zeros(4)))
    assert line.startswith("batch: Rows[0:2] raised TypeError: ")
    assert "__getitem__(slice)" in line

    class Longer(Samples):
        def __getitem__(self, rows: slice) -> Any:
            return self

    assert "Longer[0:2] has 4 samples by len()" in refusal(Longer(torch.zeros(4, 1), torch.ones(1)))


def test_a_whole_of_parts_is_joined_again() -> None:
    """Samples of a proof, one by one, make one batch."""
    batch = (images(5), {"y": torch.arange(5), "names": list("abcde"), "scale": 2.0})
    columns = read_columns(batch)
    joined = columns.join([columns.cut(n, n + 1) for n in (4, 0, 2)])
    assert [one.shape[1] for one in joined[0]] == [6, 2, 4]
    assert joined[1]["y"].tolist() == [4, 0, 2]
    assert joined[1]["names"] == ["e", "a", "c"]
    assert joined[1]["scale"] == 2.0


def test_a_named_tuple_stays_one() -> None:
    pair = namedtuple("pair", "x y")(images(4), torch.arange(4))
    assert [type(one) for one in split(pair, 2)] == [type(pair)] * 2
