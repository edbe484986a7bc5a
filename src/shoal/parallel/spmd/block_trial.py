"""Trial runs of one block, unsplit and split over the ranks, on the same perturbed numbers.

The split run receives its parts of the parameters and inputs. Its outputs are joined and compared
number by number. Of each gradient, a rank compares its own part, by a few random combinations of
the rows. The combinations differ where the gradients differ, with probability 1.

Memory    float64 is twice a model's bytes, and all ranks of a machine check at once: a device holds
          the parameters of the current run and one gradient, which is freed as soon as it was
          combined; numbers are drawn a few rows at a time, for each run anew
Source    Freivalds 1977, "Probabilistic machines can use less running time": products of matrices
          compared by random vectors
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shoal.parallel._torch import pytree
from shoal.parallel.spmd import autograd_collectives
from shoal.parallel.spmd.autograd_collectives import Axis
from shoal.parallel.spmd.labelling.labels import WHOLE, Label, Partial, Split, Tiled, cut_tensor
from shoal.parallel.spmd.sequence_shards import gather_if_shard, wrap_output
from shoal.parallel.spmd.split_block import BlockClass, split_for_inputs
from shoal.trace.isolation.lifted_casts import NARROW
from shoal.trace.isolation.module_copies import copy_module

HOST = torch.device("cpu")

NOISE = 0.1
"""Standard deviation of the perturbation, relative to that of the values (at least 0.1)."""

PIECE = 2**13
"""Elements that are drawn at once; at least one row."""

COMBINATIONS = 8
"""Random combinations of a gradient's rows. Their norm is 1/100 to 3 times the gradient's norm,
except with probability 10⁻¹¹.
"""

Labels = tuple[Label, ...]
"""Labels of a tensor over every axis, the outermost first."""

Changed = Callable[[str, Tensor], Tensor]


@dataclass
class TrialResults:
    """Outputs and gradients of one trial run; inputs with gradients are named `input 0`, etc.

    Attributes:
        outputs: whole outputs, on the host.
        gradients: this rank's part of each gradient, in brief (`sketch_gradient`).
        own: gradients of parameters that are not cut, before the sums over ranks of each step.
        norm: norm of all whole gradients together; 1 if this run has no whole gradients.
    """

    outputs: list[Tensor]
    gradients: dict[str, Tensor]
    own: dict[str, Tensor]
    norm: float = 1.0

    def relative_difference(self, difference: Tensor) -> float:
        """Return the size of a gradient's difference, relative to `norm`."""
        return float(difference.norm()) / self.norm


