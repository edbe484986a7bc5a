"""One stage of a pipeline: the user's own forward, with other stages' blocks left out.

Every unit of the model (block, embedding, head) has an object in the place of its `forward`. While
a stage runs, the object of a unit of this stage calls it. That of another stage returns at once
the outputs that the cut lists: tensors that arrived from the stage before and, for irrelevant
values, zeros of the right shape. Code between the units runs as the user wrote it. At the first
call after the stage's last one an exception leaves the forward pass. No `except Exception` catches
it, and it ends in the replaced `forward` of the model. So the hooks of the stage's blocks and of
the model (which gather and free parameters) all run. The model's outputs are then the departures.

    run(call, arrivals)   call(module) is the forward pass on a micro-batch; arrivals in the order
                          of `cut.crossings[number]`, with requires_grad as the sender had it.
                          Returns the departures, in the order of `cut.crossings[number + 1]`, or
                          on the last stage the model's outputs

A model's own reentrant checkpoint runs a block without a graph, so no departure would have one:
while a stage runs, such a checkpoint is torch's other kind (`use_reentrant=False`).

Several stages of one module may be on one rank (interleaved, zbv, dualpipe):
`PipelineStages.passage` is the pass of the one that runs. Parameters of other stages hold no data
(`free_other_stages`).
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.autograd.function import FunctionCtx
from torch.utils import checkpoint as checkpointing
from torch.utils.hooks import BackwardHook

from shoal.base.attribute_patch import patch_attribute
from shoal.base.errors import BugError, PlanError
from shoal.parallel.pipeline.partition_model import CallPlan, StageCut, shape_givers
from shoal.trace._torch import pytree
from shoal.trace.flow.liveness import Leaf
from shoal.trace.isolation.meta_inputs import first_line, map_tensors, meta_like, tensors_of
from shoal.trace.isolation.replaced_forward import ReplacedForward, restore_all

Tensors = tuple[torch.Tensor, ...]


class PipelineStages:
    """All stages of one module that are on this rank.

    Attributes:
        stages: by number.
    """

    def __init__(
        self, module: nn.Module, cut: StageCut, numbers: Iterable[int], device: torch.device
    ) -> None:
        """Prepare the stages without changing the module yet.

        Forwards are replaced when the first stage runs, around the wrappers of other techniques.

        Args:
            device: on which they run.
        """
        self.module, self.cut, self.device = module, cut, device
        self.shapes = OutputShapes(cut)
        self.passage: StagePass | None = None
        self.between = _parameters_between_units(module, cut)
        self.replaced: list[ReplacedForward] = []
        self._others: dict[int, list[nn.Module]] = {}
        self.stages = {number: PipelineStage(self, number) for number in sorted(numbers)}

    def restore_forwards(self) -> None:
        """Restore the module's forwards; other stages' parameters stay on the meta device."""
        restore_all(self.replaced)
        self.replaced.clear()

    def _install(self) -> None:
        for name in dict.fromkeys(plan.name for plan in self.cut.calls):
            self.replaced.append(UnitForward(name, self.module.get_submodule(name), self))
        for name in list_uncalled_units(self.module, self.cut):
            block = self.module.get_submodule(name)
            self.replaced.append(UncalledUnitForward(name, block, self))
        self.replaced.append(RootForward("", self.module, self))

    def check_forwards(self) -> None:
        """Check that the replaced forwards are there, on every rank before one waits for another.

        Raises:
            PlanError: user code has set another forward since.
        """
        for one in self.replaced:
            if not isinstance(vars(one.block).get("forward"), ReplacedForward):
                raise PlanError(
                    f"layout.pp = {self.cut.stages}: {one.name or 'the model'}.forward was set "
                    f"since shoal.parallelize was called, in the place of the function that passes "
                    f"its results from stage to stage; try: the new forward before "
                    f"shoal.parallelize, a forward hook, or layout.pp=1"
                )

    @contextmanager
    def running_stage(self, passage: StagePass) -> Iterator[None]:
        """Mark the one stage whose forward pass runs, and install the replaced forwards."""
        if self.passage is not None:
            raise BugError("a stage ran inside of another one's forward pass")
        if not self.replaced:
            self._install()
        self.passage = passage
        try:
            with _fill_missing_parameters(self.between, self.device), _no_reentrant_checkpoints():
                yield
        finally:
            self.passage = None

    def others(self, number: int) -> list[nn.Module]:
        """Return the units that another stage than `number` runs, and this one does not."""
        if number not in self._others:
            own = {plan.name for plan in self.cut.calls if plan.stage == number}
            names = dict.fromkeys(plan.name for plan in self.cut.calls if plan.name not in own)
            self._others[number] = [self.module.get_submodule(name) for name in names]
        return self._others[number]


class PipelineStage:
    """One piece of the model.

    Attributes:
        number: 0 for the piece that reads the inputs.
        first, last: whether it is at an end.
    """

    def __init__(self, held: PipelineStages, number: int) -> None:
        self.held, self.number = held, number
        self.first, self.last = number == 0, number == held.cut.stages - 1

    def run(self, call: Callable[[nn.Module], Any], arrivals: Tensors) -> Any:
        """Run the forward pass of this stage; see the head of the module.

        Raises:
            PlanError: the pass calls other blocks, or in another order, than the sample's.
        """
        passage = StagePass(self.held.cut, self.number, arrivals, self.held.shapes)
        passage.copies_views = bool(self.held.module._forward_hooks)
        outputs = self.run_pass(call, passage)
        return outputs if self.last else passage.departures()

    def check_forwards(self) -> None:
        """Raise PlanError if user code has set a forward that a stage needs."""
        self.held.check_forwards()

    def run_pass(self, call: Callable[[nn.Module], Any], passage: StagePass) -> Any:
        """Run the forward pass with `passage`; return the model's outputs on the last stage."""
        outputs = None
        hooked = [one for one in self.held.others(self.number) if one._backward_hooks]
        without = _without_backward_hooks(hooked) if hooked else nullcontext()
        with without, self.held.running_stage(passage), suppress(_StageFinished):
            outputs = call(self.held.module)
        passage.finish()
        return outputs


