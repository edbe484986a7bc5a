"""Tensor that holds one rank's part of a sequence and looks like the full one to other code.

Under sequence parallelism a block passes its rank's part of the sequence straight to the next
block. Between two blocks runs the user's own code, which does not know about parts. Any operation
on a `SequenceShard` gathers the whole first, so the result is always right; without operations it
is free.

Protocol  shape, dtype, device …: the whole tensor's, at once   `.local`: this rank's part
          any torch function on it: all-gather, kept with the shard, then the function on the whole
          Every rank computes alike on a gathered whole, so each has the complete gradient of the
          whole, and a rank takes its part of it: gather forward, slice backward. With
          `ShardSpec.summands`, only the sum of the ranks' gradients is complete.
          A library that walks structures (recompute, FSDP's hooks) sees `.local`, an ordinary
          tensor: the class is registered with torch's pytree.
Source    Korthikanti et al. 2022 (2205.05198) for the parts; the wrapper is our own
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.base.errors import PlanError
from shoal.parallel._torch import pytree
from shoal.parallel.spmd.autograd_collectives import Axis
from shoal.parallel.spmd.labelling.labels import Label, Split


@dataclass(frozen=True)
class ShardSpec:
    """Distribution of one dim of a tensor over the ranks of an axis.

    Attributes:
        dim: the distributed dim.
        cuts: rank r has the indices from cuts[r] to cuts[r + 1].
        summands: the ranks' gradients of a gathered whole add up to its gradient, and so do those
            of a whole that is cut; otherwise each rank has the whole gradient.
    """

    axis: Axis
    dim: int
    cuts: tuple[int, ...]
    summands: bool = False

    @staticmethod
    def split_evenly(axis: Axis, dim: int, length: int, *, summands: bool = False) -> ShardSpec:
        """Distribute a dim evenly: the first `length % size` ranks have one index more."""
        return ShardSpec(axis, dim, compute_even_cuts(length, axis.size), summands)

    def part(self, whole: Tensor) -> Tensor:
        """Copy this rank's part of a full tensor."""
        start, stop = self.cuts[self.axis.rank], self.cuts[self.axis.rank + 1]
        return whole.narrow(self.dim, start, stop - start).contiguous()

    def reduce_gradient(self, whole: Tensor) -> Tensor:
        """Return this rank's part of a gathered tensor's gradient, reduced over the ranks."""
        if not self.summands:
            return self.part(whole)
        spans = list(zip(self.cuts, self.cuts[1:], strict=False))
        parts = [whole.narrow(self.dim, a, b - a).reshape(-1) for a, b in spans]
        cuts = [0, *itertools.accumulate(part.numel() for part in parts)]
        shape = list(whole.shape)
        shape[self.dim] = spans[self.axis.rank][1] - spans[self.axis.rank][0]
        return self.axis.reduce_scatter(torch.cat(parts), cuts).result().view(shape)

    def whole_gradient(self, local: Tensor) -> Tensor:
        """Return the full gradient of a tensor that was cut, or this rank's partial sum of it."""
        if not self.summands:
            return self.gather_whole(local)
        before, length = self.cuts[self.axis.rank], self.cuts[-1]
        shape = list(local.shape)
        shape[self.dim] = length
        whole = local.new_zeros(shape)
        whole.narrow(self.dim, before, local.shape[self.dim]).copy_(local)
        return whole

    def gather_whole(self, local: Tensor) -> Tensor:
        """All-gather the full tensor from every rank's part; short parts are sent padded."""
        lengths = [b - a for a, b in zip(self.cuts, self.cuts[1:], strict=False)]
        mine, most = lengths[self.axis.rank], max(lengths)
        local = local.contiguous()
        if mine < most:
            shape = list(local.shape)
            shape[self.dim] = most - mine
            local = torch.cat((local, local.new_zeros(shape)), self.dim)
        parts = self.axis.all_gather(local)
        return torch.cat(
            [p.narrow(self.dim, 0, n) for p, n in zip(parts, lengths, strict=True)], self.dim
        )


