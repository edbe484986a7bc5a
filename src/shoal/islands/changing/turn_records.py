"""Records that the driver of an island's member and its training thread exchange."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from shoal.islands.changing.change_merge import MergedChanges
from shoal.islands.membership.committed_turn import CommittedTurn


@dataclass(frozen=True)
class AppliedTurn:
    """A committed turn for the training thread.

    Attributes:
        merged: what this member merged itself; None: it merged nothing, or has to heal.
        heal: its weights are not those of the turn: it loads another member's state.
        train: it has a seat in the next turn.
        absent: members of the turn before that are no committers: name → why.
        refused: those whose changes did not count: name → why.
        left_out: who decided without this member's change, and why; "" if it had none.
    """

    fact: CommittedTurn
    merged: MergedChanges | None
    heal: bool
    train: bool
    absent: dict[int, str]
    refused: dict[int, str]
    left_out: str = ""


class OfferedChange(NamedTuple):
    """A member's change of a turn, as its training thread offers it.

    Attributes:
        change, tokens, used, steps, steps_per_s, leaves: fields of `TurnProposal`.
        size_bytes: of the change · compute_s: seconds of the inner steps.
    """

    change: str
    tokens: int
    used: int
    steps: int
    steps_per_s: float
    size_bytes: int
    compute_s: float
    leaves: bool


def join_turns(first: AppliedTurn, then: AppliedTurn) -> AppliedTurn:
    """Return what the training thread has to do for two turns that came together."""
    heal = first.heal or then.heal
    merged = None if heal else then.merged or first.merged
    left_out = first.left_out or then.left_out
    return replace(then, merged=merged, heal=heal, left_out=left_out)
