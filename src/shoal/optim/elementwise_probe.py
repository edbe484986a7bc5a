"""Test by experiment whether an optimizer may step pieces of the parameters separately.

A trial optimizer (trial_optimizer.py) steps small whole tensors. Other trial optimizers, one per
simulated rank, step pieces of the same tensors with pieces of the same gradients. If weights and
state come out equal, every rank of a layout may step its own piece alone. Three ways of cutting are
tried:

    flat    1-D runs of elements, cut at an odd position   zero1, zero2
    rows    runs along dim 0                               fsdp, hsdp
    apart   whole tensors, each on one rank only           for Muon, Adafactor, LAMB

SGD, Adam, AdamW, Lion, RMSprop pass all. An optimizer with norms of whole tensors fails the first
two. One with a quantity over all parameters (a norm for clipping inside the optimizer) fails all
three and may only be replicated. Twelve steps also reveal rules that change later (RAdam at the
6th).

Source: design §6.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shoal.base.plans.tensor_shards import StepDivisibility
from shoal.fabric.device import is_accelerator
from shoal.optim.trial_optimizer import (
    UntestableOptimizerError,
    disable_hooks,
    make_trial_optimizer,
)
from shoal.trace.isolation.collective_ban import ForbiddenCollective, forbid_collectives

STEPS = 12
CAPS_1D, CAPS = (6400,), (80, 80, 3, 3, 2)
"""Largest dims of a synthetic parameter: above the 4096 elements from which some optimizers
quantise."""
SHORTEST = 5
"""Fewest rows of a synthetic parameter, so that there is something to cut."""
SIZES = (0.01, 100.0, 1.0)
"""Scales of the gradients, in turn: they exceed and undercut any likely limit on norms."""
FORMATS = ((torch.float64, 1e-12), (torch.float32, 1e-5))
"""Number formats to try, each with its tolerance as a share of the largest value."""


@dataclass(frozen=True)
class _SyntheticParameter:
    """Synthetic parameter: the name that it represents, its weights, a gradient per step."""

    where: str
    weights: torch.Tensor
    gradients: tuple[torch.Tensor, ...]


Share = Callable[[int, torch.Tensor], torch.Tensor | None]
"""(index of the tensor, tensor) → the piece that one rank holds, None for no piece."""
Outcome = list[tuple[torch.Tensor, dict[str, Any]] | None]
"""Weights and state of every synthetic parameter after the steps, None where a rank held none."""


def probe_slicing(optimizer: torch.optim.Optimizer) -> StepDivisibility:
    """Test on small synthetic parameters in which ways ranks may split an optimizer's step.

    Trial optimizers step whole tensors and pieces of them, twelve times. A way of cutting is
    allowed if weights and state come out equal. No collective.

    Args:
        optimizer: over whole parameters, before a layout replaced them. It does not change, nor do
            torch's random generators, and no hook runs.

    Returns:
        A line per way of cutting, the same on all ranks. All three refuse an optimizer that cannot
        be tried.

    Note:
        The synthetic parameters have at most 6400 elements in two dims: a rule that starts above
        is missed.
    """
    kind = type(optimizer).__name__
    devices = {p.device for group in optimizer.param_groups for p in group["params"]}
    why = ""
    with torch.random.fork_rng([d for d in devices if is_accelerator(d)]), disable_hooks():
        for dtype, tolerance in FORMATS:
            try:
                stand_ins = [
                    _make_parameters(optimizer, n, dtype) for n in _distinct_groups(optimizer)
                ]
                whole = _step(optimizer, stand_ins, lambda place, tensor: tensor)
                _check_moved(stand_ins, whole)
            except UntestableOptimizerError as unfit:
                why = f"{kind} cannot be tried on stand-ins: {unfit}"
                continue
            return StepDivisibility(
                *(
                    _line(
                        kind, way, _describe_difference(optimizer, stand_ins, whole, way, tolerance)
                    )
                    for way in ("flat", "rows", "apart")
                )
            )
    return StepDivisibility(why, why, why)


_WAYS = {
    "flat": "a step on flat pieces of a parameter",
    "rows": "a step on some rows of a parameter",
    "apart": "a step on some parameters without the others",
}


def _line(kind: str, way: str, what: str) -> str:
    return what and f"{kind}: {_WAYS[way]} {what}"


def _distinct_groups(optimizer: torch.optim.Optimizer) -> list[int]:
    """Return the indices of groups, without those that repeat another's settings and shapes."""
    seen: dict[str, int] = {}
    for number, group in enumerate(optimizer.param_groups):
        skipped = ("params", "param_names", "lr", "initial_lr")
        settings = {k: v for k, v in group.items() if k not in skipped}
        seen.setdefault(repr((settings, _shapes(group["params"]))), number)
    return list(seen.values())


def _shapes(parameters: Sequence[torch.Tensor]) -> list[tuple[int, ...]]:
    """Return one shape per number of dims, and at least two: one tensor shows no coupling."""
    largest: dict[int, torch.Tensor] = {}
    for p in parameters:
        if not p.numel():
            continue  # a step does not change an empty tensor
        if p.ndim not in largest or p.numel() > largest[p.ndim].numel():
            largest[p.ndim] = p
    shapes = []
    for ndim, p in sorted(largest.items()):
        caps = CAPS_1D if ndim == 1 else CAPS + CAPS[-1:] * ndim
        dims = [min(length, cap) for length, cap in zip(p.shape, caps, strict=False)]
        shapes.append(tuple([max(SHORTEST, dims[0]), *dims[1:]] if dims else []))
    return shapes * 2 if len(shapes) == 1 else shapes


