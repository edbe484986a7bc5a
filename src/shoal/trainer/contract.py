"""What users hand over: the form of a batch, how the model is called, what a loss must return.

A loss gives `(sum, count)` or unreduced values. A bare mean is refused: averaging means of ranks
that hold different numbers of targets weighs their samples unequally, silently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from shoal.base.errors import ConfigError
from shoal.trainer._torch import pytree

Loss = Callable[[Any, Any], Any]
IGNORED_TARGET = -100


def split_batch(batch: Any) -> tuple[Any, Any]:
    """(inputs, targets) of a batch; one dict is both.

    Errors: ConfigError for anything that is neither a pair nor a dict.
    """
    if isinstance(batch, dict):
        return batch, batch
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    raise ConfigError(
        f"batch: (inputs, targets) or one dict is wanted, got {type(batch).__name__}"
        + (f" of {len(batch)}" if isinstance(batch, tuple | list) else "")
        + "; nearest: return (inputs, targets) from the dataset or collate function"
    )


def call_model(module: nn.Module, inputs: Any, call: str) -> Any:
    """Run the model: `model(inputs)`, or `model(**inputs)` for call = kwargs."""
    if call == "single":
        return module(inputs)
    if not isinstance(inputs, dict):
        raise ConfigError(
            f"model.call = kwargs: inputs must be a dict, got {type(inputs).__name__}; "
            f"nearest: model.call=single"
        )
    return module(**inputs)


def sum_and_count(result: Any, targets: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum, count) from whatever a loss returned; both are tensors without dims.

    Unreduced values of the shape of integer targets count the targets that are not −100, others
    count every value.
    Errors: ConfigError for a mean, or for a value that is no tensor
    """
    if isinstance(result, tuple) and len(result) == 2:
        total, count = result
        if not isinstance(total, torch.Tensor) or total.ndim != 0:
            raise ConfigError("loss: the first of (sum, count) must be a tensor without dims")
        return total, torch.as_tensor(count, device=total.device)
    if not isinstance(result, torch.Tensor):
        raise ConfigError(
            f"loss: (sum, count) or unreduced values are wanted, got {type(result).__name__}"
        )
    if result.ndim == 0:
        raise ConfigError(
            "loss returned a mean: ranks with unequal token counts would weigh wrongly. "
            "Return (sum, count), or wrap it: shoal.mean_of_samples(loss)"
        )
    if _marks_ignored(result, targets):
        return result.sum(), (targets != IGNORED_TARGET).sum()
    return result.sum(), torch.tensor(result.numel(), device=result.device)


def _marks_ignored(values: torch.Tensor, targets: Any) -> bool:
    integer = isinstance(targets, torch.Tensor) and not targets.is_floating_point()
    return integer and targets.shape == values.shape


def mean_of_samples(loss: Callable[[Any, Any], torch.Tensor]) -> Loss:
    """Wrap a loss that returns the mean over the samples of a micro-batch.

    Takes   loss(outputs, targets) → tensor without dims, a mean over dim 0 of the targets
    Gives   a loss that returns (mean × samples, samples), so that every sample weighs the same
            in every layout
    Errors  ConfigError when the targets hold no tensor to count
    Limits  right for means over samples; a mean over tokens needs (sum, count) from the loss itself
    """

    def counted(outputs: Any, targets: Any) -> tuple[torch.Tensor, int]:
        samples = batch_length(targets)
        return loss(outputs, targets) * samples, samples

    return counted


def batch_length(batch: Any) -> int:
    """Samples in a batch: the length of dim 0 of its first tensor."""
    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, torch.Tensor) and leaf.ndim > 0:
            return leaf.shape[0]
    raise ConfigError("batch: holds no tensor whose dim 0 counts samples")


def cut_batch(batch: Any, micro_batch: int) -> Iterator[Any]:
    """Cut every tensor of a batch along dim 0 into parts of `micro_batch` samples.

    Errors: ConfigError when tensors disagree about the number of samples.
    """
    leaves, structure = pytree.tree_flatten(batch)
    samples = batch_length(batch)
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and (leaf.ndim == 0 or leaf.shape[0] != samples):
            raise ConfigError(
                f"batch: tensors hold {samples} and {list(leaf.shape)} samples along dim 0; every "
                f"tensor of a batch needs the same number"
            )
    for start in range(0, samples, micro_batch):
        stop = min(start + micro_batch, samples)
        yield pytree.tree_unflatten(
            [x[start:stop] if isinstance(x, torch.Tensor) else x for x in leaves], structure
        )
