"""Private names of torch that guards of gradients use; tested on 2.11 and 2.13."""

from __future__ import annotations

import functools
import inspect
import sys
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules import module as module_hooks

from shoal.trainer._torch import pytree
from shoal.trainer.guards import reports
from shoal.trainer.guards.call_log import get_call_log

__all__ = [
    "ABSENT",
    "INIT",
    "PARTS",
    "REDUCTIONS",
    "SUMMED",
    "SUMS",
    "AbsentParameter",
    "AbsentTensor",
    "Found",
    "GradientOwner",
    "PartReader",
    "WatchedParameter",
    "copy_parameter",
    "count_global_hooks",
    "intercept_collectives",
    "intercept_gradient_clipping",
    "is_compiler_used",
    "make_gradient_placeholder",
    "mark_absent",
    "mark_stage_gradient",
    "note_written",
]


CLIPPING = {
    "clip_grad_norm_": "max_norm",
    "clip_grads_with_norm_": "max_norm",
    "clip_grad_value_": "clip_value",
    "get_total_norm": "",
}
"""torch's functions on gradients, and the name of their limit, the second argument."""

NORM_ALONE = 1e6
"""A call of `clip_grad_norm_` with at least this limit only wants the norm that it returns."""


COLLECTIVES = (
    *("all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor"),
    *("reduce_scatter", "reduce_scatter_tensor", "gather", "scatter", "send", "isend"),
)
"""Functions of torch.distributed that take tensors."""


@functools.cache
def intercept_collectives() -> None:
    """Make functions of torch.distributed refuse weights of which a rank has a part.

    As in `intercept_gradient_clipping` the function inside of torch's own wrapper is replaced.
    """
    for name in COLLECTIVES:
        function: Any = getattr(dist, name, None)
        code = getattr(function, "__code__", None)
        if code is None or "func" not in code.co_freevars:
            continue
        cell = function.__closure__[code.co_freevars.index("func")]
        cell.cell_contents = _wrap_collective(name, cell.cell_contents)


def _wrap_collective(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def asking(*args: Any, **kwargs: Any) -> Any:
        for one in (*args[:2], *kwargs.values()):
            for leaf in one if isinstance(one, list | tuple) else (one,):
                if hasattr(type(leaf), "part_of_weight") and leaf.ndim:
                    raise reports.writes_report.collective_error(name)
        done = call(*args, **kwargs)
        if name == "all_reduce" and done is None and "group" not in kwargs:
            _keep_sum(args, kwargs)
        return done

    return asking


SUMS: deque[torch.Tensor] = deque(maxlen=8)
"""Numbers that user code has summed over all ranks, the newest last."""
SUMMED: deque[torch.Tensor] = deque(maxlen=8)
"""Tensors with a gradient that user code has summed over ranks in place, the newest last."""


def _keep_sum(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Keep a single number that user code has summed over all ranks."""
    tensor = args[0] if args else kwargs.get("tensor")
    if isinstance(tensor, torch.Tensor) and tensor.numel() == 1:
        SUMS.append(tensor.detach().clone().reshape(()))
        if tensor.grad_fn is not None:
            SUMMED.append(tensor)


def is_compiler_used() -> bool:
    """Return whether this process has compiled a function by `torch.compile`."""
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    backends = getattr(compiler, "cached_backends", {})
    return any(one is not None for one in backends.values())  # None: functions that are left out


class GradientOwner(Protocol):
    """Protocol: norms and clipping of gradients over the parts of all ranks (`WholeGradients`)."""

    def total_norm(
        self, names: Sequence[str], norm_type: float = ..., *, error_if_nonfinite: bool = ...
    ) -> torch.Tensor:
        """Return the norm over all parts on all ranks."""

    def scale(self, names: Sequence[str], max_norm: float, total_norm: torch.Tensor) -> None:
        """Scale gradients down to a norm."""

    def clip_value(self, names: Sequence[str], clip_value: float) -> None:
        """Clamp every element of gradients to ±`clip_value`."""


Found = tuple[GradientOwner, Sequence[str]] | None
"""The owner of the tensors of a call, and their names; None: torch's function is right."""


def intercept_gradient_clipping(
    watched: Collection[Any], find: Callable[[str, Sequence[Any]], Found]
) -> None:
    """Make torch's gradient clipping call `find`, and clip by the `GradientOwner` it returns.

    Scripts may have imported the functions under other names. So this replaces the function that
    they call internally; a torch version without one stays unchanged.

    Args:
        watched: empty while no call has to be checked.
        find: called with the function's name and the tensors of the call; the name is "" if no
            gradient can reach the limit. May raise.
    """
    for name, limit in CLIPPING.items():
        function: Any = getattr(nn.utils, name)
        inside = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=False))
        if "func" in inside:
            cell = inside["func"]
            cell.cell_contents = _wrap_clipping_function(
                name, limit, cell.cell_contents, watched, find
            )


