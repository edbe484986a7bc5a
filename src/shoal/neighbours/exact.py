"""Weigh the losses of a script by the number of targets that each is the mean of (`--exact`).

    shoal run --as accelerate --exact -- train.py        or, before the script's own lines:
    import shoal.neighbours.exact; shoal.neighbours.exact.install()

Libraries for data-parallel training average each micro-batch's loss on each rank, then the means.
If micro-batches hold 3 and 300 targets, these three count a hundred times as much as any other.
Here a step's loss is the sum over all targets of all ranks and micro-batches, divided once by their
number, as in one process with one large batch (design §6).

The number of targets is known if torch's own function made the loss, also inside of a model, and
only factors came after. For another loss one line reports that it is not known.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional

from shoal.base.errors import ConfigError
from shoal.neighbours import library_loop

ELEMENTS = (
    *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "kl_div"),
    *("binary_cross_entropy", "binary_cross_entropy_with_logits"),
    *("poisson_nll_loss", "gaussian_nll_loss"),
)
"""Functions whose mean is over all elements of inputs and targets."""
CLASSES = ("cross_entropy", "nll_loss")
"""Functions whose mean is over targets that are not ignored, each with its class's weight."""
FACTORS = ("Div", "Mul", "Neg", "Mean", "View", "Unsqueeze", "Squeeze", "ToCopy", "Clone", "Alias")
"""Operations after which a scalar loss is still the same mean, times a factor."""
KEY = "shoal.targets"


def count_targets(loss: torch.Tensor) -> torch.Tensor:
    """Return the number of targets of a loss; with class weights, the sum of their weights.

    Raises:
        ConfigError: no function of torch's made it, or several with other counts.

    >>> mean = _record_counts(functional.cross_entropy, _count_class_targets)
    >>> count_targets(mean(torch.zeros(3, 2, requires_grad=True), torch.tensor([0, -100, 1])) / 4)
    tensor(2., dtype=torch.float64)
    """
    found = _find_count(loss.grad_fn)
    if found is None:
        last = loss.grad_fn.name() if loss.grad_fn is not None else "nothing that has a gradient"
        raise ConfigError(
            f"--exact: the loss (its last operation: {last}) is no mean that a function of torch's "
            f"made, so nobody knows how many targets it is of; try: "
            f"loss = nn.CrossEntropyLoss()(outputs, targets), or without --exact"
        )
    return found


def _find_count(node: Any) -> torch.Tensor | None:
    while node is not None:
        if KEY in node.metadata:
            return node.metadata[KEY]
        kind = type(node).__name__.partition("Backward")[0]
        inputs = [one for one, _ in node.next_functions if one is not None]
        if kind == "Add" and len(inputs) == 2:
            first, second = map(_find_count, inputs)
            same = first is not None and second is not None and torch.equal(first, second)
            return first if same else None
        if kind not in FACTORS or len(inputs) != 1:
            return None
        node = inputs[0]
    return None


def _count_elements(said: Mapping[str, Any]) -> torch.Tensor | None:
    first, target = next(iter(said.values())), said["target"]
    if said.get("weight") is not None:
        return None  # some are divided by the weights' sum, some are not
    shape = torch.broadcast_shapes(first.shape, target.shape)
    return _number(shape.numel(), first)


def _number(value: int, beside: torch.Tensor) -> torch.Tensor:
    return torch.tensor(float(value), dtype=torch.float64, device=beside.device)


def _count_class_targets(said: Mapping[str, Any]) -> torch.Tensor | None:
    target, weight = said["target"], said.get("weight")
    if target.is_floating_point():  # a share of each class
        scores = said["input"]
        return _number(scores.numel() // scores.shape[1 if scores.dim() > 1 else 0], target)
    kept = target != said["ignore_index"]
    if weight is None:
        return kept.sum(dtype=torch.float64)
    return weight.double()[target[kept]].sum()


def _record_counts(
    function: Callable[..., Any], count: Callable[[Mapping[str, Any]], torch.Tensor | None]
) -> Callable[..., Any]:
    """Wrap a loss function so that a mean's node in the graph records its number of targets."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def noting(*args: Any, **named: Any) -> Any:
        loss = function(*args, **named)
        if not isinstance(loss, torch.Tensor) or loss.grad_fn is None or loss.dim():
            return loss
        bound = signature.bind(*args, **named)
        bound.apply_defaults()
        said = bound.arguments
        old = said.get("size_average") is not None or said.get("reduce") is not None
        if old or said["reduction"] not in ("mean", "batchmean"):
            return loss
        with torch.no_grad():
            if said["reduction"] == "batchmean":
                found: torch.Tensor | None = _number(said["input"].shape[0], loss)
            else:
                found = count(said)
        if found is not None:
            kept: Any = loss.grad_fn.metadata  # a dict, whatever its type says
            kept[KEY] = found
        return loss

    return noting


def install() -> None:
    """Weigh losses by targets from now on, in this process; do nothing at a second call."""
    if library_loop.count_of is not None:
        return
    for names, count in ((ELEMENTS, _count_elements), (CLASSES, _count_class_targets)):
        for name in names:
            setattr(functional, name, _record_counts(getattr(functional, name), count))
    library_loop.count_of = count_targets