class _StageForward(ReplacedForward):
    """Replaced forward that knows the stages on this rank."""

    def __init__(self, name: str, block: nn.Module, held: PipelineStages) -> None:
        self.held = held
        super().__init__(name, block)


class UnitForward(_StageForward):
    """Replacement of a unit's forward."""

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Let the running stage handle this call.

        If none runs, as when a checkpointed part of the model is recomputed, run the unit's own
        forward.
        """
        passage = self.held.passage
        if passage is None and any(p.is_meta for p in self.block.parameters()):
            raise PlanError(
                f"layout.pp: {self.name} is called outside of a stage's forward pass, and lives on "
                f"another stage: the model is called directly, or its own checkpointing spans "
                f"blocks of several stages; try: memory.recompute instead of the model's own"
            )
        if passage is None or passage.inside:
            return self.forward(*inputs, **named)
        return passage.call(self, inputs, named)


class UncalledUnitForward(_StageForward):
    """Replacement of the forward of a unit that the sample's pass does not call."""

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Refuse the call, unless it follows all calls of the last stage, which has the weights."""
        if (passage := self.held.passage) is not None:
            passage.check_uncalled(self.name)
        return self.forward(*inputs, **named)


class RootForward(_StageForward):
    """Replacement of the model's own forward; returns the departures if a stage ends early."""

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Return the model's outputs, or the departures."""
        try:
            return self.forward(*inputs, **named)
        except _StageFinished:
            passage = self.held.passage
            if passage is None:
                raise
            return passage.departures()


class _StageFinished(BaseException):
    """Exception that ends a stage's forward pass; no user's `except Exception` stops it."""


