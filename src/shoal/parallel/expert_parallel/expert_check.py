"""Check that an expert layer is a sum over its experts, by running it.

The check runs in float64 (or in the layer's dtype, if its kernels support no other), on tokens of
the layer's width with random choices (one expert gets none). The layer's outputs and all gradients
must equal those of the parts:

    layer(x, chosen, w)  =  Σ over ranks, Σ over their places   w · part(x, own expert, 1)

A part is the same layer with the parameters that a rank would hold. A layer that keeps its number
of experts in attributes needs the part's number there; trial runs find these attributes. Layers
that draw random numbers are refused: tokens of several ranks meet in them, so the draws would
depend on the layout.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call

from shoal.parallel._torch import get_generators
from shoal.parallel.expert_parallel.expert_layer import override_expert_count
from shoal.trace.find.listed_experts import ListedExperts
from shoal.trace.find.stacked_experts import ExpertLayer
from shoal.trace.isolation.module_copies import copy_module

TOKENS = 24
"""Number of tokens sent through the layer; few, as it runs with all its experts in float64."""

DIGITS = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Largest relative difference by dtype; in shorter dtypes `COARSE`."""

COARSE = 0.03


class NotExpertsError(Exception):
    """Raised if a layer is no sum over its experts; the text is a one-line reason."""


def check_layer(layer: ExpertLayer, degree: int) -> ExpertLayer:
    """Check a layer; return it with the attributes to set when it holds 1/degree of its experts.

    Raises:
        NotExpertsError: the layer is no sum over its experts.
    """
    try:
        return _check_in_dtype(torch.float64, layer, degree)
    except RuntimeError:  # e.g. grouped matrix products exist for narrower dtypes only
        own = next(p.dtype for p in layer.part.parameters())
        try:
            return _check_in_dtype(own, layer, degree)
        except RuntimeError as failure:
            raise NotExpertsError(
                f"it fails on other tokens: {str(failure).partition(chr(10))[0]}"
            ) from failure


