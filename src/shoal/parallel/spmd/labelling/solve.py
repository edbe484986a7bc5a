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
from shoal.parallel.spmd.labelling.operation_terms import Choice, Conflict, may_stay_split
from shoal.parallel.spmd.labelling.problem import Problem

SEGMENTS = (3, 2)
"""Numbers of segments tried for a fused weight."""

DEAR = 20
"""A side result stays split if gathering it makes more than 1 / DEAR of the parameters whole."""


def solve(
    problem: Problem,
    overrides: Mapping[str, str] | None = None,
) -> tuple[Labelling, dict[str, str]]:
    """Return the best labelling found, and per whole parameter the reason why it is whole."""
    found = _searched(problem, overrides or {})
    if any(step.rule.averaged for step in found.best.steps.values()):
        # A norm with a split input can leave more weights whole after it (low-rank queries).
        problem.averages = False
        other = _searched(problem, overrides or {})
        problem.averages = _cost(found.best) < _cost(other.best)
        found = found if problem.averages else other
    found.check_said()
    return found.best, found.reasons


def _searched(problem: Problem, overrides: Mapping[str, str]) -> _Search:
    found = _run(_Search(problem, _said(problem, overrides)))
    if found.passed_over:  # a whole weight removed more conflicts; segments may end better
        other = _run(_Search(problem, _said(problem, overrides), segments_first=True))
        found = min(found, other, key=lambda search: _cost(search.best))
    return found


def _run(search: _Search) -> _Search:
    while search.best.conflicts and search.improve():
        pass
    search.take_back()
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
        self, problem: Problem, said: Mapping[str, Choice], *, segments_first: bool = False
    ) -> None:
        self.problem, self.said, self.segments_first = problem, said, segments_first
        self.passed_over = False
        self.taken_apart = _taken_apart(problem.traced.graph)
        self.lazy: frozenset[int] = frozenset()  # outputs that stay split
        self.choices = dict(said)
        self.given_up: list[str] = []
        self.reasons = {n: "whole: as asked" for n, one in said.items() if one.kind == "whole"}
        self.best = self._label(self.choices)

    def _label(self, choices: Mapping[str, Choice]) -> Labelling:
        return Labelling(self.problem, choices, None, self.lazy)

    def improve(self) -> bool:
        """Take the best step to remove a conflict; return False if nothing is left to try."""
        now = self.best
        conflict = next((c for c in now.conflicts if self._movable(c)), None)
        if conflict is None:
            return False
        names = self._movable(conflict)
        options = []
        for name in names:
            for choice in (Choice("whole"), *(Choice("split", g) for g in self._segments(name))):
                if choice != self.choices.get(name, Choice()):
                    changed = {**self.choices, name: choice}
                    options.append((self._label(changed), changed, name, choice))
        if len(names) > 1:  # a fused weight, and the adapter that is added to it
            for groups in self._segments(names[0]):
                changed = {**self.choices, **dict.fromkeys(names, Choice("split", groups))}
                options.append((self._label(changed), changed, names[0], Choice("split", groups)))
        best = min(options, key=lambda option: _cost(option[0]))
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
            changed = {**self.choices, **{name: Choice("whole") for name in names}}
            found = self._label(changed)
        if self._is_dear(conflict, now, found):
            self.lazy |= {conflict.output or 0}
            self.best = self._label(self.choices)
            return True
        shape = "×".join(str(n) for n in conflict.value.meta["val"].shape)
        why = f"whole: {_short(conflict.node)} needs all of a split value [{shape}] on every rank"
        self.reasons.update({name: why for name in gone})
        self.given_up += gone
        self.best, self.choices = found, changed
        return True

    def _movable(self, conflict: Conflict) -> list[str]:
        """Return the weights behind a conflict that still have another choice."""
        return [
            name
            for name in conflict.origins
            if name not in self.said
            and self.problem.by_name[name].meta["val"].dim() > 1
            and self.choices.get(name, Choice()).kind != "whole"
        ]

    def _segments(self, name: str) -> list[Groups]:
        """Return the segments in which a fused weight is tried."""
        shape = self.problem.by_name[name].meta["val"].shape
        told = [groups for size in shape for groups in self.taken_apart.get(size, ())]
        return list(dict.fromkeys([*told, *SEGMENTS]))

    def _is_dear(self, conflict: Conflict, now: Labelling, found: Labelling) -> bool:
        """Return whether a side result (e.g. attention weights) stays split rather than whole.

        It does if gathering it would make too many weights whole. Most often nothing reads a side
        result. The first result is the layer's own.
        """
        label = now.label(conflict.value)
        if not conflict.output or not may_stay_split(label):
            return False
        every = sum(self.problem.size(node) for node in self.problem.parameters)
        return (_whole_elements(found) - _whole_elements(now)) * DEAR > every

    def take_back(self) -> None:
        """Split weights again that need not be whole, in the order in which they became whole."""
        for name in self.given_up:
            changed = {**self.choices, name: self.said.get(name, Choice())}
            other = self._label(changed)
            if _cost(other) < _cost(self.best):
                self.choices, self.best = changed, other
                self.reasons.pop(name, None)

    def check_said(self) -> None:
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


def _taken_apart(graph: fx.Graph) -> dict[int, list[Groups]]:
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
                _note(found, value, pieces)
        _note(found, value, slices)
    return found


def _note(
    found: dict[int, list[Groups]], value: Tensor, pieces: Mapping[int, Sequence[int]]
) -> None:
    for dim, sizes in pieces.items():
        if len(sizes) > 1 and sum(sizes) == value.shape[dim] and min(sizes) > 0:
            every = found.setdefault(int(value.shape[dim]), [])
            if (groups := proportions(sizes)) not in every:
                every.append(groups)


def _cost(labelling: Labelling) -> tuple[int, int, int]:
    """Return (gathers, whole elements, summed elements of values that no weight made)."""
    return len(labelling.conflicts), _whole_elements(labelling), labelling.summed


def _whole_elements(labelling: Labelling) -> int:
    problem = labelling.problem
    return sum(
        problem.size(node)
        for node, name in problem.parameters.items()
        if labelling.parameters.get(name, WHOLE) == WHOLE
    )


def _said(problem: Problem, overrides: Mapping[str, str]) -> dict[str, Choice]:
    said = {}
    for pattern, kind in overrides.items():
        for name in problem.by_name:
            if fnmatchcase(name, pattern):
                said[name] = Choice(kind)
    return said


def _short(node: object) -> str:
    target = getattr(node, "target", node)
    return str(target).removeprefix("aten.").split(".")[0]
