"""Diagnosis of a block's failed check: the difference, and the likely cause, found by undoing it.

difference      likely cause
outputs         a bias that every rank adds · a fused weight cut into the wrong segments · a
                rank that works with another rank's part of what all of them hold
gradients only  a sum over ranks that is missing in the backward pass, or is done twice
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from shoal.parallel.spmd.block_trial import BlockTrial, TrialResults, measure_relative_distance
from shoal.parallel.spmd.labelling.labels import Label, Split, divides, format_segments

SEGMENTS = (1, 2, 3, 4)
"""Numbers of segments that the diagnosis tries."""


@dataclass(frozen=True)
class CheckFinding:
    """Mistake of a split block, and its likely cause.

    Attributes:
        block: name of the block.
        outputs: difference of the outputs, relative to their norm; 0 if they are right.
        wrong: names of the gradients that differ, that of the last parameter first.
        cause: the likely cause.
        fails: text of the exception, if the split block does not run at all.
    """

    block: str
    outputs: float
    wrong: tuple[str, ...]
    cause: str
    fails: str = ""

    def text(self) -> str:
        """Return the finding as one line."""
        if self.fails:
            return f"split, it does not run ({self.fails})"
        what = f"its outputs differ by {self.outputs:.1e} of their norm"
        if not self.outputs:
            more = f" and {len(self.wrong) - 1} more" if len(self.wrong) > 1 else ""
            what = f"outputs are right, the gradient of {self.wrong[0]}{more} differs"
        return f"split, it computes something else: {what}; likely cause: {self.cause}"


def diagnose_outputs(trial: BlockTrial, tolerance: float) -> str:
    """Name the likely cause of wrong outputs; the split inside, if any, is right by itself."""
    expected = trial.run_unsplit().outputs

    def mended(got: TrialResults, wanted: list[Tensor]) -> bool:
        return trial.max_over_ranks(measure_relative_distance(got.outputs, wanted)) <= tolerance

    degree = trial.axis.size
    biases = _row_biases(trial)

    def divided(name: str, value: Tensor) -> Tensor:
        return value / degree if name in biases else value

    if biases and mended(trial.run_split(divided), expected):
        return f"every rank adds {' and '.join(biases)}, which so counts {degree} times"
    for size, names in _group_by_cut_size(trial).items():
        for segments in SEGMENTS:
            cuts: dict[str, Label] = {}
            for n in names:
                label = trial.split.parameters[n]
                if isinstance(label, Split) and divides(size, segments, degree):
                    cuts[n] = Split(label.dim, segments)
            if not cuts or cuts == {n: trial.split.parameters[n] for n in names}:
                continue
            if mended(trial.run_split(labels=cuts), expected):
                now = format_segments(trial.split.parameters[names[0]]).removeprefix(" in ")
                return (
                    f"{' and '.join(names)} hold {segments} segments and were cut as {now or 'one'}"
                )
    shared = _shared_matrices(trial)

    def mean_of_shared(name: str, value: Tensor) -> Tensor:
        return value.mean(0, keepdim=True).expand_as(value) if name in shared else value

    if shared and mended(
        trial.run_split(mean_of_shared), trial.run_unsplit(mean_of_shared).outputs
    ):
        return f"ranks work with the wrong part of {' and '.join(shared)}, which all hold"
    return "an exchange in the forward pass is missing, or stands at the wrong place"


def diagnose_gradients(
    trial: BlockTrial,
    tolerance: float,
    wrong: Sequence[str],
    got: TrialResults,
    expected: TrialResults,
) -> str:
    """Name the likely cause of wrong gradients if the outputs are right."""
    degree = trial.axis.size
    parts, repeated = [], []
    for n in wrong:
        if n not in got.own:  # it is cut
            continue
        wanted, summed = expected.gradients[n], trial.sum_over_ranks(got.own[n])
        if trial.max_over_ranks(expected.relative_difference(summed - wanted)) <= tolerance:
            parts.append(n)
        elif (
            trial.max_over_ranks(expected.relative_difference(summed - wanted * degree))
            <= tolerance
        ):
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


def _row_biases(trial: BlockTrial) -> list[str]:
    """Return names of replicated vectors in a layer that has a split weight."""
    layers = {n.rpartition(".")[0] for n in trial.split.parameters}
    return [
        n
        for n, p in trial.parameters.items()
        if p.dim() == 1 and n not in trial.split.parameters and n.rpartition(".")[0] in layers
    ]


def _group_by_cut_size(trial: BlockTrial) -> dict[int, list[str]]:
    """Group cut parameters by the size of the dim that is cut, so that a weight meets its bias."""
    sizes: dict[int, list[str]] = {}
    for n, label in trial.split.parameters.items():
        if isinstance(label, Split):
            sizes.setdefault(trial.parameters[n].shape[label.dim], []).append(n)
    return sizes


def _shared_matrices(trial: BlockTrial) -> list[str]:
    """Return names of matrices of which several ranks hold the same part."""
    return [
        n
        for n, p in trial.parameters.items()
        if p.dim() > 1 and not isinstance(trial.split.parameters.get(n), Split)
    ]
