"""Two groups of parameters whose gradients are summed over different ranks: one reducer for both.

Under expert parallelism a rank's experts are held by a part of its data-parallel ranks, all else by
all of them. A technique that knows one group of ranks is applied twice, to the experts and to the
rest, and what it made is put together: the reducer below asks both, the rest first, in the same
order on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from shoal.base.errors import BugError
from shoal.parallel.program import Program, Reducer


def apply(program: Program, technique: Callable[[Program], Program]) -> Program:
    """`technique` on the parameters of `program.apart`, and on the others, each by its ranks."""
    parts = [technique(part) for part in divided(program)]
    local = {name: one for part in parts for name, one in part.local.items()}
    fresh = [hook for part in parts for hook in part.on_close[len(program.on_close) :]]
    return replace(
        program,
        reducer=BothReducers(list(program.parameters), parts),
        # The module's own order, so that sums over parameters run as they would elsewhere.
        local={name: local[name] for name in program.parameters if name in local},
        parts={name: kept for part in parts for name, kept in part.parts.items()},
        copies=parts[0].copies,
        copies_apart={name: part.copies for part in parts[1:] for name in part.parameters},
        on_close=(*program.on_close, *fresh),
    )


def divided(program: Program) -> list[Program]:
    """The program of what all data-parallel ranks hold, then one for each group of `apart`."""
    groups = {world.ranks: world for world in program.apart.values()}
    worlds = {(): program.data, **groups}
    found = []
    for key, world in worlds.items():
        names = {
            name
            for name in program.parameters
            if (program.apart[name].ranks if name in program.apart else ()) == key
        }
        buckets = tuple(b for b in program.plan.buckets if b.names[0] in names)
        found.append(
            replace(
                program,
                parameters={n: p for n, p in program.parameters.items() if n in names},
                plan=replace(program.plan, buckets=buckets),
                data=world,
            )
        )
    return found


class BothReducers:
    """See `program.Reducer` for the order of calls; each call goes to all parts in turn."""

    def __init__(self, names: Sequence[str], parts: Sequence[Program]) -> None:
        self.names = names
        self.parts = [(list(part.parameters), _reducer(part)) for part in parts]

    @property
    def reducers(self) -> list[Reducer]:
        """Of the parts, in order."""
        return [reducer for _, reducer in self.parts]

    def begin(self, rounds: int) -> None:
        """A step begins."""
        for reducer in self.reducers:
            reducer.begin(rounds)

    def arm(self, last: bool) -> None:
        """A backward pass comes."""
        for reducer in self.reducers:
            reducer.arm(last)

    def passed(self, counted: bool) -> None:
        """It is over."""
        for reducer in self.reducers:
            reducer.passed(counted)

    def finish(self) -> None:
        """All sums are there."""
        for reducer in self.reducers:
            reducer.finish()

    def used(self) -> list[bool]:
        """Which parameters got a gradient on this rank, in the program's order."""
        told = {
            name: used
            for names, reducer in self.parts
            for name, used in zip(names, reducer.used(), strict=True)
        }
        return [told[name] for name in self.names]

    def local_norms(self) -> list[torch.Tensor]:
        """Norms of what this rank computed."""
        return [norm for reducer in self.reducers for norm in reducer.local_norms()]

    def sums(self) -> list[torch.Tensor]:
        """The sums of all parts."""
        return [tensor for reducer in self.reducers for tensor in reducer.sums()]

    def summed(self) -> list[str]:
        """A parameter of each."""
        return [name for reducer in self.reducers for name in reducer.summed()]

    def publish(self) -> None:
        """All ranks see the new weights."""
        for reducer in self.reducers:
            reducer.publish()


def _reducer(program: Program) -> Reducer:
    if program.reducer is None:
        raise BugError("a technique gave no reducer")
    return program.reducer
