"""Tokens by expert and layer of a model with experts: `experts.jsonl` in the run folder.

    {"step": 20, "layers": {"blocks.0.mixture.experts": [31, 7, 18, 8], …}}

A line holds the (token, choice) pairs that each expert got in one step, summed over all ranks; the
first step has a line, and every `EVERY`th. Only in these steps hooks see the calls of the experts,
and one more all-reduce sums the counts, so other steps cost nothing and have the same bits.

Which parts are experts is known by their parameters and their call, as for expert parallelism
(trace/find): a stack of matrices, called with tokens [n, d], chosen experts [n, k] and weights
[n, k]; or a list of equal modules, each called with rows [n, d] alone. A list whose entries all get
as many rows, or something else, chooses nothing and is not counted again. Compiled blocks are not
recorded: compiled code runs no hook that was added later.
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
from shoal.parallel._torch import graph_task_id
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
        lists: name → the list of modules, the same on all ranks.
    """

    file = "experts.jsonl"

    def __init__(
        self,
        program: Program,
        parts: dict[str, tuple[nn.Module, int]],
        lists: dict[str, nn.ModuleList],
    ) -> None:
        self.world, self.parts, self.lists = program.world, parts, lists
        self.is_first_of_tensor = program.tensor.rank == 0  # its peers route the same tokens
        self.counts: dict[str, Tensor] = {}
        self._handles: list[Any] = []
        self._joins = False

    def begin_step(self, step: int) -> None:
        """Start to count if the step is recorded."""
        self._remove_hooks()
        self.counts = {}
        if step != 1 and step % EVERY:
            return
        for name, (part, experts) in self.parts.items():
            self.counts[name] = self._zeros(experts)
            hook = self._make_hook(name)
            self._handles.append(part.register_forward_pre_hook(hook, with_kwargs=True))
        for name, entries in self.lists.items():
            self.counts[name] = self._zeros(len(entries))
            for place, entry in enumerate(entries):
                hook = self._make_entry_hook(name, place)
                self._handles.append(entry.register_forward_pre_hook(hook, with_kwargs=True))

    def _zeros(self, experts: int) -> Tensor:
        """Return a count for each expert, and one for calls and choices of none."""
        return torch.zeros(experts + 1, dtype=torch.long, device=self.world.device)

    @contextmanager
    def micro_batch(self, step: int, index: int) -> Iterator[None]:
        """Count the tokens of a micro-batch inside, unless the pass only joins collectives."""
        before, self._joins = self._joins, index < 0
        try:
            yield
        finally:
            self._joins = before

    def end_step(self) -> dict[str, Any]:
        """Return `layers`: each layer's tokens by expert over all ranks; {} without any.

        Every rank calls it.
        """
        if not self._handles:
            return {}
        self._remove_hooks()
        told = torch.cat(list(self.counts.values())) * self.is_first_of_tensor
        self.world.all_reduce(told)
        rows = told.split([len(row) for row in self.counts.values()])
        # The last number is of choices beyond the experts: dropped, for lack of capacity.
        layers = {name: row.tolist() for name, row in zip(self.counts, rows, strict=True)}
        for name in set(self.lists) & layers.keys():
            *counts, others = layers[name]
            if others or (any(counts) and len(set(counts)) == 1):  # the same on all ranks
                del self.lists[name], layers[name]
        layers = {name: counts[:-1] for name, counts in layers.items()}
        return {"layers": layers} if any(map(any, layers.values())) else {}  # a server has none

    def _remove_hooks(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _make_hook(self, name: str) -> Any:
        def count_choices(part: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
            if self._is_repeated():
                return
            chosen = _find_choices([*args, *named.values()])
            if chosen is not None:
                places = chosen.flatten().long()
                self.counts[name].scatter_add_(0, places, torch.ones_like(places))

        return count_choices

    def _make_entry_hook(self, name: str, place: int) -> Any:
        def count_rows(entry: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
            if self._is_repeated():
                return
            rows = args[0] if len(args) == 1 and not named else None
            if isinstance(rows, Tensor) and rows.dim() == 2 and rows.is_floating_point():
                self.counts[name][place] += len(rows)
            else:  # the last number is of other calls: with any, the list holds no experts
                self.counts[name][-1] += 1

        return count_rows

    def _is_repeated(self) -> bool:
        """Return whether this forward pass counts nothing: it runs again, or only joins."""
        return self._joins or not torch.is_grad_enabled() or graph_task_id() >= 0


def count_experts(program: Program) -> tuple[ExpertCounts | None, Program]:
    """Return the counts of a program's experts, None if none can be counted, and the program."""
    parts, lists = _find_experts(program)
    if not parts and not lists:
        return None, program
    counts = ExpertCounts(program, parts, lists)
    return counts, replace(program, around=(*program.around, counts.micro_batch))


def _find_experts(
    program: Program,
) -> tuple[dict[str, tuple[nn.Module, int]], dict[str, nn.ModuleList]]:
    """Return the parts that may be experts by name: stacks with their number in the model, lists.

    By parameters and signature alone, so that all stages of a pipeline find the same.
    """
    if program.plan.differs_from_default(CompilePolicy) or program.plan.layout.threads > 1:
        return {}, {}
    parts: dict[str, tuple[nn.Module, int]] = {}
    for name, part in iterate_stacked_modules(program.module):
        if any(name.startswith(f"{outer}.") for outer in parts) or not _takes_routes(part):
            continue
        first = next(iter(part.state_dict(keep_vars=True)))
        row = program.rows.get(program.aliases.get(f"{name}.{first}", f"{name}.{first}"))
        if row is not None:
            parts[name] = part, row.shape[0]
    return parts, dict(_iterate_equal_lists(program))


def _iterate_equal_lists(program: Program) -> Iterator[tuple[str, nn.ModuleList]]:
    """Yield lists inside of layers, with their names, whose entries are equal and no blocks.

    By the shapes of the whole model: a rank may hold parts of some entries, and none of others.
    """
    for name, part in program.module.named_modules():
        if not isinstance(part, nn.ModuleList) or len(part) < 2 or "." not in name:
            continue
        kinds = {
            (type(entry), *_shapes_of(program, f"{name}.{place}", entry))
            for place, entry in enumerate(part)
        }
        holds_blocks = any(block.startswith(f"{name}.") for block in program.blocks)
        if len(kinds) == 1 and len(next(iter(kinds))) > 1 and not holds_blocks:
            yield name, part


def _shapes_of(program: Program, name: str, entry: nn.Module) -> Iterator[tuple[int, ...]]:
    """Yield the whole shape of each parameter of a module."""
    for own, _ in entry.named_parameters():
        row = program.rows.get(program.aliases.get(f"{name}.{own}", f"{name}.{own}"))
        yield row.shape if row is not None else ()


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
