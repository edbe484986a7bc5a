"""Read the terms of a loss that a user's loop computed, from its autograd graph.

    loss = Σ f · R        R: a sum or a mean over elements · f: a product of numbers of the script

`run.backward(loss, count)` takes a sum, which `run.update` divides by the count of all ranks. A
mean times a number is no sum, unless one of the factors is the count. A sum that was divided by its
own elements or by its count is a mean, too. A number of the script is told from the length of a
batch by the script's text, and by micro-batches of unequal sizes. Loops that were written for DDP
multiply by the number of ranks, since DDP takes a mean of their gradients; a run adds them up.

Only a run's first step is read, since the host waits for the factors.
"""

from __future__ import annotations

import ast
import functools
import inspect
import math
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from shoal.base.attribute_patch import patch_attribute
from shoal.base.errors import ConfigError
from shoal.parallel.program import Program
from shoal.trainer.guards._torch import SUMMED, SUMS

ALIASES = ("ToCopyBackward", "AliasBackward", "ViewBackward", "CloneBackward", "SqueezeBackward",
           "UnsqueezeBackward", "ReshapeAliasBackward", "UnsafeViewBackward",
           "_FollowChainBackward")  # fmt: skip
"""Operations that change no number of a scalar; the last is that of fsdp's outputs."""
LIMITS = ("ClampBackward", "ClampMinBackward", "ClampMaxBackward", "MinimumBackward",
          "MaximumBackward", "HardtanhBackward", "WhereBackward", "ReluBackward")  # fmt: skip
"""Operations that limit a scalar."""
LIMITED = -1
"""Elements of a term that is a limited scalar."""
MEAN, SUM = 1, 2
"""torch's numbers for `reduction="mean"` and `reduction="sum"`."""
MOST = 64
"""Terms of a loss that are read."""


@dataclass(frozen=True)
class LossTerm:
    """One term of a loss.

    Attributes:
        mean: a mean over elements; else their sum.
        factors: numbers that multiply it; a divisor d is 1/d.
        elements: elements that it is over; 0: not known; LIMITED: a scalar that is limited.
    """

    mean: bool
    factors: tuple[float, ...]
    elements: float

    @property
    def factor(self) -> float:
        """Return the product of all factors, without its sign."""
        return abs(math.prod(self.factors))


def read_terms(loss: torch.Tensor) -> list[LossTerm]:
    """Return the terms of a scalar loss that are sums or means over elements."""
    found: list[LossTerm] = []
    open_nodes: list[tuple[Any, tuple[float, ...]]] = [(loss.grad_fn, ())]
    while open_nodes and len(found) < MOST:
        node, factors = open_nodes.pop()
        if node is not None:
            open_nodes += _read_node(node, factors, found)
    return found


def _read_node(
    node: Any, factors: tuple[float, ...], found: list[LossTerm]
) -> list[tuple[Any, tuple[float, ...]]]:
    """Read one operation: add a term, or return the operations before it with their factors."""
    name, before = node.name(), [one for one, _ in node.next_functions]
    if name.startswith(ALIASES):
        return [(before[-1], factors)]
    if name.startswith("NegBackward"):
        return [(before[0], factors)]
    if name.startswith(("AddBackward", "SubBackward")):
        return [(one, factors) for one in before]
    if name.startswith(("MulBackward", "DivBackward")):
        side = 0 if before[0] is not None else 1
        other = getattr(node, "_saved_self" if side else "_saved_other", None)
        if all(one is not None for one in before) and len(before) > 1:
            return []  # a weight that is learned
        divides = name.startswith("Div")
        if other is None or (divides and side) or getattr(other, "ndim", 0):
            return []
        number = float(other)
        if divides:
            number = 1 / number if number else math.inf
        return [(before[side], (*factors, number))]
    if name.startswith(("MeanBackward", "SumBackward")):
        sizes = getattr(node, "_saved_self_sym_sizes", None)
        if sizes is not None and not sizes:
            return [(before[0], factors)]  # of a scalar
    if (term := _read_term(node, factors)) is not None:
        found.append(term)
    return []


def _read_term(node: Any, factors: tuple[float, ...]) -> LossTerm | None:
    """Return the term of an operation that reduces many elements or limits one; None: another."""
    name, reduction = node.name(), getattr(node, "_saved_reduction", None)
    if name.startswith(LIMITS):
        return LossTerm(False, factors, LIMITED)
    if reduction in (MEAN, SUM):
        held, weighed = (getattr(node, f"_saved_{key}", None) for key in ("target", "total_weight"))
        if reduction == MEAN and weighed is not None:  # targets that are not ignored, by weight
            return LossTerm(True, factors, float(weighed))
        return LossTerm(reduction == MEAN, factors, 0 if held is None else held.numel())
    if not name.startswith(("MeanBackward", "SumBackward")):
        return None
    return LossTerm(name.startswith("Mean"), factors, _count_reduced(node))


