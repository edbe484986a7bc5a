"""Trace the facts of any nn.Module, from one run of each kind of part, without allocating it.

A copy of the model has shapes and no data. It runs forward once. The first of equal units (see
`model_units.py`) runs forward and backward while every operation is counted. The others are not
run: they return outputs of the shapes that the first one returned. Work outside of units (residual
sums, activations between layers, positions) counts to the unit before it, or to a unit "inputs".

    kernels="cpu"   FakeTensors on the CPU: what this machine's kernels keep
    kernels="gpu"   meta tensors and the replacements of `gpu_kernels.py`: what a GPU's keep; the
                    loss is always traced so, since ours reads its targets on a CPU

Per sample means divided by the example's batch (the first dim of its first tensor).
Measured  Llama-3-8B's block in bf16, 8192 tokens: 41·s·b·h bytes. 100 layers of an
          unknown module: see docs of the planner
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from shoal.base.errors import PlanError, ShoalError, check_choice
from shoal.base.estimates.estimate import ModelFacts
from shoal.base.layouts.policies import BlocksPolicy
from shoal.trace._torch import FakeTensorMode, pytree
from shoal.trace.costs.facts_rows import UnitCost, UnitRows
from shoal.trace.costs.gpu_kernels import GpuKernelMode
from shoal.trace.costs.operation_costs import CostRecorder, Tally
from shoal.trace.find.blocks import FOUND, residual_blocks
from shoal.trace.find.model_units import detect_units, module_key
from shoal.trace.isolation.meta_inputs import (
    build_meta_model,
    cast_product_weights,
    first_line,
    is_record,
    map_tensors,
    meta_like,
    tensors_of,
)
from shoal.trace.isolation.module_copies import copy_to_meta
from shoal.trace.isolation.narrow_blocks import (
    NarrowForward,
    NarrowNorm,
    list_narrow_weights,
    list_stream_norms,
)

DIGITS = re.compile(r"\d+")
FORMATS = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}


def trace_facts(
    build_or_module: nn.Module | Callable[[], nn.Module],
    example_inputs: Any,
    *,
    kernels: str = "cpu",
    element_bytes: int = 4,
    autocast: bool = False,
    residual: str = "fp32",
    loss: Callable[..., Any] | None = None,
    targets: Any = None,
    blocks: BlocksPolicy = FOUND,
    name: str = "",
) -> ModelFacts:
    """Trace a model on shapes alone: parameters, work and memory of every unit, per sample.

    Args:
        build_or_module: a module, or a function that builds one (then nothing is allocated).
        example_inputs: a tensor, a tuple of arguments or a dict of keyword arguments; only shapes
            and types matter; the first dim of every tensor is the batch.
        kernels: cpu or gpu: whose saved tensors to count.
        element_bytes: 2 (bf16), 4 (fp32) or 8 (fp64): the format of parameters and activations.
        autocast: weights and activations between layers stay fp32, products compute in the format
            of element_bytes (2): how Shoal and torch.autocast train bf16.
        residual: bf16 (with autocast): blocks pass on bf16 and compute in it, without autocast.
        loss, targets: loss(outputs, targets) → values, or (sum, count); its peak is `loss_bytes`.
        blocks: the user's choice of blocks, if there is one.

    Returns:
        units in the order of the first call; a unit whose parameters belong to an earlier one has
        `tied_to`.

    Raises:
        PlanError: the model cannot run on shapes alone; the text names the module.
    """
    check_choice("kernels", kernels, ("cpu", "gpu"), kind=PlanError)
    if autocast and element_bytes != 2:
        raise PlanError(f"element_bytes = {element_bytes}: autocast is narrow; try: 2")
    if element_bytes not in FORMATS:
        raise PlanError(f"element_bytes = {element_bytes}: not one of 2, 4, 8; try: 4")
    dtype = FORMATS[element_bytes]
    wide = torch.float32 if autocast else dtype
    twin = build_meta_model(build_or_module).to(wide)
    narrow = _narrow_blocks(twin, blocks) if autocast and residual == "bf16" else ()
    if autocast:
        twin = cast_product_weights(twin, dtype)
    with ExitStack() as modes:
        modes.enter_context(torch.autocast("cpu", dtype, enabled=autocast))
        if kernels == "cpu":
            modes.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            twin = copy_to_meta(twin, "cpu")
        else:
            modes.enter_context(GpuKernelMode(dtype if autocast else None))
        modes.enter_context(torch.enable_grad())
        trace = _FactsTrace(twin, "cpu" if kernels == "cpu" else "meta", wide, blocks)
        _narrow_forwards(twin, narrow)  # outside of units, whose calls then all receive bf16
        outputs = trace.forward(example_inputs)
    if loss is not None:
        trace.loss(loss, outputs, targets)
    source = f"traced, {kernels.upper()} kernels, batch {trace.batch}"
    source += ", autocast" if autocast else ""
    source += ", bf16 residuals" if narrow else ""
    return trace.rows.model_facts(name or type(twin).__name__, element_bytes, source)


def _narrow_blocks(twin: nn.Module, policy: BlocksPolicy) -> list[str]:
    """Cast the weights of blocks that read them in bf16; return the names of the blocks."""
    found = residual_blocks(twin, policy)
    read = list_narrow_weights(twin, found.values())
    for parameter in twin.parameters():
        if parameter.requires_grad and id(parameter) in read:
            parameter.data = parameter.data.to(torch.bfloat16)
    return list(found)


def _narrow_forwards(twin: nn.Module, names: Sequence[str]) -> None:
    """Run blocks, and norms between and after them, as a bf16 residual stream does."""
    blocks = {name: twin.get_submodule(name) for name in names}
    for name, block in blocks.items():
        NarrowForward(name, block, "cpu")
    for name, norm in list_stream_norms(twin, blocks.values()).items() if blocks else ():
        NarrowNorm(name, norm, "cpu")


def _shape_key(tree: Any) -> tuple[Any, ...]:
    told = [
        (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else repr(leaf)[:80]
        for leaf in pytree.tree_leaves(tree)
    ]
    return tuple(told)


@dataclasses.dataclass
class _UnitResult:
    """Costs and outputs of the first unit of a kind, and what it writes into its dict arguments."""

    call: UnitCost
    outputs: Any
    written: list[dict[Any, Any]]


class _FactsTrace:
    """Forward pass of the meta copy, unit by unit."""

    def __init__(
        self, twin: nn.Module, device: str, dtype: torch.dtype, policy: BlocksPolicy
    ) -> None:
        self.twin, self.device, self.dtype = twin, device, dtype
        self.batch = 1
        units = detect_units(twin)
        self.watch = CostRecorder([*twin.parameters(), *twin.buffers()])
        self.rows = UnitRows(twin, units, policy)
        self.running: list[str] = []
        self.kept: Any = WeakIdKeyDictionary()  # storages that a unit already counted as saved
        self.seen: dict[tuple[Any, ...], _UnitResult] = {}
        self.glue = Tally()
        for path, module in units:
            module.__dict__["forward"] = self._replace_forward(path, module, module.forward)
        for path, module in twin.named_modules():
            module.register_forward_pre_hook(self._push_module(path or "the model", module))
            module.register_forward_hook(self._pop_module)

    def forward(self, example: Any) -> Any:
        """Run the copy on shapes like the example's; return its outputs."""
        shapes = pytree.tree_map(self._like, example)
        tensors = tensors_of(shapes)
        if not tensors or not tensors[0].dim():
            raise PlanError("example_inputs: hold no tensor with a batch; give a tensor or a tuple")
        self.batch = self.rows.batch = tensors[0].shape[0]
        self.rows.sequence = _sequence(tensors[0])
        with self._name_failures(), self.watch, self._count_glue():
            if isinstance(shapes, dict):
                outputs = self.twin(**shapes)
            else:
                outputs = self.twin(*shapes) if isinstance(shapes, tuple) else self.twin(shapes)
        return outputs

    def loss(self, loss: Callable[..., Any], outputs: Any, targets: Any) -> None:
        """Run the forward and backward pass of the loss alone, on the meta device."""
        owned = {id(p) for p in self.twin.parameters()}
        gradients: set[int] = set()
        constants: list[torch.Tensor] = []
        anchor = torch.empty((), device="meta", requires_grad=True)

        def to_meta(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in owned:
                return (
                    _InnerOutput.apply(anchor, tensor)
                    if tensor.requires_grad
                    else meta_like(tensor)
                )
            constants.append(meta_like(tensor).requires_grad_(tensor.requires_grad))
            return constants[-1]

        with torch.enable_grad():
            given = map_tensors(to_meta, outputs)
        wanted = map_tensors(meta_like, targets)
        self.watch = watch = CostRecorder(constants)
        arguments = [given] if targets is None else [given, wanted]
        given_bytes = sum(t.numel() * t.element_size() for t in tensors_of(given))
        with self._name_failures(), watch, watch.count_into(Tally()) as tally, torch.enable_grad():
            self.running.append("the loss")
            watch.mark_inputs([t for t in tensors_of(arguments) if not watch.is_constant(t)])
            value = loss(*arguments)
            del given
            arguments.clear()  # a training step frees outputs that the loss does not keep
            backward = watch.tally = Tally()
            with self._drop_gradients([c for c in constants if c.requires_grad], gradients):
                _backward(value)
            self.running.pop()
        self.rows.add_loss(tally, backward.flops, watch.peak_bytes(0, gradients), given_bytes)

    def _like(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        dtype = self.dtype if leaf.is_floating_point() else leaf.dtype
        return torch.empty(leaf.shape, dtype=dtype, device=self.device)

    @contextmanager
    def _count_glue(self) -> Iterator[None]:
        """Count the operations between units; `_call` ends a stretch when a unit begins."""
        with self.watch.count_into(self.glue):
            yield
        self.rows.add_glue(self.glue, self.kept)

    @contextmanager
    def _name_failures(self) -> Iterator[None]:
        """Convert a failure to a PlanError that names the running module."""
        try:
            yield
        except ShoalError:
            raise
        except Exception as failure:
            where = self.running[-1] if self.running else "the model"
            raise PlanError(
                f"model: {where} cannot be traced by shapes alone: {first_line(failure)}; make it "
                f"independent of the values of tensors, or leave it out of the plan and measure: "
                f"shoal compare"
            ) from failure

    def _push_module(self, path: str, module: nn.Module) -> Callable[..., None]:
        told = f"{path} ({type(module).__name__})"

        def enter(*_: Any) -> None:
            self.running.append(told)

        return enter

    def _pop_module(self, *_: Any) -> None:
        self.running.pop()

    def _replace_forward(self, path: str, module: nn.Module, forward: Callable[..., Any]) -> Any:
        kind = (*module_key(module), _attribute_key(module))

        def call(*args: Any, **kwargs: Any) -> Any:
            return self._run_or_reuse(path, module, kind, forward, args, kwargs)

        return call

    def _run_or_reuse(
        self,
        path: str,
        module: nn.Module,
        kind: tuple[Any, ...],
        forward: Callable[..., Any],
        args: Any,
        kwargs: Any,
    ) -> Any:
        """Run a unit, or reuse an equal earlier call; return outputs without autograd graph."""
        self.rows.add_glue(self.glue, self.kept)
        self.glue = self.watch.tally = Tally()
        inputs = tensors_of((args, kwargs))
        key = (kind, _shape_key((args, kwargs)))
        same = (key, tuple(t.requires_grad for t in inputs))
        seen = self.seen.get(same)
        if seen is None or not _can_repeat(seen.outputs):
            seen = self.seen[same] = self._run(module, forward, args, kwargs)
        outputs = map_tensors(_inner_output, seen.outputs)
        for given, entries in zip(_dicts_of(args, kwargs), seen.written, strict=True):
            given.update(map_tensors(_inner_output, entries))
        call = seen.call
        self.rows.add_call(path, module, key, call, call.unique_saved_bytes(inputs, self.kept))
        if call.keeps_outputs:
            for made, kept in zip(tensors_of(outputs), call.keeps_outputs, strict=True):
                if kept:
                    self.kept[made.untyped_storage()] = True
        return outputs

    def _run(
        self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> _UnitResult:
        watch = self.watch
        args, kwargs = map_tensors(_detach, (args, kwargs))
        inputs = tensors_of((args, kwargs))
        watch.mark_inputs(inputs)
        shared = _dicts_of(args, kwargs)
        before = [dict(one) for one in shared]
        with watch.count_into(Tally()) as tally:
            outputs = forward(*args, **kwargs)
        written = [
            {key: value for key, value in one.items() if value is not old.get(key)}
            for one, old in zip(shared, before, strict=True)
        ]
        saved = [t.untyped_storage() in tally.saved for t in inputs]
        keeps = [t.untyped_storage() in tally.saved for t in tensors_of(outputs)]
        call = UnitCost.of(tally, inputs, saved, keeps)
        shapes, written = map_tensors(_empty_like, (outputs, written))
        since, gradients = len(watch.moves), set[int]()
        trained = [p for p in module.parameters() if p.requires_grad]
        with watch.count_into(Tally()), self._drop_gradients(trained, gradients):
            _backward(outputs)
        call.working_bytes = watch.peak_bytes(since, gradients)
        return _UnitResult(call, shapes, written)

    @contextmanager
    def _drop_gradients(
        self, trained: Sequence[torch.Tensor], gradients: set[int]
    ) -> Iterator[None]:
        """Drop each parameter's gradient once it is complete; record its storage as a state."""

        def forget(parameter: torch.Tensor) -> None:
            if parameter.grad is not None:
                gradients.add(self.watch.number_of(parameter.grad))
                parameter.grad = None

        hooks = [p.register_post_accumulate_grad_hook(forget) for p in trained]
        yield
        for hook in hooks:
            hook.remove()


class _InnerOutput(torch.autograd.Function):
    """Output without data on an anchor's device: no leaf, whose graph would keep its data alive."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        ctx.device = anchor.device
        return torch.empty(like.shape, dtype=like.dtype, device=anchor.device)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.empty((), device=ctx.device), None


def _inner_output(tensor: torch.Tensor) -> torch.Tensor:
    """Return an output without data, and no leaf: the model may write to it in place."""
    if not tensor.requires_grad:
        return _empty_like(tensor)
    anchor = torch.empty((), device=tensor.device, requires_grad=True)
    return _InnerOutput.apply(anchor, tensor)


def _backward(outputs: Any) -> None:
    made = [t for t in tensors_of(outputs) if t.requires_grad and t.grad_fn is not None]
    if not made:
        return
    with torch.autocast("cpu", enabled=False):  # as in a run, where it ends with the forward pass
        torch.autograd.backward(made, [torch.empty_like(t) for t in made])


def _detach(tensor: torch.Tensor) -> torch.Tensor:
    """Detach a tensor with the same storage; parameters stay themselves."""
    if isinstance(tensor, nn.Parameter):
        return tensor
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _empty_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor).requires_grad_(tensor.requires_grad)


def _attribute_key(module: nn.Module) -> tuple[Any, ...]:
    """Return what layers of equal weights may differ in: a sliding window, shared keys and values.

    Of the attributes of all parts: texts, truths, and which are None. Numbers count layers.
    """
    return tuple(
        (name, value if isinstance(value, bool) else DIGITS.sub("#", str(value or "")))
        for part in module.modules()
        for name, value in vars(part).items()
        if name[0] != "_" and (value is None or isinstance(value, bool | str))
    )


def _dicts_of(args: Any, kwargs: dict[str, Any]) -> list[MutableMapping[Any, Any]]:
    """Return the dicts among the arguments of a call, into which it may write."""
    values = (args, *kwargs.values())
    leaves = pytree.tree_leaves(values, is_leaf=lambda one: isinstance(one, MutableMapping))
    return [leaf for leaf in leaves if isinstance(leaf, MutableMapping)]


def _can_repeat(outputs: Any) -> bool:
    """Return whether all leaves of the outputs are tensors, constants or dataclasses."""
    constants = (torch.Tensor, int, float, bool, str, type(None))
    return all(
        isinstance(leaf, constants) or is_record(leaf)
        for leaf in pytree.tree_leaves(outputs, is_leaf=is_record)
    )


def _sequence(first: torch.Tensor) -> int:
    """Return the positions of [batch, seq] token ids or [batch, seq, width] vectors; else 0."""
    ids = first.dim() == 2 and not first.is_floating_point()
    return first.shape[1] if ids or first.dim() == 3 else 0