def _wrap_clipping_function(
    name: str,
    limit: str,
    clip: Callable[..., Any],
    watched: Collection[Any],
    find: Callable[[str, Sequence[Any]], Found],
) -> Callable[..., Any]:
    signature = inspect.signature(clip)

    @functools.wraps(clip)
    def asking(*args: Any, **kwargs: Any) -> Any:
        if not watched or _owners:
            return clip(*args, **kwargs)
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        first = next(iter(given.arguments))
        tensors = given.arguments[first]
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        given.arguments[first] = tensors  # a generator is exhausted by now
        reads = name == "get_total_norm" or (
            name == "clip_grad_norm_" and float(given.arguments[limit]) >= NORM_ALONE
        )
        weights = name == "get_total_norm" and any(isinstance(t, nn.Parameter) for t in tensors)
        # The norm of weights is no norm of their gradients.
        found = None if weights else find("" if reads else name, tensors)
        if found is None:
            return clip(*given.args, **given.kwargs)
        _owners.append(found[0])
        try:
            with torch._C.DisableTorchFunction():  # not a reduction of user code
                return _use_owner(name, limit, reads, *found, given.arguments)
        finally:
            _owners.pop()

    return asking


_owners: list[GradientOwner] = []
"""The owner of a call in progress, which may call torch's function itself."""


CALLED = "torch.nn.utils."
"""Begin of a function's name in the ranks' pages."""


def _use_owner(
    name: str,
    limit: str,
    reads: bool,
    owner: GradientOwner,
    names: Sequence[str],
    arguments: Mapping[str, Any],
) -> torch.Tensor | None:
    """Apply a function of torch on gradients, such as clipping, to the parts of all ranks."""
    if name == "clip_grad_value_":
        owner.clip_value(names, float(arguments[limit]))
        return None
    if name == "clip_grads_with_norm_":
        owner.scale(names, float(arguments[limit]), arguments["total_norm"])
        return None
    program = getattr(owner, "program", None)  # else the norm needs no other rank
    log = nullcontext() if program is None else get_call_log(program.world).at_once(CALLED + name)
    with log:
        norm = owner.total_norm(
            names,
            float(arguments["norm_type"]),
            error_if_nonfinite=bool(arguments["error_if_nonfinite"]),
        )
    if not reads:
        owner.scale(names, float(arguments[limit]), norm)
    return norm


def make_gradient_placeholder(
    like: torch.Tensor,
    refusal: Callable[[str], Exception | None],
    read: Callable[[], None] = lambda: None,
) -> torch.Tensor:
    """Return a placeholder for `.grad` of a parameter whose gradient is stored in another buffer.

    It reads as zeros and has no memory. A write into it would change nothing, so it raises.

    Args:
        like: a tensor with the placeholder's shape, dtype and device.
        refusal: builds the error that a write raises, from the name of torch's operation; None:
            the write may be dropped.
        read: called when its elements are read.
    """
    made: Any = torch.Tensor._make_wrapper_subclass(
        _GradientPlaceholder, like.shape, dtype=like.dtype, device=like.device
    )
    made.refusal, made.read = refusal, read
    return cast(torch.Tensor, made)