def _count_reduced(node: Any) -> int:
    """Return the number of elements of a sum or a mean; 0: not known."""
    sizes = getattr(node, "_saved_self_sym_sizes", None)
    count = getattr(node, "_saved_self_sym_numel", None)
    return math.prod(sizes) if count is None and sizes is not None else int(count or 0)


WEIGHT_GRADIENTS = (
    "torch.autograd.grad(…, create_graph=True) by weights, inside of the loop over "
    "run.micro_batches: the gradient is that of one micro-batch of this rank, so a penalty on it "
    "depends on micro_batch and the ranks; try: a penalty on the gradient by the inputs, which is "
    "a sum over samples"
)
"""Notice on gradients by weights that a loss may use."""


@contextmanager
def watch_weight_gradients(program: Program, notice: Callable[[str], None]) -> Iterator[None]:
    """Print a line if user code inside takes gradients by weights that a loss may use again.

    Such a gradient is that of one micro-batch: its norm, or a projection, is another number than
    that of the step's.
    """
    own, whole = {id(p) for p in program.parameters.values()}, torch.autograd.grad
    print_once = functools.cache(lambda: notice(WEIGHT_GRADIENTS))

    def grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        given = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
        if kwargs.get("create_graph") and any(id(one) in own for one in given):
            print_once()
        return whole(outputs, given, *args, **kwargs)

    with patch_attribute(torch.autograd, "grad", grad):
        yield


class LossTermsCheck:
    """Check of the losses that a rank passes to `run.backward` in a run's first step.

    Args:
        notice: prints a line of this rank.
        is_first: this rank prints what every rank finds.
        passes: micro-batches of the step over all ranks, at most.
        ranks: all ranks, if some have samples of their own; else 1.
    """

    def __init__(
        self, notice: Callable[[str], None], *, is_first: bool, passes: int, ranks: int = 1
    ) -> None:
        self.notice, self.is_first, self.passes = notice, is_first, passes
        self.ranks = ranks
        self._weights: dict[tuple[int, int], tuple[set[float], set[float]]] = {}
        self._factors: dict[tuple[int, int], float] = {}
        self._divided: dict[tuple[int, int], str] = {}
        self._done = False

    def check(self, loss: torch.Tensor, count: Any, call: int) -> None:
        """Print a line if a loss looks like a mean.

        Args:
            loss: a scalar.
            count: as `run.backward` got it.
            call: the index of the call in its micro-batch.
        """
        if any(one is loss for one in SUMMED):
            raise ConfigError(SUMMED_LOSS)
        if self._done or loss.grad_fn is None:
            return
        number = None if count is None else abs(float(count))
        for place, term in enumerate(read_terms(loss)):
            line = self._judge(term, number) if self.is_first else ""
            if number is not None and number > 1 and not term.mean:  # equal by chance, maybe
                before = self._divided.setdefault((call, place), line)
                self._divided[call, place], line = before and line, ""
            if not line and (term.elements > 1 or (call, place) in self._weights):
                line = self._compare(term, number, (call, place))
                line = line and (self._divided.get((call, place)) or line)
            if line:
                self._done = True
                self.notice(line)
                return

    def close(self) -> None:
        """Print the line on a sum that every micro-batch divides by its own elements."""
        lines = [line for line in self._divided.values() if line]
        if lines and not self._done:
            self.notice(lines[0])

    def _judge(self, term: LossTerm, count: float | None) -> str:
        """Return the line on a term that is a mean by itself, or ""."""
        if term.elements == 1:
            return ""
        if term.elements == LIMITED:
            return limited_line() if self.passes > 1 else ""
        if count is None:
            if not term.mean:
                return multiplied_by_ranks_line() if self._undoes_a_mean(term) else ""
            alone = all(one in _literals() for one in term.factors)
            return bare_mean_line(self.passes) if alone and self.passes > 1 else ""
        if term.mean:
            sizes = [one for one in map(abs, term.factors) if _is_multiple(one, count)]
            meant = any(one not in _literals() for one in sizes)
            return "" if meant or not count else scaled_mean_line(term.factor, count)
        if count <= 1:
            return ""
        divisors = {1 / abs(one) for one in term.factors if one}
        own = (float(term.elements), count)
        normed = any(math.isclose(one, other) for one in divisors - _literals() for other in own)
        return divided_sum_line(count) if normed else ""

    def _undoes_a_mean(self, term: LossTerm) -> bool:
        """Return whether a sum is multiplied by the ranks, and divided by a sum over the ranks."""
        if self.ranks < 2:
            return False
        factor = abs(math.prod(one for one in term.factors if one not in _literals()))
        return any(math.isclose(factor * abs(float(one)), self.ranks) for one in SUMS)

    def _compare(self, term: LossTerm, count: float | None, key: tuple[int, int]) -> str:
        """Return a line if unequal micro-batches normalise a term each for itself, or "".

        Either elements or targets weigh the same in all of them, unless the loss is wrong.
        """
        factor, elements = term.factor, term.elements
        if count == 0 or (count is None and not term.mean):
            return ""
        if count is None:  # a share n / total has another factor for another n
            if factor != self._factors.setdefault(key, factor):
                return ""
            weights = (factor / elements, 1 / elements)
        elif term.mean:
            weights = (factor / elements, factor / count)
        else:
            weights = (factor, factor * elements / count)
        seen = self._weights.setdefault(key, (set(), set()))
        for one, weight in zip(seen, weights, strict=True):
            one.add(float(f"{weight:.6g}"))
        return uneven_line(*sorted(seen[0])[:2]) if min(map(len, seen)) > 1 else ""


