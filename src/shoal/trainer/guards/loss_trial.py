"""Try the user's loss once, on parts of a micro-batch: do the parts add up to the whole?

    (sum, count) of all rows = (sum, count) of the first k rows + (sum, count) of the others
    (sum, count) of no rows  = (0, 0)

Cuts at unequal places show a mean that is not the loss's last operation, a sum that was wrapped as
a mean, a count that is clamped or fixed, and a loss that couples samples: by a mean over a mask, by
a weight or a norm of the batch, by negatives. The trial is made once in a run, on a few rows of the
first micro-batches, of detached outputs. It makes nine calls of a copy of the loss, and restores
the random generators. A loss that draws random numbers, keeps a state between calls, or gets
outputs without a dimension of samples is not tried. Losses that call collectives are not tried
either, since ranks would have to try together.
"""

from __future__ import annotations

import copy
import functools
import math
import types
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shoal.base.errors import ShoalError
from shoal.data.loading.dataset_kind import digest_of
from shoal.data.loading.sample_seeds import GENERATORS, preserved_rng
from shoal.fabric import World
from shoal.trainer._torch import pytree
from shoal.trainer.batches.batch_split import has_item_per_sample, target_length
from shoal.trainer.batches.batch_values import says_samples
from shoal.trainer.step.call_contract import Loss, sum_and_count

ROWS, ELEMENTS = 11, 1 << 20
"""Rows of a trial at most · elements of their outputs at most, but for two rows."""
LARGE = 1 << 20
"""Elements from which on a tensor or module that a loss refers to is not copied."""
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
HALF_TOLERANCE = 3e-2


@dataclass(frozen=True)
class TrialFinding:
    """A loss whose parts do not add up.

    Attributes:
        kind: mean, product, count, fixed, coupled; or random, state, shape: it was not tried.
        rows: rows of the trial.
        first: rows of the first part.
        whole, parts: sums of the whole, and of both parts; counts for `count` and `fixed`.
    """

    kind: str
    rows: int
    first: int = 0
    whole: float = 0.0
    parts: tuple[float, float] = (0.0, 0.0)


Sums = tuple[float, float]
"""(sum, count) of a call."""


