"""Runs one block alone and split over the ranks, on the same perturbed numbers, in one format.

The split run gets its parts of the parameters and inputs. Its outputs are put together again and
compared number by number; of a gradient each rank compares the part that it has, by a few random
combinations of its rows. They differ where it differs, with probability 1.

Memory    float64 is twice a model's bytes, and all ranks of a machine check at once: a device holds
          the parameters of the run under way and one gradient, which is let go of as soon as it was
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
from shoal.parallel.spmd.labelling.labels import WHOLE, Label, Partial, Split, Tiled, cut
from shoal.parallel.spmd.sequence_shards import handed_on, whole_of
from shoal.parallel.spmd.split_block import BlockClass, again
from shoal.trace.isolation.lifted_casts import NARROW
from shoal.trace.isolation.module_copies import copied_module

HOST = torch.device("cpu")

NOISE = 0.1
"""Standard deviation of the perturbation, of that of the values; at least as for values of 0.1."""

PIECE = 2**13
"""Elements that are drawn at once, but at least a row."""

COMBINATIONS = 8
"""Of a gradient's rows. Their norm is its own times 1/100 to 3, but for once in 10¹¹."""

Labels = tuple[Label, ...]
"""A label over every axis, the outermost first."""

Changed = Callable[[str, Tensor], Tensor]


@dataclass
class Results:
    """What a run gave; inputs that take a gradient are named `input 0`, …

    Attributes:
        outputs: whole, on the host.
        gradients: this rank's part of each, in brief (`brief`).
        own: of what is not cut, before sums over ranks that come once a step.
        norm: of all whole gradients as one, where they were there.
    """

    outputs: list[Tensor]
    gradients: dict[str, Tensor]
    own: dict[str, Tensor]
    norm: float = 1.0

    def off(self, difference: Tensor) -> float:
        """How large a gradient's difference is, of `norm`."""
        return float(difference.norm()) / self.norm


