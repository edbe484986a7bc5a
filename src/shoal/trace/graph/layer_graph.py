"""Trace one layer as on one device: a graph of torch operations, with nothing computed.

The layer's forward runs once on tensors without data. Every operation that it calls is recorded
before autograd and before decomposition, so that linear, layer norm, attention and dropout stay
whole and are differentiated when the graph runs. A custom `autograd.Function` stays one operation
too. A layer that depends on numbers (`.item()`, data-dependent shapes) cannot be traced.

Source: torch.fx.experimental.proxy_tensor (pre-dispatch tracing).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from shoal.base.attribute_patch import patch_attribute
from shoal.trace._torch import pytree
from shoal.trace.graph._torch_graph import (
    FakeTensor,
    FakeTensorMode,
    disable_proxy_modes_tracing,
    get_proxy_mode,
    get_proxy_slot,
    make_fx,
    track_tensor_tree,
)
from shoal.trace.isolation.equal_layers import list_inner_hooks, list_loose_tensors
from shoal.trace.isolation.preserve_state import preserve_attributes

aten = torch.ops.aten

FUNCTION = "autograd_function"
"""Module name that marks functions made from a custom autograd.Function."""


class UntraceableLayer(Exception):
    """Raised if a layer cannot become a graph; the text is the reason."""


@dataclass(frozen=True)
class LayerGraph:
    """Layer as a graph.

    Attributes:
        module: the graph, with constants that the layer made; `node.meta["val"]` has shapes.
        parameters, buffers: names in the order of the placeholders, which come before the inputs.
        inputs: the sample's tensors, flat; the values of integers and booleans are used.
        trained: placeholders of parameters and inputs that require gradients.
        mutated: buffers that the layer changes by operations that declare it.
        flatten: (args, kwargs) → flat tensors, in the order of the input placeholders.
        rebuild: flat outputs → what forward returns.
        opaque: names of the parts that the graph shows as one operation.
    """

    module: fx.GraphModule
    parameters: tuple[str, ...]
    buffers: dict[str, Tensor]
    inputs: tuple[Tensor, ...]
    trained: frozenset[fx.Node]
    mutated: frozenset[str]
    flatten: Callable[[tuple[Any, ...], Mapping[str, Any]], list[Tensor]]
    rebuild: Callable[[Sequence[Tensor]], Any]
    opaque: tuple[str, ...] = ()

    @property
    def graph(self) -> fx.Graph:
        """Return the operations, in order."""
        return self.module.graph

    def operations(self) -> list[Any]:
        """Return the called functions in order: equal lists are equal programs but for shapes."""
        return [n.target for n in self.graph.nodes if n.op == "call_function"]


def trace_layer(
    block: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    shapes: Mapping[str, Sequence[int]] | None = None,
    *,
    masks: bool = False,
    shared: bool = False,
    opaque: Any = None,
) -> LayerGraph:
    """Trace a layer's forward on a sample call; the layer and the generators stay unchanged.

    Args:
        shapes: whole shapes of parameters by name, if the layer holds only parts of them now.
        masks: write a mask instead of attention's `is_causal`.
        shared: let the ranks compute attention together, where they can
            (`maskable_attention.share`).
        opaque: an `opaque_parts.Opaque`: parts of the layer that become one operation each.

    Raises:
        Untraceable: the layer cannot become a graph; the text is the reason.
    """
    parameters = dict(block.named_parameters())
    if hooks := list_inner_hooks(block):
        raise UntraceableLayer(f"a hook inside ({hooks[0]}), which a graph would leave out")
    buffers = dict(block.named_buffers())
    leaves, structure = pytree.tree_flatten((args, dict(kwargs)))
    places = [k for k, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    inputs = tuple(leaves[k] for k in places)
    outs: dict[str, Any] = {}

    def call(*flat: Tensor) -> list[Tensor]:
        named = dict(zip([*parameters, *buffers], flat, strict=False))
        filled = list(leaves)
        for place, value in zip(places, flat[len(named) :], strict=True):
            filled[place] = value
        its_args, its_kwargs = pytree.tree_unflatten(filled, structure)
        result = torch.func.functional_call(block, named, its_args, its_kwargs)
        outs["leaves"], outs["structure"] = pytree.tree_flatten(result)
        return [leaf for leaf in outs["leaves"] if isinstance(leaf, Tensor)]

    fakes = FakeTensorMode(allow_non_fake_inputs=True)
    flat = [
        _make_fake(fakes, p, (shapes or {}).get(name, p.shape)) for name, p in parameters.items()
    ] + [_make_fake(fakes, t, t.shape) for t in (*buffers.values(), *inputs)]
    try:
        parts = opaque.installed(block, fakes) if opaque is not None else nullcontext()
        attention = _show_whole_attention(masks)
        with (
            preserve_attributes(block),
            torch.enable_grad(),
            _record_autograd_functions(),
            attention,
            parts,
        ):
            module = make_fx(call, tracing_mode="fake", pre_dispatch=True)(*flat)
            left = [n for n, t in list_loose_tensors(block).items() if isinstance(t, FakeTensor)]
    except Exception as error:
        raise UntraceableLayer(
            f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
        ) from error
    if left:
        raise UntraceableLayer(
            f"it leaves a tensor in its {left[0]}, which a graph does not follow"
        )
    _normalize_graph(module, masks, shared)
    kinds = [isinstance(leaf, Tensor) for leaf in outs["leaves"]]
    still = [None if isinstance(leaf, Tensor) else leaf for leaf in outs["leaves"]]
    return LayerGraph(
        module,
        tuple(parameters),
        buffers,
        inputs,
        _list_trained(module.graph, flat),
        _list_mutated(module.graph, len(parameters), list(buffers)),
        _flatten,
        functools.partial(_rebuild, kinds=kinds, still=still, structure=outs["structure"]),
        opaque.names if opaque is not None else (),
    )


def _flatten(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    leaves = pytree.tree_leaves((args, dict(kwargs)))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _rebuild(flat: Sequence[Tensor], kinds: list[bool], still: list[Any], structure: Any) -> Any:
    values = iter(flat)
    leaves = [next(values) if kind else leaf for kind, leaf in zip(kinds, still, strict=True)]
    return pytree.tree_unflatten(leaves, structure)


def _make_fake(fakes: FakeTensorMode, like: Tensor, shape: Sequence[int]) -> Tensor:
    with fakes:
        made = torch.empty(tuple(shape), dtype=like.dtype, device=like.device)
    return made.requires_grad_(like.requires_grad)


def _show_whole_attention(masks: bool) -> AbstractContextManager[None]:
    """Let Shoal's models show attention as one operation, if it gets masks."""
    if not masks:
        return nullcontext()
    from shoal.base.opaque_ops import opaque_ops

    return opaque_ops()


