"""Check that all islands of a run hold the same data.

    island 0   samples 0 1 2 3 │ 8 9 …        one stream, dealt by sample numbers: number 5 must be
    island 1            4 5 6 7 │ …            the same sample on every island

Each island sends its dataset's length and fingerprints of some samples, once, before the first
round. Islands with different data would train in a false order, and island 0, which validates for
all, would report a loss on data that the others never saw.

Integers and texts must be equal. Of floating numbers mean and root mean square are compared, since
two machines may decode an image to other last bits.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from shoal.base.errors import ConfigError
from shoal.data.loading.dataset_kind import digest_of, is_indexed
from shoal.data.loading.sample_seeds import seeded_rng
from shoal.trainer.islands.island_join import MEET_S, IslandConnection
from shoal.trainer.run_folder.resume_checks import read_in_fork, spread_indices

SAMPLES, SAMPLES_S = 64, 1.0
"""Samples that are compared, and seconds that an island may spend on reading them."""

CLOSE = 1e-3
"""Relative difference of means that different decoders may cause."""


def check_same_data(
    joined: IslandConnection, parts: Mapping[str, tuple[str, Any]], workers: int
) -> None:
    """Refuse islands whose data differ; every rank of every island calls it.

    Args:
        joined: the connected islands.
        parts: key of [data] → (the source that the user named, its dataset, None: there is none).
            For `data.validation` only islands that have some are compared.
        workers: processes that read the data for the run.

    Raises:
        ConfigError: names the key, two islands and what differs; the same on all ranks.
    """
    inner = joined.inner
    own = {}
    if inner.rank == 0:
        for key, (name, dataset) in parts.items():
            if is_indexed(dataset):
                own[key] = {"source": name, **fingerprint_dataset(dataset, workers)}
    message = json.dumps(inner.broadcast_json(own)).encode()
    told = [json.loads(one) for one in joined.plane.gather(message, deadline_s=MEET_S)]
    for key in parts:
        for island, other in enumerate(told[1:], 1):
            if (
                key in told[0]
                and key in other
                and (why := describe_difference(told[0][key], other[key]))
            ):
                raise ConfigError(_format_difference(key, island, told[0][key], other[key], why))


def _format_difference(
    key: str, island: int, first: dict[str, Any], other: dict[str, Any], why: str
) -> str:
    sources = f"{other['source']} on island {island}, {first['source']} on island 0"
    reason, near = "islands take turns in one stream of samples", ", or islands.data=own"
    if key == "data.validation":
        reason, near = "island 0 validates for all", ""
    return f"{key}: {why} ({sources}): {reason}; try: the same data on all islands{near}"


def fingerprint_dataset(dataset: Any, workers: int) -> dict[str, Any]:
    """Return the fingerprint of a dataset: {"samples": length, "seen": [[number, …], …]}.

    Each entry of `seen` is [sample number, digest of the exact values, [mean, rms, …] of the
    floats]. It is empty for data that differ at every reading.
    """
    return {"samples": len(dataset), "seen": read_in_fork(_fingerprint_samples, dataset, workers)}


def _fingerprint_samples(dataset: Any) -> list[Any]:
    def entry(index: int) -> list[Any]:
        with seeded_rng("islands", index):
            sums = list[float]()
            return [index, digest_of(_split_exact_values(dataset[index], sums)), sums]

    until_s, seen = time.monotonic() + SAMPLES_S, list[Any]()
    try:
        for index in spread_indices(len(dataset), SAMPLES):
            seen.append(entry(index))
            if len(seen) == 1 and not _is_same_sample(seen[0], entry(index)):
                return []
            if time.monotonic() > until_s:
                break
    except Exception:  # the steps meet the error again, and report it
        return []
    return seen


def _split_exact_values(value: Any, sums: list[float]) -> Any:
    """Return a sample without its floating numbers; append their mean and rms to `sums`."""
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        value = value.detach().to("cpu", torch.float64).numpy()
    if isinstance(value, np.ndarray | np.floating) and value.dtype.kind == "f":
        numbers = np.asarray(value, dtype=np.float64)
        rms = math.sqrt(float(np.square(numbers).mean())) if numbers.size else 0.0
        sums += [float(numbers.mean()) if numbers.size else 0.0, rms]
        return f"floats {list(numbers.shape)}"
    if isinstance(value, float):
        sums.append(value)
        return "float"
    if isinstance(value, Mapping):
        return {
            key: _split_exact_values(part, sums) for key, part in sorted(value.items(), key=repr)
        }
    if isinstance(value, list | tuple):
        return [_split_exact_values(part, sums) for part in value]
    return value.item() if isinstance(value, np.generic) else value


def describe_difference(first: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Return how two fingerprints differ, as text; "" if they agree.

    >>> describe_difference({"samples": 8, "seen": []}, {"samples": 9, "seen": []})
    '9 samples, and 8'
    """
    if first["samples"] != other["samples"]:
        return f"{other['samples']} samples, and {first['samples']}"
    pairs = list(zip(first["seen"], other["seen"], strict=False))
    unlike = [one[0] for one, two in pairs if not _is_same_sample(one, two)]
    if not unlike:
        return ""
    return (
        f"{len(unlike)} of {len(pairs)} samples that were compared differ, sample {unlike[0]} first"
    )


def _is_same_sample(one: list[Any], two: list[Any]) -> bool:
    if one[:2] != two[:2] or len(one[2]) != len(two[2]):
        return False
    pairs = zip(one[2], two[2], strict=True)
    scale = max((abs(number) for number in (*one[2], *two[2]) if math.isfinite(number)), default=0)
    return all(
        a == b or (a != a and b != b) or abs(a - b) <= CLOSE * max(abs(a), abs(b), 0.1 * scale)
        for a, b in pairs
    )
