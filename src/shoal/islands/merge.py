"""What an island says when a fragment of the model is exchanged, and how the exchange ended."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from shoal.islands.admission import Verdict
from shoal.islands.commit_vote import Ballot


@dataclass(frozen=True)
class Say:
    """What an island says of itself beside its message.

    tokens       that its change was learnt from
    used         samples of the round's data that it used
    steps_per_s  of its inner steps, without waiting for others
    stop         somebody asked it to stop after this round
    """

    tokens: int
    used: int
    steps_per_s: float
    stop: bool = False


@dataclass(frozen=True)
class Merge:
    """How the exchange of one fragment ended, the same on every rank of all islands.

    committed   W and u have moved · why  if not
    partners    islands that took part · verdict  whose changes counted
    ballots     of all islands of the run, in their order
    plain       means of what no optimizer moves (running statistics), by name
    seconds     from the message to the vote · sent_bytes  coded, by this rank
    spread      how far apart the partners' weights are, where the method leaves them apart
    """

    round: int
    fragment: int
    committed: bool
    why: str
    partners: tuple[int, ...]
    verdict: Verdict
    ballots: tuple[Ballot, ...]
    divisor: float
    digest: str
    seconds: float
    sent_bytes: int
    plain: dict[str, torch.Tensor] = field(default_factory=dict)
    spread: float | None = None

    @property
    def stop(self) -> bool:
        """Whether an island asked all to stop."""
        return any(ballot.stop for ballot in self.ballots)

    def refused(self, island: int) -> str:
        """Why an island's change did not count; empty if it did."""
        return self.verdict.refused.get(island, "")
