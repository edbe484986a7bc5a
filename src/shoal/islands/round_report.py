"""What a round's merges say to people and to events: who counted, who did not, and why.

A round has a merge for every fragment, and its events tell of all: an island may be refused in one
fragment only. What is said once for a round (the divisor, the digest) is that of its last merge,
which ends it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shoal.islands.merge import Merge


def refusals(merges: Sequence[Merge]) -> dict[int, str]:
    """Collect whose changes were refused in a round: island → why, ascending; {} if nobody's.

    merges   of the round's fragments, in their order; the first that refused an island says why
    """
    found: dict[int, str] = {}
    for merge in merges:
        found = {**merge.verdict.refused, **found}
    return dict(sorted(found.items()))


def round_fields(merges: Sequence[Merge]) -> dict[str, Any]:
    """Collect what the event of a round says of its merges, as plain JSON values.

    merges   of the round's fragments, in their order, not empty. Of the last: tokens_all (of all
             islands), admitted, divisor, digest, why, and spread if it has one; of all: refused
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
