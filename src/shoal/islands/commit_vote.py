"""Vote on an outer step: it happens on all islands or on none.

Each island computes the new weights and outer state itself, from the same bytes, and sends a
ballot. The islands commit if all vote ok and all have the same digest. All see the same ballots, so
all decide the same:

    ok          nothing failed, and the result is finite
    digest      sha256 of the proposed weights and outer state, over all of the island's processes;
                under noloco, whose islands are never equal, of a pair's mean message
    tokens      tokens of its change: its weight in the mean
    steps_per_s its speed, which decides its share of the next round; None: not measured
    used        samples used of those dealt to it, in order
    stop        it requests the end after this round
    saved       the last committed round is on its disk; None: still being written, vote again

Ballots are JSON: bytes of another machine are parsed, never executed. If an island dies in the
vote, some islands may have committed and others not; `common_round.py` resolves that at resume.

Source: Gray 1978 (two-phase commit); torchft's should_commit and PCCL's vote on hashes are kin
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from shoal.base.errors import ClusterError

NOT_FINITE = "the merged weights would not be finite"
NOBODY_ADMITTED = "nobody's change was admitted"


@dataclass(frozen=True)
class Ballot:
    """Vote of one island on one fragment of one round; the module explains the fields."""

    round: int
    fragment: int
    ok: bool
    digest: str
    tokens: float
    steps_per_s: float | None
    used: int
    stop: bool = False
    why: str = ""
    """reason if `ok` is False, for people"""
    saved: bool | None = True

    def to_bytes(self) -> bytes:
        """Return the ballot as JSON bytes."""
        return json.dumps(asdict(self), allow_nan=False).encode()

    @staticmethod
    def from_bytes(message: bytes, island: int) -> Ballot:
        """Parse the ballot that `island` sent.

        Raises:
            ClusterError: the message is no ballot; the error names the island and the fault.
        """
        found = parse_json_object(message, f"island {island}: its ballot")
        names = [field.name for field in fields(Ballot)]
        if sorted(found) != sorted(names):
            raise ClusterError(
                f"island {island}: its ballot has the fields {', '.join(sorted(found))}; "
                f"{', '.join(names)} are wanted: all islands need the same version"
            )
        for name, value in found.items():
            if not _is_sound(name, value):
                raise ClusterError(f"island {island}: its ballot says {name} = {value!r}")
        return Ballot(**found)


@dataclass(frozen=True)
class VoteResult:
    """Result of a vote.

    Attributes:
        why: if nothing is committed: one line that names the islands.
        stop: the islands that request the end of the run.
    """

    committed: bool
    why: str
    stop: tuple[int, ...]


def count_ballots(ballots: Sequence[Ballot], islands: Sequence[int] | None = None) -> VoteResult:
    """Count ballots and return whether the step is committed.

    Args:
        islands: islands of the ballots; default: 0, 1, 2, …

    Raises:
        ClusterError: the ballots are for different rounds or fragments, so no step can be right.
    """
    named = list(range(len(ballots))) if islands is None else list(islands)
    cast = dict(zip(named, ballots, strict=True))
    _check_places(cast)
    stop = tuple(island for island, ballot in cast.items() if ballot.stop)
    against = [
        f"island {island}: {ballot.why or 'voted no'}"
        for island, ballot in cast.items()
        if not (ballot.ok and ballot.saved)
    ]
    if against:
        return VoteResult(False, "; ".join(against), stop)
    apart = _describe_digest_differences({island: ballot.digest for island, ballot in cast.items()})
    return VoteResult(not apart, apart, stop)


def decide_commit(ballots: Sequence[Ballot], partners: Sequence[int]) -> VoteResult:
    """Decide by all islands' ballots whether these partners commit their outer step.

    They do if every partner votes ok and all have the same digest. An island that could not save
    stops the step of all islands, also of those that do not merge with it. If those saved a later
    round, no common round would be left.

    Args:
        ballots: ballots of all islands of the run, in their order.
        partners: numbers of the islands that merge.

    Returns:
        whether to commit, the reason if not, and the islands that request a stop: among the
        partners, or only among the islands that could not save.

    Raises:
        ClusterError: the ballots are for different rounds or fragments.
    """
    unsaved = {island: one for island, one in enumerate(ballots) if not one.saved}
    if unsaved:
        return count_ballots(list(unsaved.values()), list(unsaved))
    return count_ballots([ballots[island] for island in partners], partners)


def commit_failure_remedy(ballots: Sequence[Ballot]) -> tuple[bool, str]:
    """Return (training is at fault, remedy) for an outer step that was not committed.

    True if an island could not save, or its numbers are at fault (not finite, no change admitted).
    Else False, the cluster's fault: islands computed different weights.

    Args:
        ballots: ballots of all islands of the run.
    """
    if not all(ballot.saved for ballot in ballots):
        return True, "mend that, and resume"
    if any(ballot.why in (NOT_FINITE, NOBODY_ADMITTED) for ballot in ballots if not ballot.ok):
        return True, "a lower optimizer.lr or islands.outer_lr"
    return False, (
        "resume from the last round that all agreed on; if it comes back, memory or processor of "
        "one of them err, or its versions differ: leave it out"
    )


def parse_json_object(message: bytes, whose: str) -> dict[str, Any]:
    """Parse a JSON object from another machine's bytes; NaN is accepted.

    Raises:
        ClusterError: the bytes are no JSON object; the message starts with `whose`.
    """
    try:
        found = json.loads(message)
    except (ValueError, RecursionError) as error:
        raise ClusterError(f"{whose} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise ClusterError(f"{whose} cannot be read: no JSON object")
    return found


def name_islands(islands: Iterable[int]) -> str:
    """Format the names of islands for people.

    >>> name_islands([2]), name_islands([0, 1, 3])
    ('island 2', 'islands 0, 1 and 3')
    """
    *most, last = [str(island) for island in islands]
    return f"islands {', '.join(most)} and {last}" if most else f"island {last}"


def _is_sound(name: str, value: object) -> bool:
    if name in {"ok", "stop"}:
        return isinstance(value, bool)
    if name == "saved":
        return value is None or isinstance(value, bool)
    if name in {"digest", "why"}:
        return isinstance(value, str)
    if value is None or isinstance(value, bool):
        return value is None and name == "steps_per_s"
    if isinstance(value, float) and name in {"steps_per_s", "tokens"}:
        return math.isfinite(value) and value >= 0
    return isinstance(value, int) and value >= 0


def _check_places(cast: dict[int, Ballot]) -> None:
    places = {island: (ballot.round, ballot.fragment) for island, ballot in cast.items()}
    if len(set(places.values())) > 1:
        said = "; ".join(
            f"island {island}: round {round_}, fragment {fragment}"
            for island, (round_, fragment) in places.items()
        )
        raise ClusterError(
            f"the islands vote on different steps: {said}; stop all of them and resume: they go on "
            f"from the newest round that all hold"
        )


def _describe_digest_differences(digests: dict[int, str]) -> str:
    """Return a text on the islands whose digest differs from the majority, or ""."""
    (common, votes), *rest = Counter(digests.values()).most_common()
    if not rest:
        return ""
    tie = rest[0][1] == votes
    odd = [island for island, digest in digests.items() if tie or digest != common]
    said = ", ".join(digests[island][:8] for island in odd)
    if tie:
        return f"{name_islands(odd)}: each came to another state ({said}), none has a majority"
    return f"{name_islands(odd)}: came to another state ({said}) than the others ({common[:8]})"
