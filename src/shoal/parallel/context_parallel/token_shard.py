"""Tensor of one context-parallel rank's tokens that looks whole between a model's layers.

A `SequenceShard` gathers for any operation of the user's code. This class runs the most frequent
operations on the parts, because whole tensors of long sequences must be avoided:

    arithmetic and activations, with parts of the same tokens or with tensors without tokens
    changes of dtype, indexing that keeps all tokens, dropout (with the whole tensor's mask)
    the default loss, of this rank's tokens (`sharing`)

Gradients   Every rank runs the whole of the user's code, so work that is equal on every rank
            would count n times. Only the first rank's loss is differentiated, and every collective
            passes gradients on as the transpose of a linear map: gather ↔ sum of parts, part ↔
            zeros around it, sum ↔ sum. So a rank's gradient of anything whole, every parameter
            included, is a summand, however often it is used; parameters are summed over the
            ranks once a step. The gradients of a rank's own tokens are whole on that rank.
Source      the transpose rules of SPMD programs, as in JAX's shard_map (psum ↔ psum)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.parallel._torch import graph_task_id, pytree
from shoal.parallel.spmd import autograd_collectives
from shoal.parallel.spmd.autograd_collectives import Axis
from shoal.parallel.spmd.labelling.labels import Split
from shoal.parallel.spmd.sequence_shards import (
    SequenceShard,
    ShardSpec,
    cut_whole,
    is_shard,
    rewrap_shard,
    wrap_shard,
)

ACTIVATIONS = ("relu", "gelu", "silu", "tanh", "sigmoid", "softplus", "neg", "square", "sqrt")
ARITHMETIC = ("add", "sub", "mul", "div", "true_divide", "rsub")
OPERATORS = ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "neg")
FORMATS = ("to", "float", "double", "half", "bfloat16", "contiguous", "clone")


def _collect_functions(names: tuple[str, ...], *homes: Any) -> set[Callable[..., Any]]:
    return {getattr(home, name) for name in names for home in homes if hasattr(home, name)}


POINTWISE = (
    _collect_functions((*ACTIVATIONS, *ARITHMETIC), torch, Tensor, F)
    | _collect_functions(tuple(f"__{name}__" for name in OPERATORS), Tensor)
    | _collect_functions(FORMATS, Tensor)
)
"""Element-wise functions, with broadcasting."""


@dataclass(frozen=True)
class TokenSharing:
    """Interface of a shard for the default loss, see `models.loss.Sharing`."""

    deal: ShardSpec

    def own(self, targets: Tensor) -> Tensor:
        """Return this rank's part of a tensor whose tokens are distributed in the same way."""
        return self.deal.part(targets)

    def sum(self, total: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        """Sum a total and a count over the ranks; the total is differentiable."""
        axis = self.deal.axis
        whole = autograd_collectives.reduce(autograd_collectives.enter(total, axis), axis)
        counted = count.clone()
        axis.all_reduce(counted)
        return whole, counted


class ContextShard(SequenceShard):
    """Tensor that holds this rank's tokens and has the full tensor's shape."""

    @property
    def sharing(self) -> TokenSharing | None:
        """Return the loss's view of the tokens; None if a feature dim is distributed."""
        return TokenSharing(self.deal) if self.deal.dim < self._local.dim() - 1 else None

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation on the parts if that is equivalent, else on the full tensor."""
        kwargs = kwargs or {}
        done = None
        if graph_task_id() >= 0 and not torch.is_grad_enabled():
            pass  # a user's own backward: its gradients are summands that differ on each rank
        elif func in POINTWISE:
            done = _run_pointwise(func, args, kwargs)
        elif func is Tensor.__getitem__:
            done = _run_indexing(*args)
        elif func is F.dropout:
            done = _run_dropout(*args, **kwargs)
        return super().__torch_function__(func, types, args, kwargs) if done is None else done


pytree.register_pytree_node(
    ContextShard, lambda shard: ([shard.local], (shard.deal, type(shard))), rewrap_shard
)


def wrap_tokens(local: Tensor, axis: Axis, dim: int, length: int) -> SequenceShard:
    """Wrap this rank's tokens as the full tensor, whose dim `dim` has `length`."""
    return wrap_shard(local, ShardSpec.split_evenly(axis, dim, length, summands=True), ContextShard)


def _run_pointwise(func: Any, args: Any, kwargs: Any) -> Any:
    if kwargs.get("out") is not None:
        return None
    leaves, structure = pytree.tree_flatten((args, kwargs), is_leaf=is_shard)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    shards = [leaf for leaf in tensors if isinstance(leaf, ContextShard)]
    deal, after = shards[0].deal, shards[0].dim() - shards[0].deal.dim
    parts: list[Any] = []
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            parts.append(leaf)
        elif isinstance(leaf, ContextShard):
            if leaf.deal.cuts != deal.cuts or leaf.dim() - leaf.deal.dim != after:
                return None
            parts.append(leaf.local)
        elif is_shard(leaf):
            return None
        elif leaf.dim() < after or leaf.shape[-after] == 1:
            parts.append(leaf)
        elif leaf.shape[-after] == deal.cuts[-1]:
            parts.append(cut_whole(leaf, ShardSpec(deal.axis, leaf.dim() - after, deal.cuts, True)))
        else:
            return None
    args, kwargs = pytree.tree_unflatten(parts, structure)
    result = func(*args, **kwargs)
    return wrap_shard(
        result, ShardSpec(deal.axis, result.dim() - after, deal.cuts, True), ContextShard
    )


def _run_indexing(value: Any, index: Any) -> Any:
    """Index as in `h[:, :, 4:]`, with all tokens and some of the rest; None for anything else."""
    places = index if isinstance(index, tuple) else (index,)
    if not isinstance(value, ContextShard) or not all(isinstance(one, slice) for one in places):
        return None
    deal = value.deal
    if deal.dim < len(places):
        tokens = places[deal.dim]
        if tokens.indices(deal.cuts[-1]) != (0, deal.cuts[-1], 1):
            return None
        every = slice(None)
        places = (*places[: deal.dim], every, *places[deal.dim + 1 :])
    return wrap_shard(value.local[places], deal, ContextShard)


def _run_dropout(value: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """Apply dropout with this rank's part of the mask that one process draws."""
    if not isinstance(value, ContextShard) or inplace or not training or not p:
        return None
    deal = value.deal
    if deal.cuts[-1] % deal.axis.size:
        return None
    order = tuple(range(value.dim()))
    dropped = autograd_collectives.dropout(
        value.local, deal.axis, labels=(Split(deal.dim),), probability=p, order=order
    )
    return wrap_shard(dropped, deal, ContextShard)
