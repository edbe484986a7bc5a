"""Runs one block alone and split over the ranks, on the same perturbed numbers, in one format.

The split run gets its parts of the parameters and inputs, and what it gives (outputs, gradients of
inputs and of all parameters) is put together again, so that both can be compared number by number.

Memory    float64 is twice a model's bytes, and a device may have no room for more: it holds the
          parameters of the run under way. What is compared, gradients too, lies on the host, but
          for this rank's parts of what is cut. All ranks of a machine do so at once: the perturbed
          numbers are made anew for each run, and gradients compared one by one
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shoal.parallel._torch import pytree
from shoal.parallel.spmd import autograd_collectives
from shoal.parallel.spmd.autograd_collectives import Axis
from shoal.parallel.spmd.labels import WHOLE, Label, Partial, Split, Tiled, cut, join
from shoal.parallel.spmd.sequence import handed_on, whole_of
from shoal.parallel.spmd.split_block import BlockClass, again
from shoal.trace.casts import NARROW
from shoal.trace.copies import copied_module

HOST = torch.device("cpu")

NOISE = 0.1
"""Standard deviation of the perturbation, of that of the values; at least as for values of 0.1."""


Labels = tuple[Label, ...]
"""A label over every axis, the outermost first."""


@dataclass
class Results:
    """What a run gave, whole, on the host; inputs that take a gradient are named `input 0`, …

    own   gradients as this rank has them, before sums over ranks that come once a step
    off   how far gradients are from others, by norm: those that were compared are let go of
    """

    outputs: list[Tensor]
    gradients: dict[str, Tensor]
    own: dict[str, Tensor]
    off: dict[str, float] = field(default_factory=dict)


class Trial:
    """A block with perturbed numbers, its inputs, and the gradients that pull at its outputs.

    block    holds its parameters whole; they stay as they are
    axes     those of the split, and of the one inside of it
    dtype    what it computes in: float64, or float32 for a block that knows no float64
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

    def numbers(self) -> Iterator[tuple[str, Tensor]]:
        """The perturbed parameters by name, on the host: the same ones every time."""
        generator = torch.Generator().manual_seed(3)
        for n, p in self.parameters.items():
            yield n, self._perturbed(p, generator)

    @property
    def labels(self) -> Mapping[str, Label]:
        """How the cut parameters are cut."""
        return self.split.parameters

    @property
    def casts(self) -> bool:
        """Whether the block computes in float32 somewhere."""
        return self.dtype == torch.float32 or "torch.float32" in self.program.run.code

    def alone(self, numbers: Mapping[str, Tensor] | None = None) -> Results:
        """As one process computes it; `numbers` in place of the perturbed parameters."""
        given = numbers.items() if numbers else self.numbers()
        held = {n: self._leaf(n, t) for n, t in given}
        args, kwargs, inputs = self._fresh_inputs()
        buffers = {n: b.clone() for n, b in self.block.named_buffers()}
        torch.manual_seed(2)
        result = torch.func.functional_call(self.block, {**held, **buffers}, args, kwargs)
        outputs = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        self._pull(outputs, [(WHOLE,) * len(self.axes)] * len(outputs))
        gradients = {n: _gradient(t) for n, t in {**held, **inputs}.items()}
        return Results([o.detach().to(HOST) for o in outputs], gradients, gradients)

    def together(
        self,
        numbers: Mapping[str, Tensor] | None = None,
        labels: Mapping[str, Label] | None = None,
        against: Mapping[str, Tensor] | None = None,
    ) -> Results:
        """As the ranks compute it.

        numbers   in place of the perturbed parameters · labels  of how those are cut
        against   gradients that each is compared with, one at a time; only `off` is given then
        """
        program = self.program
        cuts: list[Mapping[str, Label]] = [one.parameters for one in self.splits]
        if labels:
            cuts[0] = {**cuts[0], **labels}
        leaves: dict[str, tuple[Tensor, Labels]] = {}
        for n, t in numbers.items() if numbers else self.numbers():
            its = tuple(one.get(n, WHOLE) for one in cuts)
            leaves[n] = self._leaf(n, self._own(t, its), stays=_is_cut(its)), its
        buffers = dict(self.block.named_buffers())
        given = [self._read(n, leaves[n][0]) for n in program.shapes]
        given += [buffers[n].clone() for n in program.buffers]
        args, kwargs, inputs = self._fresh_inputs()
        names = {id(t): n for n, t in inputs.items()}
        its_inputs = zip(*(one.inputs for one in self.programs), strict=True)
        for t, its in zip(program.flatten(args, kwargs), its_inputs, strict=True):
            given.append(self._own(t.detach(), its).requires_grad_(t.requires_grad))
            if id(t) in names:
                leaves[names[id(t)]] = given[-1], its
        torch.manual_seed(2)
        outputs = list(program.run(*self.axes, *given))
        its_outputs = list(zip(*(one.outputs for one in self.programs), strict=True))
        self._pull(outputs, its_outputs)
        own = {
            n: _gradient(t, self.device if _is_cut(its) else HOST) for n, (t, its) in leaves.items()
        }
        labelled = {n: its for n, (_, its) in leaves.items()}
        del leaves, given  # only gradients are wanted from here on
        gradients, off = dict[str, Tensor](), dict[str, float]()
        for n, its in labelled.items():
            whole = self._whole_gradient(n, own[n], its)
            if against is None:
                gradients[n] = whole
            else:
                off[n] = float((whole - against[n]).norm())
                del own[n]
        wholes = [
            self._shown(o.detach(), its).to(HOST)
            for o, its in zip(outputs, its_outputs, strict=True)
        ]
        return Results(wholes, gradients, own, off)

    def everywhere(self, number: float) -> float:
        """The largest of the ranks' numbers; not a number counts as infinite."""
        told = torch.tensor([number], dtype=torch.float64, device=self.device)
        told = told.nan_to_num(nan=1e300)
        for axis in self.axes:
            told = axis.all_gather(told).max().reshape(1)
        return float(told)

    def summed(self, part: Tensor, axis: Axis | None = None) -> Tensor:
        """The sum of the ranks' tensors, on the host; over the outer axis if none is named."""
        total = part.to(self.device).clone(memory_format=torch.contiguous_format)
        (axis or self.axis).all_reduce(total)
        return total.to(HOST)

    def _input(self, leaf: Tensor) -> Tensor:
        """Hidden states with noise; masks and tables as they are."""
        if not leaf.is_floating_point():
            return leaf
        if leaf.requires_grad:
            return self._perturbed(leaf, self.generator).to(leaf.device).requires_grad_()
        return leaf.to(self.dtype)

    def _leaf(self, name: str, value: Tensor, stays: bool = False) -> Tensor:
        """A parameter for one run, on its device; its gradient goes to the host, or stays there."""
        leaf = value.detach().to(self.device).requires_grad_(name in self.trained)
        if self.device != HOST and leaf.requires_grad and not stays:
            leaf.register_post_accumulate_grad_hook(_to_host)
        return leaf

    def _perturbed(self, value: Tensor, generator: torch.Generator) -> Tensor:
        # Uniform: normal numbers take three times as long, and layers have many.
        noise = torch.rand(value.shape, generator=generator, dtype=torch.float64)
        noise.sub_(0.5).mul_(12**0.5)
        if value.is_meta:  # not made yet: any numbers of a usual size do
            return (noise / max(1, value.shape[-1]) ** 0.5 if value.dim() else noise).to(self.dtype)
        wide = value.detach().to(HOST, torch.float64, copy=True)
        if not bool(wide.isfinite().all()):
            return wide.to(self.dtype)
        size = float(wide.std()) if wide.numel() > 1 else 0.0
        return wide.add_(noise.mul_(NOISE * max(size, 0.1))).to(self.dtype)

    def _fresh_inputs(self) -> tuple[Any, Any, dict[str, Tensor]]:
        """(args, kwargs, those that take a gradient by name), part of no graph yet."""
        fresh: dict[str, Tensor] = {}

        def copied(leaf: Tensor) -> Tensor:
            new = leaf.detach().clone().requires_grad_(leaf.requires_grad)
            if new.requires_grad:
                fresh[f"input {len(fresh)}"] = new
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
            (o, self._own(pull.to(o.device, o.dtype), label))
            for o, pull, label in zip(outputs, self.pulls, labels, strict=True)
            if o.requires_grad
        ]
        torch.autograd.backward([o for o, _ in moving], [pull for _, pull in moving])

    def _own(self, whole: Tensor, labels: Labels) -> Tensor:
        for axis, label in zip(self.axes, labels, strict=True):
            whole = cut(whole, label, axis.rank, axis.size)
        return whole.clone()

    def _read(self, name: str, value: Tensor) -> Tensor:
        """A parameter as the graph reads it, whose gradients are summed as the split says."""
        for axis, split, program in zip(self.axes, self.splits, self.programs, strict=True):
            if name in split.partial and name not in program.partial:
                value = autograd_collectives.counted_once(value, axis)
        return value

    def _whole_gradient(self, name: str, part: Tensor, labels: Labels) -> Tensor:
        for axis, split, label in reversed(list(zip(self.axes, self.splits, labels, strict=True))):
            if name in split.partial or isinstance(label, Partial):
                part = self.summed(part, axis)
            elif isinstance(label, Split | Tiled):
                parts = axis.all_gather(part.to(self.device).contiguous())
                part = join(parts.to(HOST).unbind(0), label)
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


def _to_host(leaf: Tensor) -> None:
    """Keep a leaf's gradient, which is complete, where `_gradient` looks for it."""
    if leaf.grad is not None:
        leaf.host_gradient = leaf.grad.to(HOST)  # type: ignore[attr-defined]
        leaf.grad = None


def _is_cut(labels: Labels) -> bool:
    return any(isinstance(label, Split | Tiled) for label in labels)


def _gradient(leaf: Tensor, place: torch.device = HOST) -> Tensor:
    found = getattr(leaf, "host_gradient", leaf.grad)
    return torch.zeros_like(leaf, device=place) if found is None else found.to(place)


def distance_of(got: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Measure how far tensors are from others: the norm of all differences, by that of all."""
    pairs = [(g, e) for g, e in zip(got, expected, strict=True) if e.is_floating_point()]
    norm = norm_of(e for _, e in pairs)
    return float(norm_of(g - e for g, e in pairs) / norm)


def norm_of(tensors: Iterable[Tensor]) -> Tensor:
    """Take the norm of several tensors as one, never 0; 1 where there are none."""
    norms = [t.detach().double().norm().cpu() for t in tensors]
    return torch.stack(norms).norm().clamp(min=1e-300) if norms else torch.ones(())
