"""What an island says when a fragment of the model is exchanged, and how the exchange ended."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from shoal.islands.admission import Verdict
from shoal.islands.commit_vote import Ballot


@dataclass(frozen=True)
class Say:
    """What an island tells of itself with the message of a fragment.

    tokens       that its change was learnt from: its weight in a mean by tokens
    used         samples that it used of those it was dealt
    steps_per_s  of its inner steps, without waiting for others
    stop         it was asked to stop after this round
    """

    tokens: int
    used: int
    steps_per_s: float
    stop: bool = False


@dataclass(frozen=True)
class Merge:
    """How the exchange of one fragment ended.

    The same on every rank of the partners, but for `plain`, `seconds` and `sent_bytes`.

    committed   merged weights and outer optimizer state have moved · why  if not, else ""
    partners    islands that merged, this one included · verdict  whose changes counted
    ballots     of all islands of the run, in their order
    divisor     what the weighted sum of changes was divided by; 0 if none was admitted
    digest      sha256 of the merged weights and state as proposed, over all ranks of an island; of
                names and shapes under noloco, whose weights stay each island's own
    plain       means of what no optimizer moves (running statistics), by name: this rank's parts;
                {} if not committed
    seconds     from the message to the vote · sent_bytes  coded, by this rank
    spread      how far apart the weights of the admitted were just before, as a share of their
                norm; None where the method makes them equal, or fewer than two were admitted
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
