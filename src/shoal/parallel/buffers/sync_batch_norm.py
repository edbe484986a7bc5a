"""Synchronised BatchNorm: statistics over the i-th micro-batches of all data-parallel ranks.

    forward     each rank: m, mean, Σ(x − mean)² of its micro-batch  ── all-gather ──▶  those of all
    backward    each rank: Σ dy, Σ dy·x̂                              ── all-reduce ──▶  those of all

    dx = w/σ · (dy − (Σ dy + x̂ · Σ dy·x̂) / M)        M: elements of a channel on all ranks

So `accumulate = 1` computes on any number of ranks what one process computes on the whole batch.
Means are joined by Chan's formula in float64, in the order of the ranks: the same bits everywhere.
Every rank makes as many passes as the busiest one, so that collectives have one order on all ranks.
A pass that only joins those of other ranks counts no sample, and gets no gradient.

Layers: `nn.SyncBatchNorm`, and with `sync_batch_norm` every BatchNorm. torch's own class refuses
tensors on the CPU and waits for ever for a rank without a micro-batch. Where ranks share all
samples (one process, tp, pp) the layers compute what a BatchNorm computes.
Source: Chan, Golub, LeVeque 1979; the backward pass is that of torch.nn.SyncBatchNorm.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from shoal.base.errors import PlanError
from shoal.base.layouts.policies import CompilePolicy
from shoal.base.layouts.schedule_names import model_copies
from shoal.fabric import World
from shoal.parallel._torch import BatchNorm
from shoal.parallel.program import Program
from shoal.trace.isolation.replaced_forward import ReplacedForward


def apply(program: Program) -> Program:
    """Let the layers take their statistics over all data-parallel ranks.

    Raises:
        PlanError: the layout or a policy runs layers in a way that ranks cannot join.
    """
    layers = {
        name: part
        for name, part in program.module.named_modules()
        if isinstance(part, BatchNorm)
        and (isinstance(part, nn.SyncBatchNorm) or program.plan.sync_batch_norm)
    }
    if not layers:
        return program
    if joins := program.data.size > 1:
        _refuse_layouts(program, next(iter(layers)))
    ranks = JoinedRanks(program.data)
    undo = tuple(SyncedForward(name, layer, ranks).restore for name, layer in layers.items())
    return replace(
        program,
        together=program.together or joins,
        around=(*program.around, ranks.micro_batch) if joins else program.around,
        on_close=(*program.on_close, *undo),
    )


def _refuse_layouts(program: Program, name: str) -> None:
    plan, layout = program.plan, program.plan.layout
    for axis in ("tp", "cp", "ep"):
        if getattr(layout, axis) > 1:
            raise PlanError(
                f"model: {name} takes its statistics over ranks (SyncBatchNorm), and layout.{axis} "
                f"= {getattr(layout, axis)} beside data-parallel ranks runs layers by parts; try: "
                f"layout.{axis}=1, or nn.BatchNorm"
            )
    if layout.servers or layout.threads > 1 or model_copies(layout.schedule) > 1:
        raise PlanError(
            f"model: {name} takes its statistics over ranks (SyncBatchNorm), and under "
            f"{layout.text()} ranks do not run their passes together; try: ddp, or nn.BatchNorm"
        )
    if plan.differs_from_default(CompilePolicy):
        raise PlanError(
            f"model: {name} takes its statistics over ranks (SyncBatchNorm), and a compiled block "
            f"makes no collectives; try: train.compile=none, or nn.BatchNorm"
        )


class JoinedRanks:
    """The ranks that join their statistics, and what this rank's pass is.

    Attributes:
        world: the ranks.
        counts: True in a pass whose samples count, False in one that joins those of other ranks;
            None outside of passes, where a layer computes alone.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.counts: bool | None = None

    def __deepcopy__(self, known: object) -> JoinedRanks:
        return self  # a copy of the model joins the same ranks

    @contextmanager
    def micro_batch(self, step: int, index: int) -> Iterator[None]:
        """Return a context around a pass."""
        before, self.counts = self.counts, index >= 0
        try:
            yield
        finally:
            self.counts = before


def joins_ranks(layer: nn.Module) -> bool:
    """Return whether a layer takes its statistics over several ranks."""
    forward = layer.__dict__.get("forward")
    while isinstance(forward, ReplacedForward) and not isinstance(forward, SyncedForward):
        forward = forward.replaced  # a stage's, or a recomputed block's, around it
    return isinstance(forward, SyncedForward) and forward.ranks.world.size > 1


