"""From which round a resumed run goes on: the newest that all given islands hold, bit for bit.

Each island keeps the state before and after its last commit, with round number and digest, until
the next commit is known to all. An island that died in a vote may have committed a round that the
others did not, or the other way round; so when a run resumes, they tell each other what they hold:

    island 0   {7: "ab…", 8: "cd…"}
    island 1   {6: "55…", 7: "ab…"}        →  round 7
    island 2   {}                              takes it from island 0, the lowest that holds it

An island that holds nothing is new; one that holds other rounds than the rest stops the resume,
because to overwrite what somebody saved is for people to decide.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shoal.base.errors import CheckpointError, ClusterError
from shoal.islands.commit_vote import name_islands, read_object

Held = Mapping[int, str]
"""Round → digest of the state after it."""


@dataclass(frozen=True)
class Resume:
    """The round after which islands go on, and where each takes its state from.

    Attributes:
        donors: by island: the island whose state it takes, itself if it holds one.
    """

    round: int
    donors: tuple[int, ...]


def newest_common(held: Sequence[Held]) -> int | None:
    """The newest round that all of these hold with equal digests.

    >>> newest_common([{7: "a", 8: "b"}, {7: "a", 8: "c"}])
    7
    """
    if not held:
        return None
    shared = set.intersection(*(set(one.items()) for one in held))
    return max((round_ for round_, _ in shared), default=None)


def resume_point(held: Sequence[Held]) -> Resume | None:
    """Find the newest round that all islands with saved states hold with equal digests.

    An island that holds nothing takes the state of the lowest that does. None where none of them
    holds anything: a new run.

    Args:
        held: by island: round → digest of the state after it.

    Raises:
        CheckpointError: where no round is common, with what each holds and what could be done.

    >>> resume_point([{}, {7: "a"}, {6: "x", 7: "a"}])
    Resume(round=7, donors=(1, 1, 2))
    """
    holders = [island for island, one in enumerate(held) if one]
    if not holders:
        return None
    newest = newest_common([held[island] for island in holders])
    if newest is None:
        raise CheckpointError(_no_common(held, holders))
    return Resume(newest, tuple(i if one else holders[0] for i, one in enumerate(held)))


def refuse_damaged(folders: Sequence[str]) -> None:
    """Refuse to begin a new run where one was: that must be somebody's decision.

    Args:
        folders: by island: of checkpoints that cannot be read, not one of them; "" where none is.

    Raises:
        CheckpointError: the same on all islands, naming them.

    >>> refuse_damaged(["", ""])
    """
    if lost := [folder for folder in folders if folder]:
        raise CheckpointError(
            f"no island holds a round that can be read, and the manifests of all checkpoints in "
            f"{', '.join(lost)} are damaged; try: bring one of them back from a copy; to begin "
            f"anew move these folders away"
        )


def to_bytes(held: Held) -> bytes:
    """Encode what this island holds, round → digest, as JSON for the other islands."""
    return json.dumps({str(round_): digest for round_, digest in held.items()}).encode()


def from_bytes(message: bytes, island: int) -> dict[int, str]:
    """Decode what `island` holds, round → digest, from the message that `to_bytes` made.

    Raises:
        ClusterError: that names the island, for anything else.
    """
    found = read_object(message, f"island {island}: its list of saved rounds")
    for round_, digest in found.items():
        if not (round_.isascii() and round_.isdecimal() and isinstance(digest, str)):
            raise ClusterError(
                f"island {island}: its list of saved rounds says {round_!r}: {digest!r}"
            )
    return {int(round_): digest for round_, digest in found.items()}


def _no_common(held: Sequence[Held], holders: Sequence[int]) -> str:
    said = "; ".join(f"island {island} holds {_listed(held[island])}" for island in holders)
    states = {state for island in holders for state in held[island].items()}
    by_state = {s: [i for i in holders if s in held[i].items()] for s in states}
    best = max(by_state, key=lambda state: (len(by_state[state]), state))
    others = [island for island in holders if island not in by_state[best]]
    return (
        f"no round is held by all islands with the same digest: {said}; try: resume "
        f"{name_islands(by_state[best])} alone from round {best[0]}, or move the run folder of "
        f"{name_islands(others)} away and take the round from island {by_state[best][0]}"
    )


def _listed(held: Held) -> str:
    return ", ".join(f"round {round_} ({held[round_][:8]})" for round_ in sorted(held))