class StagePass:
    """One forward pass of one stage.

    fill           the value of irrelevant elements
    copies_views   departures are no views: forward hooks of the model (fsdp's) copy views, and
                   register what happens before the backward pass on the copies
    """

    fill = 0.0

    def __init__(self, cut: StageCut, number: int, arrivals: Tensors, shapes: OutputShapes) -> None:
        expected = cut.crossings[number]
        if len(arrivals) != len(expected):
            raise BugError(f"stage {number} gets {len(arrivals)} tensors, not {len(expected)}")
        self.cut, self.number, self.shapes = cut, number, shapes
        self.arrived: dict[Leaf, torch.Tensor] = dict(zip(expected, arrivals, strict=True))
        self.made: dict[Leaf, torch.Tensor] = {}
        self.at = 0
        self.inside, self.trains = False, torch.is_grad_enabled()
        self.copies_views = False
        last = number == cut.stages - 1
        self.wanted = frozenset(() if last else cut.crossings[number + 1])
        self.departing = {call for call, _ in self.wanted}
        mine = [place for place, plan in enumerate(cut.calls) if plan.stage == number]
        self.stop = len(cut.calls) if last else max(mine)

    def call(self, unit: UnitForward, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Handle the next call of a unit."""
        number = self.at
        if number > self.stop:
            raise _StageFinished
        if number == len(self.cut.calls) or self.cut.calls[number].name != unit.name:
            raise self._order_error(unit.name)
        self.at += 1
        if self.trains and not torch.is_grad_enabled() and _in_autograd_function():
            raise PlanError(
                f"layout.pp = {self.cut.stages}: {unit.name} runs without a graph in the forward "
                f"pass of an autograd.Function (a checkpoint of the model's own), so the stages "
                f"before the last would train nothing; try: memory.recompute, or "
                f"torch.utils.checkpoint.checkpoint"
            )
        unit.computes = self.cut.calls[number].stage == self.number
        if not unit.computes:
            return self._substitute_outputs(number, inputs, named)
        # Departures leave before torch's own hook of the block sees them.
        hooked = self.trains and unit.block._backward_hooks and number in self.departing
        watch = _backward_hook(unit.block) if hooked else None
        inputs = inputs if watch is None else watch.setup_input_hook(inputs)
        self.inside = True
        try:
            outputs = self.run_unit(number, unit, inputs, named)
        finally:
            self.inside = False
        outputs = outputs if watch is None else watch.setup_output_hook(outputs)
        if self.copies_views and self.trains and number in self.departing:
            is_one = isinstance(outputs, torch.Tensor)
            outputs = _copy_view(outputs) if is_one else map_tensors(_copy_view, outputs)
        self._keep_outputs(number, outputs)
        return outputs

    def check_uncalled(self, name: str) -> None:
        """Check a call of a unit that the sample's pass does not call.

        Raises:
            PlanError: calls of the sample's pass are still to come.
        """
        if self.at > self.stop:
            raise _StageFinished
        if self.at < len(self.cut.calls):
            raise self._order_error(name)

    def run_unit(
        self, number: int, unit: UnitForward, inputs: tuple[Any, ...], named: dict[str, Any]
    ) -> Any:
        """Run call `number`, of a unit of this stage."""
        return unit.forward(*inputs, **named)

    def departures(self) -> Tensors:
        """Return the tensors for the next stage."""
        crossing = self.cut.crossings[self.number + 1]
        return tuple(
            self.made[leaf] if leaf in self.made else self.arrived[leaf] for leaf in crossing
        )

    def finish(self) -> None:
        """End the forward pass.

        Raises:
            PlanError: it made fewer calls than the sample's.
        """
        if self.at < min(self.stop + 1, len(self.cut.calls)):
            raise self._order_error("no other block")

    def _keep_outputs(self, number: int, outputs: Any) -> None:
        """Keep the departures of a call now, since code between the units may write into them."""
        plan = self.cut.calls[number]
        leaves = tensors_of(outputs)
        if len(leaves) != len(plan.devices):
            raise self._count_error(plan, len(leaves))
        for place, tensor in enumerate(leaves):
            if (number, place) in self.wanted:
                kept = tensor.clone() if place in plan.written else tensor
                self.made[number, place] = kept

    def _substitute_outputs(
        self, number: int, inputs: tuple[Any, ...], named: dict[str, Any]
    ) -> Any:
        """Return the outputs of another stage's unit `number`: received tensors or placeholders."""
        plan = self.cut.calls[number]
        count = len(plan.devices)
        known = all((number, place) in self.arrived for place in range(count))
        given = plan.outputs if known else self.shapes.of(number, inputs, named)
        if len(tensors_of(given)) != count:
            raise self._count_error(plan, len(tensors_of(given)))
        places = iter(range(count))

        def value(shape: torch.Tensor) -> torch.Tensor:
            place = next(places)
            arrived = self.arrived.get((number, place))
            if arrived is not None:
                # An autograd leaf cannot be written into, and it may be sent on to the next stage.
                return arrived.clone() if place in plan.written else arrived
            fill = self.fill if shape.is_floating_point() else 0
            one = torch.full((), fill, dtype=shape.dtype, device=plan.devices[place])
            whole = one.expand(shape.shape)  # takes no memory, and cannot be written into
            return whole.clone() if place in plan.written else whole

        return map_tensors(value, given)

    def _order_error(self, name: str) -> PlanError:
        calls = self.cut.calls
        expected = calls[self.at].name if self.at < len(calls) else "no other block"
        return PlanError(
            f"layout.pp = {self.cut.stages}: the forward pass calls {name} where the sample's "
            f"called {expected}: a pipeline's stages are cut for one order of blocks; try: "
            f"a forward pass that calls its blocks in one order for all inputs, or layout.pp=1"
        )

    def _count_error(self, plan: CallPlan, count: int) -> PlanError:
        return PlanError(
            f"layout.pp = {self.cut.stages}: {plan.name} returns {count} tensors where it returned "
            f"{len(plan.devices)} for the sample; try: outputs of one form for all "
            f"inputs, in training and evaluation, or layout.pp=1"
        )


def _copy_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of its own for a view, or for a parameter, that needs a gradient."""
    is_shared = tensor._is_view() or isinstance(tensor, nn.Parameter)
    return tensor.clone() if tensor.requires_grad and is_shared else tensor


def _backward_hook(block: nn.Module) -> BackwardHook | None:
    """Return torch's hook that calls a block's full backward hooks; None for those of old torch."""
    if not block._is_full_backward_hook:
        return None
    before = list(block._backward_pre_hooks.values())
    return BackwardHook(block, list(block._backward_hooks.values()), before)


@contextmanager
def _without_backward_hooks(blocks: Sequence[nn.Module]) -> Iterator[None]:
    """Leave out the backward hooks of blocks that another stage runs: they run there."""
    kept = [block._backward_hooks for block in blocks]
    for block in blocks:
        block._backward_hooks = OrderedDict()
    try:
        yield
    finally:
        for block, hooks in zip(blocks, kept, strict=True):
            block._backward_hooks = hooks


def _parameters_between_units(module: nn.Module, cut: StageCut) -> list[tuple[nn.Module, str]]:
    """Return the locations of parameters that code between units reads, tied names included.

    These include the first parameter of each container of units: code there reads "the device of
    the model" from it (transformers' `self.device`), and would create its tensors on the meta
    device.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    paths = [plan.name.split(".") for plan in cut.calls]
    holders = {".".join(path[:end]) for path in paths for end in range(len(path))}
    first = {id(next(module.get_submodule(one).parameters(), None)) for one in holders}
    return [
        (part, name)
        for part in module.modules()
        for name, parameter in part._parameters.items()
        if parameter is not None and (names[id(parameter)] in cut.between or id(parameter) in first)
    ]


def list_uncalled_units(module: nn.Module, cut: StageCut) -> list[str]:
    """Return the outermost modules with parameters that no stage needs, in order of registration.

    Only the last stage has them, so that checkpoints do. A container without a forward pass of its
    own is none; its entries are.
    """
    needed = {id(one) for plan in cut.calls for one in module.get_submodule(plan.name).parameters()}
    needed |= {id(one) for name, one in module.named_parameters() if name in cut.between}
    found: list[str] = []
    for name, part in module.named_modules():
        own = list(part.parameters())
        inside = any(name.startswith(f"{outer}.") for outer in found)
        is_container = type(part).forward is nn.Module.forward
        if name and own and not inside and not is_container:
            found += [] if any(id(one) in needed for one in own) else [name]
    return found


class _NonReentrantCheckpoint:
    """Replacement of the function behind `checkpoint(…, use_reentrant=True)`."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve_rng_state: bool, *inputs: Any) -> Any:
        """Run the checkpoint as a non-reentrant one, whose graph includes the block."""
        return checkpointing.checkpoint(
            function, *inputs, use_reentrant=False, preserve_rng_state=preserve_rng_state
        )


def _no_reentrant_checkpoints() -> AbstractContextManager[None]:
    return patch_attribute(checkpointing, "CheckpointFunction", _NonReentrantCheckpoint)


def _in_autograd_function() -> bool:
    """Return whether the forward pass of an autograd.Function runs on this thread."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if any(isinstance(value, FunctionCtx) for value in frame.f_locals.values()):
            return True
        frame = frame.f_back
    return False


@contextmanager
def _fill_missing_parameters(
    between: list[tuple[nn.Module, str]], device: torch.device
) -> Iterator[None]:
    """Put zeros in place of other stages' parameters that code here reads.

    They have the memory of one row, whose numbers lie side by side as `view_as_complex` wants them.
    """
    replaced = [
        (part, name, parameter)
        for part, name in between
        if (parameter := part._parameters[name]) is not None and parameter.is_meta
    ]
    for part, name, parameter in replaced:
        zero = torch.zeros(parameter.shape[-1:], dtype=parameter.dtype, device=device)
        part._parameters[name] = nn.Parameter(zero.expand(parameter.shape), requires_grad=False)
    try:
        yield
    finally:
        for part, name, parameter in replaced:
            part._parameters[name] = parameter


class OutputShapes:
    """Outputs of every call of a unit, as tensors on the meta device.

    An irrelevant output of a block on another stage must at least have the right shape: a mask may
    be made from it. The sample has it for inputs of its own size. For other sizes a copy of the
    block on the meta device runs once, and its result is cached. If the copy cannot run (routing by
    values), a result that had the shape of an input takes that input's new shape.
    """

    def __init__(self, cut: StageCut) -> None:
        self.cut = cut
        self.known: dict[Hashable, Any] = {}
        for number, plan in enumerate(cut.calls):
            self.known[number, _signature(plan.inputs)] = plan.outputs

    def of(self, number: int, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Return the result of call `number` for these inputs.

        Raises:
            PlanError: neither the sample nor the meta copy has the shape.
        """
        key = (number, _signature((inputs, named)))
        if key not in self.known:
            self.known[key] = self._derive_shapes(self.cut.calls[number], inputs, named)
        return self.known[key]

    def _derive_shapes(self, plan: CallPlan, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        twin = self.cut.twin.get_submodule(plan.name)
        own = next((p.dtype for p in twin.parameters() if p.is_floating_point()), None)

        def to_twin(tensor: torch.Tensor) -> torch.Tensor:  # a residual stream may be narrower
            like = meta_like(tensor)
            return like.to(own) if own and like.is_floating_point() else like

        args, kwargs = pytree.tree_map_only(
            torch.device, lambda _: torch.device("meta"), map_tensors(to_twin, (inputs, named))
        )
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                outputs = twin(*args, **kwargs)
        except Exception as failure:  # the user's block needs real values
            return _shapes_from_inputs(plan, (inputs, named), failure)
        return map_tensors(meta_like, outputs)


def _shapes_from_inputs(plan: CallPlan, inputs: Any, failure: Exception) -> Any:
    now = tensors_of(inputs)
    then = tensors_of(plan.inputs)

    def like(output: torch.Tensor) -> torch.Tensor:
        for before, present in zip(then, now, strict=False):
            if before.shape == output.shape:
                return torch.empty(present.shape, dtype=output.dtype, device="meta")
        if not output.dim():
            return output
        raise PlanError(
            f"layout.pp: {plan.name} cannot be run without values ({first_line(failure)}), so the "
            f"shape that it gives for inputs {[tuple(t.shape) for t in now]} is not known on other "
            f"stages; try: micro-batches of one size and length"
        ) from failure

    return map_tensors(like, plan.outputs)


def _signature(inputs: Any) -> Hashable:
    return tuple(
        (tuple(one.shape), one.dtype) if isinstance(one, torch.Tensor) else one
        for one in shape_givers(inputs)
    )