def compute_even_cuts(length: int, degree: int) -> tuple[int, ...]:
    """Return the indices at which `length` elements are cut for `degree` ranks.

    >>> compute_even_cuts(10, 4)
    (0, 3, 6, 8, 10)
    """
    few, more = divmod(length, degree)
    return tuple(rank * few + min(rank, more) for rank in range(degree + 1))


class SequenceShard(Tensor):
    """Tensor with the full shape that holds this rank's part of one dim in `.local`.

    `wrap_shard` makes it. It raises no errors of its own. Every rank must apply the same operations
    to it, as always under tensor parallelism.
    """

    deal: ShardSpec
    _local: Tensor
    _whole: Tensor | None
    _seen: int

    @staticmethod
    def __new__(cls, local: Tensor, deal: ShardSpec) -> SequenceShard:
        """Make the bare wrapper, outside of autograd."""
        shape = list(local.shape)
        shape[deal.dim] = deal.cuts[-1]
        wrapper: SequenceShard = torch.Tensor._make_wrapper_subclass(
            cls, tuple(shape), dtype=local.dtype, device=local.device
        )
        wrapper.deal, wrapper._local, wrapper._whole, wrapper._seen = deal, local, None, 0
        return wrapper

    def __init__(self, local: Tensor, deal: ShardSpec) -> None:
        """Accept the arguments of `__new__`, which does all the work."""

    @property
    def local(self) -> Tensor:
        """Return this rank's part, with its own autograd history."""
        self._sync_in_place_changes()
        return self._local

    def whole(self) -> Tensor:
        """Return the full tensor, gathered at the first call and cached with the shard."""
        if self._whole is None:
            with torch.enable_grad():
                self._whole = gather_whole(self._local, self.deal)
            self._seen = self._whole._version
        return self._whole if torch.is_grad_enabled() else self._whole.detach()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        """Format without gathering: printing on one rank must not wait for the others."""
        cuts, rank = self.deal.cuts, self.deal.axis.rank
        return (
            f"{type(self).__name__}({list(self.shape)}, here {cuts[rank]} … {cuts[rank + 1] - 1} "
            f"of dim {self.deal.dim})"
        )

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Answer metadata without communication; run other functions on the full tensor."""
        kwargs = kwargs or {}
        if func in _FREE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func is Tensor.register_hook:
            return args[0].local.register_hook(*args[1:], **kwargs)
        if func is F.dropout and not (kwargs.get("training", True) and kwargs.get("p", 0.5)):
            return args[0]
        shards = [leaf for leaf in _leaves((args, kwargs)) if isinstance(leaf, SequenceShard)]
        for shard in shards:
            shard._sync_in_place_changes()
        args, kwargs = _with_wholes((args, kwargs))
        result = func(*args, **kwargs)
        for shard in shards:
            shard._sync_in_place_changes()
        return result

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Use the full tensor below autograd too (in a user's own autograd function)."""
        with torch.no_grad():
            args, kwargs = _with_wholes((args, kwargs or {}))
        return func(*args, **kwargs)

    def _sync_in_place_changes(self) -> None:
        """Update autograd's view of the wrapper if the full tensor was changed in place."""
        whole = self._whole
        if whole is None or whole._version == self._seen:
            return
        if not torch.is_grad_enabled() and whole.requires_grad:
            raise PlanError(
                f"a hidden state of shape {list(whole.shape)}, split over layout.tp along the "
                f"sequence, was changed through a view (x = h[:, 0]; x.zero_()) between two "
                f"blocks; write h = h.clone() before it, or set layout.tp=1"
            )
        self._local, self._seen = cut_whole(whole, self.deal), whole._version
        if torch.is_grad_enabled():
            with torch._C.DisableTorchFunctionSubclass():
                _Replace.apply(self, whole)


def wrap_shard(
    local: Tensor, deal: ShardSpec, kind: type[SequenceShard] = SequenceShard
) -> SequenceShard:
    """Wrap this rank's part so that it looks like the full tensor.

    Args:
        local: [..., own part of dim, ...], part of autograd's graph or not.
    """
    shard: SequenceShard = _WrapShard.apply(local, deal, kind)
    shard._local = local  # with its autograd history: the next block uses it without the wrapper
    return shard


