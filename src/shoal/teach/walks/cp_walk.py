"""Context parallelism step by step: ring attention, keys and values travel, queries stay.

Rank r holds block r of the sequence: its queries, keys and values. In n − 1 rounds every rank sends
the keys and values it holds to the next rank. A query adds what it meets to two running sums, so
that no rank ever holds the whole row of scores:

    numerator += w·v    denominator += w    w = 2^(q·k)    output = numerator / denominator

Base 2 instead of e keeps every number an exact fraction. Attention is causal: a block attends to
itself and to earlier ones, so that rank 0 works in one round and the last rank in all.

Source: Liu et al. 2023 (Ring Attention); Brandon et al. 2023 (Striped Attention: equal work).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction

from shoal.base.text.units import bytes_text
from shoal.teach.walks.walk import StepThrough, TableCell, WalkStep, check_equal, check_ranks

TOKENS, TOKEN_BYTES = 131_072, 4096
"""Sequence and bytes of keys and values per token and layer (8 heads of 128, bf16) in the facts."""


@dataclass
class _QueryBlock:
    """Running sums of one rank's query."""

    query: int
    numerator: Fraction = Fraction(0)
    denominator: Fraction = Fraction(0)
    met: list[int] = field(default_factory=list)

    def attend(self, block: int, key: int, value: int) -> None:
        """Add one block of keys and values to the sums."""
        weight = Fraction(2) ** (self.query * key)
        self.numerator += weight * value
        self.denominator += weight
        self.met.append(block)


def make_block(rank: int) -> tuple[int, int, int]:
    """Return query, key and value of block `rank`: one token of one number.

    >>> [make_block(rank) for rank in range(3)]
    [(0, 1, 1), (1, -1, 3), (2, 0, 5)]
    """
    return rank % 3, (rank + 2) % 3 - 1, (2 * rank) % 9 + 1


def _whole_attention(ranks: int, rank: int) -> Fraction:
    """Return the output of one query, computed by one process that holds everything."""
    query = make_block(rank)[0]
    blocks = [make_block(other) for other in range(rank + 1)]
    weights = [Fraction(2) ** (query * key) for _, key, _ in blocks]
    terms = (w * value for w, (_, _, value) in zip(weights, blocks, strict=True))
    total = sum(terms, Fraction(0))
    return total / sum(weights, Fraction(0))


def cp(ranks: int) -> StepThrough:
    """Show causal ring attention, round by round.

    Raises:
        PlanError: a number of ranks that cannot be shown.

    >>> walk = cp(4)
    >>> len(walk.steps), walk.facts["blocks of work per rank"]
    (4, '1 2 3 4')
    """
    check_ranks("ring attention", ranks)
    queries = [_QueryBlock(make_block(rank)[0]) for rank in range(ranks)]
    steps = []
    for turn in range(ranks):
        held = [(rank - turn) % ranks for rank in range(ranks)]
        for rank, block in enumerate(held):
            if block <= rank:
                _, key, value = make_block(block)
                queries[rank].attend(block, key, value)
        steps.append(_make_step(turn, held, queries))
    for rank, one in enumerate(queries):
        check_equal(
            f"output of rank {rank}",
            one.numerator / one.denominator,
            _whole_attention(ranks, rank),
        )
        check_equal(f"blocks of rank {rank}", sorted(one.met), list(range(rank + 1)))
    layer_bytes = TOKENS * TOKEN_BYTES
    return StepThrough(
        title=f"Context parallelism: ring attention, {ranks} ranks, causal",
        story=(
            "The sequence is cut: rank r holds block r. Queries stay. Keys and values travel "
            "around the ring, one rank further each round, while ranks compute with those they "
            "hold. A block of later tokens is masked, so its round is idle.",
        ),
        rows=tuple(f"rank {rank}" for rank in range(ranks)),
        columns=("holds", "met so far", "numerator", "denominator", "output"),
        steps=tuple(steps),
        checked="every output is that of one process that holds all keys and values, as exact "
        "fractions; each rank met every block that it may attend to once",
        looks={"own": "its own", "part": "sum so far", "whole": "complete", "busy": "masked: idle"},
        facts={
            "blocks of work per rank": " ".join(str(len(one.met)) for one in queries),
            "with two half blocks each, i and 2n−1−i": f"{(ranks + 1) / 2:g} on every rank",
            "each rank sends per layer": f"{bytes_text((ranks - 1) / ranks * layer_bytes)} = "
            "(n−1)/n·KV",
            "for": f"{TOKENS:,} tokens, {TOKEN_BYTES} bytes of keys and values each",
        },
    )


def _make_step(turn: int, held: list[int], queries: list[_QueryBlock]) -> WalkStep:
    """Return one step of the walk: each rank's block of keys and values, and its sums."""
    rows = []
    n = len(held)
    for rank, (block, one) in enumerate(zip(held, queries, strict=True)):
        done = len(one.met) == rank + 1
        look = "whole" if done else "part"
        came = None if turn == 0 else (rank - 1) % n
        output = TableCell(str(one.numerator / one.denominator), look) if done else None
        rows.append((
            TableCell(f"kv{block}", "own" if block <= rank else "busy", came),
            TableCell(" ".join(map(str, one.met)), look),
            TableCell(str(one.numerator), look),
            TableCell(str(one.denominator), look),
            output or TableCell("", "none"),
        ))  # fmt: skip
    title = f"round {turn + 1} of {n}"
    idle = [str(rank) for rank, block in enumerate(held) if block > rank]
    happens = ["own keys and values" if turn == 0 else "keys and values from the rank before"]
    if idle:
        happens.append(f"masked and idle: rank {', '.join(idle)}")
    return WalkStep(title, tuple(happens), tuple(rows))
