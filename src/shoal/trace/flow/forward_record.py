"""Record of a model's forward pass on a few samples, which every technique then reads.

    trunk     which modules are called, how often, with outputs of which shape: its blocks
    calls     arguments of its blocks, embeddings and the layers beside blocks
    tables    readers of the weights of embeddings and heads (`tables`)
    draws     which calls draw random numbers, and inside of which modules (`draws`)
    flows     for pipelines: which values depend on which others (`liveness`), in two passes

Equal layers compute once in it (`memoized_forward`). The pass runs in training mode, as the run
will, and with gradients on, because only so it shows which inputs carry one; tensors that autograd
would save are dropped at once. A second pass runs if the first one listened to the wrong modules:
the repeated modules are guessed from the classes, and known only after the call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shoal.base.errors import PlanError
from shoal.base.layouts.policies import BlocksPolicy
from shoal.trace._torch import pytree
from shoal.trace.find.blocks import FOUND, UNCALLED, detect_blocks, iterate_stacked_modules
from shoal.trace.find.trunk import ForwardFunction, Trunk, detect_trunk, guess_blocks
from shoal.trace.find.vocabulary_use import TableUseRecorder, TableUses, VocabularyTables, is_table
from shoal.trace.isolation.equal_layers import PLAIN, tensor_versions
from shoal.trace.isolation.layer_calls import LayerCall
from shoal.trace.isolation.memoized_forward import memoize_layers, run_memoized
from shoal.trace.isolation.meta_inputs import tensors_of
from shoal.trace.isolation.preserve_state import preserve_state
from shoal.trace.isolation.random_draws import DrawRecorder, RandomDraw
from shoal.trace.isolation.replaced_forward import ReplacedForward, restore_all

if TYPE_CHECKING:
    from shoal.trace.find.listed_experts import ListedExperts
    from shoal.trace.find.stacked_experts import ExpertLayer


class ForwardRecord:
    """Record of a model's behaviour on one sample; passes run when first needed, and are cached.

    Attributes:
        module: the whole model; its attributes, buffers and generators are left unchanged.
        run: does one forward pass of a module on the sample.
        policy: the user's choice of blocks, if there is one.
        blocks: names of the blocks that recompute, compile and dropout keys use.
        passes: forward passes so far, by purpose: look (which modules are called), flow (which
            values depend on which, for pp), check (replays of a model cut into stages).
    """

    def __init__(
        self, module: nn.Module, run: ForwardFunction, policy: BlocksPolicy = FOUND
    ) -> None:
        self.module = module
        self.blocks = tuple(detect_blocks(module, policy))
        self.wished = self.blocks if policy.names_blocks else ()
        self.passes: Counter[str] = Counter()
        self._run = run
        self._further: dict[str, LayerCall] = {}

    def run(self, purpose: str, module: nn.Module) -> Any:
        """Run one forward pass on the sample, and count it."""
        self.passes[purpose] += 1
        return self._run(module)

    @cached_property
    def first_pass(self) -> PassLog:
        """Return the calls, draws and table uses of the first pass."""
        parts = dict(self.module.named_modules())
        named = self.wished or guess_blocks(self.module)
        names = [
            *named,
            *_iterate_beside(self.module, "", named),
            *(n for n, _ in iterate_stacked_modules(self.module)),
        ]
        names += [name for name, part in parts.items() if isinstance(part, nn.Embedding)]
        return run_memoized(lambda cheaply: self._run_recorded_pass(names, cheaply))

    @cached_property
    def trunk(self) -> Trunk:
        """Return the blocks that tp and pp work on: the user's, or what repeats."""
        return detect_trunk(self.module, self.first_pass.shapes, self.first_pass.order, self.wished)

    @property
    def draws(self) -> list[RandomDraw]:
        """Return the random draws of the pass, in order; for equal layers those of the first."""
        return self.first_pass.draws

    @property
    def call_counts(self) -> Counter[str]:
        """Return the number of calls of each module."""
        return Counter(told.name for told in self.first_pass.log)

    def is_runnable(self) -> bool:
        """Return whether the pass runs, and calls a module.

        Raises:
            InnerBackwardError: what it computes is to be differentiated twice.
        """
        try:
            return bool(self.call_counts)
        except InnerBackwardError as error:
            if error.is_twice:
                raise
            return False
        except Exception:  # of the user's model
            return False

    def layers_beside_blocks(self) -> list[str]:
        """Return the outermost layers with parameters that hold no block and lie in none."""
        return list(_iterate_beside(self.module, "", () if self.trunk.leaf else self.trunk.blocks))

    def externally_called_blocks(self, blocks: Iterable[str]) -> dict[str, str]:
        """Find blocks of which a part is called from outside of them: {block: the first such part}.

        A replaced forward or a gather of such a block would not run for that part.
        """
        wanted, found = set(blocks), dict[str, str]()
        for told in self.first_pass.log:
            above = told.name
            while above := above.rpartition(".")[0]:
                if above in wanted and above not in told.around:
                    found.setdefault(above, told.name)
        return found

    def stacked_experts(self) -> list[ExpertLayer]:
        """Return the layers of stacked experts."""
        from shoal.trace.find.stacked_experts import detect_stacked_experts  # only ep needs them

        return detect_stacked_experts(
            self.module, self.calls(name for name, _ in iterate_stacked_modules(self.module))
        )

    def listed_experts(self) -> list[ListedExperts]:
        """Return the lists of modules that are experts."""
        from shoal.trace.find.listed_experts import detect_listed_experts, iterate_expert_lists

        lists = iterate_expert_lists(self.module, self.trunk.blocks)
        names = [f"{name}.{k}" for name, part in lists for k in range(len(part))]
        return detect_listed_experts(self.module, self.trunk.blocks, self.calls(names))

    def tables(
        self, blocks: Collection[str], degree: int, wish: Callable[[str], str | None]
    ) -> VocabularyTables:
        """Return the embeddings and output heads whose rows `degree` ranks can split."""
        from shoal.trace.find.vocabulary_tables import select_tables  # only tp needs them

        order = [name for name, _ in self.first_pass.order]
        return select_tables(self.module, self.first_pass.uses, order, blocks, degree, wish)

    def calls(self, names: Iterable[str]) -> dict[str, LayerCall]:
        """Return the first call of each of some layers, in call order; without layers never called.

        Note:
            numbers in a call may be those of an equal layer's; shapes are its own.
        """
        wanted = set(names)
        known = self.first_pass.calls | self._further
        if missing := [
            name for name in wanted if name in self.first_pass.shapes and name not in known
        ]:
            more = run_memoized(lambda cheaply: self._run_recorded_pass(missing, cheaply))
            self._further |= more.calls
            known |= more.calls
        return {
            name: known[name] for name in self.first_pass.begun if name in wanted and name in known
        }

    def _run_recorded_pass(self, copied: Iterable[str], cheaply: bool) -> PassLog:
        module, seen = self.module, PassLog(frozenset(copied))
        uses = TableUseRecorder({n: part for n, part in module.named_modules() if is_table(part)})
        listeners: list[_RecordingForward] = []
        nothing = torch.empty(0)
        drop = torch.autograd.graph.saved_tensors_hooks(lambda _: nothing, _refuse_backward)
        with (
            in_mode(module, training=True),
            memoize_layers(module, seen) if cheaply else nullcontext(),
        ):
            try:
                for name, part in module.named_modules():
                    listeners.append(_RecordingForward(name, part, seen, uses))
                drawing = DrawRecorder(seen.draws, seen.around)
                with torch.enable_grad(), drop, preserve_state(module), uses, drawing:
                    seen.uses = uses.of(self.run("look", module))
            finally:
                restore_all(listeners)
        if seen.handed_objects:
            from shoal.trace.isolation.argument_keys import (
                drop_holders,  # few models pass objects
            )

            seen.log = [replace(one, call=one.call and drop_holders(one.call)) for one in seen.log]
        return seen