class _GradientPlaceholder(torch.Tensor):
    """Placeholder tensor of `make_gradient_placeholder`; its views are placeholders too."""

    refusal: Callable[[str], Exception | None]
    read: Callable[[], None]
    stands_for = "a gradient that is kept elsewhere"  # other modules read this: it has no memory

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub has a static method
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs, schema = kwargs or {}, func._schema
        if schema.name.startswith("c10d::"):  # its schema shows no write, and there is no memory
            name = schema.name.removeprefix("c10d::").rstrip("_")
            raise reports.writes_report.collective_error(name)
        for place, argument in enumerate(schema.arguments):
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            if argument.alias_info is not None and argument.alias_info.is_write:
                for leaf in pytree.tree_leaves(value):
                    if isinstance(leaf, _GradientPlaceholder):
                        error = leaf.refusal(schema.name.partition("::")[2])
                        if error is not None:
                            raise error
                        return leaf
        result = func(
            *pytree.tree_map(_replace_placeholder, args),
            **pytree.tree_map(_replace_placeholder, kwargs),
        )
        is_view = (
            isinstance(args[0], _GradientPlaceholder) and schema.returns[0].alias_info is not None
        )
        if is_view and isinstance(result, torch.Tensor):
            return make_gradient_placeholder(result, args[0].refusal, args[0].read)
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, _GradientPlaceholder):
                leaf.read()
        return result

    def numpy(self, *, force: bool = False) -> Any:
        """Return zeros, like every other read of the placeholder."""
        self.read()
        return _replace_placeholder(self).cpu().numpy()

    def tolist(self) -> Any:
        """Return zeros as nested lists."""
        self.read()
        return _replace_placeholder(self).tolist()


def _replace_placeholder(leaf: Any) -> Any:
    if not isinstance(leaf, _GradientPlaceholder):
        return leaf
    return torch.zeros((), dtype=leaf.dtype, device=leaf.device).expand(leaf.shape)


def count_global_hooks() -> int:
    """Return the number of forward hooks on all modules of the process."""
    found = (module_hooks._global_forward_hooks, module_hooks._global_forward_pre_hooks)
    return sum(map(len, found))


INIT = "torch.nn.init"
DRAWS = frozenset(
    {"normal_", "uniform_", "bernoulli_", "exponential_", "log_normal_", "cauchy_", "geometric_"}
    | {"random_", "rand_like", "randn_like", "randint_like", "bernoulli", "dropout", "dropout_"}
)
"""Functions that draw random numbers, for every element one."""

REDUCTIONS = frozenset(
    {"norm", "vector_norm", "matrix_norm", "_foreach_norm", "sum", "mean", "std", "var", "dot"}
    | {"vdot", "max", "amax", "min", "amin", "linalg_norm", "linalg_vector_norm", "prod", "median"}
    | {"linalg_matrix_norm", "frobenius_norm", "nuclear_norm", "std_mean", "var_mean", "aminmax"}
    | {"count_nonzero", "quantile", "histc", "argmax", "argmin", "topk", "sort", "any", "all"}
    | {"logsumexp", "trace", "linalg_svdvals", "linalg_svd", "svd", "linalg_matrix_rank"}
)
"""Functions of torch whose result depends on elements that may lie on another rank."""


class PartReader(Protocol):
    """Watcher of what user code does with parts of tensors."""

    def read_part(self, function: str) -> None:
        """Note a result that is that of a part."""

    def compute_with_part(self, tensor: torch.Tensor, result: torch.Tensor) -> None:
        """Note a tensor of the size of a part that was computed from it."""

    def note_operand(self, tensor: torch.Tensor) -> None:
        """Note a plain tensor that user code combines with a part, or writes into a weight."""


