"""Names a mistake of our own in a divided forward pass: which one, made in one process, gives it?

While weights are still equal, only the forward pass can make the loss of a step differ. What such
mistakes compute is what one process computes with other weights, or with its blocks in another
order:

    row bias               a bias that every rank adds to its summand      bias × degree
    fused weight           q, k and v cut as one segment, read as three    rows in another order
    shared heads           every rank takes its neighbour's key/value part rows rotated
    stage order            stages run in another order                     blocks exchanged
    position restart       ranks count their own tokens from 0             positions modulo S / cp

Each is tried on the step's own micro-batches; the one whose loss is the layout's loss, in all its
digits, is the cause. Only what the record says of the layout is tried, so these are few. Users
cannot mend what is found here, so the product does without.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from shoal.base.layouts.layout import Layout
from shoal.base.plans.placement import Placement
from shoal.parallel.spmd.labelling.labels import Split, cut_tensor, divides, join_parts
from shoal.proof.diagnosis.clue import Clue
from shoal.proof.diagnosis.evidence import Evidence
from shoal.proof.trajectory_record import Tensors, TrajectoryRecord
from step_again import StepAgain, step_again

SAME, SAME_ROUNDED = 1e-10, 1e-5
"""Losses nearer than this share are one: in float64, in shorter formats."""


def wrong_loss(evidence: Evidence) -> Clue | None:
    """The mistake that gives the loss of the first wrong step, whose weights still were right."""
    number, got = evidence.number, evidence.got
    if number is None or not got.held:
        return None
    ours, theirs = evidence.expected.rows[number], got.rows[number]
    if ours.loss is None or theirs.loss is None:
        return None
    exact = all(t.dtype == torch.float64 for t in evidence.expected.gradients[number].values())
    same = SAME if exact else SAME_ROUNDED
    if math.isclose(ours.loss, theirs.loss, rel_tol=10 * same):
        return None
    again = step_again(evidence)
    if not math.isclose(again.loss(lambda module: nullcontext()), ours.loss, rel_tol=same):
        return None  # the step cannot be repeated: what it gives would tell nothing
    for one in _suspicions(got, again, ours.label):
        if math.isclose(again.loss(one.mistake), theirs.loss, rel_tol=same):
            seen = (
                f"the loss at step {ours.step} is {theirs.loss:.8g} instead of {ours.loss:.8g}: "
                f"one process gets that with {one.seen}"
            )
            return Clue(one.name, one.parameter, seen, one.cause, one.look)
    return None


def _suspicions(got: TrajectoryRecord, again: StepAgain, label: str) -> Iterator[Suspicion]:
    start = f"{label}/" if label else ""
    held = {
        name.removeprefix(start): one for name, one in got.held.items() if name.startswith(start)
    }
    weights, layout = again.kept, got.layout
    if layout.tp > 1:
        for look in (row_biases, fused, shared):
            yield from look(held, weights, layout.tp)
    if layout.cp > 1:
        yield from positions(weights, layout.cp, again.tokens)
    if layout.pp > 1:
        yield from orders(held, weights)


SEGMENTS = (1, 2, 3, 4)
"""Numbers of segments that a fused weight may have."""

ALL_ORDERS = 4
"""Stages of which every order is tried."""

Mistake = Callable[[nn.Module], AbstractContextManager[None]]


@dataclass(frozen=True)
class Suspicion:
    """A mistake that can be made on purpose, and the words for it."""

    mistake: Mistake
    name: str
    parameter: str
    seen: str
    cause: str
    look: str


# ---- tensor parallelism


def row_biases(held: Mapping[str, Placement], weights: Tensors, degree: int) -> Iterator[Suspicion]:
    """Whole biases beside weights whose inputs are cut."""
    biases = [
        name
        for name, one in held.items()
        if name.endswith("bias") and one.tp_cut is None and _beside(name, held, weights) == 1
    ]
    for names in _all_then_each(biases):
        changed = {name: weights[name] * degree for name in names}
        yield Suspicion(
            _with(changed),
            "row bias on every rank",
            names[0],
            f"{_alike(names)} counted {degree} times",
            f"each of {degree} tensor-parallel ranks adds the bias to its summand before the sum; "
            f"it may be added once",
            "see where a row-parallel layer adds its bias (autograd_collectives.once)",
        )


def _beside(bias: str, held: Mapping[str, Placement], weights: Tensors) -> int | None:
    """The dim along which a bias's weight is cut."""
    weight = f"{bias.removesuffix('bias')}weight"
    if weight not in held or weights[weight].dim() < 2:
        return None
    cut = held[weight].tp_cut
    return None if cut is None else cut.dim