class TrialRows:
    """Rows of the first micro-batches of a step, joined for the trial of a loss.

    A micro-batch may hold one sample, which cannot be cut. Rows are clones of detached outputs, so
    that they keep no other memory.
    """

    def __init__(self) -> None:
        self.pieces: list[tuple[Any, Any]] = []
        self.rows = 0
        self._apart = False

    def add(self, outputs: Any, targets: Any) -> None:
        """Keep some rows of a micro-batch, until there are enough.

        Args:
            outputs: of the model.
            targets: of the micro-batch.
        """
        try:
            samples = target_length(targets) if self.rows < ROWS else 0
        except ShoalError:
            return
        if not samples:
            return
        per_row = max(1, sum(leaf.numel() for leaf in _tensors(outputs)) // samples)
        few = min(samples, ROWS - self.rows, max(2, ELEMENTS // per_row))
        piece = _cut_first(outputs, targets, samples, slice(0, few))
        if few * per_row > 8 * ELEMENTS:
            return
        if piece is None and not self.pieces and samples * per_row <= ELEMENTS:
            piece, few = (outputs, targets), ROWS  # another dimension: this micro-batch alone
        if piece is not None:
            clone = functools.partial(pytree.tree_map_only, torch.Tensor, _clone)
            self.pieces.append((clone(piece[0]), clone(piece[1])))
            self._apart = self._apart or _has_items(targets, samples)
            self.rows += few

    def join(self) -> tuple[Any, Any] | None:
        """Return (outputs, targets) of all rows, or of the first micro-batch if shapes differ."""
        if len(self.pieces) < 2 or self._apart:
            return self.pieces[0] if self.pieces else None
        columns = [pytree.tree_flatten(piece) for piece in self.pieces]
        joined = []
        for leaves in zip(*(column for column, _ in columns), strict=False):
            shapes = {
                tuple(leaf.shape[1:]) if isinstance(leaf, torch.Tensor) and leaf.ndim else None
                for leaf in leaves
            }
            if len(shapes) > 1 or None in shapes:
                return self.pieces[0]
            joined.append(torch.cat(leaves))
        same = len({len(column) for column, _ in columns}) == 1
        return pytree.tree_unflatten(joined, columns[0][1]) if same else self.pieces[0]


def _clone(leaf: torch.Tensor) -> torch.Tensor:
    return leaf.detach().clone()


def try_loss(loss: Loss, outputs: Any, targets: Any, module: nn.Module) -> TrialFinding | None:
    """Call a copy of a loss on parts of a micro-batch.

    Args:
        loss: the user's.
        outputs: of the model for the micro-batch.
        targets: of the micro-batch.
        module: the model, which is never copied.

    Returns:
        The finding; None if the parts add up, or if the micro-batch has one sample.
    """
    try:
        samples = target_length(targets)
        per_row = sum(leaf.numel() for leaf in _tensors(outputs)) // max(samples, 1)
        rows = min(samples, ROWS, max(2, ELEMENTS // max(per_row, 1)))
        if rows < 2 or rows * per_row > 8 * ELEMENTS:
            return None
        layouts = [how for how in (_cut_first, _cut_second, _cut_halves)
                   if how(outputs, targets, samples, slice(0, rows)) is not None]  # fmt: skip
    except (ShoalError, IndexError):
        return None
    if not layouts:
        return TrialFinding("shape", rows)
    if len(layouts) > 1 and layouts[0] is _cut_first and samples == rows > 2:
        # As many samples as outputs of one: a row less, and the tensors are read in one way.
        less, their = _cut_first(outputs, targets, samples, slice(0, rows - 1))
        return try_loss(loss, less, their, module)
    finding = None
    for how in layouts:  # an ambiguous shape is innocent if one reading of it adds up
        finding = _try_cuts(loss, functools.partial(how, outputs, targets, samples), rows, module)
        if finding is None or finding.kind != "coupled":
            break
    return finding


@torch.no_grad()
def _try_cuts(
    loss: Loss, cut: Callable[[slice], Any], rows: int, module: nn.Module
) -> TrialFinding | None:
    """Compare the whole with its parts, for three cuts and for no rows."""
    tried = copy_loss(loss, module)
    dtype = torch.float64

    def call(start: int, stop: int) -> Sums:
        nonlocal dtype
        given, wanted = cut(slice(start, stop))
        total, count = sum_and_count(tried(given, wanted), wanted)
        dtype = total.dtype
        return float(total), float(count)

    try:
        with preserved_rng(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            before = [one.state() for one in GENERATORS]
            whole = call(0, rows)
            if not _are_equal(before, [one.state() for one in GENERATORS]):
                return TrialFinding("random", rows)
            if call(0, rows) != whole and all(map(math.isfinite, whole)):
                return TrialFinding("state", rows)
            cuts = sorted({max(1, rows // 3), max(1, rows // 2), max(1, rows - 2)}, reverse=True)
            found = [(k, call(0, k), call(k, rows)) for k in cuts]
    except Exception:  # it needs a whole micro-batch, a gradient, or a row of each kind
        return None
    near = TOLERANCES.get(dtype, HALF_TOLERANCE)
    kinds = [_judge(whole, one, other, k, rows - k, near) for k, one, other in found]
    for kind in ("coupled", "count", "fixed", "product", "mean"):
        if kind in kinds:  # one cut is a proof; another may add up by chance
            place = len(kinds) - 1 - kinds[::-1].index(kind)
            k, one, other = found[place]
            side = int(kind in ("count", "fixed"))
            return TrialFinding(kind, rows, k, whole[side], (one[side], other[side]))
    return _try_no_rows(call, rows)


def _try_no_rows(call: Callable[[int, int], Sums], rows: int) -> TrialFinding | None:
    """Call the loss without samples, whose count must be 0."""
    try:
        with preserved_rng(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            total, count = call(0, 0)
    except Exception:  # many losses take no empty tensors, and never get one
        return None
    if math.isfinite(count) and count != 0:
        return TrialFinding("count", rows, 0, 0.0, (count, total))
    return None


def _judge(whole: Sums, one: Sums, other: Sums, first: int, second: int, near: float) -> str:
    """Return how a whole differs from the sum of its parts; "" if it does not."""
    (total, count), (a, n), (b, m) = whole, one, other
    if not all(map(math.isfinite, (total, count, a, b, n, m))):
        return ""

    def equal(x: float, y: float, size: float) -> bool:
        return abs(x - y) <= near * max(abs(size), 1e-30)

    if not equal(count, n + m, max(abs(count), abs(n) + abs(m))):
        return "fixed" if n == m == count else "count"
    if equal(total, a + b, max(abs(total), abs(a) + abs(b))):
        return ""
    rows = first + second
    if equal(total * rows, a * first + b * second, abs(a) * first + abs(b) * second):
        return "mean"
    if equal(total / rows, a / first + b / second, abs(a) / first + abs(b) / second):
        return "product"
    return "coupled"


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _has_items(targets: Any, samples: int) -> bool:
    """Return whether some of the targets have items instead of rows of tensors."""
    found = pytree.tree_leaves(targets, is_leaf=lambda one: has_item_per_sample(one, samples))
    return any(has_item_per_sample(one, samples) for one in found)


def _cut_first(outputs: Any, targets: Any, samples: int, rows: slice) -> Any:
    """Cut along dim 0; outputs may have several rows for a sample. None: some tensor has none."""
    return _cut_leaves(outputs, targets, samples, rows, 0)


def _cut_second(outputs: Any, targets: Any, samples: int, rows: slice) -> Any:
    """Cut outputs of shape [time, batch, …] along dim 1, if all can be."""
    fit = [one.ndim > 1 and one.shape[1] == samples for one in _tensors(outputs) if one.ndim]
    return _cut_leaves(outputs, targets, samples, rows, 1) if fit and all(fit) else None


def _cut_halves(outputs: Any, targets: Any, samples: int, rows: slice) -> Any:
    """Cut a batch of pairs whose first halves come before all second ones, as DPO stacks them."""
    half = samples // 2
    if samples % 2 or rows.stop > half:
        return None
    places = torch.arange(samples)
    places = torch.cat([places[:half][rows], places[half:][rows]])

    def choose(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.ndim and leaf.shape[0] == samples:
            return leaf.detach()[places.to(leaf.device)]
        return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf

    return pytree.tree_map(choose, outputs), pytree.tree_map(choose, targets)


def _cut_leaves(outputs: Any, targets: Any, samples: int, rows: slice, dim: int) -> Any:
    unfit = False

    def cut(leaf: Any) -> Any:
        nonlocal unfit
        if not isinstance(leaf, torch.Tensor) or not leaf.ndim:
            return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf
        size = leaf.shape[dim]
        if size % samples or not size or (says_samples(targets) and size != samples):
            unfit = True
            return leaf
        each = size // samples
        return leaf.detach().narrow(dim, rows.start * each, (rows.stop - rows.start) * each)

    def cut_target(leaf: Any) -> Any:
        if says_samples(leaf) and len(leaf) == samples:
            from shoal.trainer.batches.batch_objects import cut_object

            return cut_object(leaf, rows.start, rows.stop)
        if has_item_per_sample(leaf, samples):
            return leaf[rows]
        fits = isinstance(leaf, torch.Tensor) and leaf.ndim and leaf.shape[0] == samples
        return leaf[rows] if fits else leaf

    plain = dict(targets) if isinstance(targets, Mapping) else targets
    given = pytree.tree_map(cut, outputs)
    wanted = pytree.tree_map(
        cut_target, plain, is_leaf=lambda value: has_item_per_sample(value, samples)
    )
    return None if unfit else (given, wanted)


def _are_equal(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Return whether generators have equal states: tensors, or tuples with arrays."""
    for one, other in zip(some, others, strict=True):
        same = (
            torch.equal(one, other) if isinstance(one, torch.Tensor) else repr(one) == repr(other)
        )
        if not same:
            return False
    return True


def copy_loss(loss: Loss, module: nn.Module) -> Loss:
    """Return a copy of a loss, whose calls leave the original's state alone.

    Closures, bound objects and mutable globals are copied; the model and other large modules and
    tensors are shared, as is what cannot be copied.

    Args:
        loss: a function, a module, or any callable object.
        module: the run's model.
    """
    known: dict[int, Any] = {id(one): one for one in module.modules()}
    return _copied(loss, known)


def _copied(value: Any, known: dict[int, Any]) -> Any:
    if id(value) in known:
        return known[id(value)]
    if isinstance(value, functools.partial):
        given = [_copied(one, known) for one in value.args]
        named = {key: _copied(one, known) for key, one in value.keywords.items()}
        return functools.partial(_copied(value.func, known), *given, **named)
    if isinstance(value, types.MethodType):
        return types.MethodType(value.__func__, _copied(value.__self__, known))
    if isinstance(value, types.FunctionType):
        return _copied_function(value, known)
    if isinstance(value, type | types.ModuleType | types.BuiltinFunctionType):
        return value
    if _elements(value) > LARGE:
        return value
    _share_large(value, known, 3)
    try:
        return copy.deepcopy(value, known)
    except Exception:  # a lock, a file, a tensor with a graph
        return value


def _copied_function(function: types.FunctionType, known: dict[int, Any]) -> Any:
    """Return a function with copies of its cells and of the mutable globals that it names."""
    if (function.__module__ or "").partition(".")[0] in ("torch", "numpy", "transformers"):
        return function
    cells = tuple(types.CellType() for _ in function.__closure__ or ())
    names = set(function.__code__.co_names)
    own = {
        name: _copied(value, known)
        for name, value in function.__globals__.items()
        if name in names and isinstance(value, list | dict | set | deque | torch.Tensor)
    }
    made = types.FunctionType(
        function.__code__, {**function.__globals__, **own}, function.__name__,
        function.__defaults__, cells,
    )  # fmt: skip
    made.__kwdefaults__ = function.__kwdefaults__
    known[id(function)] = made
    for cell, held in zip(cells, function.__closure__ or (), strict=True):
        try:
            cell.cell_contents = _copied(held.cell_contents, known)
        except ValueError:  # a name that is not bound yet
            continue
    return made


def _elements(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel()
    if isinstance(value, nn.Module):
        return sum(one.numel() for one in (*value.parameters(), *value.buffers()))
    return 0


def _share_large(value: Any, known: dict[int, Any], depth: int) -> None:
    """Note large modules and tensors inside of an object, which a copy of it then shares."""
    inside: list[Any] = []
    if isinstance(value, Mapping):
        inside = list(value.values())
    elif isinstance(value, list | tuple | deque):
        inside = list(value)
    elif hasattr(value, "__dict__") and not isinstance(value, nn.Module):
        inside = list(vars(value).values())
    for one in inside[:1000]:
        if _elements(one) > LARGE:
            known[id(one)] = one
        elif depth:
            _share_large(one, known, depth - 1)


def list_loss_values(loss: Loss, module: nn.Module) -> dict[str, Any]:
    """Return each small tensor, and table of class numbers, that a loss refers to, by its name.

    Args:
        loss: the user's.
        module: the run's model, whose tensors are not listed.
    """
    skipped = {id(one) for one in (*module.modules(), *module.parameters(), *module.buffers())}
    found: dict[str, Any] = {}

    def visit(name: str, value: Any, depth: int) -> None:
        if id(value) in skipped or depth < 0:
            return
        skipped.add(id(value))
        if isinstance(value, torch.Tensor):
            if 0 < value.numel() <= LARGE and not value.is_meta:
                found[f"{name} {list(value.shape)}"] = value
        elif _numbers_classes(value):
            found[f"{name} of {len(value)} names"] = value
        else:
            for key, one in _referred(value):
                visit(key or name, one, depth - 1)

    visit("", loss, 3)
    return found


def checksum_loss_tensors(loss: Loss, module: nn.Module) -> dict[str, str]:
    """Return a hash of each value of `list_loss_values`.

    Args:
        loss: the user's.
        module: the run's model, whose tensors are not listed.
    """
    return {name: digest_of(one) for name, one in list_loss_values(loss, module).items()}


def _numbers_classes(value: Any) -> bool:
    """Return whether a value is a dict of names whose numbers are 0, 1, …, in any order."""
    if not isinstance(value, dict) or not all(type(one) is int for one in value.values()):
        return False
    return len(value) > 1 and sorted(value.values()) == list(range(len(value)))


def _referred(value: Any) -> list[tuple[str, Any]]:
    """Return what a loss refers to, by name: state, arguments, closure, attributes."""
    if isinstance(value, nn.Module):
        return list(value.state_dict(keep_vars=True).items())
    if isinstance(value, functools.partial):
        return [("", value.func), *((f"{n}", one) for n, one in enumerate(value.args)),
                *value.keywords.items()]  # fmt: skip
    if isinstance(value, types.MethodType):
        return [("", value.__self__)]
    if isinstance(value, types.FunctionType):
        tables = {name: value.__globals__.get(name) for name in value.__code__.co_names}
        tables = {n: one for n, one in tables.items() if isinstance(one, torch.Tensor | dict)}
        cells = dict(zip(value.__code__.co_freevars, value.__closure__ or (), strict=True))
        return [*((n, cell.cell_contents) for n, cell in cells.items() if _is_bound(cell)),
                *tables.items()]  # fmt: skip
    if hasattr(value, "__dict__") and not isinstance(value, type | types.ModuleType):
        return list(vars(value).items())
    return []


def _is_bound(cell: types.CellType) -> bool:
    """Return whether a cell of a closure has a value yet."""
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def unlike_loss_lines(world: World, loss: Loss, module: nn.Module) -> list[str]:
    """Return a line if the tensors of a loss differ between ranks; every rank calls it.

    Args:
        world: all ranks.
        loss: the user's.
        module: the run's model.
    """
    unlike = world.find_differing_rank(checksum_loss_tensors(loss, module))
    if unlike is None:
        return []
    rank, first, other = unlike
    name = next((n for n in first if other.get(n) != first[n]), "a tensor")
    return [
        f"loss: {name.strip()} that it uses is another on rank {rank} than on rank 0, so ranks "
        f"weigh or label samples differently; try: the same numbers on every rank, of the whole "
        f"dataset; classes numbered in the order of sorted(set(names))"
    ]


def unlike_tensor_line(name: str) -> str:
    """Return the notice on a tensor of the loss that each rank writes for itself.

    Args:
        name: of the tensor, with its shape.
    """
    return (
        f"loss: {name.strip()} that it uses was written between steps, by other numbers on each "
        f"rank, so ranks weigh samples differently; try: numbers of the whole batch "
        f"(torch.distributed.all_reduce of sums and counts), or the same on every rank"
    )