class SyncedForward(ReplacedForward):
    """Forward pass of a BatchNorm over the micro-batches of all ranks."""

    def __init__(self, name: str, block: nn.Module, ranks: JoinedRanks) -> None:
        super().__init__(name, block)
        self.ranks = ranks

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Normalise the inputs; update the running statistics as `nn.BatchNorm` does."""
        layer, ranks = cast("BatchNorm", self.block), self.ranks
        if not layer.training or ranks.counts is None or ranks.world.size == 1:
            # SyncBatchNorm's own forward refuses the CPU where a process group exists.
            return BatchNorm.forward(layer, *inputs, **named)
        (x,) = (*inputs, *named.values())
        layer._check_input_dim(x)
        counted, mean, variance = _join_moments(x.detach(), ranks)
        if counted < 2:
            raise ValueError(
                f"Expected more than 1 value per channel when training, got input size "
                f"{tuple(x.shape)}"
            )
        _update_running(layer, mean, variance * (counted / (counted - 1)))
        inverse = (variance + layer.eps).rsqrt()
        return _SyncedNorm.apply(x, layer.weight, layer.bias, mean, inverse, counted, ranks)


@torch.no_grad()
def _join_moments(x: torch.Tensor, ranks: JoinedRanks) -> tuple[float, torch.Tensor, torch.Tensor]:
    """Return (elements of a channel, mean [C], biased variance [C]) over all ranks, in float64.

    Args:
        x: [N, C, …].
        ranks: the ranks.
    """
    wide = x if x.dtype == torch.float64 else x.float()
    over = [dim for dim in range(x.ndim) if dim != 1]
    own = x.numel() // x.shape[1] if ranks.counts else 0
    mean = wide.mean(over) if own else wide.new_zeros(x.shape[1])
    spread = (wide - _by_channel(mean, x)).square().sum(over) if own else torch.zeros_like(mean)
    row = torch.cat([mean.double(), spread.double(), mean.new_full((1,), own, dtype=torch.double)])
    means, spreads, counts = ranks.world.all_gather(row).split([len(mean), len(mean), 1], dim=1)
    total = counts.sum()
    joined = (means * counts).sum(0) / total
    square = (spreads + counts * (means - joined).square()).sum(0)
    return float(total), joined, square / total


def _update_running(layer: BatchNorm, mean: torch.Tensor, variance: torch.Tensor) -> None:
    """Update a layer's running statistics, as F.batch_norm does."""
    if layer.running_mean is None or layer.running_var is None:
        return
    if layer.num_batches_tracked is not None:
        layer.num_batches_tracked.add_(1)
    share = layer.momentum
    if share is None:  # a plain average over all calls
        share = 1.0 / float(layer.num_batches_tracked or 1)
    with torch.no_grad():
        layer.running_mean.lerp_(mean.to(layer.running_mean), share)
        layer.running_var.lerp_(variance.to(layer.running_var), share)


def _by_channel(values: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return values [C] in the dims of x [N, C, …]."""
    return values.view(1, -1, *([1] * (x.ndim - 2)))


class _SyncedNorm(torch.autograd.Function):
    """y = (x − mean) · inverse · w + b, with gradients through the statistics of all ranks."""

    @staticmethod
    def forward(
        context: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mean: torch.Tensor,
        inverse: torch.Tensor,
        counted: float,
        ranks: JoinedRanks,
    ) -> torch.Tensor:
        context.save_for_backward(x, weight, mean, inverse)
        context.counted, context.ranks, context.counts = counted, ranks, ranks.counts
        context.dtypes = [None if one is None else one.dtype for one in (weight, bias)]
        normal = _normalise(x, mean, inverse)
        if weight is not None:
            normal = normal * _by_channel(weight.to(normal), x)
        if bias is not None:
            normal = normal + _by_channel(bias.to(normal), x)
        return normal.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        x, weight, mean, inverse = context.saved_tensors
        normal = _normalise(x, mean, inverse)
        over = [dim for dim in range(x.ndim) if dim != 1]
        gradient = gradient.to(normal)
        sums = torch.stack([gradient.sum(over), (gradient * normal).sum(over)]).double()
        own = sums.clone()
        context.ranks.world.all_reduce(sums)
        inner = None
        if context.needs_input_grad[0]:
            if context.counts:
                shift, slope = (_by_channel(one, x).to(normal) for one in sums / context.counted)
                factor = inverse if weight is None else inverse * weight.double()
                inner = (gradient - shift - normal * slope) * _by_channel(factor, x).to(normal)
                inner = inner.to(x.dtype)
            else:  # its samples are in no statistic
                inner = torch.zeros_like(x)
        kinds = context.dtypes
        of_weight = own[1].to(kinds[0]) if kinds[0] is not None else None
        of_bias = own[0].to(kinds[1]) if kinds[1] is not None else None
        return inner, of_weight, of_bias, None, None, None, None


def _normalise(x: torch.Tensor, mean: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """Return (x − mean) · inverse, in float64 for float64 and else in float32."""
    wide = x if x.dtype == torch.float64 else x.float()
    return (wide - _by_channel(mean, x).to(wide)) * _by_channel(inverse, x).to(wide)