def _is_multiple(number: float, count: float) -> bool:
    ratio = number / count if count else 0.0
    return ratio > 0.5 and math.isclose(ratio, round(ratio), rel_tol=1e-6)


def read_script() -> ast.AST | None:
    """Return the text of the function of the script that called; None if it cannot be read."""
    frame = sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__", "")).startswith("shoal"):
        frame = frame.f_back  # type: ignore[assignment]
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(frame.f_code)))
    except (OSError, SyntaxError, TypeError):
        return None


def _literals() -> set[float]:
    """Return the numbers by which the calling script multiplies or divides, from its text."""
    tree = read_script()
    if tree is None:
        return set()
    pairs = [one for one in ast.walk(tree) if isinstance(one, ast.BinOp)]
    sides = [s for one in pairs if isinstance(one.op, ast.Mult | ast.Div)
             for s in (one.left, one.right) if isinstance(s, ast.Constant)]  # fmt: skip
    numbers = [float(s.value) for s in sides if isinstance(s.value, int | float)]
    return {*numbers, *(1 / one for one in numbers if one)}


SUM_TRY = 'try: reduction="sum", or (mean * n, n)'


def scaled_mean_line(factor: float, count: float) -> str:
    """Return the notice on a mean times a number that comes with a count."""
    return (
        f"run.backward: the loss is {factor:g} × a mean and comes with a count of {count:g}: "
        f"run.update divides it by the count of all ranks once more; {SUM_TRY}"
    )


def divided_sum_line(count: float) -> str:
    """Return the notice on a sum that its own number of elements divides."""
    return (
        f"run.backward: the loss is a sum that was divided by its elements or its count already, "
        f"and comes with a count of {count:g}, so it is divided twice; try: the sum before the "
        f"division"
    )


def uneven_line(one: float, other: float) -> str:
    """Return the notice on elements that weigh differently in two micro-batches."""
    return (
        f"run.backward: an element weighs {one:g} in one micro-batch and {other:g} in another, so "
        f"the loss is normalised by each micro-batch for itself; {SUM_TRY}"
    )


def limited_line() -> str:
    """Return the notice on a sum over a micro-batch that is limited (clamp, max)."""
    return (
        "run.backward: the loss of a micro-batch is limited (clamp, max, where) after its sum, so "
        "each micro-batch is limited for itself; try: a limit for each sample, before the sum"
    )


SUMMED_LOSS = (
    "run.backward: the loss was summed over ranks in place (torch.distributed.all_reduce) before "
    "its backward pass: its number is that of several ranks, its gradient is not, and the run sums "
    "both once more; try: run.backward(loss, count) with this rank's own sum, and for a log the "
    "reduced number of loss.detach().clone()"
)
"""Error for a loss that user code has summed over ranks."""


def multiplied_by_ranks_line() -> str:
    """Return the notice on a sum that undoes a mean over ranks, as gradients of DDP are."""
    return (
        "run.backward: the loss is a sum times the number of ranks, divided by a sum over ranks "
        "(all_reduce), as a mean of gradients over ranks needs it; here gradients of ranks are "
        "added up; try: run.backward(loss_sum, count), or loss_sum / run.total(count)"
    )


def bare_mean_line(passes: int) -> str:
    """Return the notice on a mean without a count, which micro-batches add up."""
    return (
        f"run.backward: the loss is a mean over one micro-batch and comes without a count, so up "
        f"to {passes} of them are added up to a multiple of the step's mean; try: "
        f"run.backward(loss_sum, count), or loss_sum / run.total(count)"
    )
