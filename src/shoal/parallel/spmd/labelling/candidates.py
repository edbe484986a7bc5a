"""List the candidates for one operation: labels of parameters, and splits of replicated inputs.

The order is the preference: candidates without cost come first. `rules.py` finds out whether a
candidate works.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from shoal.base.plans.placement import Groups
from shoal.parallel.spmd.labelling.labels import WHOLE, Label, Split, Tiled, divides
from shoal.parallel.spmd.labelling.outcome import list_segments
from shoal.parallel.spmd.labelling.rules import list_grid_degrees

Shape = tuple[int, ...]


def enumerate_assignments(
    matrices: Mapping[str, Shape],
    vectors: Mapping[str, Shape],
    values: Sequence[Label | None],
    groups: Groups,
    degree: int,
) -> Iterator[dict[str, Label | None]]:
    """Yield labels for undecided parameters; None: rank 0 alone passes the parameter.

    Args:
        values: labels of the other inputs (None for weights).
        groups: segments of a matrix that meets whole values only; otherwise the segments of the
            values are tried.
    """
    labels = [label for label in values if label is not None]
    counts = [groups] if all(label == WHOLE for label in labels) else list_segments(labels)

    def splits(shape: Shape) -> list[Label]:
        every = itertools.product(range(len(shape)), counts)
        return [Split(d, g) for d, g in every if divides(shape[d], g, degree)]

    of_vectors: list[list[Label | None]] = []
    for shape in vectors.values():
        cut: list[Label | None] = [*splits(shape)]
        of_vectors.append([*cut, None, WHOLE] if matrices else [WHOLE, *cut, None])
    of_matrices = [splits(shape) for shape in matrices.values()]
    for some in itertools.product(*of_matrices):
        for others in itertools.product(*of_vectors):
            yield dict(zip([*matrices, *vectors], [*some, *others], strict=True))


def enumerate_cuts(
    shapes: Sequence[Shape], wants: Sequence[Label], weights: Sequence[bool], degree: int
) -> Iterator[tuple[list[Label], frozenset[int]]]:
    """Yield (labels, positions that only rank 0 passes), with some replicated inputs split.

    The order: unchanged; whole weights from rank 0 alone; one whole input cut; two cut.
    """
    yield list(wants), frozenset()
    alone = [k for k, label in enumerate(wants) if label == WHOLE and weights[k]]
    if alone:
        yield list(wants), frozenset(alone)
    options = {
        k: list(enumerate_part_labels(shape, wants, degree))
        for k, (shape, label) in enumerate(zip(shapes, wants, strict=True))
        if label == WHOLE
    }
    for count in (1, 2):
        for places in itertools.combinations(options, count):
            for labels in itertools.product(*(options[k] for k in places)):
                tried = list(wants)
                for k, label in zip(places, labels, strict=True):
                    tried[k] = label
                yield tried, frozenset()


def enumerate_part_labels(shape: Shape, wants: Sequence[Label], degree: int) -> Iterator[Label]:
    """Yield ways to split a replicated tensor, from the labels of the operation's other inputs."""
    every = list(itertools.product(range(len(shape)), list_segments(wants)))
    for d, g in every:
        if divides(shape[d], g, degree):
            yield Split(d, g)
    for outer in list_grid_degrees(wants, degree):
        inner = degree // outer
        for d, g in every:
            if divides(shape[d], g, outer):
                yield Tiled(((outer, Split(d, g)), (inner, WHOLE)))
            if divides(shape[d], g, inner):
                yield Tiled(((outer, WHOLE), (inner, Split(d, g))))
