"""Metadata of an island's message for a fragment, and the result of its exchange.

A round has a merge for every fragment, and its event reports all: an island may be refused in one
fragment only. The fields of a whole round (divisor, digest) come from its last merge, which ends
it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shoal.islands.admission import AdmissionVerdict
from shoal.islands.commit_vote import Ballot


@dataclass(frozen=True)
class MergeProposal:
    """Metadata that an island sends with the message of a fragment.

    Attributes:
        tokens: training tokens of its change: its weight in a mean by tokens.
        used: samples that it used of those assigned to it.
        steps_per_s: speed of its inner steps, without waiting for others.
        stop: the island requests a stop after this round.
        samples: its weight in a mean by samples: those that it used, or that an owner holds.
    """

    tokens: int
    used: int
    steps_per_s: float
    stop: bool = False
    samples: int = 0


@dataclass(frozen=True)
class IslandChange:
    """Change of one sender, as this rank's part of a message.

    Attributes:
        sender: number of the island, or of the owner that it trained.
        message: OLD − NEW of this rank's parts, by name.
        plain: tensors that are averaged without an optimizer, by name.
    """

    sender: int
    message: Mapping[str, torch.Tensor]
    proposal: MergeProposal
    plain: Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class MergeResult:
    """Result of the exchange of one fragment.

    Equal on every rank of the partners, except `plain`, `seconds` and `sent_bytes`.

    Attributes:
        committed: merged weights and outer optimizer state were updated.
        why: reason if not, else "".
        partners: islands that merged, this one included.
        verdict: admitted and refused islands.
        ballots: ballots of all islands of the run, in their order.
        divisor: divisor of the weighted sum of changes; 0 if none was admitted.
        digest: sha256 of the merged weights and state as proposed, over all ranks of an island; of
            names and shapes under noloco, whose weights stay each island's own.
        plain: means of tensors without optimizer (running statistics), by name: this rank's parts;
            {} if not committed.
        seconds: seconds from the message to the vote.
        sent_bytes: encoded bytes sent by this rank.
        spread: distance of the admitted islands' weights before the merge, relative to their norm;
            None if the method makes them equal, or fewer than two were admitted.
        weights: weight of each sender's change, by its number; 0 for a refused one.
    """

    round: int
    fragment: int
    committed: bool
    why: str
    partners: tuple[int, ...]
    verdict: AdmissionVerdict
    ballots: tuple[Ballot, ...]
    divisor: float
    digest: str
    seconds: float
    sent_bytes: int
    plain: dict[str, torch.Tensor] = field(default_factory=dict)
    spread: float | None = None
    weights: Mapping[int, float] = field(default_factory=dict)

    @property
    def stop(self) -> bool:
        """True if an island requested a stop."""
        return any(ballot.stop for ballot in self.ballots)

    def refused(self, island: int) -> str:
        """Return the reason for which an island's change was refused; empty if it was not."""
        return self.verdict.refused.get(island, "")


def collect_refusals(merges: Sequence[MergeResult]) -> dict[int, str]:
    """Collect the islands refused in a round: island → reason, ascending; {} if none.

    Args:
        merges: merges of the round's fragments, in order; the first refusal of an island gives its
            reason.
    """
    found: dict[int, str] = {}
    for merge in merges:
        found = {**merge.verdict.refused, **found}
    return dict(sorted(found.items()))


def collect_round_fields(merges: Sequence[MergeResult]) -> dict[str, Any]:
    """Collect the fields of a round's event from its merges, as plain JSON values.

    Args:
        merges: merges of the round's fragments, in order, not empty. From the last: tokens_all (of
            all islands), admitted, divisor, digest, why, and spread if it has one; from all:
            refused.
    """
    last = merges[-1]
    return {
        "tokens_all": sum(ballot.tokens for ballot in last.ballots),
        "admitted": sorted(last.verdict.admitted),
        "refused": {str(island): why for island, why in collect_refusals(merges).items()},
        "divisor": last.divisor,
        "digest": last.digest,
        "why": last.why,
        **({} if last.spread is None else {"spread": last.spread}),
    }


def format_merge_lines(merges: Sequence[MergeResult]) -> list[str]:
    """List the printed lines of a round's merges; [] if there is nothing to report.

    First the warnings on admitted changes (`AdmissionVerdict.told`), then each uncommitted fragment
    except the last, which the round's own event reports.
    """
    told = [line for merge in merges for line in merge.verdict.told]
    return told + [
        f"fragment {merge.fragment} was not merged: {merge.why}"
        for merge in merges[:-1]
        if not merge.committed
    ]
