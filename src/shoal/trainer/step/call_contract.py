"""What users hand over: the form of a batch, how the model is called, what a loss must return.

A loss gives `(sum, count)` or unreduced values. A bare mean is refused: averaging means of ranks
that hold different numbers of targets weighs their samples unequally, silently.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from shoal.base.errors import ConfigError, ShoalError
from shoal.trainer._torch import pytree

Loss = Callable[[Any, Any], Any]
Metric = Callable[[Any, Any], Any]
BuildOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
IGNORED_TARGET = -100


def split_batch(batch: Any) -> tuple[Any, Any]:
    """Split a batch into (inputs, targets); of one dict both are that dict.

    Raises:
        ConfigError: for anything that is neither a pair nor a dict.
    """
    if isinstance(batch, Mapping):
        return batch, batch
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    raise ConfigError(
        f"batch: (inputs, targets) or one dict is wanted, got {type(batch).__name__}"
        + (f" of {len(batch)}" if isinstance(batch, tuple | list) else "")
        + "; try: return (inputs, targets) from the dataset or collate function; for a model "
        'of several inputs ({"a": a, "b": b}, targets) with call="kwargs"'
    )


def bare(model: nn.Module) -> tuple[nn.Module, list[str]]:
    """The module inside DistributedDataParallel, DataParallel or torch.compile, and a line on it.

    Left in place, DDP would sum the same gradients at the same time, into the same memory; what was
    compiled is a module of other names around the same one.
    """
    if type(model).__name__ == "OptimizedModule" and isinstance(model._orig_mod, nn.Module):
        inside, said = bare(model._orig_mod)
        return inside, [
            "model: taken out of torch.compile, which knows nothing of layouts, so it is not "
            'compiled now; try: compile="blocks"',
            *said,
        ]
    if not isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        return model, []
    name = type(model).__name__
    return model.module, [f"model: taken out of {name}, which costs memory and does nothing here"]


def call_model(module: nn.Module, inputs: Any, call: str) -> Any:
    """Run the model: `model(inputs)`, or `model(**inputs)` for call = kwargs.

    Args:
        call: "single"; whatever else is kwargs, for which inputs must be a dict.

    Raises:
        ConfigError: where forward seems to take inputs in another form: kwargs with a keyword that
            it does not have, single with a tuple of several, or any exception after single with a
            dict of which it names a key; all other exceptions of the model pass.
    """
    if call != "single" and not isinstance(inputs, Mapping):
        raise ConfigError(
            f"model.call = kwargs: inputs must be a dict, got {type(inputs).__name__}; "
            f"try: model.call=single"
        )
    try:
        return module(inputs) if call == "single" else module(**inputs)
    except ShoalError:
        raise
    except Exception as error:
        line = _form_line(module, inputs, call, error)
        if not line:
            raise
        raise ConfigError(line) from error


def _form_line(module: nn.Module, inputs: Any, call: str, error: Exception) -> str:
    """Why `forward` failed, if it wanted its inputs in another form; "" if that is not plain."""
    names = list(inspect.signature(module.forward).parameters)
    if call == "kwargs":
        extra = [key for key in inputs if key not in names]
        if not extra or "unexpected keyword argument" not in str(error):
            return ""
        return (
            f"model: forward() takes no {', '.join(extra)}, and a batch that is one dict goes to "
            f"it whole; try: ({{inputs}}, targets), a pair of the model's dict and the rest"
        )
    if isinstance(inputs, Mapping) and any(key in names for key in inputs):
        takes = ", ".join(key for key in inputs if key in names)
        return (
            f"model: forward() takes {takes} by name and was given one dict "
            f'({type(error).__name__}: {error}); try: call="kwargs" (model.call=kwargs)'
        )
    missing = isinstance(error, TypeError) and "missing" in str(error) and "forward()" in str(error)
    if missing and isinstance(inputs, tuple | list) and len(inputs) > 1:
        takes = ", ".join(f'"{name}": …' for name in names[: len(inputs)])
        return (
            f"model: forward() takes {len(inputs)} inputs and was given one tuple of them; "
            f'try: a batch ({{{takes}}}, targets) with call="kwargs" (model.call=kwargs)'
        )
    return ""


def named_parts(result: Any) -> tuple[Any, Mapping[str, Any]]:
    """Split what a loss returned into (what is trained on, parts of it by name)."""
    if isinstance(result, tuple) and len(result) == 3 and isinstance(result[2], Mapping):
        return result[:2], result[2]
    return result, {}


def sum_and_count(
    result: Any, targets: Any, where: str = "loss"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reduce what a loss or a metric returned to (sum, count), two tensors without dims.

    Unreduced values of the shape of integer targets are summed and counted where the target is not
    −100, others everywhere. Parts by name, a third, are left to `logged_values.py`.
    Takes   where, the name that an error line begins with

    Raises:
        ConfigError: for a mean, or for a value that is no tensor.
    """
    result, _ = named_parts(result)
    if isinstance(result, tuple) and len(result) == 2:
        total, count = result
        if not isinstance(total, torch.Tensor) or total.ndim != 0:
            raise ConfigError(
                f"{where}: the first of (sum, count) must be a tensor without dims, got "
                f"{_kind(total)}"
            )
        counted = isinstance(count, torch.Tensor) and count.ndim == 0
        if not counted and not isinstance(count, int | float):
            raise ConfigError(
                f"{where}: the second of (sum, count) must be a number or a tensor without dims, "
                f"got {_kind(count)}"
            )
        if not isinstance(count, torch.Tensor):  # filled there: a copy would wait for the device
            count = torch.full((), count, device=total.device)
        return total, count.to(total.device).detach()
    if not isinstance(result, torch.Tensor):
        raise ConfigError(
            f"{where}: (sum, count) or unreduced values are wanted, got {_kind(result)}"
        )
    if result.ndim == 0:
        raise ConfigError(
            f"{where} returned a mean: ranks with unequal token counts would weigh wrongly. "
            f"Return (sum, count), or wrap it: shoal.mean_of_samples({where})"
        )
    if _marks_ignored(result, targets):
        valid = targets.long() != IGNORED_TARGET  # long: −100 wraps around to 156 in uint8
        return result.masked_fill(~valid, 0).sum(), valid.sum()
    return result.sum(), torch.full((), result.numel(), device=result.device)


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}"
    length = f" of {len(value)}" if isinstance(value, tuple | list) else ""
    return type(value).__name__ + length


