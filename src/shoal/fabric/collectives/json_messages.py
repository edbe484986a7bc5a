"""Short JSON messages between ranks; cost grows with their differences, not ranks × length.

Most messages are equal on all ranks: a structure, a plan, a "nothing to report". So the ranks
compare digests before any of them sends its text.

Protocol  1  an all-reduce of the least of (digest, its complement, −length): all messages are the
             same, or how long the longest is                                     72 bytes
          2  short ones: an all-gather of padded rows                             72 bytes × ranks
          3  long ones: an all-gather of (digest, length), then an all-reduce to which the first
             rank with each message adds it        16 bytes × ranks + the sum of unlike messages
Cost      300 tensors in 30 KB of JSON that all 4,096 ranks agree on: 72 bytes, in place of 120 MB
Source    docs/lab-log.md, "A control plane that scales"

At start, ranks also sum numbers whose sum is known (`check_sums`). Links and cards that add wrongly
exist, and vendors' diagnostics passed on them (SemiAnalysis, on NVLS).

Before that, the members of a group authenticate each other. gloo does not: a stranger that connects
while ranks do, and sends a small number, becomes that rank (tests/worlds/faults/test_hijack.py). So
each pair exchanges the MAC of "group:i>j", under a key derived from the store's random word; only
members of the store can compute it. A stranger cannot relay the MAC: the true rank's connection is
its own, and nobody answers there. If a pair fails, the start fails within PROOF_S with an error
that names the pair.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from shoal.base.errors import ClusterError
from shoal.fabric.device import supports_host_tensors

SHORT_BYTES = 64
"""Longest message in bytes that travels in a padded row (step 2 above)."""

WORDS = 4
"""Number of int64 words of a SHA-256 digest."""

PROOF_S, PROOF_BYTES, PROOF_TAG = 60.0, 32, 7401


class MessageGroup(Protocol):
    """The part of `World` that messages need: rank, size and a few collectives."""

    rank: int
    size: int
    device: torch.device
    messages: torch.device

    def all_reduce(self, tensor: torch.Tensor) -> Any:
        """All-reduce a tensor by sum, in place."""

    def all_reduce_min(self, tensor: torch.Tensor) -> None:
        """All-reduce a tensor by minimum, in place."""

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """All-gather a tensor: [...] → [size, ...]."""

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None:
        """Overwrite a tensor with that of rank `source`."""


def gather_json(world: MessageGroup, message: Any) -> list[Any]:
    """Return every rank's JSON value, by rank; equal values are one object, not to be mutated."""
    text = json.dumps(message).encode()
    same, longest = _compare_digests(world, text)
    if same:
        return [json.loads(text)] * world.size
    if longest <= SHORT_BYTES:
        rows = _gather_short_texts(world, text, longest)
        return [json.loads(row) for row in rows]
    words = torch.tensor([*_digest(text)[:1], len(text)], device=world.messages)
    told = [tuple(row) for row in world.all_gather(words).tolist()]
    unlike = list(dict.fromkeys(told))  # in the order of the first rank that has it
    starts = _starts([length for _, length in unlike])
    whole = torch.zeros(starts[-1], dtype=torch.uint8)
    mine = unlike.index(told[world.rank])
    if told.index(unlike[mine]) == world.rank:
        whole[starts[mine] : starts[mine + 1]] = _bytes(text)
    whole = whole.to(world.messages)
    world.all_reduce(whole)
    raw = whole.cpu().numpy().tobytes()
    values = {
        one: json.loads(raw[start:stop])
        for one, start, stop in zip(unlike, starts, starts[1:], strict=False)
    }
    return [values[one] for one in told]


def broadcast_json(world: MessageGroup, message: Any, source: int = 0) -> Any:
    """Return rank `source`'s JSON value on every rank; the arguments of other ranks are ignored."""
    text = json.dumps(message).encode() if world.rank == source else b""
    length = torch.tensor([len(text)], device=world.messages)
    world.broadcast(length, source)
    raw = torch.zeros(int(length.item()), dtype=torch.uint8)
    if world.rank == source:
        raw = _bytes(text)
    raw = raw.to(world.messages)
    world.broadcast(raw, source)
    return json.loads(raw.cpu().numpy().tobytes())


