"""Contract between a run and user code: batch format, model call, and return values of a loss.

A loss returns `(sum, count)` or unreduced values. A bare mean raises an error: a mean of the means
of ranks with different numbers of targets silently weights their samples unequally.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import nn

from shoal.base.errors import ConfigError, ShoalError, shorten
from shoal.trainer.batches.batch_split import target_length
from shoal.trainer.batches.batch_values import NEAREST, says_samples

Loss = Callable[[Any, Any], Any]
Metric = Callable[[Any, Any], Any]
BuildOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
IGNORED_TARGET = -100


def split_batch(batch: Any) -> tuple[Any, Any]:
    """Split a batch into (inputs, targets); a dict, or an object that says its samples, is both.

    Raises:
        ConfigError: the batch is none of these.
    """
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    if isinstance(batch, Mapping) or says_samples(batch):
        return batch, batch
    raise ConfigError(
        f"batch: (inputs, targets) or one dict is wanted, got {type(batch).__name__}"
        + (f" of {len(batch)}" if isinstance(batch, tuple | list) else "")
        + "; try: return (inputs, targets) from the dataset or collate function; for a model "
        'of several inputs ({"a": a, "b": b}, targets) with call="kwargs"'
        + ("" if isinstance(batch, tuple | list | torch.Tensor) else f"; or {NEAREST[5:]}")
    )


def unwrap_model(model: nn.Module) -> tuple[nn.Module, list[str]]:
    """Return the module inside DistributedDataParallel, DataParallel or torch.compile, and lines.

    A DDP wrapper would sum the same gradients at the same time, into the same memory. A compiled
    module is another module around the same one, with other parameter names.
    """
    if type(model).__name__ == "OptimizedModule" and isinstance(model._orig_mod, nn.Module):
        inside, said = unwrap_model(model._orig_mod)
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

    A dict whose keys are all parameters of `forward` is passed by name, as transformers has it.

    Args:
        module: the model.
        inputs: its inputs, a dict unless call is "single".
        call: "single", or any other word for kwargs.

    Raises:
        ConfigError: `forward` seems to take inputs in another form: kwargs with a keyword that it
            lacks, single with a tuple of several, or any exception after single with a dict that
            has a key of its name. All other exceptions of the model pass.
    """
    if call != "single" and not isinstance(inputs, Mapping):
        raise ConfigError(
            f'call="kwargs" (model.call): inputs must be a dict, got {type(inputs).__name__}; '
            f'try: call="single" (model.call=single)'
        )
    by_name = call != "single"
    if not by_name and type(inputs) is not torch.Tensor:  # the test takes as long as an operation
        by_name = isinstance(inputs, Mapping) and _takes_by_name(module, inputs)
    try:
        return module(**inputs) if by_name else module(inputs)
    except ShoalError:
        raise
    except Exception as error:
        line = _diagnose_call(module, inputs, call, error)
        if not line:
            raise
        raise ConfigError(line) from error


def _takes_by_name(module: nn.Module, inputs: Mapping[Any, Any]) -> bool:
    """Return whether all keys of a dict are parameters of `forward`, however it is wrapped."""
    forward = inspect.unwrap(module.forward)
    code = getattr(getattr(forward, "__func__", forward), "__code__", None)
    if code is None or not inputs:
        return False
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return inputs.keys() <= set(names) - {"self"}


