"""Distances of a layout's tensors from those of one process, tensor by tensor.

Differences are norms of differences over the norm of the whole: of the whole gradient for
gradients, of all weights for weights. A number that is not finite on one side only is infinitely
far away.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from shoal.proof.tensor_spill import Tensors

Named = Iterable[tuple[str, torch.Tensor]]


@dataclass
class TensorDistances:
    """Distances by name, infinite for a tensor of one side alone.

    Attributes:
        rows: of every step's gradients, 0 where they are not judged, and whether both sides have
            it.
        scales: of every step: norm of the whole gradient of one process.
        weights, buffers: at the end.
        shapes: of weights.
    """

    rows: list[dict[str, tuple[float, bool]]] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    weights: dict[str, float] = field(default_factory=dict)
    buffers: dict[str, float] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def add_row(self, expected: Tensors, got: Named, judged: bool = True) -> None:
        """Append the distances of one more step's gradients from those of one process.

        Args:
            expected: gradients of one process, by name.
            got: (name, gradient) of the layout.
            judged: False: record distance 0, and only compare which names have a gradient.
        """
        off, names, scale = _measure_differences(expected, got, judged)
        self.rows.append(
            {
                n: (share_of_norm(size, scale), n in names and n in expected)
                for n, size in off.items()
            }
        )
        self.scales.append(scale)

    def end(self, weights: Tensors, buffers: Tensors, got: Named) -> None:
        """Compare final tensors with one process's; ignore tensors that only `got` has."""
        others: dict[str, torch.Tensor] = {}

        def of_weights() -> Named:
            for name, tensor in got:
                if name in weights:
                    self.shapes[name] = tuple(tensor.shape)
                    yield name, tensor
                elif name in buffers:
                    others[name] = tensor.clone()

        off, _, whole = _measure_differences(weights, of_weights(), True)
        self.weights = {name: share_of_norm(size, whole) for name, size in off.items()}
        for name, tensor in buffers.items():
            size = difference_norm(tensor, others.get(name))
            self.buffers[name] = share_of_norm(size, max(1.0, norm_over([tensor])))


def _measure_differences(
    expected: Tensors, got: Named, judged: bool
) -> tuple[dict[str, float], set[str], float]:
    """Return (norm of each difference, in one process's order; names of `got`; total norm)."""
    sizes: dict[str, float] = {}
    norms: dict[str, float] = {}
    for name, theirs in got:
        sizes[name] = 0.0 if name in expected else math.inf
        if judged and name in expected:
            ours = expected[name]
            sizes[name], norms[name] = difference_norm(ours, theirs), norm_over([ours])
    names = set(sizes)
    for name in expected:
        if name not in names:
            sizes[name] = math.inf
            norms[name] = norm_over([expected[name]]) if judged else 0.0
    order = [*expected, *(name for name in sizes if name not in expected)]
    whole = torch.linalg.vector_norm(torch.tensor([*norms.values()], dtype=torch.float64))
    return {name: sizes[name] for name in order}, names, float(whole)


def difference_norm(ours: torch.Tensor, theirs: torch.Tensor | None) -> float:
    """Return the norm of the difference; infinite where one is missing, or integers differ."""
    if theirs is None or ours.shape != theirs.shape:
        return math.inf
    theirs = theirs.to(ours.device)
    if not ours.is_floating_point():
        return 0.0 if torch.equal(ours, theirs) else math.inf
    return float(torch.linalg.vector_norm(ours.double() - theirs.double()))


def number_distance(ours: float | None, theirs: float | None, scale: float) -> float:
    """Return how far two numbers are apart, as a share of ours, or of a larger `scale`."""
    if ours is None or theirs is None:
        return 0.0 if ours is theirs else math.inf
    return share_of_norm(abs(ours - theirs), max(abs(ours), scale))


def share_of_norm(difference: float, whole: float) -> float:
    """Return a difference as a share of the whole; infinite if it is not a number."""
    if difference == 0:
        return 0.0
    return difference / whole if whole > 0 and math.isfinite(difference) else math.inf


def norm_over(tensors: Iterable[torch.Tensor]) -> float:
    """Return the Euclidean norm over all floating-point tensors, one in memory at a time."""
    norms = [torch.linalg.vector_norm(t.double()) for t in tensors if t.is_floating_point()]
    return float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0