def find_differing_rank(world: MessageGroup, message: Any) -> tuple[int, Any, Any] | None:
    """Return (rank, rank 0's value, its own) of the first rank whose value differs, else None.

    The result is the same on all ranks. Costs 72 bytes if all agree, else two messages.
    """
    text = json.dumps(message).encode()
    if _compare_digests(world, text)[0]:
        return None
    mine = torch.tensor(_digest(text), device=world.messages)
    first = mine.clone()
    world.broadcast(first)
    unlike = not torch.equal(first, mine)
    least = torch.tensor([world.rank if unlike else world.size], device=world.messages)
    world.all_reduce_min(least)
    rank = int(least.item())
    return rank, broadcast_json(world, message), broadcast_json(world, message, rank)


def find_differing_indices(world: MessageGroup, numbers: Sequence[int]) -> list[int]:
    """Return the indices at which ranks' numbers differ; each rank passes as many numbers.

    Args:
        numbers: integers of 63 bits and a sign. Costs 72 bytes if all agree, else 16 bytes a
            number.
    """
    if _compare_digests(world, json.dumps(list(numbers)).encode())[0]:
        return []
    mine = torch.tensor(numbers, dtype=torch.int64)
    both = torch.cat([mine, ~mine]).to(world.messages)
    world.all_reduce_min(both)
    least, most = both[: len(numbers)].cpu(), ~both[len(numbers) :].cpu()
    return (least != most).nonzero().flatten().tolist()


def _compare_digests(world: MessageGroup, text: bytes) -> tuple[bool, int]:
    """Return (whether all ranks have the same text, length of the longest text)."""
    words = _digest(text)
    both = torch.tensor([*words, *(~word for word in words), -len(text)], device=world.messages)
    world.all_reduce_min(both)
    told = both.tolist()
    same = all(least == ~rest for least, rest in zip(told[:WORDS], told[WORDS:-1], strict=True))
    return same, -told[-1]


def _gather_short_texts(world: MessageGroup, text: bytes, longest: int) -> list[bytes]:
    """Return all ranks' texts, all-gathered as padded rows that start with the length."""
    row = torch.zeros(1 + longest, dtype=torch.uint8)
    row[0] = len(text)
    row[1 : 1 + len(text)] = _bytes(text)
    rows = world.all_gather(row.to(world.messages)).cpu().numpy()
    return [one[1 : 1 + one[0]].tobytes() for one in rows]


def _digest(text: bytes) -> list[int]:
    raw = hashlib.sha256(text).digest()
    return [int.from_bytes(raw[8 * k : 8 * k + 8], "big", signed=True) for k in range(WORDS)]


