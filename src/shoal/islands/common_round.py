"""Round from which a resumed run continues: the newest that all islands hold, bit for bit.

Each island keeps the state before and after its last commit, with round number and digest, until
all islands know the next commit. An island that died in a vote may have committed a round that the
others did not, or the reverse. So when a run resumes, the islands exchange their rounds:

    island 0   {7: "ab…", 8: "cd…"}
    island 1   {6: "55…", 7: "ab…"}        →  round 7
    island 2   {}                              takes it from island 0, the lowest that holds it

An island without rounds is new. An island with other rounds than the rest stops the resume, because
only a person may decide to overwrite saved state.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shoal.base.errors import CheckpointError, ClusterError
from shoal.islands.commit_vote import name_islands, parse_json_object

Held = Mapping[int, str]
"""Round → digest of the state after it."""


@dataclass(frozen=True)
class ResumePoint:
    """Round after which the islands continue, and the donor of each island's state.

    Attributes:
        donors: by island: the island whose state it loads, itself if it holds one.
    """

    round: int
    donors: tuple[int, ...]


def find_newest_common_round(held: Sequence[Held]) -> int | None:
    """Return the newest round that all islands hold with equal digests.

    >>> find_newest_common_round([{7: "a", 8: "b"}, {7: "a", 8: "c"}])
    7
    """
    if not held:
        return None
    shared = set.intersection(*(set(one.items()) for one in held))
    return max((round_ for round_, _ in shared), default=None)


def find_resume_point(held: Sequence[Held]) -> ResumePoint | None:
    """Return the newest round that all islands with saved states hold with equal digests.

    An island without state loads that of the lowest island that has one. None if no island has
    state: a new run.

    Args:
        held: by island: round → digest of the state after it.

    Raises:
        CheckpointError: no round is common; the message lists each island's rounds and the
            remedies.

    >>> find_resume_point([{}, {7: "a"}, {6: "x", 7: "a"}])
    ResumePoint(round=7, donors=(1, 1, 2))
    """
    holders = [island for island, one in enumerate(held) if one]
    if not holders:
        return None
    newest = find_newest_common_round([held[island] for island in holders])
    if newest is None:
        raise CheckpointError(_no_common(held, holders))
    return ResumePoint(newest, tuple(i if one else holders[0] for i, one in enumerate(held)))


def is_before_first_round(held: Sequence[Held]) -> bool:
    """Return whether some islands hold no round, and the others only the state before the first.

    Owners save that state. If one of them died meanwhile, nobody has trained: all begin anew.

    >>> is_before_first_round([{0: "a"}, {}]), is_before_first_round([{0: "a", 1: "b"}, {}])
    (True, False)
    """
    return not all(held) and all(set(one) <= {0} for one in held)


def refuse_damaged(folders: Sequence[str]) -> None:
    """Refuse to start a new run over damaged checkpoints of an earlier one.

    Args:
        folders: by island: folder whose checkpoints are all unreadable; "" if there is none.

    Raises:
        CheckpointError: an island has such a folder; all islands raise the same message, which
            names them.

    >>> refuse_damaged(["", ""])
    """
    if lost := [folder for folder in folders if folder]:
        raise CheckpointError(
            f"no island holds a round that can be read, and the manifests of all checkpoints in "
            f"{', '.join(lost)} are damaged; try: bring one of them back from a copy; to begin "
            f"anew move these folders away"
        )


def encode_rounds(held: Held) -> bytes:
    """Encode this island's rounds and digests as JSON for the other islands."""
    return json.dumps({str(round_): digest for round_, digest in held.items()}).encode()


def decode_rounds(message: bytes, island: int) -> dict[int, str]:
    """Decode the rounds and digests of `island` from a message of `encode_rounds`.

    Raises:
        ClusterError: the message is malformed; the error names the island.
    """
    found = parse_json_object(message, f"island {island}: its list of saved rounds")
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