@contextmanager
def in_mode(module: nn.Module, *, training: bool) -> Iterator[None]:
    """Set a model to training or evaluation, and restore every part's mode when the context closes.

    If the model trains already and is to train, parts in evaluation mode (frozen) stay so.
    """
    modes = [(part, part.training) for part in module.modules()]
    if not (training and module.training):
        module.train(training)
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


@dataclass(frozen=True)
class _CallEntry:
    """Finished call: its module, the modules around it, and its output's shape.

    Attributes:
        follows: the layer whose output, untouched, is its first floating argument, or "".
        call: arguments of the module's first call, if they are copied.
    """

    name: str
    around: tuple[str, ...]
    shape: torch.Size
    follows: str
    call: LayerCall | None


@dataclass
class PassLog:
    """Calls of one forward pass, in the order of their ends.

    Attributes:
        copied: modules whose first call's arguments are kept.
        begun: modules by their first call.
        around: modules whose call is in progress.
        last: the newest output of a module in `copied`, and its module.
        handed_objects: a module was called with an argument that is neither tensor nor number.
    """

    copied: frozenset[str]
    log: list[_CallEntry] = field(default_factory=list)
    begun: dict[str, None] = field(default_factory=dict)
    around: list[str] = field(default_factory=list)
    last: tuple[Tensor | None, str] = (None, "")
    draws: list[RandomDraw] = field(default_factory=list)
    uses: TableUses = field(default_factory=TableUses)
    handed_objects: bool = False

    def __len__(self) -> int:
        return len(self.log)

    def again(self, said: slice, names: Mapping[str, str]) -> None:
        """Record the calls inside of a block again, as inside of the block called now."""
        for told in self.log[said]:
            inside = [names.get(name, name) for name in told.around]
            inside = inside[inside.index(self.around[-1]) + 1 :]
            own, follows = names.get(told.name, told.name), names.get(told.follows, "")
            self.begun.setdefault(own)
            around = (*self.around, *inside)
            self.log.append(replace(told, name=own, around=around, follows=follows))

    @property
    def order(self) -> list[tuple[str, tuple[str, ...]]]:
        """Return every call, in the order of their ends: (module, modules around the call)."""
        return [(told.name, told.around) for told in self.log]

    @cached_property
    def shapes(self) -> dict[str, list[torch.Size]]:
        """Return the first output's shape of every call, by module, in order of first ends."""
        found: dict[str, list[torch.Size]] = {}
        for told in self.log:
            found.setdefault(told.name, []).append(told.shape)
        return found

    @cached_property
    def calls(self) -> dict[str, LayerCall]:
        """Return first calls of the modules in `copied`, with the layers that all calls follow."""
        found: dict[str, LayerCall] = {}
        for told in self.log:
            if told.name in self.copied and (call := found.get(told.name, told.call)):
                found[told.name] = replace(call, follows=(*call.follows, told.follows))
        return found