def _diagnose_call(module: nn.Module, inputs: Any, call: str, error: Exception) -> str:
    """Return an error line if `forward` failed because it takes inputs in another form, else ""."""
    names = list(inspect.signature(module.forward).parameters)
    if "more than 1 value per channel" in str(error):  # of torch's BatchNorm and InstanceNorm
        return (
            f"model: a normalisation layer got a micro-batch of one value per channel "
            f"({error}), as the last part of a batch may be; try: another micro_batch (train."
            f"micro_batch), or for BatchNorm sync_batch_norm=True (train.sync_batch_norm)"
        )
    if "storage_offset divisible by 2" in str(error) and any(
        p.storage_offset() % 2 for p in module.parameters()
    ):
        return (
            f"model: view_as_complex ({error}): under zero1 and zero2 a weight lies in a buffer "
            f"behind others, here at an odd place; try: torch.complex(w[..., 0], w[..., 1]), or "
            f"layout.strategy=ddp or fsdp"
        )
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
    if isinstance(inputs, Mapping) and isinstance(error, TypeError | AttributeError):
        if "dict" not in str(error):
            return ""
        pair = ", ".join(f'batch["{key}"]' for key in list(inputs)[:2])
        return (
            f"model: forward({', '.join(names)}) was given the batch's whole dict "
            f"({shorten(', '.join(map(str, inputs)))}), as is the loss; try: a collate function "
            f"for run.loader(data, collate=…) that returns a pair ({pair})"
        )
    missing = isinstance(error, TypeError) and "missing" in str(error) and "forward()" in str(error)
    if missing and isinstance(inputs, tuple | list) and len(inputs) > 1:
        takes = ", ".join(f'"{name}": …' for name in names[: len(inputs)])
        return (
            f"model: forward() takes {len(inputs)} inputs and was given one tuple of them; "
            f'try: a batch ({{{takes}}}, targets) with call="kwargs" (model.call=kwargs)'
        )
    return ""


def split_named_parts(result: Any) -> tuple[Any, Mapping[str, Any]]:
    """Split the result of a loss into (loss to train on, its parts by name)."""
    if isinstance(result, tuple) and len(result) == 3 and isinstance(result[2], Mapping):
        return result[:2], result[2]
    return result, {}


