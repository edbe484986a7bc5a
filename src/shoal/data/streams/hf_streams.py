"""Shards of a streaming dataset of the library `datasets`, each read by itself.

    load_dataset(…, streaming=True).map(…)  ──shard(n, i)──>  shard i of n: a file, or, where files
                                                              are few, a row group of parquet

`shard_order.py` decides when each shard is read. A shard is a streaming dataset too, with all
operations of the whole one: map functions, filters and formats. Operations that give other samples
on parts (`take`, `interleave_datasets`, indices) prevent sharding, see `DatasetShards.why`.

A shuffle buffer of N samples has N / 64 in each of 64 streams, and draws by (seed, epoch, shard).
The library's state does not contain its samples, so such a shard is resumed from its front.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np

from shoal.base.errors import ConfigError
from shoal.data.loading.dataset_kind import digest_of
from shoal.data.loading.hf_layers import (
    is_streaming,
    iter_layers,
    layer_buffer_samples,
    shuffle_buffer_samples,
)
from shoal.data.loading.sample_seeds import draws_nothing
from shoal.data.streams.shard_order import stream_count
from shoal.data.streams.stream_loader import Gather, ShardedLoader
from shoal.data.streams.stream_order import STREAMS

SPLITS = (
    *("ExamplesIterable", "ArrowExamplesIterable", "RebatchedArrowExamplesIterable"),
    *("TypedExamplesIterable", "FormattedExamplesIterable", "SelectColumnsIterable"),
    *("MappedExamplesIterable", "FilteredExamplesIterable", "BufferShuffledExamplesIterable"),
    *("InterleavedShardsExamplesIterable", "VerticallyConcatenatedMultiSourcesExamplesIterable"),
)
"""Layers of the library that give the same samples shard by shard."""

WORDS = {
    "TakeExamplesIterable": "take",
    "SkipExamplesIterable": "skip",
    "RepeatExamplesIterable": "repeat",
    "CyclingMultiSourcesExamplesIterable": "interleave_datasets",
    "RandomlyCyclingMultiSourcesExamplesIterable": "interleave_datasets",
    "HorizontallyConcatenatedMultiSourcesExamplesIterable": "concatenate_datasets(axis=1)",
}
"""User-visible names of the other layers."""


def _unshardable_operation(dataset: Any) -> str:
    """Return the operation that gives other samples on shards; "" for none."""
    for layer in iter_layers(dataset):
        name = type(layer).__name__
        if name not in SPLITS:
            return WORDS.get(name, name)
        if getattr(layer, "with_indices", False):
            return "map or filter with_indices"
        if getattr(layer, "drop_last_batch", False):
            return "map with drop_last_batch"
    return ""


class DatasetShards:
    """Shards of a streaming dataset, `count` of them; `open` reads one from its front.

    Attributes:
        why: reason that forbids reading it shard by shard; "" if none.
        digest: digest of the files' names: the same on every rank, and after a resume.
        has_places: a shard's own state is its exact position.

    Raises:
        ConfigError: the dataset is one rank's share already.
    """

    def __init__(self, dataset: Any) -> None:
        node = dataset._distributed
        if node is not None and node.world_size > 1:
            raise ConfigError(
                f"data.source: the dataset is the share of rank {node.rank} of {node.world_size} "
                f"already (split_dataset_by_node); try: the dataset before that, which "
                f"run.loader deals to ranks"
            )
        self.draws_nothing = draws_nothing(dataset)
        self.why = _unshardable_operation(dataset)
        if not self.why and dataset.num_shards < STREAMS and hasattr(dataset, "reshard"):
            dataset = dataset.reshard()  # parquet: row groups; reads the files' footers
        self.dataset = dataset
        self.count = int(dataset.num_shards)
        kinds = [_names(layer.kwargs) for layer in iter_layers(dataset) if hasattr(layer, "kwargs")]
        self.digest = digest_of(kinds)
        formats = getattr(dataset._formatting, "is_table", False)
        self.has_places = not (shuffle_buffer_samples(dataset) or formats)

    def open(self, number: int, seed: int, epoch: int, streams: int) -> Any:
        """Open shard `number` as an iterable with `state_dict()` and `load_state_dict()`."""
        shard = self.dataset.shard(num_shards=self.count, index=number)
        for depth, layer in enumerate(iter_layers(shard)):
            below: Any = getattr(layer, "ex_iterable", None)
            if type(below).__name__ == "InterleavedShardsExamplesIterable":
                layer.ex_iterable = below.ex_iterable  # of one shard; it would sleep 1 s at its end
            if size := layer_buffer_samples(layer):
                key = f"{seed} {epoch} {number} {depth}".encode()
                drawn = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")
                layer.generator = np.random.default_rng(drawn)
                layer.buffer_size = max(1, size // streams)
        return shard


def _names(value: Any) -> Any:
    """Replace files by name and last folder, so that data may be moved; keep other values."""
    if isinstance(value, str):
        return value.split("::")[-1].rsplit("/", 2)[-2:]
    if isinstance(value, dict):
        return {str(key): _names(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_names(one) for one in value]
    return value


def open_sharded_loader(
    dataset: Any, gather: Gather, notice: Callable[[str], None], settings: dict[str, Any]
) -> ShardedLoader | None:
    """Return the loader of a sharded streaming dataset; None for all others.

    Args:
        notice: called with a line if every rank reads all of a stream.
        settings: keyword arguments of a loader.
    """
    if not is_streaming(dataset):
        return None
    shards, degree = DatasetShards(dataset), settings["degree"]
    if shards.why:
        lines = [f"each of {degree} ranks reads all of it"] if degree > 1 else []
        if buffer := shuffle_buffer_samples(dataset):
            lines.append(
                f"a resume leaves out up to {buffer} samples, those in its shuffle buffer, which "
                f"the library does not keep"
            )
        near = "try: the same without it, or with shuffle() before it"
        told = f"data.source: a stream with {shards.why} is read as one: {', and '.join(lines)}"
        if lines:
            notice(f"{told}; {near}")
        return None
    loader = ShardedLoader(shards, gather=gather, **settings)
    if not loader.is_whole:
        return loader
    streams = stream_count(shards.count)
    of = "file or row group" if shards.count == 1 else "files or row groups"
    notice(
        f"data.source: each of {degree} ranks reads all of a stream of {shards.count} {of}, which "
        f"are dealt as {streams} streams; try: more files, or a data-parallel degree that "
        f"divides {streams}"
    )
    return loader