PARTS: dict[int, PartReader] = {}
"""By id of a weight in the hands of user code: its watcher; an attribute would be saved with it."""


class WatchedParameter(nn.Parameter):
    """A weight that is whole here and not on every rank, in the hands of user code.

    Tensors that are written into it are noted.
    """

    def __deepcopy__(self, memo: Any) -> Any:
        return copy_parameter(self, memo)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        _note_operands(func, args, kwargs)
        leaves = pytree.tree_leaves((args, kwargs))
        ours = list({id(one): one for one in leaves if isinstance(one, WatchedParameter)}.values())
        swapped: list[Any] = ours
        for one in swapped:
            one.__class__ = nn.Parameter
        try:
            result = func(*args, **kwargs)
        finally:
            for one in swapped:
                one.__class__ = WatchedParameter
        if not ABSENT:
            return result
        name = getattr(func, "__name__", "")
        if name in DRAWS and name.endswith("_like"):  # ranks without the weight draw it, too
            PARTS[id(ours[0])].note_operand(result)
        return _mark_stage(result)


def _mark_stage(result: Any) -> Any:
    """Return a result whose plain tensors are known to be computed from weights of this stage."""
    return pytree.tree_map_only(
        torch.Tensor,
        lambda one: one.as_subclass(StageTensor) if type(one) is torch.Tensor else one,
        result,
    )


class StageTensor(torch.Tensor):
    """A tensor computed from weights of this stage of a pipeline: other ranks have none like it."""

    part_of_weight = True
    owner: PartReader | None = None

    def __reduce_ex__(self, protocol: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(one, AbsentTensor | AbsentParameter) for one in types):
            return _run_on_absent(func, args, kwargs or {})
        _note_operands(func, args, kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        return result if func in READERS else _keep_owner(func, args, _mark_stage(result))


def mark_stage_gradient(gradient: torch.Tensor, owner: PartReader) -> torch.Tensor:
    """Return an alias of a gradient of this stage; what is written into it is noted.

    Args:
        gradient: it shares the memory.
        owner: watcher of the weight.
    """
    made: Any = gradient.as_subclass(StageTensor)
    made.owner = owner
    return cast(torch.Tensor, made)


def _keep_owner(func: Any, args: tuple[Any, ...], result: Any) -> Any:
    """Return an operation's result; an alias of a gradient keeps its watcher, `owner`."""
    owner = getattr(args[0], "owner", None) if args else None
    if owner is not None and func in (READ_DATA, torch.Tensor.detach):
        result.owner = owner
    return result


READ_DEVICE = torch.Tensor.device.__get__  # a property, in C
READ_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]
READERS = {torch.Tensor.requires_grad_, torch.Tensor.backward}
"""Functions whose result is no new tensor."""


