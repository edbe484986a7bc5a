"""Tokens by expert and layer of a model with experts: `experts.jsonl` in the run folder.

    {"step": 20, "layers": {"blocks.0.mixture.experts": [31, 7, 18, 8], …}}

A line holds the (token, choice) pairs that each expert got in one step, summed over all ranks; the
first step has a line, and every `EVERY`th. Only in these steps hooks see the calls of the experts,
and one more all-reduce sums the counts, so other steps cost nothing and have the same bits.

Which parts are experts is known by their parameters and their call, as for expert parallelism
(trace/find/stacked_experts.py): a stack of matrices, called with tokens [n, d], chosen experts
[n, k] and weights [n, k]. So Shoal's own mixtures are recorded, and those of transformers that keep
their experts in a stack. Experts in a list of modules are not, nor compiled blocks.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from shoal.base.layouts.policies import CompilePolicy
from shoal.parallel._torch import in_backward
from shoal.parallel.program import Program
from shoal.trace.find.blocks import iterate_stacked_modules

EVERY = 20
"""Steps from one record to the next."""
ARGUMENTS = 3
"""Of a call of experts: tokens, chosen experts, weights."""


class ExpertCounts:
    """Counts of the tokens of each expert on this rank, in the steps that are recorded.

    Args:
        program: the run's.
        parts: name → (module, number of experts), the same on all ranks.
    """

    def __init__(self, program: Program, parts: dict[str, tuple[nn.Module, int]]) -> None:
        self.world, self.parts = program.world, parts
        self.is_first_of_tensor = program.tensor.rank == 0  # its peers route the same tokens
        self.counts: dict[str, Tensor] = {}
        self._handles: list[Any] = []
        self._joins = False

    def begin_step(self, step: int) -> None:
        """Start to count if the step is recorded."""
        self._remove_hooks()
        if step != 1 and step % EVERY:
            return
        for name, (part, experts) in self.parts.items():
            zeros = torch.zeros(experts + 1, dtype=torch.long, device=self.world.device)
            self.counts[name] = zeros
            hook = self._make_hook(name, experts)
            self._handles.append(part.register_forward_pre_hook(hook, with_kwargs=True))

    @contextmanager
    def micro_batch(self, step: int, index: int) -> Iterator[None]:
        """Leave a pass out that only joins the collectives of other ranks."""
        before, self._joins = self._joins, index < 0
        try:
            yield
        finally:
            self._joins = before

    def end_step(self) -> dict[str, list[int]]:
        """Return each layer's tokens by expert over all ranks; {} if the step is not recorded.

        Every rank calls it.
        """
        if not self._handles:
            return {}
        self._remove_hooks()
        told = torch.cat(list(self.counts.values())) * self.is_first_of_tensor
        self.world.all_reduce(told)
        rows = told.split([len(row) for row in self.counts.values()])
        # The last number is of choices beyond the experts: dropped, for lack of capacity.
        return {name: row.tolist()[:-1] for name, row in zip(self.counts, rows, strict=True)}

    def _remove_hooks(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _make_hook(self, name: str, experts: int) -> Any:
        def hear(part: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
            if self._joins or not torch.is_grad_enabled() or in_backward():  # run again
                return
            chosen = _find_choices([*args, *named.values()])
            if chosen is not None:
                places = chosen.flatten().long()
                self.counts[name].scatter_add_(0, places, torch.ones_like(places))

        return hear


def count_experts(program: Program) -> tuple[ExpertCounts | None, Program]:
    """Return the counts of a program's experts, None if none can be counted, and the program."""
    parts = _find_experts(program)
    if not parts:
        return None, program
    counts = ExpertCounts(program, parts)
    return counts, replace(program, around=(*program.around, counts.micro_batch))


def _find_experts(program: Program) -> dict[str, tuple[nn.Module, int]]:
    """Return the parts that are experts by name, with their number of experts in the whole model.

    By parameters and signature alone, so that all stages of a pipeline find the same.
    """
    if program.plan.differs_from_default(CompilePolicy) or program.plan.layout.threads > 1:
        return {}
    parts: dict[str, tuple[nn.Module, int]] = {}
    for name, part in iterate_stacked_modules(program.module):
        if any(name.startswith(f"{outer}.") for outer in parts) or not _takes_routes(part):
            continue
        first = next(iter(part.state_dict(keep_vars=True)))
        row = program.rows.get(program.aliases.get(f"{name}.{first}", f"{name}.{first}"))
        if row is not None:
            parts[name] = part, row.shape[0]
    return parts


def _takes_routes(part: nn.Module) -> bool:
    """Return whether a module's forward pass takes three arguments, as experts' do."""
    try:
        parameters = inspect.signature(type(part).forward).parameters.values()
    except (TypeError, ValueError):
        return False
    needed = [one for one in parameters if one.default is one.empty and one.name != "self"]
    return len(needed) == ARGUMENTS and all(o.kind is o.POSITIONAL_OR_KEYWORD for o in needed)


def _find_choices(values: list[Any]) -> Tensor | None:
    """Return the chosen experts [n, k] of a call; None if it is no call of experts."""
    tensors = [one for one in values if isinstance(one, Tensor) and one.dim() == 2]
    whole = [one for one in tensors if not one.is_floating_point() and one.dtype != torch.bool]
    if len(values) != ARGUMENTS or len(tensors) != ARGUMENTS or len(whole) != 1:
        return None
    return whole[0]
