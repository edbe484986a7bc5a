"""Texts on ranks that differ although they must be equal, for trainer and watchdog."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

FEW = 8


def ranks_text(ranks: Sequence[int]) -> str:
    """Format ranks as "rank 3" or "ranks 0, 2", and only the first of many.

    >>> ranks_text([3]), ranks_text([0, 2]), ranks_text(range(10))
    ('rank 3', 'ranks 0, 2', 'ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more')
    """
    some = ", ".join(map(str, ranks[:FEW]))
    more = f" and {len(ranks) - FEW} more" if len(ranks) > FEW else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {some}{more}"


def values_text(values: Mapping[int, str]) -> str:
    """Group the ranks by their value, and format each value with its ranks.

    Args:
        values: rank → value.

    >>> values_text({0: "heads.a", 1: "heads.b", 2: "heads.a"})
    'heads.a on ranks 0, 2, heads.b on rank 1'
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, value in values.items():
        ranks_of.setdefault(value, []).append(rank)
    return ", ".join(f"{value} on {ranks_text(ranks)}" for value, ranks in ranks_of.items())


def blocks_line(calls: Mapping[int, str], when: str) -> str:
    """Format the error line for ranks that run different fsdp blocks at the same time.

    Args:
        calls: rank → its block and pass, or another activity; empty if unknown.
        when: the step, as "step 3".
    """
    said = values_text(calls) or "in another order"
    return (
        f"{when}: ranks run different blocks: {said}; fsdp and hsdp gather weights and sum "
        f"gradients block by block, so these would be mixed up; try: layout.strategy=zero2"
    )
