"""Keep a data-dependent part of a layer as one opaque operation of its graph.

An expert layer computes which tokens go where (`nonzero`) and calls one expert after the other:
that is not traceable, but all around it is. So the part becomes one operation of the layer's graph.
It takes the part's parameters and inputs, runs the part's own forward on them, and is
differentiated there. As for every operation, trial runs find how it acts on parts of its
parameters.

Parts that draw random numbers, change their inputs or buffers, or return data-dependent shapes are
refused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import gcd
from typing import Any

import torch
from torch import Tensor, nn

from shoal.trace._torch import pytree
from shoal.trace.graph._torch_graph import (
    FakeTensorMode,
    disable_proxy_modes_tracing,
    get_proxy_mode,
    unset_fake_temporarily,
)
from shoal.trace.graph.layer_graph import (
    FUNCTION,
    LayerGraph,
    UntraceableLayer,
    record_call,
    trace_layer,
)
from shoal.trace.isolation.layer_calls import copy_without_numbers
from shoal.trace.isolation.lifted_casts import LiftedCasts

GROUPED = frozenset({torch.ops.aten._grouped_mm.default})
"""Grouped matrix products of many experts: they lack float64, in which rules are found."""

IMPLEMENTATION = "_experts_implementation"
"""Key of transformers' configuration that selects the implementation of expert layers."""

MANY = 512
"""Largest size that stays when a part is made smaller: numbers of experts are below it."""


def trace_with_opaque(
    block: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    shapes: Mapping[str, Sequence[int]] | None = None,
    known: Collection[str] | None = None,
) -> LayerGraph:
    """Trace a layer into a graph, with each untraceable part as one operation.

    Args:
        known: the parts, if they are known already.

    Raises:
        Untraceable: opaque parts do not help; the text is the reason for the layer as it is.
    """
    if known is not None:
        return trace_layer(
            block, args, kwargs, shapes, opaque=OpaqueParts(known) if known else None
        )
    try:
        traced = trace_layer(block, args, kwargs, shapes)
        if not any(node.target in GROUPED for node in traced.graph.nodes):
            return traced
        refusal = ""
    except (
        UntraceableLayer
    ) as failure:  # kept as text: its frames would keep the sample's pass alive
        traced, refusal = None, str(failure)
    kept: set[str] = set()
    refused: set[str] = set()
    for _ in range(len([*block.modules()])):
        opaque = OpaqueParts(kept)
        try:
            found = trace_layer(block, args, kwargs, shapes, opaque=opaque)
        except UntraceableLayer:
            refused |= kept & set(opaque.under_way)
            culprits = opaque.under_way
        else:
            culprits = opaque.grouped
            if not culprits:
                return found
        able = [n for n in culprits if n and n not in refused and _has_matrices(block, n)]
        if not able:
            break
        inside = f"{able[-1]}."
        kept = {n for n in kept - refused if not n.startswith(inside)} | {able[-1]}
    if traced is None:
        raise UntraceableLayer(refusal)
    return traced


def _has_matrices(block: nn.Module, name: str) -> bool:
    return any(p.dim() > 1 for p in block.get_submodule(name).parameters())


