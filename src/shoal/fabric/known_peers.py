"""Are those at the other ends of gloo's connections the ranks of this run?

gloo asks nobody who he is: whoever connects while ranks do, and says a small number, takes a rank's
place in that connection (tests/worlds/test_hijack.py). So each pair of ranks tells each other what
only who was at their store can know: the MAC of "group:i>j", by a key of the store's random word.
Nobody can pass it on: the true rank's connection is its own, and nobody answers there. Where a pair
fails, the start does, within PROOF_S, and names it.
"""

from __future__ import annotations

import hmac
import itertools
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from shoal.base.errors import ClusterError
from shoal.fabric.device import carries_host_tensors

PROOF_S, BYTES = 60.0, 32
TAG = 7401
_proofs = itertools.count()


def key_of(token: bytes, word: bytes) -> bytes:
    """The key of a run's groups, out of its token (may be empty) and its store's random word."""
    return hmac.digest(token or b"no token", word, "sha256")


def prove_peers(group: dist.ProcessGroup | None, ranks: Sequence[int], key: bytes) -> None:
    """Have every member of a new group prove itself to every other; all of them call it.

    ranks    the members, by their numbers among all processes · key  of `key_of`; empty: no proof
    Errors   ClusterError naming the pair, after PROOF_S
    """
    number = next(_proofs)
    if group is None or not key or not carries_host_tensors(group):
        return  # NCCL's connections ask for a random word of their own, which the store carries
    here = dist.get_rank(group)
    others = [place for place in range(len(ranks)) if place != here]
    name = "-".join(map(str, ranks))
    told = {place: torch.zeros(BYTES, dtype=torch.uint8) for place in others}
    until = timedelta(seconds=PROOF_S)
    place = here
    try:
        heard = {p: dist.irecv(told[p], group=group, group_src=p, tag=TAG) for p in others}
        said = [
            dist.isend(word(key, name, here, p), group=group, group_dst=p, tag=TAG) for p in others
        ]
        for place, work in heard.items():
            _wait(work, until)
            if not torch.equal(told[place], word(key, name, place, here)):
                raise RuntimeError("it does not know the word of this run")
        for work in said:
            _wait(work, until)
    except RuntimeError as failure:
        raise ClusterError(
            f"rank {ranks[here]}: who is connected in the place of rank {ranks[place]} does not "
            f"prove to be it ({number + 1}. group): somebody else on this network or machine took "
            f"it, or the link carries nothing; start again: {failure}"
        ) from failure


def _wait(work: dist.Work | None, until: timedelta) -> None:
    if work is not None:
        work.wait(until)


def word(key: bytes, name: str, source: int, target: int) -> torch.Tensor:
    """What member `source` of the group `name` says to `target`: [BYTES] uint8."""
    said = hmac.digest(key, f"{name}:{source}>{target}".encode(), "sha256")
    return torch.frombuffer(bytearray(said), dtype=torch.uint8)
