"""What an island says when a fragment of the model is exchanged, and how the exchange ended.

A round has a merge for every fragment, and its events tell of all: an island may be refused in one
fragment only. What is said once for a round (the divisor, the digest) is that of its last merge,
which ends it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shoal.islands.admission import Verdict
from shoal.islands.commit_vote import Ballot


@dataclass(frozen=True)
class Say:
    """What an island tells of itself with the message of a fragment.

    Attributes:
        tokens: that its change was learnt from: its weight in a mean by tokens.
        used: samples that it used of those it was dealt.
        steps_per_s: of its inner steps, without waiting for others.
        stop: it was asked to stop after this round.
    """

    tokens: int
    used: int
    steps_per_s: float
    stop: bool = False


@dataclass(frozen=True)
class Merge:
    """How the exchange of one fragment ended.

    The same on every rank of the partners, but for `plain`, `seconds` and `sent_bytes`.

    Attributes:
        committed: merged weights and outer optimizer state have moved.
        why: if not, else "".
        partners: islands that merged, this one included.
        verdict: whose changes counted.
        ballots: of all islands of the run, in their order.
        divisor: what the weighted sum of changes was divided by; 0 if none was admitted.
        digest: sha256 of the merged weights and state as proposed, over all ranks of an island; of
            names and shapes under noloco, whose weights stay each island's own.
        plain: means of what no optimizer moves (running statistics), by name: this rank's parts; {}
            if not committed.
        seconds: from the message to the vote.
        sent_bytes: coded, by this rank.
        spread: how far apart the weights of the admitted were just before, as a share of their
            norm; None where the method makes them equal, or fewer than two were admitted.
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


def refusals(merges: Sequence[Merge]) -> dict[int, str]:
    """Collect whose changes were refused in a round: island → why, ascending; {} if nobody's.

    Args:
        merges: of the round's fragments, in their order; the first that refused an island says why.
    """
    found: dict[int, str] = {}
    for merge in merges:
        found = {**merge.verdict.refused, **found}
    return dict(sorted(found.items()))


def round_fields(merges: Sequence[Merge]) -> dict[str, Any]:
    """Collect what the event of a round says of its merges, as plain JSON values.

    Args:
        merges: of the round's fragments, in their order, not empty. Of the last: tokens_all (of all
            islands), admitted, divisor, digest, why, and spread if it has one; of all: refused.
    """
    last = merges[-1]
    return {
        "tokens_all": sum(ballot.tokens for ballot in last.ballots),
        "admitted": list(last.verdict.admitted),
        "refused": {str(island): why for island, why in refusals(merges).items()},
        "divisor": last.divisor,
        "digest": last.digest,
        "why": last.why,
        **({} if last.spread is None else {"spread": last.spread}),
    }


def lines(merges: Sequence[Merge]) -> list[str]:
    """List lines for people on a round's merges; [] if there is nothing to tell.

    First what looked odd and was admitted (`Verdict.told`), then each fragment that was not
    committed, but the last: the round's own event tells of that one.
    """
    told = [line for merge in merges for line in merge.verdict.told]
    return told + [
        f"fragment {merge.fragment} was not merged: {merge.why}"
        for merge in merges[:-1]
        if not merge.committed
    ]