class BlockTrial:
    """Trial of a block: perturbed parameters, inputs, and random gradients of its outputs.

    Args:
        block: the block with whole parameters, which the trial does not change.
        axes: the axis of the split, then that of the split inside of it.
        dtype: compute dtype: float64, or float32 for a block that does not run in float64.
    """

    def __init__(
        self,
        block: nn.Module,
        group: BlockClass,
        axes: Sequence[Axis],
        dtype: torch.dtype = torch.float64,
    ) -> None:
        self.axes, self.split, self.dtype = tuple(axes), group.split, dtype
        self.axis = self.axes[0]
        here = (p.device for p in group.bare.parameters() if not p.is_meta)
        self.device = next(here, HOST)
        self.generator = torch.Generator().manual_seed(1)
        self.args, self.kwargs = pytree.tree_map_only(
            Tensor, self._perturb_input, (group.call.args, group.call.kwargs)
        )
        self.block = _copy_in_dtype(group.bare, dtype)
        self.parameters = dict(block.named_parameters())
        self.trained = {n for n, p in block.named_parameters() if p.requires_grad}
        for own, b in zip(self.block.buffers(), block.buffers(), strict=True):
            own.copy_(b)
        self.program = group.split
        if not _runs_in_dtype(group, dtype):
            self.program = split_for_inputs(group.split, self.block, self.args, self.kwargs)
        self.splits = [one for one in (group.split, group.split.inner) if one is not None]
        self.programs = [one for one in (self.program, self.program.inner) if one is not None]
        self.pulls: list[Tensor] = []

    @property
    def uses_float32(self) -> bool:
        """Return whether the block computes in float32 somewhere."""
        return self.dtype == torch.float32 or "torch.float32" in self.program.run.code

    def run_unsplit(self, changed: Changed | None = None) -> TrialResults:
        """Run the unsplit block on one process, and return its outputs and gradients.

        Args:
            changed: function applied to each perturbed parameter, by name.
        """
        leaves = {n: self._make_parameter(n, changed) for n in self.parameters}
        cuts = {n: self._labels_by_axis(n) for n in leaves}
        args, kwargs, inputs = self._clone_inputs()
        held = {**leaves}
        for t, its in self._flat_inputs(args, kwargs):
            if id(t) in inputs:
                leaves[inputs[id(t)]], cuts[inputs[id(t)]] = t, its
        told, norms = self._record_gradients(leaves, cuts)
        buffers = {n: b.clone() for n, b in self.block.named_buffers()}
        torch.manual_seed(2)
        result = torch.func.functional_call(self.block, {**held, **buffers}, args, kwargs)
        outputs = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        self._run_backward(outputs, [(WHOLE,) * len(self.axes)] * len(outputs))
        return TrialResults(
            [o.detach().to(HOST) for o in outputs], told, told, float(compute_total_norm(norms))
        )

    def run_split(
        self, changed: Changed | None = None, labels: Mapping[str, Label] | None = None
    ) -> TrialResults:
        """Run the block split over the ranks, and return its outputs and gradients.

        Args:
            changed: function applied to each perturbed parameter, by name.
            labels: other labels for some parameters.
        """
        program = self.program
        cuts = {n: self._labels_by_axis(n) for n in self.parameters}
        for n, label in (labels or {}).items():
            cuts[n] = (label, *cuts[n][1:])
        leaves = {n: self._make_parameter(n, changed, its) for n, its in cuts.items()}
        buffers = dict(self.block.named_buffers())
        given = [self._count_gradients(n, leaves[n]) for n in program.shapes]
        given += [buffers[n].clone() for n in program.buffers]
        args, kwargs, inputs = self._clone_inputs()
        for t, its in self._flat_inputs(args, kwargs):
            own = self._slice_part(t.detach(), its).clone().requires_grad_(t.requires_grad)
            given.append(own)
            if id(t) in inputs:
                leaves[inputs[id(t)]], cuts[inputs[id(t)]] = own, its
        told, _ = self._record_gradients(leaves, dict.fromkeys(leaves, ()))
        torch.manual_seed(2)
        outputs = list(program.run(*self.axes, *given))
        its_outputs = list(zip(*(one.outputs for one in self.programs), strict=True))
        self._run_backward(outputs, its_outputs)
        del leaves, given  # only gradients are wanted from here on
        wholes = [
            self._join_output(o.detach(), its).to(HOST)
            for o, its in zip(outputs, its_outputs, strict=True)
        ]
        gradients = {n: self._sum_gradient(n, g, cuts[n]) for n, g in told.items()}
        cut_ones = {n for n, its in cuts.items() if any(isinstance(i, Split | Tiled) for i in its)}
        return TrialResults(wholes, gradients, {n: g for n, g in told.items() if n not in cut_ones})

    def max_over_ranks(self, number: float) -> float:
        """Return the largest of the ranks' numbers; NaN counts as infinite."""
        told = torch.tensor([number], dtype=torch.float64, device=self.device)
        told = told.nan_to_num(nan=1e300)
        for axis in self.axes:
            told = axis.all_gather(told).max().reshape(1)
        return float(told)

    def sum_over_ranks(self, part: Tensor, axis: Axis | None = None) -> Tensor:
        """Return the sum of the ranks' tensors, over the outer axis unless another is named."""
        total = part.to(self.device).clone(memory_format=torch.contiguous_format)
        (axis or self.axis).all_reduce(total)
        return total.to(part.device)

    def _perturb_input(self, leaf: Tensor) -> Tensor:
        """Add noise to hidden states; leave masks and tables unchanged."""
        if not leaf.is_floating_point():
            return leaf
        if leaf.requires_grad:
            return self._perturb(leaf, self.generator, leaf.device).requires_grad_()
        return leaf.to(self.dtype)

    def _make_parameter(self, name: str, changed: Changed | None, labels: Labels = ()) -> Tensor:
        """Return a perturbed parameter, or this rank's part of it: equal numbers in every run."""
        generator = torch.Generator().manual_seed(3 + list(self.parameters).index(name))
        value = self._perturb(self.parameters[name], generator, self.device)
        value = changed(name, value) if changed else value
        return self._slice_part(value, labels).clone().requires_grad_(name in self.trained)

    def _perturb(self, value: Tensor, generator: torch.Generator, device: torch.device) -> Tensor:
        """Return values with noise; the host holds a few rows of them at a time."""
        made = torch.empty_like(value.detach(), dtype=self.dtype, device=device)
        rows = value.detach() if value.dim() else value.detach()[None]
        pieces = rows.split(max(1, PIECE // max(1, math.prod(rows.shape[1:]))))
        size = _standard_deviation(pieces) * NOISE
        places = made.view(rows.shape).split(len(pieces[0]) or 1)
        for piece, place in zip(pieces, places, strict=True):
            # Uniform: normal numbers take three times as long, and layers have many.
            noise = torch.rand(piece.shape, generator=generator, dtype=torch.float64)
            noise.sub_(0.5).mul_(12**0.5 * size)
            place.copy_(noise if piece.is_meta else noise.add_(piece.to(HOST)))
        return made

    def _clone_inputs(self) -> tuple[Any, Any, dict[int, str]]:
        """Return (args, kwargs, names of inputs with gradients by id), detached from any graph."""
        fresh: dict[int, str] = {}

        def copied(leaf: Tensor) -> Tensor:
            new = leaf.detach().clone().requires_grad_(leaf.requires_grad)
            if new.requires_grad:
                fresh[id(new)] = f"input {len(fresh)}"
            return new

        args, kwargs = pytree.tree_map_only(Tensor, copied, (self.args, self.kwargs))
        return args, kwargs, fresh

    def _run_backward(self, outputs: list[Tensor], labels: Iterable[Labels]) -> None:
        """Run the backward pass, from the same random gradients of the outputs every time."""
        if not self.pulls:  # `alone` runs first: it knows the whole shapes
            self.pulls = [
                torch.randn(o.shape, generator=self.generator, dtype=torch.float64) for o in outputs
            ]
        moving = [
            (o, self._slice_part(pull.to(o.device, o.dtype), label))
            for o, pull, label in zip(outputs, self.pulls, labels, strict=True)
            if o.requires_grad
        ]
        torch.autograd.backward([o for o, _ in moving], [pull for _, pull in moving])

    def _labels_by_axis(self, name: str) -> Labels:
        return tuple(one.parameters.get(name, WHOLE) for one in self.splits)

    def _flat_inputs(self, args: Any, kwargs: Any) -> Iterator[tuple[Tensor, Labels]]:
        labels = zip(*(one.inputs for one in self.programs), strict=True)
        return zip(self.program.flatten(args, kwargs), labels, strict=True)

    def _slice_part(self, whole: Tensor, labels: Labels) -> Tensor:
        """Return this rank's part of a tensor, maybe a view; without labels the whole tensor."""
        for axis, label in zip(self.axes, labels, strict=False):
            whole = cut_tensor(whole, label, axis.rank, axis.size)
        return whole

    def _count_gradients(self, name: str, value: Tensor) -> Tensor:
        """Return a parameter as the graph reads it, with gradients summed as the split says."""
        for axis, split, program in zip(self.axes, self.splits, self.programs, strict=True):
            if name in split.partial and name not in program.partial:
                value = autograd_collectives.count_gradient_once(value, axis)
        return value

    def _record_gradients(
        self, leaves: Mapping[str, Tensor], cuts: Mapping[str, Labels]
    ) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Return (brief gradients of this rank's parts, norms); the backward pass fills both."""
        told, norms = dict[str, Tensor](), list[Tensor]()

        def record_gradient(leaf: Tensor, name: str) -> None:
            if leaf.grad is not None:
                norms.append(leaf.grad.norm())
                told[name] = sketch_gradient(self._slice_part(leaf.grad, cuts[name]))
                leaf.grad = None

        for n, leaf in leaves.items():
            if leaf.requires_grad:
                told[n] = sketch_gradient(
                    self._slice_part(leaf.new_zeros(()).expand(leaf.shape), cuts[n])
                )
                leaf.register_post_accumulate_grad_hook(partial(record_gradient, name=n))
        return told, norms

    def _sum_gradient(self, name: str, part: Tensor, labels: Labels) -> Tensor:
        """Sum a brief gradient over the ranks where the split sums it once per step."""
        for axis, split, label in reversed(list(zip(self.axes, self.splits, labels, strict=True))):
            if name in split.partial or isinstance(label, Partial):
                part = self.sum_over_ranks(part, axis)
        return part

    def _join_output(self, part: Tensor, labels: Labels) -> Tensor:
        for axis, label in reversed(list(zip(self.axes, labels, strict=True))):
            part = gather_if_shard(wrap_output(part, label, axis))
        return part


def _runs_in_dtype(group: BlockClass, dtype: torch.dtype) -> bool:
    """Return whether the split's program computes in `dtype` and casts to no narrower one."""
    given = [*group.bare.parameters(), *group.bare.buffers()]
    given += pytree.tree_leaves((group.call.args, group.call.kwargs))
    formats = {t.dtype for t in given if isinstance(t, Tensor) and t.is_floating_point()}
    return formats == {dtype} and not any(str(one) in group.split.run.code for one in NARROW)


def _copy_in_dtype(bare: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Copy a block to another dtype; its parameters still have no numbers."""
    twin = copy_module(bare)
    for p in twin.parameters():
        p.data = torch.zeros((), dtype=dtype, device=p.device).expand(p.shape)
    for part in twin.modules():
        for key, buffer in part._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                part._buffers[key] = buffer.to(dtype)
    return twin


def _standard_deviation(pieces: Sequence[Tensor]) -> float:
    """Return the standard deviation of a parameter, at least 0.1; 0 if it has infinities."""
    if pieces[0].is_meta:  # not initialized yet: any numbers of a usual size will do
        return float(max(1, pieces[0].shape[-1]) ** -0.5) / NOISE
    count, total, squares = 0, 0.0, 0.0
    for piece in pieces:
        wide = piece.to(HOST, torch.float64)
        count, total = count + wide.numel(), total + float(wide.sum())
        squares += float(wide.norm()) ** 2
    if not math.isfinite(total + squares):
        return 0.0
    return max(0.01, (squares - total**2 / max(1, count)) / max(1, count - 1)) ** 0.5


def sketch_gradient(gradient: Tensor) -> Tensor:
    """Compress a gradient to `COMBINATIONS` fixed linear combinations of its rows; keep fewer rows.

    >>> sketch_gradient(torch.ones(3, 100)).shape, sketch_gradient(torch.ones(50, 100)).shape
    (torch.Size([3, 100]), torch.Size([8, 100]))
    """
    shape = gradient.shape
    cuts = [(math.prod(shape[:k]), math.prod(shape[k:])) for k in range(1, len(shape))]
    count, width = min(cuts, key=sum, default=(0, 0))
    if count <= COMBINATIONS:
        return gradient
    generator = torch.Generator().manual_seed(count)
    weights = torch.randn(COMBINATIONS, count, generator=generator, dtype=gradient.dtype)
    return weights.div_(COMBINATIONS**0.5).to(gradient.device) @ gradient.reshape(count, width)


def measure_relative_distance(got: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the norm of all differences, relative to the norm of the expected tensors."""
    pairs = [(g, e) for g, e in zip(got, expected, strict=True) if e.is_floating_point()]
    norm = compute_total_norm(e for _, e in pairs)
    return float(compute_total_norm(g - e for g, e in pairs) / norm)


def compute_total_norm(tensors: Iterable[Tensor]) -> Tensor:
    """Return the norm of several tensors together, never 0; 1 if there are none."""
    norms = [t.detach().cpu().double().norm() for t in tensors]
    return torch.stack(norms).norm().clamp(min=1e-300) if norms else torch.ones(())