def wrap_output(value: Tensor, label: Label, axis: Axis) -> Tensor:
    """Return a block's result for its reader: as it is, or this rank's part in a shard."""
    if not isinstance(label, Split):
        return value
    return wrap_shard(
        value, ShardSpec.split_evenly(axis, label.dim, value.shape[label.dim] * axis.size)
    )


def gather_whole(local: Tensor, deal: ShardSpec) -> Tensor:
    """All-gather the full tensor; backward: take this rank's part of the full gradient."""
    return _Gather.apply(local, deal)


def cut_whole(whole: Tensor, deal: ShardSpec) -> Tensor:
    """Take this rank's part; backward: all-gather the full gradient from the ranks' parts."""
    return _Cut.apply(whole, deal)


def local_part_of(value: Tensor, deal: ShardSpec) -> Tensor:
    """Return this rank's part of a full tensor, or of a shard with the same distribution."""
    if isinstance(value, SequenceShard):
        same = value.deal.dim == deal.dim and value.deal.cuts == deal.cuts
        if same and value.deal.axis is deal.axis:
            return value.local
        value = value.whole()
    return cut_whole(value, deal)


def gather_if_shard(value: Any) -> Any:
    """Gather a shard; return any other value unchanged."""
    return value.whole() if isinstance(value, SequenceShard) else value


def _with_wholes(tree: Any) -> Any:
    return pytree.tree_map(gather_if_shard, tree, is_leaf=is_shard)


def _leaves(tree: Any) -> list[Any]:
    return pytree.tree_leaves(tree, is_leaf=is_shard)


def is_shard(value: Any) -> bool:
    """Return whether a value is a shard, as `is_leaf` of pytree functions."""
    return isinstance(value, SequenceShard)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, deal: ShardSpec) -> Tensor:
        ctx.deal = deal
        return deal.gather_whole(local)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        return ctx.deal.reduce_gradient(upstream), None


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, deal: ShardSpec) -> Tensor:
        ctx.deal = deal
        return deal.part(whole)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        return ctx.deal.whole_gradient(upstream), None


class _WrapShard(torch.autograd.Function):
    """Node of a wrapper in autograd's graph, for users' own autograd functions on it."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, deal: ShardSpec, kind: type[SequenceShard]) -> Tensor:
        ctx.deal = deal
        return kind(local, deal)  # `wrap_shard` then sets the part with its autograd history

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        return ctx.deal.reduce_gradient(gather_if_shard(upstream)), None, None


class _Replace(torch.autograd.Function):
    """Autograd node after which the wrapper represents the full tensor `whole`."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, whole: Tensor) -> Tensor:
        ctx.mark_dirty(shard)
        return shard

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[None, Tensor]:
        return None, gather_if_shard(upstream)


_METADATA = (
    *("shape", "dtype", "device", "layout", "requires_grad", "is_leaf", "grad_fn", "ndim"),
    *("is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_nested", "is_mkldnn"),
    *("is_mps", "itemsize", "nbytes", "output_nr", "_version", "_backward_hooks"),
)
_FREE = frozenset(getattr(Tensor, name).__get__ for name in _METADATA) | {
    Tensor.size,
    Tensor.dim,
    Tensor.ndimension,
    Tensor.numel,
    Tensor.nelement,
    Tensor.element_size,
    Tensor.is_floating_point,
    Tensor.is_complex,
    Tensor.is_inference,
    Tensor.get_device,
    Tensor.__len__,
    torch.numel,
    torch.is_floating_point,
    torch.is_complex,
}
"""Functions that the wrapper answers without a gather."""


def rewrap_shard(children: Any, context: Any) -> Any:
    """Wrap a pytree child again, the inverse of the shard's flatten function."""
    (child,), (deal, kind) = children, context
    return wrap_shard(child, deal, kind) if isinstance(child, Tensor) else child


pytree.register_pytree_node(
    SequenceShard, lambda shard: ([shard.local], (shard.deal, type(shard))), rewrap_shard
)
