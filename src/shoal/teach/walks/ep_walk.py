"""Expert parallelism step by step: two all-to-alls carry tokens to their experts and back.

Every rank has its own tokens and one expert of a mixture. A router names an expert for each token.
An all-to-all sends every token to the rank of its expert; the experts compute; a second all-to-all
sends the results back to where the tokens came from. The backward pass does the same twice more.

The batch of an expert is what the router sends it: a rank with a popular expert works longer, and
the others wait for it in the second all-to-all.

Source: Lepikhin et al. 2020 (GShard); Fedus et al. 2021 (Switch Transformer).
"""

from __future__ import annotations

from shoal.base.errors import PlanError
from shoal.base.text.units import bytes_text
from shoal.teach.walks.walk import StepThrough, TableCell, WalkStep, check_equal, check_ranks

TOKENS_PER_RANK = 3
MOST_EXPERTS = 8
"""Most ranks whose tokens still fit into a row."""

TOKENS, WIDTH, NUMBER_BYTES = 8192, 4096, 2
"""Tokens of a rank's micro-batch, width and bytes per number in the facts."""

PASSES = 4
"""All-to-alls of a layer: there and back, forward and backward."""


def route(token: int, experts: int) -> int:
    """Return the expert of a token: fixed here, so that some experts are popular.

    >>> [route(token, 4) for token in range(12)]
    [0, 1, 0, 1, 0, 2, 1, 2, 1, 3, 3, 0]
    """
    return (token * token + token // 5 + token // 9) % experts


def expert_output(expert: int, token: int) -> int:
    """Return what an expert makes of a token: its number times a factor of the expert's own."""
    return (token + 1) * (expert + 2)


def ep(ranks: int) -> StepThrough:
    """Show one layer of experts, one expert per rank, forward.

    Raises:
        PlanError: a number of ranks that cannot be shown.

    >>> walk = ep(4)
    >>> walk.facts["tokens per expert"]
    '4 4 2 2, mean 3'
    """
    check_ranks("expert parallelism", ranks)
    if ranks > MOST_EXPERTS:
        raise PlanError(
            f"--ranks = {ranks}: experts are shown on 2 to {MOST_EXPERTS} ranks; "
            f"try: --ranks {MOST_EXPERTS}"
        )
    tokens = [list(range(r * TOKENS_PER_RANK, (r + 1) * TOKENS_PER_RANK)) for r in range(ranks)]
    received: list[list[int]] = [[] for _ in range(ranks)]
    for own in tokens:
        for token in own:
            received[route(token, ranks)].append(token)
    computed = [{t: expert_output(e, t) for t in batch} for e, batch in enumerate(received)]
    back = [[computed[route(token, ranks)][token] for token in own] for own in tokens]
    right = [[expert_output(route(token, ranks), token) for token in own] for own in tokens]
    check_equal("outputs", back, right)
    counts = [len(batch) for batch in received]
    check_equal("tokens of all experts", sum(counts), ranks * TOKENS_PER_RANK)
    mean = sum(counts) / ranks
    sent_bytes = PASSES * (ranks - 1) / ranks * TOKENS * WIDTH * NUMBER_BYTES
    title = f"Expert parallelism, {ranks} ranks with one expert each"
    return StepThrough(
        title=title,
        story=(
            "Each rank has its own tokens and one expert. A router chooses an expert for every "
            "token. Tokens travel to their expert's rank, and the results travel back.",
        ),
        rows=tuple(f"rank {rank}" for rank in range(ranks)),
        columns=("tokens", "router chose", "expert got", "expert made", "back"),
        start=_table(tokens, ranks, None, None, None),
        steps=(
            WalkStep("all-to-all, to the experts", ("every rank sends to every other",),
                     _table(tokens, ranks, received, None, None),
                     f"batches of the experts: {' '.join(map(str, counts))}"),
            WalkStep("the experts compute", ("token t becomes (t + 1)·(expert + 2)",),
                     _table(tokens, ranks, received, computed, None),
                     f"the fullest works {max(counts) / mean:.2f} times as long as the mean"),
            WalkStep("all-to-all, back", ("every result goes to its token's rank",),
                     _table(tokens, ranks, received, computed, back)),
        ),
        checked="every token comes back to its rank with what one process computes for it; no "
        "token is lost or doubled",
        looks={"own": "its own tokens", "busy": "of other ranks too", "whole": "results"},
        facts={
            "tokens per expert": f"{' '.join(map(str, counts))}, mean {mean:g}",
            "each rank sends per layer, evenly routed": f"{bytes_text(sent_bytes)} = "
            f"{PASSES} · (n−1)/n·M",
            "for": f"{TOKENS} tokens a rank, width {WIDTH}, bf16, one expert a token",
        },
    )  # fmt: skip


def _table(
    tokens: list[list[int]],
    ranks: int,
    received: list[list[int]] | None,
    computed: list[dict[int, int]] | None,
    back: list[list[int]] | None,
) -> tuple[tuple[TableCell, ...], ...]:
    """Return one row per rank; columns that are not reached yet stay empty."""
    rows = []
    for rank, own in enumerate(tokens):
        chosen = [route(token, ranks) for token in own]
        rows.append((
            _cell(own, "own"),
            _cell(chosen, "own"),
            _cell(received[rank] if received else None, "busy"),
            _cell(list(computed[rank].values()) if computed else None, "busy"),
            _cell(back[rank] if back else None, "whole"),
        ))  # fmt: skip
    return tuple(rows)


def _cell(numbers: list[int] | None, look: str) -> TableCell:
    return TableCell(" ".join(map(str, numbers)), look) if numbers else TableCell("", "none")