def _note_operands(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Note the plain tensors and the numbers that a function writes into a weight."""
    name = getattr(func, "__name__", "")
    writes = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
    first = args[0] if writes and args else None
    reader = PARTS.get(id(first)) or getattr(first, "owner", None)
    if reader is not None:
        note_written(reader, args[1:], kwargs)


def note_written(reader: PartReader, *arguments: Any, single: bool = False) -> None:
    """Note the plain tensors and the numbers that are written into a weight or its gradient.

    Args:
        reader: watcher of the weight.
        arguments: of the function that writes.
        single: of tensors, only those of one number.
    """
    for leaf in pytree.tree_leaves(arguments):
        if isinstance(leaf, float | int):
            reader.note_operand(torch.tensor(float(leaf), dtype=torch.float64))
        elif type(leaf) is torch.Tensor and not (single and leaf.ndim):
            reader.note_operand(leaf)


ABSENT: dict[int, tuple[Callable[[], Exception], torch.device]] = {}
"""By id of an `AbsentParameter`: builds the error of a read · the run's device."""


class AbsentTensor(torch.Tensor):
    """A tensor without numbers, computed from a weight that another rank holds."""

    part_of_weight = True
    absent: tuple[Callable[[], Exception], torch.device]
    owner: PartReader | None = None

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        """Return True; raise for draws of torch that would skip the weight, and its numbers."""
        return _refuse_skipped_draws(self.absent)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return _run_on_absent(func, args, kwargs or {})


class AbsentParameter(nn.Parameter):
    """A weight that another stage of a pipeline holds, in the hands of user code.

    Writes change nothing here; a read of numbers raises.
    """

    part_of_weight = True

    def __deepcopy__(self, memo: Any) -> Any:
        return copy_parameter(self, memo)

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        """Return True; raise for draws of torch that would skip the weight, and its numbers."""
        return _refuse_skipped_draws(ABSENT[id(self)])

    @property
    def grad(self) -> Any:
        """Return a gradient without numbers, which like the weight takes writes."""
        with torch._C.DisableTorchFunctionSubclass():
            made: Any = mark_absent(torch.empty_like(self, requires_grad=False), ABSENT[id(self)])
            made.owner = PARTS.get(id(self))
            return made

    @grad.setter
    def grad(self, gradient: Any) -> None: ...

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return _run_on_absent(func, args, kwargs or {})


def _run_on_absent(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a function of torch on tensors without numbers.

    Raises:
        Exception: as the weight's `refuse` returns it, if numbers are needed.
    """
    leaves = pytree.tree_leaves((args, kwargs))
    first = next(one for one in leaves if isinstance(one, AbsentTensor | AbsentParameter))
    absent = ABSENT[id(first)] if isinstance(first, AbsentParameter) else first.absent
    if func == READ_DEVICE:
        return absent[1]
    _note_operands(func, args, kwargs)
    name = getattr(func, "__name__", "")
    written = args[0] if args and name.endswith("_") and not name.endswith("__") else None
    if isinstance(written := kwargs.get("out", written), torch.Tensor) and not written.is_meta:
        raise absent[0]()  # torch would write nothing
    if name in DRAWS or getattr(func, "__module__", "") == INIT:
        # The numbers are thrown away: other ranks draw them, and all draw the same ones after.
        args, kwargs = pytree.tree_map_only(
            (AbsentTensor, AbsentParameter), lambda one: _stand_in(one, absent[1]), (args, kwargs)
        )
        drawn = func(*args, **kwargs)
        if name.endswith("_like") and id(first) in PARTS:
            PARTS[id(first)].note_operand(drawn)
            with torch._C.DisableTorchFunctionSubclass():
                return mark_absent(torch.empty_like(first, requires_grad=False), absent)
        return first
    try:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
    except (RuntimeError, TypeError) as error:
        if torch.is_grad_enabled() and "leaf" in str(error):
            raise  # as in one process
        raise absent[0]() from error
    result = pytree.tree_map_only(
        torch.Tensor, lambda one: mark_absent(one, absent) if one.is_meta else one, result
    )
    return _keep_owner(func, args, result)


def _refuse_skipped_draws(absent: tuple[Callable[[], Exception], torch.device]) -> bool:
    if sys._getframe(2).f_globals.get("__name__") == INIT:
        raise absent[0]()
    return True


def _stand_in(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)


def mark_absent(
    tensor: torch.Tensor, absent: tuple[Callable[[], Exception], torch.device]
) -> torch.Tensor:
    """Return an alias of a tensor on the meta device whose numbers cannot be read.

    Args:
        tensor: the tensor.
        absent: builds the error of a read · the run's device.
    """
    if isinstance(tensor, AbsentTensor | AbsentParameter):
        return tensor
    made: Any = tensor.as_subclass(AbsentTensor)
    made.absent = absent
    return cast(torch.Tensor, made)


def copy_parameter(parameter: Any, memo: Any) -> nn.Parameter:
    """Return a deep copy of a weight in the hands of user code: a plain parameter."""
    kind = type(parameter)
    parameter.__class__ = nn.Parameter
    try:
        return nn.Parameter.__deepcopy__(parameter, memo)
    finally:
        parameter.__class__ = kind