class InnerBackwardError(PlanError):
    """A PlanError: the model's forward pass runs a backward pass.

    Attributes:
        is_twice: its result is to be differentiated again.
    """

    is_twice: bool = False


def _refuse_backward(_nothing: Tensor) -> Tensor:
    """Raise InnerBackwardError: a backward pass asks for a tensor that the record has dropped."""
    error = InnerBackwardError(
        "model: its forward pass runs a backward pass (torch.autograd.grad inside of forward), and "
        "where ranks gather or split weights (fsdp, tp, cp, ep, pp) a model can be differentiated "
        "once only; try: layout.strategy=ddp, zero1 or zero2"
    )
    error.is_twice = torch.is_grad_enabled()  # create_graph=True
    raise error


class _RecordingForward(ReplacedForward):
    """Replaced forward that records every call of a module."""

    def __init__(self, name: str, block: nn.Module, seen: PassLog, uses: TableUseRecorder) -> None:
        self.seen, self.uses = seen, uses
        super().__init__(name, block)
        self.loose = tensor_versions(block) if name in seen.copied else {}

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Run the module's own forward and record the call."""
        seen, name = self.seen, self.name
        copied, call, follows = name in seen.copied, None, ""
        if copied:
            given = tensors_of((inputs, named))
            first = next((t for t in given if t.is_floating_point()), None)
            follows = seen.last[1] if first is not None and first is seen.last[0] else ""
            if name not in seen.begun:
                with self.uses.ignore_reads():
                    args, kwargs = pytree.tree_map_only(Tensor, _copy_tensor, (inputs, named))
                leaves = pytree.tree_leaves((args, kwargs))
                seen.handed_objects |= not all(isinstance(t, (Tensor, *PLAIN)) for t in leaves)
                anew = [
                    n for n, its in tensor_versions(self.block).items() if self.loose.get(n) != its
                ]
                why = f"its {anew[0]} is set from outside in every pass" if anew else ""
                call = LayerCall(args, kwargs, (), why and f"{why}, which a graph does not follow")
        seen.begun.setdefault(name)
        seen.around.append(name)
        try:
            with self.uses.inside(name):
                outputs = self.forward(*inputs, **named)
        finally:
            seen.around.pop()
        found = tensors_of(outputs)
        if copied:
            seen.last = (found[0] if found else None, name)
        self.uses.record_output(name, outputs)
        shape = found[0].shape if found else torch.Size()
        seen.log.append(_CallEntry(name, tuple(seen.around), shape, follows, call))
        return outputs


def _copy_tensor(tensor: Tensor) -> Tensor:
    """Copy a tensor, because the layer may write into it."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _iterate_beside(module: nn.Module, prefix: str, blocks: Sequence[str]) -> Iterator[str]:
    """Yield names of the outermost layers with parameters that hold no block and lie in none.

    A list or dict of layers is not called itself: its entries are used instead.
    """
    for child, part in module.named_children():
        name = f"{prefix}.{child}" if prefix else child
        if name in blocks or next(part.parameters(), None) is None:
            continue
        holds = any(block.startswith(f"{name}.") for block in blocks)
        if holds or isinstance(part, UNCALLED):
            yield from _iterate_beside(part, name, blocks)
        else:
            yield name
