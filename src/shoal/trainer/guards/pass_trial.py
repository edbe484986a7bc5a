"""Try a written-out pass in a run's first step: does its loss mix samples, or carry numbers along?

    f(A, B) + f(B, A)  =  f(A, A) + f(B, B)      A, B: halves of a micro-batch's samples

The equation holds for every sum over samples, with any weights and constants. It does not where a
statistic of the micro-batch enters: a normalised advantage, balanced targets, class weights by
frequency, negatives. A loop that writes out its passes has no loss function to call again. So each
torch function that it calls on samples is repeated on the four batches; of the model's outputs the
rows are exchanged. Nothing is printed if an operation cannot be repeated, or if the repeated loss
of (A, B) is not the loss itself.

A tensor of the loop that such a loss reads, and that the loop changes by samples of a micro-batch
(a moving centre, a queue, a baseline), is seen too: the next micro-batch reads other numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from shoal.base.errors import ShoalError
from shoal.base.layouts.policies import CompilePolicy
from shoal.data.loading.sample_seeds import preserved_rng
from shoal.parallel.program import Program
from shoal.trace.isolation.collective_ban import forbid_collectives
from shoal.trainer._torch import pytree
from shoal.trainer.batches.batch_split import target_length
from shoal.trainer.guards._torch import is_compiler_used
from shoal.trainer.guards.coupled_passes import coupled_pass_line
from shoal.trainer.guards.pass_records import (
    ELEMENTS,
    OVERWRITES,
    SILENT,
    FollowedTensor,
    PassRecord,
    is_in_place,
    is_random,
    match_rows,
)

ALL = 1 << 22
"""Elements of all tensors that are followed, at most."""
TOLERANCES = {torch.float64: 1e-7, torch.float32: 1e-3}


class PassTrial(TorchFunctionMode):
    """Trial of a rank's micro-batches in its first step.

    Args:
        module: the run's model.
        notice: prints a line of this rank.
        passes: micro-batches of the step over all ranks, at most.
    """

    def __init__(self, module: nn.Module, notice: Callable[[str], None], passes: int) -> None:
        super().__init__()
        self.module, self.notice, self.passes = module, notice, passes
        self.records: list[PassRecord] = []
        self._followed: dict[int, FollowedTensor] = {}
        self._changed: dict[int, torch.Tensor] = {}
        self._depth = self._samples = self._elements = 0
        self._is_over = self._has_line = self._is_open = False

    @contextmanager
    def follow(self, inputs: Any, targets: Any) -> Iterator[None]:
        """Follow the samples of a micro-batch while the loop works on it.

        Args:
            inputs, targets: of the micro-batch.
        """
        if self._is_over:
            yield
            return
        self._begin(inputs, targets)
        self._is_open = True
        hooks = (
            self.module.register_forward_pre_hook(self._enter_model),
            self.module.register_forward_hook(self._exit_model, with_kwargs=True),
        )
        try:
            with self:
                yield
        finally:
            self._is_open = False
            for hook in hooks:
                hook.remove()
            self._end()

    def _begin(self, inputs: Any, targets: Any) -> None:
        try:
            samples = target_length(targets)
        except ShoalError:
            samples = 0
        record, half = PassRecord(), samples // 2
        if half:
            a, b = torch.arange(half), torch.arange(half, 2 * half)
            rest = torch.arange(2 * half, samples)
            record.orders = [torch.cat([*pair, rest]) for pair in ((a, b), (b, a), (a, a), (b, b))]
        self.records.append(record)
        self._depth, self._samples = 0, samples
        for leaf in pytree.tree_leaves((inputs, targets)):
            if isinstance(leaf, torch.Tensor) and leaf.ndim and leaf.shape[0] == samples:
                self._add_rows(leaf, record.orders)

    def _add_rows(self, leaf: torch.Tensor, orders: Sequence[torch.Tensor]) -> None:
        if leaf.numel() > ELEMENTS or leaf.is_sparse or leaf.is_nested:
            self.records[-1].is_unsure, orders = True, ()
        rows = leaf.detach()
        repeats = [rows[order.to(leaf.device)] for order in orders]
        self._keep(FollowedTensor(leaf, len(self.records), repeats))

    def _keep(self, one: FollowedTensor) -> None:
        self._elements += one.tensor.numel()
        self._is_over = self._is_over or self._elements > ALL
        self._followed[id(one.tensor)] = one

    # ---- the model's own calls are not repeated

    def _enter_model(self, _module: nn.Module, _inputs: Any) -> None:
        self._depth += 1

    def _exit_model(self, _module: nn.Module, args: Any, kwargs: Any, outputs: Any) -> None:
        self._depth = max(self._depth - 1, 0)
        if self._depth or self._is_over:
            return
        with torch._C.DisableTorchFunction():
            given = self._list_followed((args, kwargs))
            orders = self._find_orders((args, kwargs)) if given else []
            carried = any(one.is_carried or one.micro_batch < len(self.records) for one in given)
            sources = frozenset[int]().union(*(one.sources for one in given))
            for leaf in pytree.tree_leaves(outputs):
                if not isinstance(leaf, torch.Tensor) or not leaf.ndim or not given:
                    continue
                fits = bool(orders) and leaf.shape[0] == len(orders[0])
                self._add_rows(leaf, orders if fits else ())
                found = self._followed[id(leaf)]
                found.is_carried, found.sources = carried, sources

    def _find_orders(self, inputs: Any) -> list[torch.Tensor]:
        """Return which rows of the model's inputs the repeated inputs have; []: not known."""
        leaves = [one for one in pytree.tree_leaves(inputs) if isinstance(one, torch.Tensor)]
        known = [(one, self._followed[id(one)]) for one in leaves if id(one) in self._followed]
        if not all(one.repeats for _, one in known):
            return []
        found = [
            order
            for place, own in enumerate(self.records[-1].orders)
            if (order := match_rows([(leaf, one.repeats[place]) for leaf, one in known], own))
            is not None
        ]
        if not known or len(found) < len(self.records[-1].orders):
            return []
        others = [one for one in leaves if id(one) not in self._followed and one.ndim]
        fixed = [one for one in others if one.shape[0] == len(found[0])]
        is_moved = any(
            not torch.equal(one[order.to(one.device)], one) for one in fixed for order in found
        )
        return [] if is_moved else found

    # ---- torch functions of the loop

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if self._depth or self._is_over or name in SILENT:
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            given = self._list_followed((args, kwargs))
        result = func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            if given and not (name.endswith("_like") and is_random(name)):
                self._repeat(func, name, args, kwargs, given, result)
            else:
                self._note_derived(name, args, result)
        return result

    def _list_followed(self, arguments: Any) -> list[FollowedTensor]:
        leaves = pytree.tree_leaves(arguments)
        return [self._followed[id(leaf)] for leaf in leaves if id(leaf) in self._followed]

    def _note_derived(self, name: str, args: Any, result: Any) -> None:
        """Keep what the loop makes of tensors from outside, without samples."""
        record = self.records[-1]
        if is_in_place(name) and args and id(args[0]) in self._changed:
            if name in OVERWRITES:
                del self._changed[id(args[0])]
            return
        given = [one for one in pytree.tree_leaves(args) if isinstance(one, torch.Tensor)]
        sources = frozenset[int]()
        for one in given:
            record.outer.setdefault(id(one), one)  # kept, so that its id stays
            sources |= self._sources_of(one)
        own = set(map(id, given))
        for leaf in pytree.tree_leaves(result):
            few = isinstance(leaf, torch.Tensor) and leaf.numel() <= ELEMENTS
            if few and id(leaf) not in own:
                record.derived[id(leaf)] = (leaf, sources)

    def _sources_of(self, tensor: torch.Tensor) -> frozenset[int]:
        known = self.records[-1].derived.get(id(tensor))
        return frozenset([id(tensor)]) if known is None else known[1]

    def _repeat(
        self,
        func: Any,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        given: list[FollowedTensor],
        result: Any,
    ) -> None:
        record, now = self.records[-1], len(self.records)
        leaves = pytree.tree_leaves((args, kwargs))
        record.numbers += [one for one in leaves if type(one) in (int, float)]
        target = args[0] if args and is_in_place(name) else kwargs.get("out")
        outer = self._note_outer([leaf for leaf in leaves if leaf is not target])
        fresh = any(one.micro_batch == now for one in given)
        old = [one for one in given if one.micro_batch < now]
        is_changed = bool(outer & self._changed.keys())
        carried = any(one.is_carried for one in given) or (fresh and (bool(old) or is_changed))
        sources = outer.union(*(one.sources for one in given))
        if isinstance(target, torch.Tensor) and id(target) not in self._followed:
            self._note_write(name, target)
            return
        if not all(one.repeats for one in given):
            record.is_unsure = True
        repeats = [] if record.is_unsure else self._call_again(func, name, args, kwargs, result)
        wanted = [one for one in pytree.tree_leaves(result) if isinstance(one, torch.Tensor)]
        columns = [[r for r in pytree.tree_leaves(one) if isinstance(r, torch.Tensor)]
                   for one in repeats]  # fmt: skip
        for place, leaf in enumerate(wanted):
            matched = [one[place] for one in columns if len(one) == len(wanted)]
            more = matched if len(matched) == len(record.orders) else ()
            when = now if fresh else max(one.micro_batch for one in given)
            self._keep(FollowedTensor(leaf, when, more, sources, carried))

    def _note_outer(self, leaves: list[Any]) -> frozenset[int]:
        """Return ids of tensors from outside of the loop that meet samples, weights left out."""
        record, found = self.records[-1], frozenset[int]()
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor) or id(leaf) in self._followed:
                continue
            if leaf.requires_grad:  # a weight; or a result that was not seen
                record.is_unsure = record.is_unsure or not leaf.is_leaf
                continue
            sources = self._sources_of(leaf)
            record.outer.setdefault(id(leaf), leaf)
            record.is_unsure = record.is_unsure or bool(sources & record.written.keys())
            found |= sources - record.overwritten
        record.read |= found
        return found

    def _note_write(self, name: str, target: torch.Tensor) -> None:
        record = self.records[-1]
        for one in self._sources_of(target):  # a view of it, too
            record.written[one] = self._changed[one] = target
            if name in OVERWRITES and one == id(target) and one not in record.read:
                record.overwritten.add(one)
        record.is_unsure = record.is_unsure or id(target) in record.derived

    def _call_again(
        self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> list[Any]:
        """Return the results of a function for the four batches; []: it cannot be repeated."""
        record = self.records[-1]
        if is_random(name):
            record.is_unsure = True
            return []
        found = []
        try:
            with torch.no_grad(), preserved_rng(), forbid_collectives():
                before = torch.get_rng_state()
                for place in range(len(record.orders)):
                    given, named = pytree.tree_map(self._exchange(place), (args, kwargs))
                    found.append(func(*given, **named))
                drew = not torch.equal(before, torch.get_rng_state())
        except Exception:  # another form, or what has no meaning without a gradient
            found, drew = [], True
        record.is_unsure = record.is_unsure or drew
        is_mark = name == "__get__" and isinstance(result, bool)  # requires_grad, is_leaf
        if isinstance(result, bool | int | float | str | list | tuple) and found and not is_mark:
            record.reads += [repr(result)] * any(_differs(one, result) for one in found)
        return [] if drew else found

    def _exchange(self, place: int) -> Callable[[Any], Any]:
        def exchange(leaf: Any) -> Any:
            one = self._followed.get(id(leaf))
            return one.repeats[place] if one is not None and one.repeats else leaf

        return exchange

    # ---- the loss

    @contextmanager
    def judge(self, loss: torch.Tensor) -> Iterator[None]:
        """Judge a loss that goes into a backward pass; inside nothing is followed."""
        self._depth += 1
        try:
            if self._is_open and not self._is_over:  # else a pass of weight 0
                self._judge(loss)
            yield
        finally:
            self._depth = max(self._depth - 1, 0)

    @torch.no_grad()
    def _judge(self, loss: torch.Tensor) -> None:
        record, found = self.records[-1], self._followed.get(id(loss))
        if found is None:
            return
        record.sources |= found.sources
        if found.is_carried:
            self._print(earlier_samples_line())
        near = TOLERANCES.get(loss.dtype)
        if not found.repeats or near is None:
            return
        real = float(loss)
        ab, ba, aa, bb = (float(one) for one in found.repeats)
        size = sum(map(abs, (ab, ba, aa, bb)))
        if not size < float("inf") or not abs(real - ab) <= near * size:
            return
        record.is_coupled = record.is_coupled or abs(ab + ba - aa - bb) > near * size

    def _end(self) -> None:
        record = self.records[-1]
        if record.sources & record.written.keys():
            self._print(earlier_samples_line())
        if record.is_coupled and not record.is_unsure and self._is_certain(record):
            self._print(coupled_pass_line(self._samples, self.passes))

    def _is_certain(self, record: PassRecord) -> bool:
        """Return whether no number that the loop read of samples is a factor of the loss."""
        if not record.reads:
            return True
        return any(
            other.reads != record.reads and other.numbers == record.numbers
            for other in self.records
            if other is not record
        )

    def _print(self, line: str) -> None:
        self._is_over = True
        if not self._has_line:
            self._has_line = True
            self.notice(line)

    def close(self) -> None:
        """Print what the micro-batches together show, and forget all tensors."""
        for record in self.records:
            sure = record.is_coupled and not record.is_unsure and not self._is_over
            if sure and self._is_certain(record):
                self._print(coupled_pass_line(len(record.orders[0]), self.passes))
        self._is_over = True
        self.records.clear()
        self._followed.clear()
        self._changed.clear()


def try_passes(program: Program, notice: Callable[[str], None], passes: int) -> PassTrial | None:
    """Return the trial of a run's first step; None beside compiled functions, which a mode breaks.

    Args:
        program: the run's.
        notice: prints a line of this rank.
        passes: micro-batches of the step over all ranks, at most.
    """
    if program.plan.differs_from_default(CompilePolicy) or is_compiler_used():
        return None
    return PassTrial(program.module, notice, passes)


def _differs(one: Any, other: Any) -> bool:
    tensors = any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(other))
    return not tensors and one != other


def earlier_samples_line() -> str:
    """Return the notice on a loss that depends on samples of earlier micro-batches."""
    return (
        "run.backward: the loss reads a tensor that the loop over run.micro_batches changes by the "
        "samples of each micro-batch (a moving mean, a queue, a baseline), so the next one reads "
        "other numbers, and each rank has its own; try: change it after the loop, by all samples "
        "of the step (torch.distributed.all_reduce of sums)"
    )
