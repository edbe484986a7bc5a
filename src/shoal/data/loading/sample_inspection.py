"""Inspection of a dataset's first samples before training: their kind, and a joined batch.

No function here advances a stream or a generator: training reads the samples again.
"""

from __future__ import annotations

import copy
from itertools import islice
from typing import Any

import torch
from torch.utils.data import IterableDataset

from shoal.base.errors import ConfigError
from shoal.data.loading.dataset_kind import Collate, is_indexed, join_samples
from shoal.data.loading.sample_seeds import preserved_rng


def sample_kind(dataset: Any) -> str:
    """Return the kind of inputs of a dataset's first sample: images, numbers, or tokens.

    images   floats of two dims or more · numbers  floats of fewer
    tokens   whole numbers, and whatever is unknown: an iterable, which is not read, or a sample
             that is no tensor or fails
    The first sample is loaded; the generators are put back afterwards.
    """
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        return "tokens"
    try:
        with preserved_rng():
            first = dataset[0]
        inputs = torch.as_tensor(first[0] if isinstance(first, tuple | list) else first)
    except Exception:
        return "tokens"
    if not inputs.is_floating_point():
        return "tokens"
    return "images" if inputs.ndim > 1 else "numbers"


def first_samples(data: Any, collate: Collate | None, count: int = 4) -> Any:
    """Join the first `count` samples to a batch; data and generators stay as they were.

    Args:
        data: map-style, or an iterable with `state_dict()`.

    Raises:
        ConfigError: the iterable cannot be reset; also the errors of `join_samples` and of the
        dataset.
    """
    with preserved_rng():
        if is_indexed(data):
            samples = [data[place] for place in range(min(count, len(data)))]
        elif hasattr(data, "state_dict"):
            state = copy.deepcopy(data.state_dict())
            try:
                samples = list(islice(iter(data), count))
            finally:
                data.load_state_dict(state)
        else:
            raise ConfigError(
                "data.source: can only be iterated, so no sample can be looked at without taking "
                "it; try: a dataset with __getitem__ and __len__, or with state_dict()"
            )
    return join_samples(samples, collate, "the first samples")