def record_call(tracer: Any, operation: Any, args: Any, out: Any) -> None:
    """Add a call of an operation to the graph that is being traced, with its results `out`."""

    def proxy_of(leaf: Any) -> Any:
        return get_proxy_slot(leaf, tracer).proxy if isinstance(leaf, Tensor) else leaf

    proxy = tracer.create_proxy("call_function", operation, pytree.tree_map(proxy_of, args), {})
    track_tensor_tree(out, proxy, constant=None, tracer=tracer)


@contextmanager
def _record_autograd_functions() -> Iterator[None]:
    """Record a custom autograd.Function as one operation, so that its backward is kept."""
    function: Any = torch.autograd.Function
    original = function.__dict__["apply"].__func__

    def noted(cls: Any, *args: Any) -> Any:
        mode = get_proxy_mode()
        if mode is None:
            return original(cls, *args)
        with disable_proxy_modes_tracing():
            out = original(cls, *args)
        record_call(mode.tracer, _plain_function(cls), args, out)
        return out

    with patch_attribute(function, "apply", classmethod(noted)):
        yield


@functools.cache
def _plain_function(cls: Any) -> Callable[..., Any]:
    """Return a plain function for an autograd.Function, with a name that code can use."""

    def run(*args: Any) -> Any:
        return cls.apply(*args)

    run.__name__ = run.__qualname__ = cls.__name__
    run.__module__ = FUNCTION
    return run