def _make_parameters(
    optimizer: torch.optim.Optimizer, number: int, dtype: torch.dtype
) -> tuple[int, list[_SyntheticParameter]]:
    """Return (group number, synthetic parameters of the group), the same on every rank.

    Weights and gradients grow along a tensor and change in size from step to step. The norm of a
    piece thus always differs from that of the whole, and the optimizer meets its limits on norms.
    """
    group = optimizer.param_groups[number]
    generator = torch.Generator().manual_seed(number)
    device = group["params"][0].device if group["params"] else torch.device("cpu")
    home = torch.device("cpu") if device.type == "meta" else device
    made = []
    for shape in _shapes(group["params"]):

        def draw(shape: tuple[int, ...] = shape) -> torch.Tensor:
            ramp = torch.linspace(0.1, 3.0, math.prod(shape), dtype=torch.float64).reshape(shape)
            noise = torch.randn(shape, generator=generator, dtype=torch.float64)
            return (ramp * noise).to(home, dtype)

        weights = draw()
        gradients = tuple(draw() * SIZES[step % len(SIZES)] for step in range(STEPS))
        made.append(_SyntheticParameter(f"group {number}, shape {list(shape)}", weights, gradients))
    return number, made


def _step(
    optimizer: torch.optim.Optimizer,
    groups: list[tuple[int, list[_SyntheticParameter]]],
    share: Share,
) -> Outcome:
    """Step a new trial optimizer over one rank's share of the synthetic parameters.

    Raises:
        UntestableOptimizerError: with the exception that the optimizer raised.
    """
    members: list[list[nn.Parameter]] = [[] for _ in optimizer.param_groups]
    held: list[tuple[nn.Parameter, int, _SyntheticParameter] | None] = []
    for number, stand_ins in groups:
        for one in stand_ins:
            piece = share(len(held), one.weights.clone())
            if piece is None:
                held.append(None)
                continue
            parameter = nn.Parameter(piece)
            members[number].append(parameter)
            held.append((parameter, len(held), one))
    twin = make_trial_optimizer(optimizer, members)
    try:
        with forbid_collectives():  # every rank makes these steps for itself
            for step in range(STEPS):
                for entry in held:
                    if entry is not None:
                        parameter, place, one = entry
                        parameter.grad = share(place, one.gradients[step].clone())
                twin.step()
    except ForbiddenCollective as failure:
        raise UntestableOptimizerError(
            f"its step calls {failure.name} at {failure.where}, which would mix parts of weights"
        ) from failure
    except Exception as failure:
        first = (str(failure).splitlines() or [""])[0]
        raise UntestableOptimizerError(
            f"raises {type(failure).__name__}: {first[:160]}"
        ) from failure
    return [
        None if entry is None else (entry[0].detach(), dict(twin.state.get(entry[0], {})))
        for entry in held
    ]


def _check_moved(groups: list[tuple[int, list[_SyntheticParameter]]], whole: Outcome) -> None:
    flat = [one for _, stand_ins in groups for one in stand_ins]
    for one, outcome in zip(flat, whole, strict=True):
        if outcome is not None and torch.equal(outcome[0], one.weights):
            raise UntestableOptimizerError(f"its steps leave {one.where} where it was")


def _piece_function(way: str, part: int) -> Share:
    """Return the function that cuts the piece of simulated rank `part` (0 or 1)."""

    def share(place: int, tensor: torch.Tensor) -> torch.Tensor | None:
        if way == "apart":
            return tensor if place % 2 == part else None
        if way == "rows" and tensor.ndim == 0:
            return tensor if part == 0 else None
        line = tensor.flatten() if way == "flat" else tensor
        cut = line.shape[0] * 3 // 7 | 1
        piece = line[:cut] if part == 0 else line[cut:]
        return piece if piece.numel() else None

    return share


def _describe_difference(
    optimizer: torch.optim.Optimizer,
    groups: list[tuple[int, list[_SyntheticParameter]]],
    whole: Outcome,
    way: str,
    tolerance: float,
) -> str:
    """Describe the difference between stepping pieces and stepping wholes; "" if none."""
    flat = [one for _, stand_ins in groups for one in stand_ins]
    for part in (0, 1):
        share = _piece_function(way, part)
        try:
            pieces = _step(optimizer, groups, share)
        except UntestableOptimizerError as unfit:
            return str(unfit)
        for place, (one, want, got) in enumerate(zip(flat, whole, pieces, strict=True)):
            if want is None or got is None:
                continue
            size = _difference(share(place, want[0]), got[0])
            if not size <= tolerance:
                return f"differs from that part of a whole step by {size:.1e} ({one.where})"
            for key in sorted(want[1].keys() | got[1].keys()):
                value = want[1].get(key)
                if isinstance(value, torch.Tensor) and value.shape == one.weights.shape:
                    value = share(place, value)
                if not _difference(value, got[1].get(key)) <= tolerance:
                    return f"leaves another {key} in its state than a whole step ({one.where})"
    return ""


def _difference(want: Any, got: Any) -> float:
    """Return the largest difference as a share of the largest value; inf if not comparable."""
    if not isinstance(want, torch.Tensor) or not isinstance(got, torch.Tensor):
        return 0.0 if type(want) is type(got) and want == got else math.inf
    if want.numel() != got.numel() or (want.numel() > 1 and want.shape != got.shape):
        return math.inf
    if not want.numel():
        return 0.0
    away = (want.double() - got.double().reshape(want.shape)).abs().max()
    return float(away / want.double().abs().max().clamp(min=1e-30))
