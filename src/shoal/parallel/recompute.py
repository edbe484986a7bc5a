"""Recompute: a block drops its activations in the forward pass and recomputes them in backward.

    none        a block keeps all that its backward pass needs
    selective   it keeps its inputs and what costs most to compute: the outputs of matrix products,
                convolutions and fused attention; norms, activations, softmax run again
    full        it keeps its inputs only, and its whole forward pass runs again: up to a third more
                arithmetic, and no more than one block's activations at a time

Blocks are the entries of the outermost ModuleLists and Sequentials; a single layer of torch.nn has
nothing to gain and is left out. A block's `forward` is replaced on the instance: no name in the
state dict changes, and hooks (a new key for dropout, FSDP2's gather) stay outside of what runs
twice. The second run must compute what the first did. torch restores generators and autocast. This
module restores function modes (rounding to fp16) and buffers that the first run changed
(BatchNorm's statistics, a moving average), so that buffers change only once.
Source: Chen et al. 2016 (1604.06174); selective: Korthikanti et al. 2022 (2205.05198). The engine
is torch.utils.checkpoint; its own selective mode is not used, for the reasons given at
`_SavingMode`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointError, checkpoint

from shoal.base.errors import PlanError
from shoal.parallel._torch import (
    TorchDispatchMode,
    enable_version_counter,
    function_modes,
    graph_task_id,
    pytree,
)
from shoal.parallel.program import Program, layered_blocks
from shoal.trace.isolation.replaced_forward import ReplacedForward, restore_all


def apply(program: Program) -> Program:
    """Make every block of the program's module recompute; call it before parameters are split.

    Raises:
        PlanError: during a step, for a block that cannot run twice: it changes its input in place,
            or its second run does not match the first.
    """
    policy = program.plan.recompute
    if policy == "none":
        return program
    found = layered_blocks(program)
    if not found:
        program.notices.append(
            f"memory.recompute = {policy}: nothing to recompute: the model has no ModuleList or "
            f"Sequential whose entries are blocks of several layers"
        )
        return program
    run = _Messages(policy, program.notices)
    wrapped = [_RecomputedForward(name, block, run) for name, block in found]
    return replace(
        program,
        around=(*program.around, run.micro_batch),
        on_close=(*program.on_close, partial(restore_all, wrapped)),
    )


@dataclass
class _Messages:
    """Context for errors and notices: the policy, and the block that runs again now."""

    policy: str
    notices: list[str]
    block: str = ""
    nested: bool = False

    @contextmanager
    def micro_batch(self, step: int, index: int) -> Iterator[None]:
        """Turn torch's checkpoint mismatch in a forward and backward pass into one line."""
        try:
            yield
        except CheckpointError as failure:
            raise PlanError(
                f"memory.recompute = {self.policy}: {self.block} saved other tensors in its second "
                f"run than in its first: it depends on something beside its inputs, its buffers "
                f"and torch's generators (a cache that it fills, Python's random); "
                f"try: memory.recompute=none"
            ) from failure

    def in_place_error(self, block: str) -> PlanError:
        return PlanError(
            f"memory.recompute = {self.policy}: {block} changes its input in place, so it cannot "
            f"run again from that input; write x = x + y for x += y, or memory.recompute=none"
        )

    def note_nested_recompute(self, block: str) -> None:
        """Add a notice if the user's own checkpointing already reruns a block."""
        if not self.nested:
            self.nested = True
            self.notices.append(
                f"memory.recompute = {self.policy}: the model recomputes {block} itself, so it "
                f"runs three times; switch off one of the two"
            )