class Trial:
    """A block with perturbed numbers, its inputs, and the gradients that pull at its outputs.

    Args:
        block: holds its parameters whole; they stay as they are.
        axes: those of the split, and of the one inside of it.
        dtype: what it computes in: float64, or float32 for a block that knows no float64.
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
            Tensor, self._input, (group.call.args, group.call.kwargs)
        )
        self.block = _in_format(group.bare, dtype)
        self.parameters = dict(block.named_parameters())
        self.trained = {n for n, p in block.named_parameters() if p.requires_grad}
        for own, b in zip(self.block.buffers(), block.buffers(), strict=True):
            own.copy_(b)
        self.program = group.split
        if not _computes_in(group, dtype):
            self.program = again(group.split, self.block, self.args, self.kwargs)
        self.splits = [one for one in (group.split, group.split.inner) if one is not None]
        self.programs = [one for one in (self.program, self.program.inner) if one is not None]
        self.pulls: list[Tensor] = []

    @property
    def casts(self) -> bool:
        """Whether the block computes in float32 somewhere."""
        return self.dtype == torch.float32 or "torch.float32" in self.program.run.code

    def alone(self, changed: Changed | None = None) -> Results:
        """As one process computes it; `changed` is done to the perturbed parameters, by name."""
        leaves = {n: self._leaf(n, changed) for n in self.parameters}
        cuts = {n: self._cuts(n) for n in leaves}
        args, kwargs, inputs = self._fresh_inputs()
        held = {**leaves}
        for t, its in self._flat_inputs(args, kwargs):
            if id(t) in inputs:
                leaves[inputs[id(t)]], cuts[inputs[id(t)]] = t, its
        told, norms = self._listen(leaves, cuts)
        buffers = {n: b.clone() for n, b in self.block.named_buffers()}
        torch.manual_seed(2)
        result = torch.func.functional_call(self.block, {**held, **buffers}, args, kwargs)
        outputs = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        self._pull(outputs, [(WHOLE,) * len(self.axes)] * len(outputs))
        return Results([o.detach().to(HOST) for o in outputs], told, told, float(norm_of(norms)))

    def together(
        self, changed: Changed | None = None, labels: Mapping[str, Label] | None = None
    ) -> Results:
        """As the ranks compute it.

        Args:
            changed: done to the perturbed parameters, by name.
            labels: of how some are cut.
        """
        program = self.program
        cuts = {n: self._cuts(n) for n in self.parameters}
        for n, label in (labels or {}).items():
            cuts[n] = (label, *cuts[n][1:])
        leaves = {n: self._leaf(n, changed, its) for n, its in cuts.items()}
        buffers = dict(self.block.named_buffers())
        given = [self._read(n, leaves[n]) for n in program.shapes]
        given += [buffers[n].clone() for n in program.buffers]
        args, kwargs, inputs = self._fresh_inputs()
        for t, its in self._flat_inputs(args, kwargs):
            own = self._part(t.detach(), its).clone().requires_grad_(t.requires_grad)
            given.append(own)
            if id(t) in inputs:
                leaves[inputs[id(t)]], cuts[inputs[id(t)]] = own, its
        told, _ = self._listen(leaves, dict.fromkeys(leaves, ()))
        torch.manual_seed(2)
        outputs = list(program.run(*self.axes, *given))
        its_outputs = list(zip(*(one.outputs for one in self.programs), strict=True))
        self._pull(outputs, its_outputs)
        del leaves, given  # only gradients are wanted from here on
        wholes = [
            self._shown(o.detach(), its).to(HOST)
            for o, its in zip(outputs, its_outputs, strict=True)
        ]
        gradients = {n: self._over_ranks(n, g, cuts[n]) for n, g in told.items()}
        cut_ones = {n for n, its in cuts.items() if any(isinstance(i, Split | Tiled) for i in its)}
        return Results(wholes, gradients, {n: g for n, g in told.items() if n not in cut_ones})

    def everywhere(self, number: float) -> float:
        """The largest of the ranks' numbers; not a number counts as infinite."""
        told = torch.tensor([number], dtype=torch.float64, device=self.device)
        told = told.nan_to_num(nan=1e300)
        for axis in self.axes:
            told = axis.all_gather(told).max().reshape(1)
        return float(told)

    def summed(self, part: Tensor, axis: Axis | None = None) -> Tensor:
        """The sum of the ranks' tensors; over the outer axis if none is named."""
        total = part.to(self.device).clone(memory_format=torch.contiguous_format)
        (axis or self.axis).all_reduce(total)
        return total.to(part.device)

    def _input(self, leaf: Tensor) -> Tensor:
        """Hidden states with noise; masks and tables as they are."""
        if not leaf.is_floating_point():
            return leaf
        if leaf.requires_grad:
            return self._perturbed(leaf, self.generator, leaf.device).requires_grad_()
        return leaf.to(self.dtype)

    def _leaf(self, name: str, changed: Changed | None, labels: Labels = ()) -> Tensor:
        """A parameter for one run, or this rank's part of it: the same numbers every time."""
        generator = torch.Generator().manual_seed(3 + list(self.parameters).index(name))
        value = self._perturbed(self.parameters[name], generator, self.device)
        value = changed(name, value) if changed else value
        return self._part(value, labels).clone().requires_grad_(name in self.trained)

    def _perturbed(self, value: Tensor, generator: torch.Generator, device: torch.device) -> Tensor:
        """Values with noise, of which the host has a few rows at a time."""
        made = torch.empty_like(value.detach(), dtype=self.dtype, device=device)
        rows = value.detach() if value.dim() else value.detach()[None]
        pieces = rows.split(max(1, PIECE // max(1, math.prod(rows.shape[1:]))))
        size = _deviation(pieces) * NOISE
        places = made.view(rows.shape).split(len(pieces[0]) or 1)
        for piece, place in zip(pieces, places, strict=True):
            # Uniform: normal numbers take three times as long, and layers have many.
            noise = torch.rand(piece.shape, generator=generator, dtype=torch.float64)
            noise.sub_(0.5).mul_(12**0.5 * size)
            place.copy_(noise if piece.is_meta else noise.add_(piece.to(HOST)))
        return made

    def _fresh_inputs(self) -> tuple[Any, Any, dict[int, str]]:
        """(args, kwargs, names of those that take a gradient, by id), part of no graph yet."""
        fresh: dict[int, str] = {}

        def copied(leaf: Tensor) -> Tensor:
            new = leaf.detach().clone().requires_grad_(leaf.requires_grad)
            if new.requires_grad:
                fresh[id(new)] = f"input {len(fresh)}"
            return new

        args, kwargs = pytree.tree_map_only(Tensor, copied, (self.args, self.kwargs))
        return args, kwargs, fresh

    def _pull(self, outputs: list[Tensor], labels: Iterable[Labels]) -> None:
        """Backward, from the same random gradients of the outputs every time."""
        if not self.pulls:  # the run alone comes first: it knows the whole shapes
            self.pulls = [
                torch.randn(o.shape, generator=self.generator, dtype=torch.float64) for o in outputs
            ]
        moving = [
            (o, self._part(pull.to(o.device, o.dtype), label))
            for o, pull, label in zip(outputs, self.pulls, labels, strict=True)
            if o.requires_grad
        ]
        torch.autograd.backward([o for o, _ in moving], [pull for _, pull in moving])

    def _cuts(self, name: str) -> Labels:
        return tuple(one.parameters.get(name, WHOLE) for one in self.splits)

    def _flat_inputs(self, args: Any, kwargs: Any) -> Iterator[tuple[Tensor, Labels]]:
        labels = zip(*(one.inputs for one in self.programs), strict=True)
        return zip(self.program.flatten(args, kwargs), labels, strict=True)

    def _part(self, whole: Tensor, labels: Labels) -> Tensor:
        """This rank's part of a tensor, maybe a view; without labels all of it."""
        for axis, label in zip(self.axes, labels, strict=False):
            whole = cut(whole, label, axis.rank, axis.size)
        return whole

    def _read(self, name: str, value: Tensor) -> Tensor:
        """A parameter as the graph reads it, whose gradients are summed as the split says."""
        for axis, split, program in zip(self.axes, self.splits, self.programs, strict=True):
            if name in split.partial and name not in program.partial:
                value = autograd_collectives.counted_once(value, axis)
        return value

    def _listen(
        self, leaves: Mapping[str, Tensor], cuts: Mapping[str, Labels]
    ) -> tuple[dict[str, Tensor], list[Tensor]]:
        """(gradients of this rank's parts in brief, norms), which a backward pass will fill in."""
        told, norms = dict[str, Tensor](), list[Tensor]()

        def take(leaf: Tensor, name: str) -> None:
            if leaf.grad is not None:
                norms.append(leaf.grad.norm())
                told[name] = brief(self._part(leaf.grad, cuts[name]))
                leaf.grad = None

        for n, leaf in leaves.items():
            if leaf.requires_grad:
                told[n] = brief(self._part(leaf.new_zeros(()).expand(leaf.shape), cuts[n]))
                leaf.register_post_accumulate_grad_hook(partial(take, name=n))
        return told, norms

    def _over_ranks(self, name: str, part: Tensor, labels: Labels) -> Tensor:
        """A gradient, in brief, after the sums over ranks that come once a step."""
        for axis, split, label in reversed(list(zip(self.axes, self.splits, labels, strict=True))):
            if name in split.partial or isinstance(label, Partial):
                part = self.summed(part, axis)
        return part

    def _shown(self, part: Tensor, labels: Labels) -> Tensor:
        for axis, label in reversed(list(zip(self.axes, labels, strict=True))):
            part = whole_of(handed_on(part, label, axis))
        return part


def _computes_in(group: BlockClass, dtype: torch.dtype) -> bool:
    """Whether the split's own program computes in this format, and casts to no narrower one."""
    given = [*group.bare.parameters(), *group.bare.buffers()]
    given += pytree.tree_leaves((group.call.args, group.call.kwargs))
    formats = {t.dtype for t in given if isinstance(t, Tensor) and t.is_floating_point()}
    return formats == {dtype} and not any(str(one) in group.split.run.code for one in NARROW)


def _in_format(bare: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy in another format, its parameters still without numbers."""
    twin = copied_module(bare)
    for p in twin.parameters():
        p.data = torch.zeros((), dtype=dtype, device=p.device).expand(p.shape)
    for part in twin.modules():
        for key, buffer in part._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                part._buffers[key] = buffer.to(dtype)
    return twin


def _deviation(pieces: Sequence[Tensor]) -> float:
    """The standard deviation of a parameter's values, at least 0.1; 0 if they have infinities."""
    if pieces[0].is_meta:  # not made yet: any numbers of a usual size do
        return float(max(1, pieces[0].shape[-1]) ** -0.5) / NOISE
    count, total, squares = 0, 0.0, 0.0
    for piece in pieces:
        wide = piece.to(HOST, torch.float64)
        count, total = count + wide.numel(), total + float(wide.sum())
        squares += float(wide.norm()) ** 2
    if not math.isfinite(total + squares):
        return 0.0
    return max(0.01, (squares - total**2 / max(1, count)) / max(1, count - 1)) ** 0.5


def brief(gradient: Tensor) -> Tensor:
    """Take `COMBINATIONS` of a gradient's rows, linear ones, always the same; fewer rows as is.

    >>> brief(torch.ones(3, 100)).shape, brief(torch.ones(50, 100)).shape
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


def distance_of(got: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Measure how far tensors are from others: the norm of all differences, by that of all."""
    pairs = [(g, e) for g, e in zip(got, expected, strict=True) if e.is_floating_point()]
    norm = norm_of(e for _, e in pairs)
    return float(norm_of(g - e for g, e in pairs) / norm)


def norm_of(tensors: Iterable[Tensor]) -> Tensor:
    """Take the norm of several tensors as one, never 0; 1 where there are none."""
    norms = [t.detach().cpu().double().norm() for t in tensors]
    return torch.stack(norms).norm().clamp(min=1e-300) if norms else torch.ones(())
