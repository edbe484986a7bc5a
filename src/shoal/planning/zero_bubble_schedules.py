"""Schedules with less idle time than 1f1b: interleaved, zero-bubble and zbv, for one rank.

p ranks, m micro-batches; kinds of actions and sources as in `pipeline_schedules.py`.
"""

from __future__ import annotations

from shoal.base.plans.pipeline_actions import Action


def interleaved_actions(rank: int, p: int, m: int, chunks: int) -> list[Action]:
    """Return the interleaved 1f1b actions: item k is micro-batch k mod p of its group, by chunk."""
    total = m * chunks

    def item(k: int, backward: bool) -> Action:
        group, within = divmod(k, p * chunks)
        chunk, place = divmod(within, p)
        if backward:
            chunk = chunks - 1 - chunk
        return Action("B" if backward else "F", chunk * p + rank, group * p + place)

    ahead = min(2 * (p - 1 - rank) + (chunks - 1) * p, total)
    acts = [item(k, backward=False) for k in range(ahead)]
    for k in range(total - ahead):
        acts += [item(ahead + k, backward=False), item(k, backward=True)]
    return acts + [item(k, backward=True) for k in range(total - ahead, total)]


def zero_bubble_actions(rank: int, p: int, m: int) -> list[Action]:
    """Return the zero-bubble actions: 1f1b whose W comes `rank` micro-batches later.

    W fills the time in which 1f1b would idle on this rank. Rank i keeps p − i micro-batches open as
    in 1f1b, and i more that wait for W: p on every rank, as many as 1f1b's first rank.
    """
    ahead = min(p - rank, m)
    acts = [Action("F", rank, j) for j in range(ahead)]
    for j in range(m):
        acts.append(Action("I", rank, j))
        if j >= rank:
            acts.append(Action("W", rank, j - rank))
        if ahead + j < m:
            acts.append(Action("F", rank, ahead + j))
    return acts + [Action("W", rank, j) for j in range(max(0, m - rank), m)]


def zbv_actions(rank: int, p: int, m: int) -> list[Action]:
    """Return the zbv actions: stage `rank` goes down the V, stage 2p − 1 − rank comes up.

    The order is that of at least 2p − 1 micro-batches; actions of micro-batches that do not exist
    are removed from it, and leave gaps.
    """
    n = max(m, 2 * p - 1)
    down, up = rank, 2 * p - 1 - rank
    acts: list[Action] = []
    done = {(kind, stage): 0 for kind in "FIW" for stage in (down, up)}

    def do(stage: int, kinds: str) -> None:
        for kind in kinds:
            j = done[kind, stage]
            done[kind, stage] += 1
            if j < m:
                acts.append(Action(kind, stage, j))

    for _ in range(2 * (p - rank) - 1):
        do(down, "F")
    for _ in range(rank):
        do(up, "F")
        do(down, "F")
    for _ in range(p - rank):
        do(up, "FIW")
    while done["F", up] < n:
        if done["F", down] < n:
            do(down, "F")
        do(down, "IW")
        do(up, "FIW")
    for _ in range(rank):
        do(down, "I")
        do(up, "I")
    for _ in range(p - rank):
        do(down, "IW")
    for stage in (up, down):
        do(stage, "W" * (n - done["W", stage]))
    return acts
