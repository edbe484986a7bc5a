"""Private names of torch that this package uses; tested on 2.11 and 2.13."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.data.dataloader import _BaseDataLoaderIter as LoaderIterator

__all__ = [
    "LoaderIterator",
    "count_gradient_hooks",
    "get_step_pre_hooks",
    "intercept_gradient_clipping",
    "make_gradient_placeholder",
    "pytree",
]


def count_gradient_hooks(tensor: torch.Tensor) -> int:
    """Count a tensor's `register_hook` hooks; hooks that run after accumulation are not counted."""
    return len(tensor._backward_hooks or ())


def get_step_pre_hooks(optimizer: torch.optim.Optimizer) -> OrderedDict[int, Any]:
    """Return the optimizer's own dict of step pre-hooks, by id, in calling order."""
    hooks: Any = optimizer._optimizer_step_pre_hooks
    return cast(OrderedDict[int, Any], hooks)


CLIPPING = {
    "clip_grad_norm_": "max_norm",
    "clip_grads_with_norm_": "max_norm",
    "clip_grad_value_": "clip_value",
}
"""torch's clipping functions, and the name of their second argument."""

NORM_ALONE = 1e6
"""A call of `clip_grad_norm_` with at least this limit only wants the norm that it returns."""


def intercept_gradient_clipping(
    watched: Collection[Any], ask: Callable[[str, Sequence[Any]], bool]
) -> None:
    """Make torch's gradient clipping functions call `ask` before they change gradients.

    Scripts may have imported the functions under other names. So this replaces the function that
    they call internally; a torch version without one stays unchanged.

    Args:
        watched: empty while no call has to be checked.
        ask: called with the function's name and the parameters of the call; the name is "" if no
            gradient can reach the limit. May raise. Returns whether the gradients stay unchanged.
    """
    for name, limit in CLIPPING.items():
        function: Any = getattr(nn.utils, name)
        inside = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=False))
        if "func" in inside:
            cell = inside["func"]
            cell.cell_contents = _wrap_clipping_function(
                name, limit, cell.cell_contents, watched, ask
            )


def _wrap_clipping_function(
    name: str,
    limit: str,
    clip: Callable[..., Any],
    watched: Collection[Any],
    ask: Callable[[str, Sequence[Any]], bool],
) -> Callable[..., Any]:
    @functools.wraps(clip)
    def asking(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if not watched:
            return clip(parameters, *args, **kwargs)
        held = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        given = float(kwargs.get(limit, args[0] if args else 0.0))
        logs = given >= NORM_ALONE and name != "clip_grad_value_"
        if ask("" if logs else name, held):
            return _compute_total_norm(
                held, *args[1:], **{k: v for k, v in kwargs.items() if k != limit}
            )
        return clip(held, *args, **kwargs)

    return asking


def _compute_total_norm(
    parameters: Sequence[torch.Tensor], *args: Any, **kwargs: Any
) -> torch.Tensor | None:
    """Return the norm that `clip_grad_norm_` returns; None for a function that takes a norm."""
    if "total_norm" in kwargs or (args and isinstance(args[0], torch.Tensor)):
        return None
    gradients = [p.grad for p in parameters if p.grad is not None]
    with torch._C.DisableTorchFunction():  # not a reduction of user code
        return nn.utils.get_total_norm(gradients, *args, **kwargs)


def make_gradient_placeholder(
    like: torch.Tensor, refusal: Callable[[str], Exception]
) -> torch.Tensor:
    """Return a placeholder for `.grad` of a parameter whose gradient is stored in another buffer.

    It reads as zeros and has no memory. A write into it would change nothing, so it raises.

    Args:
        like: a tensor with the placeholder's shape, dtype and device.
        refusal: builds the error that a write raises, from the name of torch's operation.
    """
    made: Any = torch.Tensor._make_wrapper_subclass(
        _GradientPlaceholder, like.shape, dtype=like.dtype, device=like.device
    )
    made.refusal = refusal
    return cast(torch.Tensor, made)


class _GradientPlaceholder(torch.Tensor):
    """Placeholder tensor of `make_gradient_placeholder`; its views are placeholders too."""

    refusal: Callable[[str], Exception]
    stands_for = "a gradient that is kept elsewhere"  # other modules read this: it has no memory

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub has a static method
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs, schema = kwargs or {}, func._schema
        for place, argument in enumerate(schema.arguments):
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            if argument.alias_info is not None and argument.alias_info.is_write:
                for leaf in pytree.tree_leaves(value):
                    if isinstance(leaf, _GradientPlaceholder):
                        raise leaf.refusal(schema.name.partition("::")[2])
        result = func(
            *pytree.tree_map(_replace_placeholder, args),
            **pytree.tree_map(_replace_placeholder, kwargs),
        )
        is_view = (
            isinstance(args[0], _GradientPlaceholder) and schema.returns[0].alias_info is not None
        )
        if is_view and isinstance(result, torch.Tensor):
            return make_gradient_placeholder(result, args[0].refusal)
        return result

    def numpy(self, *, force: bool = False) -> Any:
        """Return zeros, like every other read of the placeholder."""
        return _replace_placeholder(self).cpu().numpy()

    def tolist(self) -> Any:
        """Return zeros as nested lists."""
        return _replace_placeholder(self).tolist()


def _replace_placeholder(leaf: Any) -> Any:
    if not isinstance(leaf, _GradientPlaceholder):
        return leaf
    return torch.zeros((), dtype=leaf.dtype, device=leaf.device).expand(leaf.shape)
