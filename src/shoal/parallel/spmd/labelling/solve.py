"""Choose which weights of a layer are split: all of them, except those that would cost a gather.

Every weight matrix starts as split. While a split value must be gathered, the search changes the
weights that split it. It tries them in segments: those into which the layer splits a value of their
size, then 3 and 2 (fused q, k, v; fused gate and up). Then it tries them whole, and keeps what
leaves the fewest gathers. At the end, weights that became whole on the way are tried as split once
more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from torch import Tensor, fx

from shoal.base.errors import PlanError
from shoal.base.plans.placement import Groups, proportions
from shoal.parallel.spmd.labelling.label_graph import Labelling
from shoal.parallel.spmd.labelling.labels import WHOLE
from shoal.parallel.spmd.labelling.operation_terms import (
    GatherConflict,
    WeightChoice,
    may_stay_split,
)
from shoal.parallel.spmd.labelling.problem import LabellingProblem

SEGMENTS = (3, 2)
"""Numbers of segments tried for a fused weight."""

DEAR = 20
"""A side result stays split if gathering it makes more than 1 / DEAR of the parameters whole."""


def solve_labelling(
    problem: LabellingProblem,
    overrides: Mapping[str, str] | None = None,
) -> tuple[Labelling, dict[str, str]]:
    """Return the best labelling found, and for each replicated parameter the reason."""
    found = _search_labelling(problem, overrides or {})
    if any(step.rule.averaged for step in found.best.steps.values()):
        # A norm with a split input can leave more weights whole after it (low-rank queries).
        problem.averages = False
        other = _search_labelling(problem, overrides or {})
        problem.averages = _rank_key(found.best) < _rank_key(other.best)
        found = found if problem.averages else other
    found.check_overrides()
    return found.best, found.reasons


def _search_labelling(problem: LabellingProblem, overrides: Mapping[str, str]) -> _Search:
    found = _run_search(_Search(problem, _match_overrides(problem, overrides)))
    if found.passed_over:  # a whole weight removed more conflicts; segments may end better
        other = _run_search(
            _Search(problem, _match_overrides(problem, overrides), segments_first=True)
        )
        found = min(found, other, key=lambda search: _rank_key(search.best))
    return found


def _run_search(search: _Search) -> _Search:
    while search.best.conflicts and search.improve():
        pass
    search.restore_splits()
    return search


class _Search:
    """State of the search for a labelling.

    Attributes:
        said: choices of the user.
        choices: choices tried now, those of the user included.
        segments_first: prefer segments that leave fewest elements whole, if they reduce the
            gathers.
        passed_over: whether `segments_first` would have made a difference.
        taken_apart: by the size of a dim, the segments into which the layer splits such values.
    """

    def __init__(
        self,
        problem: LabellingProblem,
        said: Mapping[str, WeightChoice],
        *,
        segments_first: bool = False,
    ) -> None:
        self.problem, self.said, self.segments_first = problem, said, segments_first
        self.passed_over = False
        self.taken_apart = _collect_segments(problem.traced.graph)
        self.lazy: frozenset[int] = frozenset()  # outputs that stay split
        self.choices = dict(said)
        self.given_up: list[str] = []
        self.reasons = {n: "whole: as asked" for n, one in said.items() if one.kind == "whole"}
        self.best = self._try_choices(self.choices)

    def _try_choices(self, choices: Mapping[str, WeightChoice]) -> Labelling:
        return Labelling(self.problem, choices, None, self.lazy)

    def improve(self) -> bool:
        """Take the best step to remove a conflict; return False if nothing is left to try."""
        now = self.best
        conflict = next((c for c in now.conflicts if self._changeable_weights(c)), None)
        if conflict is None:
            return False
        names = self._changeable_weights(conflict)
        options = []
        for name in names:
            for choice in (
                WeightChoice("whole"),
                *(WeightChoice("split", g) for g in self._candidate_segments(name)),
            ):
                if choice != self.choices.get(name, WeightChoice()):
                    changed = {**self.choices, name: choice}
                    options.append((self._try_choices(changed), changed, name, choice))
        if len(names) > 1:  # a fused weight, and the adapter that is added to it
            for groups in self._candidate_segments(names[0]):
                changed = {**self.choices, **dict.fromkeys(names, WeightChoice("split", groups))}
                options.append(
                    (self._try_choices(changed), changed, names[0], WeightChoice("split", groups))
                )
        best = min(options, key=lambda option: _rank_key(option[0]))
        split = [
            option
            for option in options
            if option[3].kind == "split" and len(option[0].conflicts) < len(now.conflicts)
        ]
        if split and best[3].kind == "whole":
            self.passed_over = True
            if self.segments_first:
                best = min(split, key=lambda option: _whole_elements(option[0]))
        found, changed, name, choice = best
        gone = [name] if choice.kind == "whole" else []
        if len(found.conflicts) >= len(now.conflicts):
            gone = names
            changed = {**self.choices, **{name: WeightChoice("whole") for name in names}}
            found = self._try_choices(changed)
        if self._is_costly(conflict, now, found):
            self.lazy |= {conflict.output or 0}
            self.best = self._try_choices(self.choices)
            return True
        shape = "×".join(str(n) for n in conflict.value.meta["val"].shape)
        why = f"whole: {_short(conflict.node)} needs all of a split value [{shape}] on every rank"
        self.reasons.update({name: why for name in gone})
        self.given_up += gone
        self.best, self.choices = found, changed
        return True

    def _changeable_weights(self, conflict: GatherConflict) -> list[str]:
        """Return the weights behind a conflict that still have another choice."""
        return [
            name
            for name in conflict.origins
            if name not in self.said
            and self.problem.by_name[name].meta["val"].dim() > 1
            and self.choices.get(name, WeightChoice()).kind != "whole"
        ]

    def _candidate_segments(self, name: str) -> list[Groups]:
        """List segmentations to try for a fused weight (QKV): those of the layer, then SEGMENTS."""
        shape = self.problem.by_name[name].meta["val"].shape
        told = [groups for size in shape for groups in self.taken_apart.get(size, ())]
        return list(dict.fromkeys([*told, *SEGMENTS]))

    def _is_costly(self, conflict: GatherConflict, now: Labelling, found: Labelling) -> bool:
        """Return whether gathering a side result would replicate too many weights.

        It does if gathering it would make too many weights whole. Most often nothing reads a side
        result. The first result is the layer's own.
        """
        label = now.label(conflict.value)
        if not conflict.output or not may_stay_split(label):
            return False
        every = sum(self.problem.size(node) for node in self.problem.parameters)
        return (_whole_elements(found) - _whole_elements(now)) * DEAR > every

    def restore_splits(self) -> None:
        """Split weights again that need not be replicated, in the order in which they became so."""
        for name in self.given_up:
            changed = {**self.choices, name: self.said.get(name, WeightChoice())}
            other = self._try_choices(changed)
            if _rank_key(other) < _rank_key(self.best):
                self.choices, self.best = changed, other
                self.reasons.pop(name, None)

    def check_overrides(self) -> None:
        """Refuse overrides that the labelling could not follow.

        Raises:
            PlanError: a weight matrix stays whole against the user's override.
        """
        for name, choice in self.said.items():
            if choice.kind == "whole" or self.problem.by_name[name].meta["val"].dim() < 2:
                continue
            if self.best.parameters.get(name, WHOLE) == WHOLE:
                shape = list(self.problem.by_name[name].meta["val"].shape)
                raise PlanError(
                    f"{name} {shape}: cannot be split as {choice.kind} over {self.problem.degree} "
                    f"ranks; try: whole"
                )


def _collect_segments(graph: fx.Graph) -> dict[int, list[Groups]]:
    """Return by size of a dim the segments into which the layer splits it, e.g. by slices."""
    found: dict[int, list[Groups]] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            continue
        slices: dict[int, list[int]] = {}
        for user in node.users:
            of_user = user.meta.get("val")
            several = isinstance(of_user, list | tuple)
            pieces: dict[int, list[int]] = {} if several else slices
            for piece in of_user if several else [of_user]:
                if isinstance(piece, Tensor) and piece.dim() == value.dim():
                    dims = [d for d in range(value.dim()) if piece.shape[d] != value.shape[d]]
                    if len(dims) == 1:
                        pieces.setdefault(dims[0], []).append(int(piece.shape[dims[0]]))
            if several:
                _add_segments(found, value, pieces)
        _add_segments(found, value, slices)
    return found


def _add_segments(
    found: dict[int, list[Groups]], value: Tensor, pieces: Mapping[int, Sequence[int]]
) -> None:
    for dim, sizes in pieces.items():
        if len(sizes) > 1 and sum(sizes) == value.shape[dim] and min(sizes) > 0:
            every = found.setdefault(int(value.shape[dim]), [])
            if (groups := proportions(sizes)) not in every:
                every.append(groups)


def _rank_key(labelling: Labelling) -> tuple[int, int, int]:
    """Return (gathers, replicated elements, summed elements of values that no weight made)."""
    return len(labelling.conflicts), _whole_elements(labelling), labelling.summed


def _whole_elements(labelling: Labelling) -> int:
    problem = labelling.problem
    return sum(
        problem.size(node)
        for node, name in problem.parameters.items()
        if labelling.parameters.get(name, WHOLE) == WHOLE
    )


def _match_overrides(
    problem: LabellingProblem, overrides: Mapping[str, str]
) -> dict[str, WeightChoice]:
    said = {}
    for pattern, kind in overrides.items():
        for name in problem.by_name:
            if fnmatchcase(name, pattern):
                said[name] = WeightChoice(kind)
    return said


def _short(node: object) -> str:
    target = getattr(node, "target", node)
    return str(target).removeprefix("aten.").split(".")[0]