class _RecomputedForward(ReplacedForward):
    """A block's `forward` that runs again in the backward pass."""

    def __init__(self, name: str, block: nn.Module, told: _Messages) -> None:
        self.told = told
        self.buffers = _ChangingBuffers(name, block, told)
        self.unneeded: set[tuple[Any, int]] = set()
        super().__init__(name, block)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block's forward pass; without gradients nothing runs again."""
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        if graph_task_id() >= 0:
            self.told.note_nested_recompute(self.name)
        # All tensors become arguments of `checkpoint`, which notices changes of arguments only.
        leaves, structure = pytree.tree_flatten((args, kwargs))
        versions = [leaf._version for leaf in leaves if isinstance(leaf, torch.Tensor)]
        call = _BlockCall(self, structure)
        outputs = checkpoint(call, *leaves, use_reentrant=False, context_fn=self._make_run_contexts)
        if versions != [leaf._version for leaf in leaves if isinstance(leaf, torch.Tensor)]:
            raise self.told.in_place_error(self.name)
        return outputs

    def _make_run_contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Make the contexts of the forward run and the rerun, for `torch.utils.checkpoint`.

        Returns:
            (context of the first run, of the second): empty for full recomputation; for selective
            the first keeps the outputs of matrix products, and the second returns them.
        """
        if self.told.policy == "full":
            return nullcontext(), nullcontext()
        kept = _SavedProducts(self.unneeded)
        return _SavingMode(kept), _ReplayingMode(kept)


class _BlockCall:
    """One call of a block: runs once in the forward pass and again in the backward pass."""

    def __init__(self, recomputed: _RecomputedForward, structure: Any) -> None:
        self.recomputed, self.structure = recomputed, structure
        self.modes = tuple(function_modes())
        self.before: dict[int, torch.Tensor | None] | None = None

    def __call__(self, *leaves: Any) -> Any:
        args, kwargs = pytree.tree_unflatten(leaves, self.structure)
        block = self.recomputed
        if self.before is None:
            look = block.buffers.snapshot()
            outputs = block.forward(*args, **kwargs)
            self.before = block.buffers.changed_since(look)
            return outputs
        block.told.block = block.name
        with block.buffers.restore(self.before), _enter_function_modes(self.modes):
            return block.forward(*args, **kwargs)


@contextmanager
def _enter_function_modes(modes: tuple[AbstractContextManager[object], ...]) -> Iterator[None]:
    """Enter those of the given function modes that are not active yet."""
    here = {id(mode) for mode in function_modes()}
    with ExitStack() as stack:
        for mode in modes:
            if id(mode) not in here:
                stack.enter_context(mode)
        yield


@dataclass
class _BufferSnapshot:
    """Snapshot of buffers before a run: tensors, version counters, copies of those that change."""

    modes: tuple[bool, ...]
    known: list[tuple[torch.Tensor | None, int]]
    copies: dict[int, torch.Tensor | None]


class _ChangingBuffers:
    """The buffers of a block that its forward pass changes.

    The first run in every combination of training modes finds them, by copying all buffers. Later
    runs copy those alone, since a block may hold large tables that never change.
    """

    def __init__(self, name: str, block: nn.Module, told: _Messages) -> None:
        self.name, self.told = name, told
        self.homes = [
            (path, module, key) for path, module in block.named_modules() for key in module._buffers
        ]
        self.changing: dict[tuple[bool, ...], set[int]] = {}

    def snapshot(self) -> _BufferSnapshot:
        """Return tensors and version counters of all buffers, and copies of those that change.

        The first run in a combination of training modes copies all.
        """
        modes = tuple(module.training for _, module, _ in self.homes)
        known = [(b, -1 if b is None else b._version) for b in self._values()]
        places = self.changing.get(modes, range(len(known)))
        copies = {p: None if (b := known[p][0]) is None else b.detach().clone() for p in places}
        return _BufferSnapshot(modes, known, copies)

    def changed_since(self, look: _BufferSnapshot) -> dict[int, torch.Tensor | None]:
        """Return the buffers that the run changed since `look`, with their values before it.

        Args:
            look: snapshot before the run.

        Returns:
            index of a buffer → its value before the run.

        Raises:
            PlanError: a buffer changed that never changed before, so its old value is lost.
        """
        now = self._values()
        changed = {p for p, value in enumerate(now) if _differs(value, *look.known[p])}
        if look.modes not in self.changing:
            # F.batch_norm writes statistics without bumping the version counter: compare values,
            # and treat a layer's buffers together, since a statistic of zeros may keep its value.
            changed |= {p for p, v in look.copies.items() if v is not None and _unequal(v, now[p])}
            moved = {id(self.homes[place][1]) for place in changed}
            everything = enumerate(self.homes)
            self.changing[look.modes] = {p for p, (_, m, _) in everything if id(m) in moved}
        for place in changed - self.changing[look.modes]:
            path, _, key = self.homes[place]
            name = ".".join(part for part in (self.name, path, key) if part)
            raise PlanError(
                f"memory.recompute = {self.told.policy}: {name} changes in some forward passes "
                f"only, so its value before this one was not kept; try: memory.recompute=none"
            )
        return {place: look.copies[place] for place in self.changing[look.modes]}

    @contextmanager
    def restore(self, before: dict[int, torch.Tensor | None]) -> Iterator[None]:
        """Set changing buffers to copies of their values before the first run, until it exits.

        A context manager around the second run; on exit the present tensors come back.

        Args:
            before: index of a buffer → its value, from `changed_since`.
        """
        kept = {place: self.homes[place][1]._buffers[self.homes[place][2]] for place in before}
        try:
            for place, value in before.items():
                self._set(place, None if value is None else value.clone())
            yield
        finally:
            for place, tensor in kept.items():
                self._set(place, tensor)

    def _values(self) -> list[torch.Tensor | None]:
        return [module._buffers[key] for _, module, key in self.homes]

    def _set(self, place: int, value: torch.Tensor | None) -> None:
        _, module, key = self.homes[place]
        module._buffers[key] = value


def _differs(now: torch.Tensor | None, then: torch.Tensor | None, version: int) -> bool:
    return now is not then or (now is not None and now._version != version)


def _unequal(copy: torch.Tensor, now: torch.Tensor | None) -> bool:
    return now is None or not torch.equal(copy, now)


_aten = torch.ops.aten
PRODUCTS = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten.baddbmm.default,
        _aten.convolution.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
    }
)
"""Operations whose outputs `selective` keeps, if `is_worth_keeping` agrees."""


def is_worth_keeping(operation: Any, args: tuple[Any, ...], out: Any) -> bool:
    """Return whether `selective` keeps this output.

    It drops a batched product that is larger than its inputs: attention scores, seq² numbers from
    seq × head_dim, would be most of the memory and are cheap to recompute. It drops fused attention
    with dropout: the op draws from the generator, so a run without it would shift later draws.
    """
    if operation in (_aten.bmm.default, _aten.baddbmm.default):
        return bool(out.numel() <= max(factor.numel() for factor in args[-2:]))
    names = [argument.name for argument in operation._schema.arguments]
    return not dict(zip(names, args, strict=False)).get("dropout_p", 0.0)


class _SavedProducts:
    """Outputs of one call's matrix products, in call order; None for those to recompute.

    Args:
        unneeded: positions whose outputs the block's second runs have not used so far (mostly the
            last product's, which is an output of the block): the block keeps them no longer.
    """

    def __init__(self, unneeded: set[tuple[Any, int]]) -> None:
        self.unneeded = unneeded
        self.outputs: dict[Any, list[Any]] = {}

    def add(self, operation: Any, args: tuple[Any, ...], out: Any) -> None:
        """Save the output of a matrix product, or None if the product is to be recomputed."""
        entries = self.outputs.setdefault(operation, [])
        entry = None
        worth = is_worth_keeping(operation, args, out)
        if worth and (operation, len(entries)) not in self.unneeded:
            leaves, structure = pytree.tree_flatten(out)
            entry = ([_alias(leaf) for leaf in leaves], structure)
        entries.append(entry)

    def pop(self, operation: Any, place: int) -> Any:
        """Return the output at a position, once; None if it was not kept or was changed since."""
        entries = self.outputs.get(operation, [])
        if place >= len(entries) or entries[place] is None:
            return None
        leaves, structure = entries[place]
        entries[place] = None
        if any(_version(leaf) != version for leaf, version in leaves):
            self.unneeded.add((operation, place))
            return None
        return pytree.tree_unflatten([leaf for leaf, _ in leaves], structure)

    def end(self) -> None:
        """End the second run: mark the outputs that it did not need."""
        for operation, entries in self.outputs.items():
            self.unneeded.update((operation, k) for k, e in enumerate(entries) if e is not None)
        self.outputs = {}


class _SavingMode(TorchDispatchMode):
    """Dispatch mode of the first run: saves the outputs of matrix products.

    torch's create_selective_checkpoint_contexts does the same for every operation, and fails in two
    cases. The second run may make one more of an operation: autocast casts a weight again that the
    first run had in its cache, as in a block that is called twice. Or an output is changed in place
    after it was kept (ReLU(inplace=True) after a convolution). Here such an output is recomputed.
    """

    def __init__(self, kept: _SavedProducts) -> None:
        super().__init__()
        self.kept = kept

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in PRODUCTS:
            self.kept.add(func, args, out)
        return out


class _ReplayingMode(TorchDispatchMode):
    """Dispatch mode of the second run: returns the kept outputs instead of computing them."""

    def __init__(self, kept: _SavedProducts) -> None:
        super().__init__()
        self.kept = kept
        self.places: Counter[Any] = Counter()

    def __enter__(self) -> _ReplayingMode:
        self.places.clear()
        super().__enter__()
        return self

    def __exit__(self, *failure: Any) -> None:
        super().__exit__(*failure)
        self.kept.end()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in PRODUCTS:
            place = self.places[func]
            self.places[func] += 1
            kept = self.kept.pop(func, place)
            if kept is not None:
                return kept
        return func(*args, **(kwargs or {}))


def _alias(leaf: Any) -> tuple[Any, int]:
    """Return an alias of a tensor that shares its version counter, and the counter's value."""
    if not isinstance(leaf, torch.Tensor):
        return leaf, 0
    # Below autograd `detach` starts a new version counter, unless ADInplaceOrView is active.
    with enable_version_counter():
        return leaf.detach(), leaf._version


def _version(leaf: Any) -> int:
    return leaf._version if isinstance(leaf, torch.Tensor) else 0
