"""Measure the activation memory of a model that cannot run on shapes alone, in a forked process.

A copy of this process runs the model on 2 and on 4 samples and ends. So buffers, generators, hooks
and all other state of the model stay as they were. It takes at most a share of the machine's memory
and a minute; a model that needs more, or collectives, is not measured.
"""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, NamedTuple

from torch import nn

from shoal.base.estimates.facts import FREE, STATE_BYTES, read_machine_facts
from shoal.data.loading.dataset_kind import Collate, is_indexed, join_samples
from shoal.trainer.run_folder.resume_checks import read_in_fork
from shoal.trainer.step.call_contract import split_batch
from shoal.trainer.step.saved_activations import count_saved_bytes

SAMPLES = (2, 4)
"""Samples of the two passes: their difference shows the bytes per sample."""

AT_MOST_S = 60.0


class PassBytes(NamedTuple):
    """Bytes that autograd saves in a pass: `fixed`, and `sample` each; number of `weights`."""

    fixed: int
    sample: int
    weights: int

    def largest(self, sizes: Sequence[int], memory_bytes: float) -> int:
        """Return the largest of some sizes that leaves half of the memory free; 0: none does.

        >>> PassBytes(0, 2**20, 0).largest([1024, 512], 2**31)
        512
        """
        left = FREE * memory_bytes - STATE_BYTES * self.weights
        # Gradients of activations lie beside them in the backward pass.
        fitting = [size for size in sizes if 2 * (self.fixed + size * self.sample) <= left]
        return max(fitting, default=0)


Trial = Callable[[], PassBytes | None]


def run_trial_passes(
    make: Callable[[], nn.Module], data: Any, collate: Collate | None, call: str
) -> PassBytes | None:
    """Run a model on its data's first samples, in a copy of this process.

    Args:
        make: returns the model on the host; is called in the copy.
        data: of the run, map-style or iterable.
        collate: joins samples to a batch.
        call: as `call_model`.

    Returns:
        The measured bytes; None if the trial failed, took too long or needs another process.
    """

    def run(_data: Any) -> list[int]:
        _limit_memory()
        module, most = make(), max(SAMPLES)
        samples = (
            [data[place] for place in range(min(most, len(data)))]
            if is_indexed(data)
            else list(islice(iter(data), most))
        )
        kept = []
        for count in SAMPLES:
            batch = join_samples(
                [samples[n % len(samples)] for n in range(count)], collate, "a trial"
            )
            kept.append(count_saved_bytes(module, split_batch(batch)[0], call))
        sample = max(kept[1] - kept[0], 0) // (SAMPLES[1] - SAMPLES[0])
        weights = sum(weight.numel() for weight in module.parameters())
        return [max(kept[0] - SAMPLES[0] * sample, 0), sample, weights]

    found = read_in_fork(run, data, workers=1, at_most_s=AT_MOST_S)
    return PassBytes(*found) if found else None


def _limit_memory() -> None:
    """Limit this process's memory, so that it fails before the system kills other processes."""
    with contextlib.suppress(ValueError, OSError):
        most = int(FREE * read_machine_facts().memory_bytes)
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
