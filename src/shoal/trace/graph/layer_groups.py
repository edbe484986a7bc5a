"""Group a model's equal layers, so that one of them is solved for all.

Layers are equal if they have one class, tensors of the same shapes, and equal other attributes. If
an attribute differs (many layers know their own number), the graphs decide: layers with the same
graph text, constants included, compute the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from shoal.trace._torch import pytree
from shoal.trace.graph.layer_graph import UntraceableLayer, trace_layer
from shoal.trace.isolation.equal_layers import attribute_key, structure_key
from shoal.trace.isolation.layer_calls import LayerCall, copy_without_numbers
from shoal.trace.isolation.memoized_forward import PLAIN


class LayerGrouping:
    """Grouping of a model's layers by equality, so that one can be solved for all.

    Equal: classes, shapes and attributes; or, where only attributes differ, their traced graphs.

    Args:
        opaque: untraceable parts are one operation of a graph: all their attributes must be equal.
    """

    def __init__(self, module: nn.Module, *, opaque: bool = False) -> None:
        self.module, self.opaque = module, opaque
        self.graphs: dict[Any, str] = {}

    def group_layers(self, names: list[str], calls: dict[str, LayerCall]) -> list[list[str]]:
        """Group the layers by equality, in the order of the names.

        Args:
            calls: the sample's call of each layer.
        """
        exact: dict[Any, list[str]] = {}
        for name in names:
            part = self.module.get_submodule(name)
            exact.setdefault((structure_key(part), attribute_key(part)), []).append(name)
        merged: dict[Any, list[list[str]]] = {}
        for (shape, _), group in exact.items():
            alike = merged.setdefault(shape, [])
            call = calls[group[0]]
            for other in alike:
                if self._graph_text(other[0], call) == self._graph_text(group[0], call):
                    other += group
                    break
            else:
                alike.append(group)
        return [group for alike in merged.values() for group in alike]

    def group_layers_by(
        self, names: list[str], calls: dict[str, LayerCall], key: Callable[[str], Any]
    ) -> list[list[str]]:
        """Group equal layers, as `group_layers`, of which those in a group have one key, too."""
        found: list[list[str]] = []
        for alike in self.group_layers(names, calls):
            by_key: dict[Any, list[str]] = {}
            for name in alike:
                by_key.setdefault(key(name), []).append(name)
            found += by_key.values()
        return found

    def _graph_text(self, name: str, call: LayerCall) -> str:
        """Return the text of a layer's graph with its constants, or why it has none."""
        key = (name, _kind(call))
        if key not in self.graphs:
            own = self.module.get_submodule(name)
            try:
                if self.opaque:
                    from shoal.trace.graph.opaque_parts import (
                        trace_with_opaque,  # only needed if layers differ
                    )

                    traced = trace_with_opaque(copy_without_numbers(own), call.args, call.kwargs)
                else:
                    traced = trace_layer(copy_without_numbers(own), call.args, call.kwargs)
            except UntraceableLayer as failure:
                self.graphs[key] = str(failure)
            else:
                held = {k: v for k, v in vars(traced.module).items() if isinstance(v, Tensor)}
                constants = {**held, **dict(traced.module.named_buffers())}
                values = [f"{k} = {v.tolist()}" for k, v in sorted(constants.items())]
                values += [f"{n}: {attribute_key(own.get_submodule(n))}" for n in traced.opaque]
                self.graphs[key] = "\n".join([str(traced.graph), *values])
        return self.graphs[key]


def _kind(call: LayerCall) -> Any:
    """Return a key for all that a graph depends on in a call: tensor metadata, other values."""
    leaves, structure = pytree.tree_flatten((call.args, call.kwargs))
    return structure, *(
        (leaf.shape, leaf.dtype, leaf.device, leaf.requires_grad)
        if isinstance(leaf, Tensor)
        else (type(leaf), leaf if isinstance(leaf, PLAIN) else id(leaf))
        for leaf in leaves
    )