def _marks_ignored(values: torch.Tensor, targets: Any) -> bool:
    whole = isinstance(targets, torch.Tensor) and not (
        targets.is_floating_point() or targets.is_complex()
    )
    return whole and targets.shape == values.shape


def default_loss() -> Loss:
    """Import the loss over token logits; a loop with a loss of its own does without."""
    from shoal.models.loss import token_loss

    return token_loss


def is_default(loss: Loss) -> bool:
    """Tell whether a loss is the default one, which nobody who has not imported it can give."""
    imported = sys.modules.get("shoal.models.loss")
    return imported is not None and loss is imported.token_loss


def mean_of_samples(loss: Callable[[Any, Any], torch.Tensor]) -> Loss:
    """Wrap a loss that returns the mean over the samples of a micro-batch.

    Takes   loss(outputs, targets) → tensor without dims, a mean over dim 0 of the targets

    Returns:
        a loss that returns (mean × samples, samples), so that every sample weighs the same in every
        layout; nn.CrossEntropyLoss and nn.NLLLoss, whose means leave out ignored targets and weigh
        classes, are taken apart and give their own (sum, sum of weights).

    Raises:
        ConfigError: when the targets hold no tensor to count, or the loss is no mean.

    Note:
        right for means over samples; a function of your own that takes a mean over tokens needs to
        return (sum, count) itself.
    """
    known = type(loss) in (nn.CrossEntropyLoss, nn.NLLLoss)
    if known and getattr(loss, "reduction", "") == "mean":
        return _taken_apart(loss)

    def counted(outputs: Any, targets: Any) -> tuple[torch.Tensor, int]:
        samples = batch_length(targets)
        mean = loss(outputs, targets)
        if not isinstance(mean, torch.Tensor) or mean.ndim != 0:
            raise ConfigError(
                f"shoal.mean_of_samples: the loss must return a mean, a tensor without dims, got "
                f"{_kind(mean)}; unreduced values and (sum, count) need no wrapper"
            )
        return mean * samples, samples

    return counted


