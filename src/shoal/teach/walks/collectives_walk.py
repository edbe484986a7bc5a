"""Step-throughs of ring, halving-doubling and tree collectives, chunk by chunk, with bytes.

With n ranks and a message of M bytes, the busiest rank sends

    ring all-reduce       2(n−1)/n · M   in 2(n−1) rounds: reduce-scatter, then all-gather
    reduce-scatter        (n−1)/n · M    in n−1 rounds: each rank ends with one total
    all-gather            (n−1)/n · M    in n−1 rounds: each rank ends with all of them
    halving, doubling     2(n−1)/n · M   in 2·log2(n) rounds, for n a power of two
    tree                  2·⌈log2 n⌉ · M at the root: once up (adding), once down (copying)
    broadcast             ⌈log2 n⌉ · M   at the root, by doubling the ranks that have it

Sources: Patarasuk and Yuan 2009 (ring), Thakur, Rabenseifner and Gropp 2005 (halving-doubling,
binomial trees).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shoal.base.errors import PlanError
from shoal.base.text.units import bytes_text, seconds_text
from shoal.teach.walks.walk import StepThrough, check_equal, check_ranks
from shoal.teach.walks.walk_messages import (
    ALPHA_S,
    BYTES_PER_S,
    ChunkMessage,
    ChunkSimulation,
    first_number,
)

MESSAGE_BYTES = 64 * 2**20
"""Default M: a bucket of gradients."""

Round = tuple[str, str, list[ChunkMessage]]
"""(title, kind of span, simultaneous messages)."""


@dataclass(frozen=True)
class _ExpectedCost:
    """Expected cost of a collective: formulas as text, and their values for this case.

    Attributes:
        sends_bytes: of the rank that sends most.
        messages, bytes_in_a_row: the sequential messages and bytes that determine the time.
        ends: the expected result on every rank, in words.
        everywhere: every rank ends with all totals; else rank r with that of chunk r.
    """

    sends: str
    sends_bytes: float
    takes: str
    messages: int
    bytes_in_a_row: float
    ends: str = "every rank ends with the sum over all ranks"
    everywhere: bool = True


def ring(ranks: int, message_bytes: float = MESSAGE_BYTES) -> StepThrough:
    """Show a ring all-reduce: every rank ends with the sum over all ranks.

    >>> walk = ring(4)
    >>> len(walk.steps), walk.facts["each rank sends"]
    (6, '96.0 MiB = 2(n−1)/n·M')
    """
    check_ranks("a ring", ranks)
    share = 2 * (ranks - 1) / ranks * message_bytes
    return _run_rounds(
        _full_ranks(ranks, ranks, message_bytes),
        "Ring all-reduce",
        (
            "Each rank starts with its own numbers (gradients, say) and must end with everybody's "
            "sum. The message is cut into as many chunks as there are ranks; a rank only ever "
            "sends to the next one.",
            "First half, reduce-scatter: sums travel around and grow. Second half, all-gather: "
            "finished sums travel around and replace.",
        ),
        [*_ring_reduce(ranks, 2 * (ranks - 1)), *_ring_gather(ranks, ranks - 1)],
        _ExpectedCost("2(n−1)/n·M", share, "2(n−1)·α + 2(n−1)/n·M·β", 2 * (ranks - 1), share),
    )


def reduce_scatter(ranks: int, message_bytes: float = MESSAGE_BYTES) -> StepThrough:
    """Show a ring reduce-scatter: rank r ends with the sum of chunk r (ZeRO's gradients)."""
    check_ranks("a ring", ranks)
    share = (ranks - 1) / ranks * message_bytes
    return _run_rounds(
        _full_ranks(ranks, ranks, message_bytes),
        "Reduce-scatter in a ring",
        (
            "Each rank starts with its own numbers; rank r must end with everybody's sum of chunk "
            "r. ZeRO and FSDP do this to gradients: each rank updates only its own part.",
        ),
        list(_ring_reduce(ranks, ranks - 1)),
        _half_ring_cost(ranks, share, "rank r ends with the sum over all ranks of chunk r", False),
    )


def all_gather(ranks: int, message_bytes: float = MESSAGE_BYTES) -> StepThrough:
    """Show a ring all-gather: every rank ends with every rank's chunk (FSDP's weights)."""
    check_ranks("a ring", ranks)
    share = (ranks - 1) / ranks * message_bytes
    world = ChunkSimulation(
        [{rank: first_number(rank, rank)} for rank in range(ranks)], ranks, message_bytes / ranks
    )
    return _run_rounds(
        world,
        "All-gather in a ring",
        (
            "Each rank starts with one chunk and must end with all of them. FSDP does this to the "
            "weights of a block just before it is computed.",
        ),
        list(_ring_gather(ranks, 0, of=ranks - 1)),
        _half_ring_cost(ranks, share, "every rank ends with every rank's number", True),
    )


def halving(ranks: int, message_bytes: float = MESSAGE_BYTES) -> StepThrough:
    """Show recursive halving, then doubling: an all-reduce in few rounds.

    Raises:
        PlanError: the number of ranks is no power of two.
    """
    check_ranks("halving", ranks)
    if ranks & (ranks - 1):
        lower = 1 << (ranks.bit_length() - 1)
        raise PlanError(
            f"--ranks = {ranks}: halving pairs ranks, so a power of two is wanted; "
            f"try: --ranks {lower} or --ranks {min(16, 2 * lower)}"
        )
    log = ranks.bit_length() - 1
    share = 2 * (ranks - 1) / ranks * message_bytes
    return _run_rounds(
        _full_ranks(ranks, ranks, message_bytes),
        "Recursive halving and doubling",
        (
            "An all-reduce with fewer rounds than a ring. Halving: two ranks split what they are "
            "responsible for and each sends the half that the other keeps; the distance halves "
            "every round. Doubling: the same pairs, backwards, exchange finished sums.",
            "The bytes are those of a ring, the rounds are log2: better where α counts.",
        ),
        [*_halving_rounds(ranks, log), *_doubling_rounds(ranks, log)],
        _ExpectedCost("2(n−1)/n·M", share, "2·log2(n)·α + 2(n−1)/n·M·β", 2 * log, share),
    )


def tree(ranks: int, message_bytes: float = MESSAGE_BYTES) -> StepThrough:
    """Show a tree all-reduce: sums go up to rank 0 in pairs, the total comes down the same way."""
    check_ranks("a tree", ranks)
    log = (ranks - 1).bit_length()
    whole = log * message_bytes
    up = [
        (f"up {level + 1} of {log}", "send", [
            ChunkMessage(rank, rank - 2**level, (0,), adds=True)
            for rank in range(2**level, ranks, 2 ** (level + 1))
        ])
        for level in range(log)
    ]  # fmt: skip
    return _run_rounds(
        _full_ranks(ranks, 1, message_bytes),
        "Tree all-reduce",
        (
            "Sums go up to rank 0, halving the number of senders every round, and the total comes "
            "down again. Few rounds, but whole messages: the root sends it to one rank per round.",
            "Cut into many pieces that follow each other (a pipelined tree), the time falls to "
            "2·log2(n)·α + 2·M·β.",
        ),
        [*up, *_tree_down(ranks, log)],
        _ExpectedCost("⌈log2 n⌉·M", whole, "2·⌈log2 n⌉·(α + M·β)", 2 * log, 2 * whole),
    )


def broadcast(ranks: int, message_bytes: float = MESSAGE_BYTES) -> StepThrough:
    """Show a broadcast: rank 0's numbers reach all ranks, the senders doubling every round."""
    check_ranks("a broadcast", ranks)
    log = (ranks - 1).bit_length()
    whole = log * message_bytes
    ends = "every rank ends with rank 0's number"
    holding = [{0: first_number(0, 0)}, *({} for _ in range(ranks - 1))]
    return _run_rounds(
        ChunkSimulation(holding, 1, message_bytes),
        "Broadcast by doubling",
        (
            "Rank 0 has something (first weights, a decision) that all must have. Whoever has it "
            "passes it on, so the number of ranks that have it doubles every round.",
        ),
        _tree_down(ranks, log),
        _ExpectedCost("⌈log2 n⌉·M", whole, "⌈log2 n⌉·(α + M·β)", log, whole, ends),
    )


def _half_ring_cost(ranks: int, share: float, ends: str, everywhere: bool) -> _ExpectedCost:
    """Return the expected cost of half of a ring all-reduce."""
    takes = "(n−1)·α + (n−1)/n·M·β"
    return _ExpectedCost("(n−1)/n·M", share, takes, ranks - 1, share, ends, everywhere)


def _full_ranks(ranks: int, chunks: int, message_bytes: float) -> ChunkSimulation:
    """Return ranks that each begin with their own number in every chunk."""
    holding = [{c: first_number(rank, c) for c in range(chunks)} for rank in range(ranks)]
    return ChunkSimulation(holding, chunks, message_bytes / chunks)


def _ring_reduce(ranks: int, of: int) -> Iterator[Round]:
    for turn in range(ranks - 1):
        messages = [
            ChunkMessage(rank, (rank + 1) % ranks, ((rank - turn - 1) % ranks,), adds=True)
            for rank in range(ranks)
        ]
        yield f"{turn + 1} of {of}, reduce-scatter", "reduce-scatter", messages


def _ring_gather(ranks: int, before: int, of: int = 0) -> Iterator[Round]:
    for turn in range(ranks - 1):
        messages = [
            ChunkMessage(rank, (rank + 1) % ranks, ((rank - turn) % ranks,), adds=False)
            for rank in range(ranks)
        ]
        yield f"{before + turn + 1} of {of or 2 * before}, all-gather", "all-gather", messages


def _halving_rounds(ranks: int, log: int) -> Iterator[Round]:
    """Yield the halving rounds: at distance d, rank r sends chunks that differ from r in bit d."""
    for turn in range(log):
        far = ranks >> (turn + 1)
        messages = [
            ChunkMessage(
                rank,
                rank ^ far,
                tuple(c for c in range(ranks) if c // far == (rank ^ far) // far),
                adds=True,
            )
            for rank in range(ranks)
        ]
        title = f"{turn + 1} of {2 * log}, halving at distance {far}"
        yield title, "reduce-scatter", messages


def _doubling_rounds(ranks: int, log: int) -> Iterator[Round]:
    for turn in range(log):
        far = 1 << turn
        messages = [
            ChunkMessage(
                rank,
                rank ^ far,
                tuple(c for c in range(ranks) if c // far == rank // far),
                adds=False,
            )
            for rank in range(ranks)
        ]
        title = f"{log + turn + 1} of {2 * log}, doubling at distance {far}"
        yield title, "all-gather", messages


def _tree_down(ranks: int, log: int) -> list[Round]:
    return [
        (f"down {turn + 1} of {log}", "broadcast", [
            ChunkMessage(rank, rank + far, (0,), adds=False)
            for rank in range(0, ranks, 2 * far) if rank + far < ranks
        ])
        for turn, far in enumerate(2**level for level in reversed(range(log)))
    ]  # fmt: skip


def _run_rounds(
    world: ChunkSimulation,
    title: str,
    story: tuple[str, ...],
    rounds: list[Round],
    claim: _ExpectedCost,
) -> StepThrough:
    """Run the rounds, then compare sums, bytes and time with the expected values."""
    ranks, start = len(world.held), world.cells()
    totals = {
        chunk: sum(own[chunk] for own in world.held if chunk in own)
        for chunk in range(world.chunks)
    }
    for name, kind, messages in rounds:
        world.run_round(name, kind, messages, bytes_text(claim.sends_bytes))
    for rank in range(ranks):
        for chunk in totals if claim.everywhere else [rank]:
            check_equal(f"rank {rank}'s chunk {chunk}", world.held[rank].get(chunk), totals[chunk])
    check_equal("bytes sent", round(world.busiest_bytes), round(claim.sends_bytes))
    takes_s = claim.messages * ALPHA_S + claim.bytes_in_a_row / BYTES_PER_S
    check_equal("time, microseconds", round(world.now_s * 1e6, 3), round(takes_s * 1e6, 3))
    whose = "the root" if world.chunks == 1 else "each rank"
    facts = {
        f"{whose} sends": f"{bytes_text(world.busiest_bytes)} = {claim.sends}",
        "time": f"{seconds_text(world.now_s)} = {claim.takes}",
        "with M": bytes_text(world.chunk_bytes * world.chunks),
        "α": f"{ALPHA_S * 1e3:g} ms",
        "1/β": f"{BYTES_PER_S / 1e9:.0f} GB/s",
    }
    sums = ", ".join(str(total) for total in totals.values())
    whole = f"{title}, {ranks} ranks"
    return StepThrough(
        title=whole,
        story=story,
        rows=tuple(f"rank {rank}" for rank in range(ranks)),
        columns=tuple(f"c{c}" for c in totals) if world.chunks > 1 else ("all",),
        steps=tuple(world.steps),
        checked=f"{claim.ends}: {sums}; bytes and time are counted from the steps and equal "
        "the formulas",
        start=start,
        timeline=world.timeline(whole, facts),
        facts=facts,
    )
