"""This rank's micro-batches of a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shoal.base.errors import ConfigError
from shoal.fabric import start_world
from shoal.trainer.step.rank_share import list_own_micro_batches

UNEQUAL = [(torch.zeros(4, 2), torch.zeros(3)), (torch.zeros(2, 2), torch.zeros(3))]


@pytest.mark.parametrize("cut", [0, 3, 4, 9])
def test_a_pair_of_tensors_is_cut_as_any_other_batch(cut: int) -> None:
    """The usual (inputs, targets) goes whole where nothing is cut; a list takes the longer way."""
    x, y = torch.arange(8.0).view(4, 2), torch.arange(4)
    world = start_world({})
    pair = list_own_micro_batches((x, y), cut, world)
    listed = list_own_micro_batches([x, y], cut, world)
    assert [place for place, _ in pair] == [place for place, _ in listed]
    for (_, (ours, labels)), (_, (theirs, others)) in zip(pair, listed, strict=True):
        assert torch.equal(ours, theirs)
        assert torch.equal(labels, others)


@pytest.mark.parametrize("batch", UNEQUAL)
def test_a_pair_of_unequal_lengths_is_refused(batch: Any) -> None:
    with pytest.raises(ConfigError, match="samples along dim 0"):
        list_own_micro_batches(batch, 0, start_world({}))