def _taken_apart(loss: Any) -> Loss:
    """(sum, what torch divides its mean by) of a cross-entropy, for indices or probabilities."""

    def counted(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, Any]:
        summing = copy.copy(loss)  # as it is now: a loop may change its label smoothing, or weights
        summing.reduction = "sum"
        total = summing(outputs, targets)
        if targets.is_floating_point():  # [batch, classes, …]: a mean over all but the classes
            return total, targets.numel() // targets.shape[min(1, targets.ndim - 1)]
        valid = targets != loss.ignore_index
        if loss.weight is None:
            return total, valid.sum()
        return total, (loss.weight[targets.where(valid, 0)] * valid).sum()

    return counted


def batch_length(batch: Any) -> int:
    """Count a batch's samples: dim 0 of its first tensor or array.

    Raises:
        ConfigError: for a batch without a tensor.
    """
    first = batch[0] if isinstance(batch, tuple | list) and batch else batch
    if isinstance(first, torch.Tensor) and first.ndim > 0:
        return first.shape[0]
    for leaf in pytree.tree_leaves(_plain(batch)):
        if isinstance(leaf, torch.Tensor | np.ndarray) and leaf.ndim > 0:
            return int(leaf.shape[0])
    held = sorted({type(leaf).__name__ for leaf in pytree.tree_leaves(_plain(batch))})
    raise ConfigError(
        f"batch: holds no tensor whose dim 0 counts samples, but {', '.join(held) or 'nothing'}; "
        f"try: samples of tensors or numbers, or a collate function that makes them of these"
    )


def cut_batch(batch: Any, micro_batch: int) -> Iterator[Any]:
    """Cut a batch along dim 0 into parts of `micro_batch` samples, whatever its structure.

    Tensors, NumPy arrays and lists of one value per sample (strings, for example) are cut; tensors
    without dims and other values go whole into every part.
    Errors: ConfigError when tensors disagree about the number of samples.
    """
    batch = _plain(batch)
    leaves, structure = pytree.tree_flatten(batch, is_leaf=_is_column)
    samples = batch_length(batch)
    for leaf in leaves:
        if _has_samples(leaf) and leaf.shape[0] != samples:
            raise ConfigError(
                f"batch: tensors of {samples} and {leaf.shape[0]} samples along dim 0 (shape "
                f"{list(leaf.shape)}); every tensor of a batch needs the same number"
            )
    for start in range(0, samples, micro_batch):
        stop = min(start + micro_batch, samples)
        yield pytree.tree_unflatten(
            [
                leaf[start:stop]
                if _has_samples(leaf) or (_is_column(leaf) and len(leaf) == samples)
                else leaf
                for leaf in leaves
            ],
            structure,
        )


def _plain(batch: Any) -> Any:
    """A dict for any other mapping: transformers' BatchEncoding is one that pytree cannot see."""
    return dict(batch) if isinstance(batch, Mapping) and not isinstance(batch, dict) else batch


def _has_samples(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor | np.ndarray) and leaf.ndim > 0


def _is_column(value: Any) -> bool:
    """A list that a collate function made of values that are no tensors: one per sample."""
    return (
        isinstance(value, list)
        and bool(value)
        and not any(
            isinstance(v, torch.Tensor | np.ndarray | Mapping | list | tuple) for v in value
        )
    )