def fused(held: Mapping[str, Placement], weights: Tensors, degree: int) -> Iterator[Suspicion]:
    """Cut parameters whose segments another part of the code counts otherwise."""
    sizes: dict[tuple[int, int], list[str]] = {}
    for name, one in held.items():
        cut = one.tp_cut
        if cut is not None and divides(one.shape[cut.dim], len(cut.segments), degree):
            sizes.setdefault((one.shape[cut.dim], len(cut.segments)), []).append(name)
    for (size, segments), together in sizes.items():
        others = [n for n in SEGMENTS if n != segments and divides(size, n, degree)]
        for names, other in ((n, o) for n in _all_then_each(together) for o in others):
            changed = {}
            for name in names:
                dim = held[name].tp_cut.dim
                changed[name] = _read_as(
                    weights[name], Split(dim, segments), Split(dim, other), degree
                )
            yield Suspicion(
                _with(changed),
                "fused weight cut wrongly",
                names[0],
                f"{_alike(names)}, cut as {_segments(segments)} and read as {_segments(other)}",
                "a fused weight (q, k and v in one) must be cut within each of its segments, and "
                "the layer must read the parts so",
                "see the label of that parameter: Split(dim, segments)",
            )


def _read_as(weight: torch.Tensor, cut_as: Split, read_as: Split, degree: int) -> torch.Tensor:
    return join_parts([cut_tensor(weight, cut_as, rank, degree) for rank in range(degree)], read_as)