def check_rows(layer: ListedExperts) -> None:
    """Check that an expert of a list treats every row alike, by running one expert.

    Raises:
        NotExpertsError: the expert mixes rows or draws random numbers.
    """
    twin = copy_module(layer.entries[0]).to(torch.float64).train()
    draws = _seeded_generator(layer.experts)
    rows = torch.randn(TOKENS, layer.sample.shape[1], generator=draws, dtype=torch.float64)
    rows = rows.to(layer.sample.device)
    with torch.random.fork_rng():
        before = _random_state(rows.device)
        whole = _run_rows(twin, [rows])
        if not torch.equal(before, _random_state(rows.device)):
            raise NotExpertsError(
                "it draws random numbers (dropout), which would depend on where its rows are"
            )
        parts = _run_rows(twin, list(rows.split([1, TOKENS // 2, TOKENS - 1 - TOKENS // 2])))
    worst = max(_relative_difference(a, b) for a, b in zip(whole, parts, strict=True))
    if worst > DIGITS[torch.float64]:
        raise NotExpertsError(
            f"its rows see each other: apart they are off by {worst:.0e} of themselves"
        )


def _run_rows(expert: nn.Module, groups: list[Tensor]) -> list[Tensor]:
    """Return the results for groups of rows, then gradients of rows and parameters."""
    leaves = [rows.clone().requires_grad_() for rows in groups]
    results = [expert(rows) for rows in leaves]
    if not all(isinstance(one, Tensor) and one.dim() == 2 for one in results):
        raise NotExpertsError("it does not give one row for every row")
    result = torch.cat(results)
    if len(result) != TOKENS:
        raise NotExpertsError("it does not give one row for every row")
    inputs = [*leaves, *(p for p in expert.parameters() if p.requires_grad)]
    gradients = torch.autograd.grad(
        result, inputs, result.detach().flip(0), allow_unused=True, materialize_grads=True
    )
    count = len(leaves)
    return [result.detach(), torch.cat(gradients[:count]), *gradients[count:]]


def _check_in_dtype(dtype: torch.dtype, layer: ExpertLayer, degree: int) -> ExpertLayer:
    twin = copy_module(layer.part).to(dtype).train()
    values = _make_values(layer, dtype)
    upstream = values[0].flip(0)
    with torch.random.fork_rng():
        before = _random_state(values[0].device)
        whole = _run_whole(layer, twin, values, upstream)
        if not torch.equal(before, _random_state(values[0].device)):
            raise NotExpertsError(
                "it draws random numbers (dropout), which would depend on where its tokens are"
            )
    failed = "the outputs are not the weighted sum over its experts"
    for counts in _enumerate_count_attributes(layer):
        told = replace(layer, counts=counts)
        try:
            parts = _run_parts(told, twin, values, upstream, degree)
        except (RuntimeError, IndexError, ValueError) as failure:
            failed = str(failure).partition("\n")[0]
            continue
        worst = max(_relative_difference(a, b) for a, b in zip(whole, parts, strict=True))
        if worst <= DIGITS.get(dtype, COARSE):
            return told
        failed = f"with its experts apart it is off by {worst:.0e} of itself"
    raise NotExpertsError(failed)


def _make_values(layer: ExpertLayer, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Make (tokens, chosen, weights) like the sample's, but more, and one expert idle."""
    tokens, chosen, _ = layer.sample
    draws = _seeded_generator(layer.experts)
    made = torch.randn(TOKENS, tokens.shape[1], generator=draws, dtype=torch.float64)
    busy = max(layer.experts - 1, chosen.shape[1])
    order = torch.rand(TOKENS, busy, generator=draws).argsort(1)[:, : chosen.shape[1]]
    odds = torch.rand(TOKENS, chosen.shape[1], generator=draws, dtype=torch.float64)
    device = tokens.device
    picked = order.to(device=device, dtype=chosen.dtype)
    return made.to(device, dtype), picked, (odds + 0.1).to(device, dtype)


def _random_state(device: torch.device) -> Tensor:
    """Return the random state that draws on this device change."""
    return get_generators(device)[-1].get_state()


def _seeded_generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _enumerate_count_attributes(layer: ExpertLayer) -> Iterator[tuple[str, ...]]:
    """Yield sets of attributes that may hold the number of experts: none, one, all."""
    named = [
        name
        for name, value in vars(layer.part).items()
        if type(value) is int and value == layer.experts
    ]
    yield ()
    yield from ((name,) for name in named)
    for count in range(2, len(named) + 1):
        yield from itertools.combinations(named, count)


def _run_whole(
    layer: ExpertLayer, twin: nn.Module, values: tuple[Tensor, ...], upstream: Tensor
) -> list[Tensor]:
    """Return outputs, then gradients of tokens, weights and all parameters."""
    tokens, chosen, weights = (v.clone() for v in values)
    inputs = [tokens.requires_grad_(), weights.requires_grad_(), *twin.parameters()]
    output = layer.call(twin, tokens, chosen, weights)
    if not isinstance(output, Tensor) or output.shape != tokens.shape:
        raise NotExpertsError("it does not give one row for every token")
    gradients = torch.autograd.grad(
        output, inputs, upstream.to(output), allow_unused=True, materialize_grads=True
    )
    return [output.detach(), *gradients]


def _run_parts(
    layer: ExpertLayer,
    twin: nn.Module,
    values: tuple[Tensor, ...],
    upstream: Tensor,
    degree: int,
) -> list[Tensor]:
    """Return the same results computed by ranks that hold 1/degree of the experts each."""
    held = layer.experts // degree
    tokens, chosen, weights = (v.clone() for v in values)
    inputs = [tokens.requires_grad_(), weights.requires_grad_()]
    names = [name for name, _ in twin.named_parameters()]
    wholes = [p.detach().clone().requires_grad_() for p in twin.parameters()]
    output = torch.zeros_like(tokens)
    for rank in range(degree):
        own = {n: p[rank * held : (rank + 1) * held] for n, p in zip(names, wholes, strict=True)}
        here = (chosen // held == rank).nonzero()  # (token, choice)
        if not len(here):
            continue
        rows = tokens[here[:, 0]]
        whose = chosen[here[:, 0], here[:, 1]].sub(rank * held).unsqueeze(1)
        ones = rows.new_ones(len(rows), 1)

        with override_expert_count(twin, layer.counts, held):
            results = layer.call(partial(_call_with_parameters, twin, own), rows, whose, ones)
        scaled = results * weights[here[:, 0], here[:, 1]].unsqueeze(1)
        output = output.index_add(0, here[:, 0], scaled)
    gradients = torch.autograd.grad(
        output, [*inputs, *wholes], upstream.to(output), allow_unused=True, materialize_grads=True
    )
    return [output.detach(), *gradients]


def _call_with_parameters(
    twin: nn.Module, own: dict[str, Tensor], *args: Tensor, **named: Tensor
) -> Tensor:
    return functional_call(twin, own, args, named)


def _relative_difference(ours: Tensor, theirs: Tensor) -> float:
    size = float(ours.norm())
    return float((ours - theirs).norm()) / (size or 1.0)