class OpaqueParts:
    """Parts of a layer that its graph shows as one operation each.

    Attributes:
        names: names of the parts.
        under_way: the modules whose call was in progress when a trace failed, outermost first.
        grouped: modules with a grouped product of their own, and all around them.
    """

    def __init__(self, names: Collection[str]) -> None:
        self.names = tuple(sorted(names))
        self.under_way: list[str] = []
        self.grouped: list[str] = []

    @contextmanager
    def installed(self, block: nn.Module, fakes: FakeTensorMode) -> Iterator[None]:
        """Record the parts as operations and the calls in progress while the context is open."""
        own: list[tuple[nn.Module, Any]] = []
        for name, part in block.named_modules():
            inside = any(name.startswith(f"{other}.") for other in self.names)
            if inside:
                continue
            own.append((part, part.__dict__.get("forward")))
            forward = part.forward
            if name in self.names:
                forward = partial(_record_operation, part, _make_operation(part), fakes)
            object.__setattr__(part, "forward", partial(self._track_call, name, forward))
        try:
            yield
        finally:
            for part, forward in own:
                if forward is None:
                    del part.__dict__["forward"]
                else:
                    object.__setattr__(part, "forward", forward)

    def _track_call(self, name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.under_way.append(name)
        mode: Any = get_proxy_mode()
        graph = mode.tracer.graph if mode is not None else None
        before = len(graph.nodes) if graph is not None else 0
        result = forward(*args, **kwargs)
        if graph is not None and not self.grouped:
            made = [*graph.nodes][before:]
            if any(node.target in GROUPED for node in made):
                self.grouped = [*self.under_way]
        self.under_way.pop()
        return result


def _make_operation(part: nn.Module) -> Callable[..., Any]:
    """Return the part's forward as a plain function of its tensors, with a name that code can use.

    Its attribute `reference` computes the same in float64, at any sizes.
    """
    names = [n for n, _ in (*part.named_parameters(), *part.named_buffers())]
    twin = copy_without_numbers(part)

    def run(held: Sequence[Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return torch.func.functional_call(
            twin, dict(zip(names, held, strict=True)), tuple(args), dict(kwargs)
        )

    run.__name__ = run.__qualname__ = type(part).__name__
    run.__module__ = FUNCTION
    run.reference = _Reference(twin, names)  # type: ignore[attr-defined]
    return run


class _Reference:
    """Forward of a part for trial runs: experts one by one, no casts, and sizes that can be set.

    Args:
        sizes: integer attributes of the part that are sizes, and their current values.
    """

    stands_for_part = True

    def __init__(self, part: nn.Module, names: list[str], sizes: tuple[Any, ...] = ()) -> None:
        self.part, self.names = copy_without_numbers(part), names
        self.others: dict[tuple[Any, ...], _Reference] = {}
        for inner in self.part.modules():
            config = getattr(inner, "config", None)
            if config is not None and getattr(config, IMPLEMENTATION, None) is not None:
                setattr(config, IMPLEMENTATION, "eager")
            for key, value in vars(inner).items():
                if type(value) is int and value in dict(sizes):
                    setattr(inner, key, dict(sizes)[value])

    def __call__(self, held: Sequence[Tensor], args: Sequence[Any], kwargs: Any) -> Any:
        named = dict(zip(self.names, held, strict=True))
        with LiftedCasts():
            return torch.func.functional_call(self.part, named, tuple(args), dict(kwargs))

    def at(self, sizes: Mapping[int, int]) -> _Reference:
        """Return the reference for other sizes: one object for each, the key of its rules."""
        wanted = tuple(sorted(sizes.items()))
        if wanted not in self.others:
            self.others[wanted] = _Reference(self.part, self.names, wanted)
        return self.others[wanted]


def _record_operation(
    part: nn.Module,
    operation: Callable[..., Any],
    fakes: FakeTensorMode,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Record the part as one operation; return results without data."""
    mode: Any = get_proxy_mode()
    held = [t for _, t in (*part.named_parameters(), *part.named_buffers())]
    given = (held, list(args), kwargs)
    if mode is None:
        return operation(*given)
    with disable_proxy_modes_tracing():
        first, second = (_probe_results(operation, given, random) for random in (False, True))
        if first != second:
            raise UntraceableLayer(f"{type(part).__name__} gives shapes that hang on numbers")
        device = next(t for t in held if isinstance(t, Tensor)).device
        with fakes:
            leaves = [
                torch.empty(leaf[0], dtype=leaf[1], device=device)
                if isinstance(leaf, tuple)
                else leaf
                for leaf in first[0]
            ]
    out = pytree.tree_unflatten(leaves, first[1])
    record_call(mode.tracer, operation, given, out)
    return out


def _probe_results(operation: Any, given: Any, random: bool) -> tuple[list[Any], Any]:
    """Return shapes and dtypes of a part's results, and their structure.

    The part runs on the host: parameters are zeros that take no memory, inputs zeros or random
    numbers.

    Raises:
        Untraceable: the part draws random numbers, or changes its inputs.
    """
    generator = torch.Generator().manual_seed(7)

    def made(leaf: Any, wide: bool) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if wide and leaf.is_floating_point():
            return torch.randn(leaf.shape, generator=generator).to(leaf.dtype)
        return torch.zeros((), dtype=leaf.dtype).expand(leaf.shape).clone()

    with unset_fake_temporarily(), torch.no_grad():
        held = [torch.zeros((), dtype=t.dtype).expand(t.shape) for t in given[0]]
        inputs = pytree.tree_map(partial(made, wide=random), (given[1], given[2]))
        mine = [t for t in pytree.tree_leaves(inputs) if isinstance(t, Tensor)]
        before = [t._version for t in (*held, *mine)]
        drawn = torch.get_rng_state()
        result = operation.reference(held, *inputs)  # a grouped product takes no such zeros
        name = operation.__name__
        if not torch.equal(drawn, torch.get_rng_state()):
            raise UntraceableLayer(f"{name} draws random numbers")
        if before != [t._version for t in (*held, *mine)]:
            raise UntraceableLayer(f"{name} changes what it is given")
    leaves, structure = pytree.tree_flatten(result)
    told = [(tuple(t.shape), t.dtype) if isinstance(t, Tensor) else t for t in leaves]
    return told, structure


def shrink_call(call: Any, degree: int) -> Any:
    """Return a call of a `reference` (rules.py) with smaller matrices; None if there are none."""
    count = len(pytree.tree_leaves(call.template[0][0]))
    sizes = shrink_sizes([value.shape for value in call.values[:count]], degree)
    known = [value for value in call.values if value.known is not None]
    if not sizes or any(n in sizes for value in known for n in value.shape):
        return None
    values = tuple(
        replace(v, shape=tuple(sizes.get(n, n) for n in v.shape)) if v.known is None else v
        for v in call.values
    )
    return replace(call, target=call.target.at(sizes), values=values)


def shrink_sizes(shapes: Sequence[Sequence[int]], degree: int) -> dict[int, int]:
    """Return smaller sizes for a part's parameters, in the same proportions.

    >>> shrink_sizes([(8, 28672, 4096), (8, 4096, 14336)], 2)
    {4096: 96, 14336: 336, 28672: 672}
    """
    large = sorted({n for shape in shapes for n in shape if n > MANY})
    common = gcd(*large) if large else 0
    least = 24 * degree  # divides into 1, 2, 3 or 4 segments
    return {n: n // common * least for n in large} if common > least else {}
