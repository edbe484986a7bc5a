"""Runs a script of one process with the draws that Shoal's run of it has, and gives what it ends with.

A plain script shuffles and draws by torch's generator; a run by its seed, the number of the step and
of the sample, so that any number of processes draws the same. To compare what they compute, the plain
one gets the run's draws here: the order of samples, masks of dropout, noise. Nothing else is changed.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import BatchSampler, RandomSampler

from shoal.data.loading.sample_order import permute
from shoal.parallel.dropout_rng import derive_seed

Ended = tuple[dict[str, Any], str]
"""The names that a script leaves, and what it printed."""

Patch = contextlib.AbstractContextManager[Any]


def run(script: Path, *arguments: str, given: Sequence[Patch] = ()) -> Ended:
    """Run it as `python SCRIPT ARGUMENTS` in this process, under the patches that are `given`."""
    told = io.StringIO()
    argv = mock.patch.object(sys, "argv", [str(script), *arguments])
    with contextlib.ExitStack() as around:
        for one in (argv, contextlib.redirect_stdout(told), *given):
            around.enter_context(one)
        around.callback(torch.set_default_dtype, torch.get_default_dtype())
        return runpy.run_path(str(script), run_name="__main__"), told.getvalue()


def order() -> Patch:
    """What `shuffle=True` shuffles comes in the order that a run of seed 0 has."""
    epochs = itertools.count()

    def numbers(sampler: RandomSampler) -> Iterator[int]:
        size = len(sampler.data_source)
        return iter(permute(np.arange(size), size, seed=0, epoch=next(epochs)).tolist())

    return mock.patch.object(RandomSampler, "__iter__", numbers)


def batches(per_epoch: Callable[[int], list[list[int]]]) -> Patch:
    """Batches are these lists of numbers of samples."""
    epochs = itertools.count()

    def numbers(_sampler: BatchSampler) -> Iterator[list[int]]:
        return iter(per_epoch(next(epochs)))

    return mock.patch.object(BatchSampler, "__iter__", numbers)


def _seeded(step: int, micro_batch: int, where: str, draw: Callable[[], Tensor]) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(0, step, micro_batch, where))
        return draw()


def dropout(layer: str, micro_batch: int) -> Patch:
    """The model's one dropout, named `layer`, hides what it hides in a run of such micro-batches."""
    steps = itertools.count()
    plain = F.dropout

    def drawn(values: Tensor, p: float, training: bool, inplace: bool) -> Tensor:
        if not training:
            return plain(values, p, training, inplace)
        step = next(steps)
        return torch.cat(
            [
                _seeded(step, index, layer, partial(plain, part, p))
                for index, part in enumerate(values.split(micro_batch))
            ]
        )

    return mock.patch.object(F, "dropout", drawn)


def noise(width: int, micro_batch: int) -> Patch:
    """`torch.randn(samples, width)`, once a step, is what a run draws in its loop over them."""
    steps = itertools.count()
    plain = torch.randn

    def drawn(*sizes: int, generator: torch.Generator | None = None) -> Tensor:
        if generator is not None or sizes[-1] != width:
            return plain(*sizes, generator=generator)
        step = next(steps)
        return torch.cat(
            [
                _seeded(step, index, "", partial(plain, len(part), width))
                for index, part in enumerate(torch.arange(sizes[0]).split(micro_batch))
            ]
        )

    return mock.patch.object(torch, "randn", drawn)


def llama_in_float64() -> list[Patch]:
    """What transformers computes in float32 in a float64 model too: norms, angles, its own loss.

    Rounding in float32 depends on the shape of the batch, which packing changes.
    """
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    def norm(self: Any, values: Tensor) -> Tensor:
        variance = values.square().mean(-1, keepdim=True)
        return self.weight * values * torch.rsqrt(variance + self.variance_epsilon)

    return [
        mock.patch.object(LlamaRMSNorm, "forward", norm),
        mock.patch.object(Tensor, "float", Tensor.double),
    ]