def shared(held: Mapping[str, Placement], weights: Tensors, degree: int) -> Iterator[Suspicion]:
    """Matrices of blocks that several ranks hold: key/value heads that they share."""
    groups: dict[tuple[str, torch.Size], list[str]] = {}
    for name, one in held.items():
        if (
            one.copies_in_model(Layout(tp=degree)) // len(one.stages) > 1
            and weights[name].dim() == 2
            and _block_of(name)
        ):
            home = re.sub(r"\d+", "*", name.rpartition(".")[0].rpartition(".")[0])
            groups.setdefault((home, weights[name].shape), []).append(name)
    for names in groups.values():
        for parts in range(2, degree + 1):
            size = weights[names[0]].shape[0]
            if size % parts:
                continue
            for by in range(1, parts):
                turned = {n: weights[n].roll(by * size // parts, 0) for n in names}
                yield _wrong_part(names, turned, f"by {by} of {parts} parts")
            first = {n: torch.cat([weights[n][: size // parts]] * parts) for n in names}
            yield _wrong_part(names, first, f"so that the first of {parts} parts is all")


def _wrong_part(names: Sequence[str], changed: Tensors, how: str) -> Suspicion:
    return Suspicion(
        _with(changed),
        "wrong part of shared heads",
        names[0],
        f"the rows of {_alike(names)} moved {how}",
        "tensor-parallel ranks share key/value heads, and a rank's query heads meet the heads of "
        "another rank",
        "see which part of replicated key/value heads a rank takes (autograd_collectives.part)",
    )


# ---- context parallelism


def positions(weights: Tensors, degree: int, tokens: int) -> Iterator[Suspicion]:
    """Positions that begin at 0 on every rank: counted, or rows of a table."""
    own = tokens // degree
    if own * degree != tokens:
        return
    tables = [
        name
        for name, value in weights.items()
        if value.dim() > 1 and value.shape[0] >= tokens and re.search("pos|rot|rope", name)
    ]
    restarted = {
        name: torch.cat([weights[name][:own]] * degree + [weights[name][tokens:]])
        for name in tables
    }

    @contextmanager
    def mistake(module: nn.Module) -> Iterator[None]:
        with _with(restarted)(module), _Restarting(tokens, own):
            yield

    yield Suspicion(
        mistake,
        "position restart",
        tables[0] if tables else "",
        f"positions that begin at 0 again after every {own} of {tokens} tokens",
        f"each of {degree} context-parallel ranks numbers its own tokens from 0",
        "see which part of positions and tables a rank takes (context_parallel/shard.py)",
    )


class _Restarting(TorchFunctionMode):
    """`torch.arange` over all tokens counts from 0 on every rank's own."""

    def __init__(self, tokens: int, own: int) -> None:
        super().__init__()
        self.tokens, self.own = tokens, own

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is torch.arange and made.shape == (self.tokens,):
            return made[: self.own].repeat(self.tokens // self.own)
        return made


# ---- pipeline


def orders(held: Mapping[str, Placement], weights: Tensors) -> Iterator[Suspicion]:
    """Blocks in another order, whole stages at a time."""
    lists: dict[str, dict[int, dict[str, str]]] = {}
    for name in held:
        place = _block_of(name)
        if place:
            home, number, own = place
            lists.setdefault(home, {}).setdefault(number, {})[own] = name
    for home, blocks in lists.items():
        numbers = sorted(blocks)
        at = [min(held[name].stages[0] for name in blocks[n].values()) for n in numbers]
        shapes = [{own: weights[name].shape for own, name in blocks[n].items()} for n in numbers]
        if len(set(at)) < 2 or any(shape != shapes[0] for shape in shapes):
            continue
        for order in _stage_orders(_runs(at), at):
            places = [numbers[k] for k in order]
            shown = ", ".join(map(str, places[:8])) + (", …" if len(places) > 8 else "")
            yield Suspicion(
                _reordered(home, numbers, places),
                "stage order",
                f"{home}.{places[0]}",
                f"the blocks in the order {shown}",
                "stages run, or send to each other, in another order than that of the layers",
                "see the rank of each stage in the schedule, and which blocks a rank keeps",
            )


def _runs(at: Sequence[int]) -> list[list[int]]:
    """Places in runs that one rank holds: stages."""
    runs: list[list[int]] = []
    for place, rank in enumerate(at):
        if not place or rank != at[place - 1]:
            runs.append([])
        runs[-1].append(place)
    return runs


def _stage_orders(runs: Sequence[list[int]], at: Sequence[int]) -> list[list[int]]:
    """Orders of stages that are easily mistaken for the right one, as orders of blocks."""
    count = len(runs)
    right = tuple(range(count))
    as_held = tuple(sorted(right, key=lambda stage: at[runs[stage][0]]))
    orders = [as_held, right[::-1], *(right[k:] + right[:k] for k in right[1:])]
    if count <= ALL_ORDERS:
        orders += itertools.permutations(right)
    for width in range(2, count):  # chunk by chunk where it should be rank by rank
        orders.append(tuple(k for start in range(width) for k in range(start, count, width)))
    unique = dict.fromkeys(order for order in orders if order != right)
    return [[place for stage in order for place in runs[stage]] for order in unique]


def _block_of(name: str) -> tuple[str, int, str] | None:
    """(list of blocks, number in it, the parameter's own name in the block)."""
    found = re.match(r"(.*?)\.?\b(\d+)\.(.*)$", name)
    return (found[1], int(found[2]), found[3]) if found else None


def _reordered(home: str, numbers: Sequence[int], places: Sequence[int]) -> Mistake:
    @contextmanager
    def mistake(module: nn.Module) -> Iterator[None]:
        children = module.get_submodule(home)._modules
        right = dict(children)
        children |= {str(n): right[str(p)] for n, p in zip(numbers, places, strict=True)}
        try:
            yield
        finally:
            children |= right

    return mistake


# ---- all


def _with(changed: Tensors) -> Mistake:
    """Other values of some parameters; `StepAgain` puts the right ones back."""

    @contextmanager
    def mistake(module: nn.Module) -> Iterator[None]:
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        for name, value in changed.items():
            tensors[name].copy_(value)
        yield

    return mistake


def _all_then_each(names: Sequence[str]) -> list[list[str]]:
    """All together, then those that are alike in all blocks."""
    alike: dict[str, list[str]] = {}
    for name in names:
        alike.setdefault(re.sub(r"\d+", "*", name), []).append(name)
    # A weight and its bias are cut alike, so they go together too.
    layers: dict[str, list[str]] = {}
    for pattern, group in alike.items():
        layers.setdefault(pattern.rpartition(".")[0], []).extend(group)
    found = [list(names), *layers.values(), *alike.values()]
    return [list(one) for one in dict.fromkeys(tuple(group) for group in found if group)]


def _alike(names: Sequence[str]) -> str:
    """Names for a person: blocks' numbers left out.

    >>> _alike(["blocks.0.out.bias", "blocks.1.out.bias", "norm.weight"])
    'blocks.*.out.bias and norm.weight'
    """
    shown = list(dict.fromkeys(re.sub(r"\d+", "*", name) for name in names))
    return " and ".join(shown[:3]) + (f" and {len(shown) - 3} more" if len(shown) > 3 else "")


def _segments(count: int) -> str:
    return "one segment" if count == 1 else f"{count} segments"