def sum_and_count(
    result: Any, targets: Any, where: str = "loss"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reduce the result of a loss or a metric to (sum, count), two scalar tensors.

    Unreduced values of the shape of integer targets are summed and counted where the target is not
    −100, others everywhere. `logged_values.py` handles parts by name, a third element.

    Args:
        result: the result of the loss or metric.
        targets: the targets of the micro-batch.
        where: the name that an error line begins with.

    Raises:
        ConfigError: the result is a mean, or no tensor.
    """
    total, count = reduce_result(result, targets, where)
    if not isinstance(count, torch.Tensor):  # filled on the device: a copy would wait for it
        count = torch.full((), count, device=total.device)
    return total, count.to(total.device).detach()


def reduce_result(result: Any, targets: Any, where: str = "loss") -> tuple[torch.Tensor, Any]:
    """Return what `sum_and_count` returns; a count may still be a number, or on another device."""
    if isinstance(result, tuple):
        result, _ = split_named_parts(result)
    if isinstance(result, tuple) and len(result) == 2:
        total, count = result
        if not isinstance(total, torch.Tensor) or total.ndim != 0:
            raise ConfigError(
                f"{where}: the first of (sum, count) must be a tensor without dims, got "
                f"{_describe_type(total)}"
            )
        counted = isinstance(count, torch.Tensor) and count.ndim == 0
        if not counted and not isinstance(count, (int, float)):
            raise ConfigError(
                f"{where}: the second of (sum, count) must be a number or a tensor without dims, "
                f"got {_describe_type(count)}"
            )
        return total, count
    if not isinstance(result, torch.Tensor):
        raise ConfigError(
            f"{where}: (sum, count) or unreduced values are wanted, got {_describe_type(result)}"
        )
    if result.ndim == 0:
        raise ConfigError(f"{where} returned {_describe_scalar(result, where)}")
    if _has_ignored_targets(result, targets):
        valid = targets.long() != IGNORED_TARGET  # long: −100 wraps around to 156 in uint8
        return result.masked_fill(~valid, 0).sum(), valid.sum()
    return result.sum(), result.numel()


def _describe_scalar(value: torch.Tensor, where: str) -> str:
    """Return why a tensor without dims is refused, and the cure: for a mean, a sum, or either.

    Its last operation tells the two apart, for the losses and the `mean()` of torch.
    """
    last: Any = value.grad_fn
    known = {1: "mean", 2: "sum"}.get(getattr(last, "_saved_reduction", 0))
    wrapped = f"shoal.mean_of_samples({where})"
    if known == "mean" or type(last).__name__.startswith("MeanBackward"):
        return (
            "a mean: ranks with unequal token counts would weigh wrongly. "
            f"Return (sum, count), or wrap it: {wrapped}"
        )
    if known == "sum":
        return (
            "a sum without its count. Return (sum, count), say (loss, len(targets)), or unreduced "
            'values: reduction="none"'
        )
    return (
        "one number without a count: ranks with unequal token counts would weigh a mean wrongly. "
        f"Return (sum, count), say (loss, len(targets)) of a sum; wrap a mean: {wrapped}"
    )


def _describe_type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}"
    length = f" of {len(value)}" if isinstance(value, tuple | list) else ""
    return type(value).__name__ + length


def _has_ignored_targets(values: torch.Tensor, targets: Any) -> bool:
    whole = isinstance(targets, torch.Tensor) and not (
        targets.is_floating_point() or targets.is_complex()
    )
    return whole and targets.shape == values.shape


def default_loss(module: nn.Module | None = None) -> Loss:
    """Return the default loss over token logits; runs with their own loss skip this import.

    Args:
        module: the model; one of transformers may compute its own loss.
    """
    if hasattr(module, "loss_function") and hasattr(module, "config"):
        from shoal.trainer.step.model_loss import ModelLoss

        return ModelLoss(cast(nn.Module, module))
    from shoal.models.loss import token_loss

    return token_loss


def is_default(loss: Loss) -> bool:
    """Return whether a loss is the default loss; a loss that is not yet imported cannot be.

    `ModelLoss` is, which stands for it if a model of transformers may compute its own.
    """
    if getattr(loss, "is_default", False):
        return True
    imported = sys.modules.get("shoal.models.loss")
    return imported is not None and loss is imported.token_loss


def mean_of_samples(loss: Callable[[Any, Any], torch.Tensor]) -> Loss:
    """Wrap a loss that returns the mean over the samples of a micro-batch.

    Args:
        loss: loss(outputs, targets) → scalar tensor, a mean over dim 0 of the targets.

    Returns:
        A loss that returns (mean × samples, samples), so that every sample weighs the same in every
        layout. nn.CrossEntropyLoss and nn.NLLLoss, whose means leave out ignored targets and weight
        classes, are rewritten to return their own (sum, sum of weights).

    Raises:
        ConfigError: the targets hold no tensor to count, or the loss is no mean.

    Note:
        Correct for means over samples. A function of your own that takes a mean over tokens has to
        return (sum, count) itself.
    """
    known = type(loss) in (nn.CrossEntropyLoss, nn.NLLLoss)
    if known and getattr(loss, "reduction", "") == "mean":
        return _split_mean_loss(loss)

    def counted(outputs: Any, targets: Any) -> tuple[torch.Tensor, int]:
        samples = target_length(targets)
        mean = loss(outputs, targets)
        if not isinstance(mean, torch.Tensor) or mean.ndim != 0:
            raise ConfigError(
                f"shoal.mean_of_samples: the loss must return a mean, a tensor without dims, got "
                f"{_describe_type(mean)}; unreduced values and (sum, count) need no wrapper"
            )
        return mean * samples, samples

    return counted


def _split_mean_loss(loss: Any) -> Loss:
    """Return a loss that computes (sum, torch's denominator) of a cross-entropy module.

    Targets are class indices or probabilities.
    """

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


def describe_invalid_loss(loss: Any, near: str) -> str:
    """Return a description of an object that is no valid loss.

    Args:
        loss: the object.
        near: an expression that makes a scalar of a tensor with dims.
    """
    if not isinstance(loss, torch.Tensor):
        return type(loss).__name__
    if loss.dim():
        return f"a tensor of shape {list(loss.shape)}; try: {near}"
    return "one without: it is cut off from the model (by .detach(), .item(), torch.no_grad())"
