"""Track the origins of values through a forward pass, operator by operator.

Every memory (storage) carries marks. The results of an operator carry the union of its inputs'
marks; a view shares its base's; a write adds to the marks that were there; shapes alone
(zeros_like) carry none. A value that is read on the host (`.item()`, `if tensor`) steers Python, so
everything after it depends on it. Inside of a unit's call, new memory is marked as such, and reads
are recorded. Memory that is made inside, not returned, and read later bypasses the unit's outputs.

Source: dynamic taint analysis; see Schwartz, Avgerinos, Brumley 2010 for the terms.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import flop_registry

from shoal.base.errors import PlanError
from shoal.trace._torch import TorchDispatchMode, pytree
from shoal.trace.isolation.collective_ban import caller_location
from shoal.trace.isolation.meta_inputs import map_tensors, tensors_of


class TensorOrigin(NamedTuple):
    """Origin of a value.

    Attributes:
        kind: output: tensor `leaf` of call `call` · aside: made inside of call `call` · parameter,
            buffer: `name` · input: of the model.
    """

    kind: Literal["output", "aside", "parameter", "buffer", "input"]
    call: int = -1
    leaf: int = -1
    name: str = ""


TensorOrigins = frozenset[TensorOrigin]
NOTHING: TensorOrigins = frozenset()

SHAPE_ONLY = {
    "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like",
    "new_zeros", "new_ones", "new_empty", "new_full", "new_empty_strided",
}  # fmt: skip
"""Operators whose result takes only shape and dtype from their tensor argument."""


class OriginTracker(TorchDispatchMode):
    """Dispatch mode that sees every operator and keeps the marks of every storage.

    A write into a parameter outside of calls is refused before it happens (PlanError): every stage
    runs that code, and does not have the parameters of other stages.

    Attributes:
        read: marks read since the current call began.
        born: storages made since then.
        on_host: marks of values that Python has read.
        between: parameters read outside of calls.
        flops: FLOP of all operators since the current call began.
        weights: parameter names by storage.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.marks: dict[StorageWeakRef, TensorOrigins] = {}
        self.inside: int | None = None
        self.paused = False
        self.read: set[TensorOrigin] = set()
        self.born: set[StorageWeakRef] = set()
        self.on_host: TensorOrigins = NOTHING
        self.between: set[str] = set()
        self.flops = 0
        self.module = module
        self.weights = {_key(parameter): name for name, parameter in module.named_parameters()}
        for name, parameter in module.named_parameters():
            self.set_origins(parameter, self.of(parameter) | {TensorOrigin("parameter", name=name)})
        for name, buffer in module.named_buffers():
            self.set_origins(buffer, self.of(buffer) | {TensorOrigin("buffer", name=name)})

    def begin_call(self, call: int, inputs: Any) -> None:
        """Begin a unit's call, which counts as reading all of its inputs."""
        self.read = set(self.of(inputs) | self.on_host)
        self.born, self.flops, self.inside = set(), 0, call

    def end(self, outputs: Any) -> Any:
        """End the call; return its outputs, each in memory of its own.

        Marks belong to memory: a mask that the unit passes through must not look like the unit's
        work to readers that have it from elsewhere.
        """
        self.inside = None
        taken: set[StorageWeakRef] = set()

        def own(tensor: torch.Tensor) -> torch.Tensor:
            key = _key(tensor)
            if key in self.born and key not in taken:
                taken.add(key)
                return tensor
            self.read |= self.of(tensor)
            return tensor.clone()

        self.paused = True
        try:
            return map_tensors(own, outputs)
        finally:
            self.paused = False

    def of(self, tree: Any) -> TensorOrigins:
        """Return the marks of all tensors of a structure."""
        found = NOTHING
        for tensor in tensors_of(tree):
            found |= self.marks.get(_key(tensor), NOTHING)
        return found

    def set_origins(self, tensor: torch.Tensor, marks: TensorOrigins) -> None:
        """Set the marks of a tensor's memory."""
        self.marks[_key(tensor)] = marks

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator and mark its results."""
        kwargs = kwargs or {}
        into = {_key(tensor) for tensor in _written_arguments(func, args, kwargs)}
        if self.inside is None and (changed := into & self.weights.keys()):
            raise self._write_error(sorted(self.weights[key] for key in changed)[0])
        out = func(*args, **kwargs)
        if self.paused:
            return out
        packet = func._overloadpacket
        if packet in flop_registry:
            self.flops += int(flop_registry[packet](*args, **kwargs, out_val=out))
        sources = self.of((args, kwargs)) | self.on_host
        made = [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        if self.inside is not None:
            self.read |= sources
            constant = all(mark.kind == "buffer" for mark in sources)
            result = NOTHING if constant else frozenset({TensorOrigin("aside", self.inside)})
        else:
            self.between |= {mark.name for mark in sources if mark.kind == "parameter"}
            result = sources
            if not made and out is not None:
                self.on_host |= sources
        if packet._qualified_op_name.rpartition("::")[2] in SHAPE_ONLY:
            result = NOTHING
        for key in into | {_key(tensor) for tensor in made}:
            if key not in self.marks:
                self.born.add(key)
                self.marks[key] = result
            elif key in into:
                self.marks[key] |= result
        return out

    def _write_error(self, name: str) -> PlanError:
        kind = type(self.module).__name__
        mode = "training" if self.module.training else "evaluation"
        return PlanError(
            f"layout.pp: in {mode}, {kind}'s forward pass writes into a parameter outside of its "
            f"blocks ({name}, at {caller_location() or 'an unknown line'}), and other stages' "
            f"parameters are not there to be written; try: layout.pp=1, or a forward pass "
            f"that leaves its parameters as they are"
        )


def _written_arguments(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[torch.Tensor]:
    """Return the arguments that an operator writes into."""
    if not func._schema.is_mutable:
        return []
    found = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            found += [leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, torch.Tensor)]
    return found


def _key(tensor: torch.Tensor) -> StorageWeakRef:
    """Return a key of a tensor's memory that is never reused for another memory."""
    return StorageWeakRef(tensor.untyped_storage())