def is_function(target: object) -> bool:
    """Return whether a node's target is a custom autograd.Function: one object per class."""
    return getattr(target, "__module__", "") == FUNCTION


def is_opaque(target: object) -> bool:
    """Return whether a node's target is a layer part as one operation (`opaque_parts.py`)."""
    return is_function(target) and hasattr(target, "reference")


def is_reference(target: object) -> bool:
    """Return whether a target is the reference with which an opaque part's rules are found."""
    return getattr(type(target), "stands_for_part", False)


def shared_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Compute scaled dot-product attention; under cp its graph marks it for ranks to share.

    A direct call computes torch's own attention. q is [batch, heads, tokens, head_dim], or without
    the dim of heads; k and v may have fewer heads.

    Args:
        mask: [..., tokens or 1, tokens], as torch's `attn_mask`.
    """
    grouped = q.dim() == 4 and q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(
        q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=grouped
    )


def _normalize_graph(module: fx.GraphModule, masks: bool, shared: bool) -> None:
    """Remove checks that cost time; rewrite attention into the form that its ranks need."""
    for node in list(module.graph.nodes):
        if node.op == "get_attr":
            node.meta["val"] = getattr(module, str(node.target))
            if isinstance(node.meta["val"], FakeTensor):
                raise UntraceableLayer(
                    "it takes a weight's `.data`, of which a graph knows nothing"
                )
            if node.meta["val"].requires_grad:
                raise UntraceableLayer("it computes with a parameter that is not its own")
        if node.target is aten._assert_tensor_metadata.default:
            module.graph.erase_node(node)
        elif node.target is aten.scaled_dot_product_attention.default:
            _write_attention(module.graph, node, masks, shared)
    if any(str(node.target).startswith("aten.linalg") for node in module.graph.nodes):
        from shoal.trace.graph.weight_norms import (
            rewrite_weight_norms,  # few layers take norms of weights
        )

        rewrite_weight_norms(module.graph)
    module.graph.lint()
    module.recompile()


def _write_attention(graph: fx.Graph, node: fx.Node, masks: bool, shared: bool) -> None:
    """Write attention with dropout as matrix products, and other attention with cuttable masks."""
    from shoal.trace.graph.maskable_attention import (
        decompose_attention,
        has_dropout,
        share_attention,
        write_mask,
    )

    if has_dropout(node):
        decompose_attention(graph, node)
    elif masks and not (shared and share_attention(graph, node, shared_attention)):
        write_mask(graph, node)


def _list_trained(graph: fx.Graph, flat: Sequence[Tensor]) -> frozenset[fx.Node]:
    places = [n for n in graph.nodes if n.op == "placeholder"]
    return frozenset(n for n, value in zip(places, flat, strict=True) if value.requires_grad)


def _list_mutated(graph: fx.Graph, skip: int, names: list[str]) -> frozenset[str]:
    places = [n for n in graph.nodes if n.op == "placeholder"][skip : skip + len(names)]
    named = dict(zip(places, names, strict=True))
    return frozenset(
        named[node.args[0]] for node in graph.nodes if is_in_place(node) and node.args[0] in named
    )


def is_in_place(node: fx.Node) -> bool:
    """Return whether a graph's node overwrites its first argument and returns it (`add_`)."""
    schema = getattr(node.target, "_schema", None)
    return bool(schema and schema.is_mutable and node.args and isinstance(node.args[0], fx.Node))


def list_replaceable_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Find in-place nodes that may return a new tensor: no node reads the old one later."""
    order = {node: place for place, node in enumerate(graph.nodes)}
    by_storage: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, Tensor):
            by_storage.setdefault(value.untyped_storage()._cdata, []).append(node)
    found = set()
    for node in graph.nodes:
        if not is_in_place(node):
            continue
        same = by_storage.get(node.args[0].meta["val"].untyped_storage()._cdata, [])
        before = [n for n in same if order[n] < order[node]]
        read_later = any(order[user] > order[node] for n in before for user in n.users)
        if not read_later and not any(n.op in ("placeholder", "get_attr") for n in before):
            found.add(node)
    return found
