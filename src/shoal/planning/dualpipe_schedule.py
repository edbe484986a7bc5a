"""DualPipe's actions of one rank: micro-batches enter the pipeline at both ends.

Rank i holds stage i of the first model copy and stage p − 1 − i of the second copy. "Near" is the
direction that reaches the rank first, "far" the other; both do the same work. The eight phases:

    1  near F                      2  near F, far F              3  far I, far W, far F
    4  near F, far B, far F, near B  (repeated: the steady state)
    5  far B, far F, near B        6  far B, near B, whose second half is cut: I now, W kept
    7  a kept W, near I            8  the kept W

Source: DeepSeek-V3 technical report 2024, section 3.2.1, and its published implementation's order.
"""

from __future__ import annotations

from collections import deque

from shoal.base.plans.pipeline_actions import Action


class _DualPipeRank:
    """One rank's list of actions, with the next micro-batch of each direction."""

    def __init__(self, rank: int, p: int, m: int):
        first_copy = (rank, 0)
        second_copy = (2 * p - 1 - rank, m // 2)
        here = (first_copy, second_copy) if rank < p // 2 else (second_copy, first_copy)
        self.stage = {"near": here[0][0], "far": here[1][0]}
        self.first = {"near": here[0][1], "far": here[1][1]}
        self.forwards = {"near": 0, "far": 0}
        self.backwards = {"near": 0, "far": 0}
        self.kept: deque[Action] = deque()
        self.acts: list[Action] = []
        self.pairs: list[int] = []

    def forward(self, side: str) -> None:
        j = self.first[side] + self.forwards[side]
        self.forwards[side] += 1
        self.acts.append(Action("F", self.stage[side], j))

    def backward(self, side: str, cut: bool = False) -> None:
        j = self.first[side] + self.backwards[side]
        self.backwards[side] += 1
        self.acts.append(Action("I" if cut else "B", self.stage[side], j))
        if cut:
            self.kept.append(Action("W", self.stage[side], j))

    def both(self, forward: str, backward: str, *, pair: bool = True) -> None:
        if pair:
            self.pairs.append(len(self.acts))
        self.forward(forward)
        self.backward(backward)

    def weight(self) -> None:
        self.acts.append(self.kept.popleft())


def make_dualpipe_actions(rank: int, p: int, m: int) -> tuple[list[Action], tuple[int, ...]]:
    """Return one rank's actions and pairs; p and m are even and m ≥ 2p, which the caller checks.

    >>> " ".join(a.text() for a in make_dualpipe_actions(0, 2, 4)[0][:6])
    'F0@0 F2@3 F1@0 B2@3 F3@3 B0@0'
    """
    half = p // 2
    depth = min(rank, p - 1 - rank)
    outer, inner = half - depth - 1, depth + 1
    do = _DualPipeRank(rank, p, m)
    for _ in range(2 * outer):
        do.forward("near")
    for _ in range(inner):
        do.forward("near")
        do.forward("far")
    for _ in range(outer):
        do.backward("far", cut=True)
        do.weight()
        do.forward("far")
    for i in range(m // 2 - p + inner):
        # The two middle ranks do not pair their first F and B: the neighbour gets F sooner.
        do.both("near", "far", pair=i > 0 or outer > 0)
        do.both("far", "near")
    for _ in range(outer):
        do.backward("far")
        do.both("far", "near")
    _append_cooldown(do, depth, outer, inner)
    return do.acts, tuple(do.pairs)


def _append_cooldown(do: _DualPipeRank, depth: int, outer: int, inner: int) -> None:
    """Append phases 6 to 8: no forward is left, so W fills the idle time."""
    cut = False
    for i in range(inner):
        cut = cut or (i == inner // 2 and depth % 2 == 1)
        do.backward("far", cut)
        cut = cut or (i == inner // 2 and depth % 2 == 0)
        do.backward("near", cut)
    for _ in range(outer):
        do.weight()
        do.backward("near", cut=True)
    while do.kept:
        do.weight()
