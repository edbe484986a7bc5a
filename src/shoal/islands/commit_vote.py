"""The vote on an outer step: it happens for all islands or for none.

Each island works out the new weights and outer state by itself, from the same bytes, and tells the
others how that went. They commit if all say yes and all have the same digest, which they see from
the same ballots, so that all decide alike:

    ok          nothing failed, and what came out is finite
    digest      sha256 of the proposed weights and outer state, over all of the island's processes;
                where islands are never equal (noloco), of what a pair steps with
    tokens      what it trained on for this: its weight in the mean
    steps_per_s its speed, which decides its share of the next round; None: not measured
    used        samples used of those that were dealt, in their order
    stop        it wants to end after this round
    saved       the last committed round is on its disk; None: still being written, vote again

Ballots are JSON: bytes of another machine are read, never run. An island that dies in the vote may
leave some that committed and some that did not; `common_round.py` settles that at resume.

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
    """One island's word on one fragment of one round; the fields are explained above."""

    round: int
    fragment: int
    ok: bool
    digest: str
    tokens: float
    steps_per_s: float | None
    used: int
    stop: bool = False
    why: str = ""
    """where `ok` is not: what went wrong, for people"""
    saved: bool | None = True

    def to_bytes(self) -> bytes:
        """As it travels."""
        return json.dumps(asdict(self), allow_nan=False).encode()

    @staticmethod
    def from_bytes(message: bytes, island: int) -> Ballot:
        """The ballot that `island` sent.

        Raises:
            ClusterError: that names the island and what is wrong.
        """
        found = read_object(message, f"island {island}: its ballot")
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
class Outcome:
    """What the ballots say together.

    Attributes:
        why: where nothing is committed: one line that names the islands.
        stop: the islands that want to end.
    """

    committed: bool
    why: str
    stop: tuple[int, ...]


def count(ballots: Sequence[Ballot], islands: Sequence[int] | None = None) -> Outcome:
    """Whether the step happens.

    Args:
        islands: whose ballots these are; left out: island 0, 1, 2, …

    Raises:
        ClusterError: where they are about different rounds or fragments: no step can be right.
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
        return Outcome(False, "; ".join(against), stop)
    apart = _apart({island: ballot.digest for island, ballot in cast.items()})
    return Outcome(not apart, apart, stop)


def decide(ballots: Sequence[Ballot], partners: Sequence[int]) -> Outcome:
    """Decide whether the outer step of these partners is committed, by all islands' ballots.

    It is if every partner votes ok and all have the same digest. An island that could not save
    stops everybody's step, also of those who do not merge with it: were they a round ahead and
    saved it, no round would be left that all hold.

    Args:
        ballots: of all islands of the run, in their order.
        partners: numbers of those that merge.

    Returns:
        committed, why not, and who of the ballots that counted wants to stop: those of the
        partners, or only of the islands that could not save.

    Raises:
        ClusterError: where these ballots are about different rounds or fragments.
    """
    unsaved = {island: one for island, one in enumerate(ballots) if not one.saved}
    if unsaved:
        return count(list(unsaved.values()), list(unsaved))
    return count([ballots[island] for island in partners], partners)


def cure(ballots: Sequence[Ballot]) -> tuple[bool, str]:
    """Name the cure of an outer step that was not committed: (training is at fault, what to do).

    True where an island could not save, or its numbers are at fault (not finite, no change
    admitted); else False, the cluster's fault: islands came to different weights.

    Args:
        ballots: of all islands of the run.
    """
    if not all(ballot.saved for ballot in ballots):
        return True, "mend that, and resume"
    if any(ballot.why in (NOT_FINITE, NOBODY_ADMITTED) for ballot in ballots if not ballot.ok):
        return True, "a lower optimizer.lr or islands.outer_lr"
    return False, (
        "resume from the last round that all agreed on; if it comes back, memory or processor of "
        "one of them err, or its versions differ: leave it out"
    )


def read_object(message: bytes, whose: str) -> dict[str, Any]:
    """A JSON object out of bytes that another machine sent; NaN in it is let through.

    Raises:
        ClusterError: that begins with `whose`.
    """
    try:
        found = json.loads(message)
    except (ValueError, RecursionError) as error:
        raise ClusterError(f"{whose} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise ClusterError(f"{whose} cannot be read: no JSON object")
    return found


def name_islands(islands: Iterable[int]) -> str:
    """Islands as people read them.

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


def _apart(digests: dict[int, str]) -> str:
    """Which islands came to another state than most, or an empty text."""
    (common, votes), *rest = Counter(digests.values()).most_common()
    if not rest:
        return ""
    tie = rest[0][1] == votes
    odd = [island for island, digest in digests.items() if tie or digest != common]
    said = ", ".join(digests[island][:8] for island in odd)
    if tie:
        return f"{name_islands(odd)}: each came to another state ({said}), none has a majority"
    return f"{name_islands(odd)}: came to another state ({said}) than the others ({common[:8]})"
