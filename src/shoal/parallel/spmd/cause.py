"""Names the likely cause of a block's failed check, found by trying what would undo it.

difference      likely cause
outputs         a bias that every rank adds · a fused weight cut into the wrong segments · a
                rank that works with another rank's part of what all of them hold
gradients only  a sum over ranks that is missing in the backward pass, or is done twice
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from shoal.parallel.spmd.labels import Label, Split, divides, in_segments
from shoal.parallel.spmd.trial import Results, Trial, distance_of, norm_of

SEGMENTS = (1, 2, 3, 4)
"""Numbers of segments that are tried to name a cause."""


def in_outputs(trial: Trial, tolerance: float) -> str:
    """Name the likely cause of wrong outputs; of two axes the inner one was right by itself."""
    expected = trial.alone().outputs

    def mended(got: Results, wanted: list[Tensor]) -> bool:
        return trial.everywhere(distance_of(got.outputs, wanted)) <= tolerance

    degree = trial.axis.size
    biases = _row_biases(trial)
    divided = {n: t / degree if n in biases else t for n, t in trial.numbers()}
    if biases and mended(trial.together(divided), expected):
        return f"every rank adds {' and '.join(biases)}, which so counts {degree} times"
    for size, names in _fused(trial).items():
        for segments in SEGMENTS:
            cuts: dict[str, Label] = {}
            for n in names:
                label = trial.labels[n]
                if isinstance(label, Split) and divides(size, segments, degree):
                    cuts[n] = Split(label.dim, segments)
            if not cuts or cuts == {n: trial.labels[n] for n in names}:
                continue
            if mended(trial.together(labels=cuts), expected):
                return (
                    f"{' and '.join(names)} hold {segments} segments and were cut as "
                    f"{in_segments(trial.labels[names[0]]).removeprefix(' in ') or 'one'}"
                )
    shared = _shared_matrices(trial)
    if shared:
        alike = {
            n: t.mean(0, keepdim=True).expand_as(t) if n in shared else t
            for n, t in trial.numbers()
        }
        if mended(trial.together(alike), trial.alone(alike).outputs):
            return f"ranks work with the wrong part of {' and '.join(shared)}, which all hold"
    return "an exchange in the forward pass is missing, or stands at the wrong place"


def in_gradients(
    trial: Trial, tolerance: float, wrong: Sequence[str], got: Results, expected: Results
) -> str:
    """Name the likely cause of wrong gradients behind right outputs."""
    degree = trial.axis.size
    norm = norm_of(expected.gradients.values())
    parts, repeated = [], []
    for n in wrong:
        if n in trial.labels:
            continue
        wanted, own = expected.gradients[n], got.own[n]
        if own.shape != wanted.shape:
            continue
        summed = trial.summed(own)
        if trial.everywhere(float((summed - wanted).norm() / norm)) <= tolerance:
            parts.append(n)
        elif trial.everywhere(float((summed - wanted * degree).norm() / norm)) <= tolerance:
            repeated.append(n)
    if repeated and len(repeated) == len(wrong):
        return f"the gradient of {repeated[0]} is whole on every rank and is summed all the same"
    held = [n for n in parts if not n.startswith("input")]
    if held and len(parts) == len(wrong):
        return (
            f"all ranks hold {' and '.join(held)}, each has a part of the gradient, and nobody "
            f"sums it"
        )
    return f"a sum over ranks is missing, or done twice, in the backward pass before {wrong[0]}"


def _row_biases(trial: Trial) -> list[str]:
    """Whole vectors beside a split weight of the same layer."""
    layers = {n.rpartition(".")[0] for n in trial.labels}
    return [
        n
        for n, p in trial.parameters.items()
        if p.dim() == 1 and n not in trial.labels and n.rpartition(".")[0] in layers
    ]


def _fused(trial: Trial) -> dict[int, list[str]]:
    """Cut parameters by the size of the dim that is cut: a weight and its bias go together."""
    sizes: dict[int, list[str]] = {}
    for n, label in trial.labels.items():
        if isinstance(label, Split):
            sizes.setdefault(trial.parameters[n].shape[label.dim], []).append(n)
    return sizes


def _shared_matrices(trial: Trial) -> list[str]:
    """Matrices of which several ranks hold the same part."""
    return [
        n
        for n, p in trial.parameters.items()
        if p.dim() > 1 and not isinstance(trial.labels.get(n), Split)
    ]