def _bytes(text: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _starts(lengths: Sequence[int]) -> list[int]:
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    return starts


LENGTHS = (3, 5003)
"""Lengths of the test sums: a short message, and one cut into pieces; not divisible by ranks."""

NAMED = 8
"""Most ranks that an error message names; of further ranks it reports the number."""

_checked: weakref.WeakSet[Any] = weakref.WeakSet()


def check_sums(world: MessageGroup) -> None:
    """Check all-reduces against known sums, once per world; every rank must call it.

    On a wrong sum all ranks raise a ClusterError that names the first such rank, an index and both
    numbers.
    """
    if world.size == 1 or world in _checked or _is_fake(world):
        return
    _checked.add(world)
    wrong = find_wrong_sums(world)
    also = [str(rank) for rank, found in enumerate(wrong) if found]
    if also:
        more = f" and {len(also) - NAMED} more" if len(also) > NAMED else ""
        place, got, right = wrong[int(also[0])]
        failure = ClusterError(
            f"rank {also[0]}: an all-reduce of known numbers gave {got:g} at place {place:g}, "
            f"{right:g} is right (wrong on ranks {', '.join(also[:NAMED])}{more} of {world.size}): "
            f"a link, a card or its library adds wrongly; try: leave that machine out, or "
            f"another version of the library"
        )
        failure.here = int(also[0]) == world.rank
        raise failure


def _is_fake(world: MessageGroup) -> bool:
    """Return whether a process group is torch's fake group for dry runs, which sums nothing."""
    group = getattr(world, "group", None)
    return group is not None and dist.get_backend(group) == "fake"


def find_wrong_sums(world: MessageGroup) -> list[list[float]]:
    """Return [index, received, expected] of every rank's first wrong sum; [] if all sums are right.

    Rank r contributes (r mod 64 + 1) · (i mod 13 + 1) at index i. float32 holds the sums of 4,096
    ranks exactly, added in any order.
    """
    mine: list[float] = []
    factors = sum(rank % 64 + 1 for rank in range(world.size))
    for length in LENGTHS:
        places = (torch.arange(length) % 13 + 1).to(torch.float32)
        tensor = (places * (world.rank % 64 + 1)).to(world.device)
        world.all_reduce(tensor)
        got, right = tensor.cpu(), places * factors
        for place in (got != right).nonzero().reshape(-1).tolist()[:1]:
            mine = mine or [place, float(got[place]), float(right[place])]
    return [[float(one) for one in found] for found in gather_json(world, mine)]


def derive_group_key(token: bytes, word: bytes) -> bytes:
    """Return the key of a run's groups, from its token and its store's random word."""
    return hmac.digest(token or b"no token", word, "sha256")


def authenticate_peers(group: dist.ProcessGroup | None, ranks: Sequence[int], key: bytes) -> None:
    """Authenticate every member of a new group to every other; all members must call it.

    Args:
        ranks: global ranks of the members.
        key: result of `derive_group_key`; empty: no authentication.

    Raises:
        ClusterError: a pair failed within PROOF_S; the message names it.
    """
    if group is None or not key or not supports_host_tensors(group):
        return  # NCCL's connections ask for a random word of their own, which the store carries
    here = dist.get_rank(group)
    others = [place for place in range(len(ranks)) if place != here]
    name = "-".join(map(str, ranks))
    told = {place: torch.zeros(PROOF_BYTES, dtype=torch.uint8) for place in others}
    until = timedelta(seconds=PROOF_S)
    place = here
    try:
        heard = {p: dist.irecv(told[p], group=group, group_src=p, tag=PROOF_TAG) for p in others}
        said = [
            dist.isend(pair_mac(key, name, here, p), group=group, group_dst=p, tag=PROOF_TAG)
            for p in others
        ]
        for place, work in heard.items():
            _wait(work, until)
            if not torch.equal(told[place], pair_mac(key, name, place, here)):
                raise RuntimeError("it does not know the word of this run")
        for work in said:
            _wait(work, until)
    except RuntimeError as failure:
        raise ClusterError(
            f"rank {ranks[here]}: who is connected in the place of rank {ranks[place]} does not "
            f"prove to be it (group of ranks {name}): somebody else on this network or machine "
            f"took it, or the link carries nothing; start again: {failure}"
        ) from failure
    if "SHOAL_STORE" not in os.environ:  # members may be on several machines
        from shoal.fabric.collectives.link_failures import enable_link_keepalive

        enable_link_keepalive()


def _wait(work: dist.Work | None, until: timedelta) -> None:
    if work is not None:
        work.wait(until)


def pair_mac(key: bytes, name: str, source: int, target: int) -> torch.Tensor:
    """Return the MAC for `target` from member `source` of group `name`: [PROOF_BYTES] uint8."""
    said = hmac.digest(key, f"{name}:{source}>{target}".encode(), "sha256")
    return torch.frombuffer(bytearray(said), dtype=torch.uint8)
