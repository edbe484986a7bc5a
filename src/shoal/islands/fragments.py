"""Fragments of a model, which travel between islands one by one, and their schedule.

    block k of the model  →  fragment k mod P          strided: each has early and late layers
    fragment p, round of H steps:   applied after step a = ⌊(p+1)·H/P⌋,   sent after step a − τ

A block is a layer of a stack: the parameters whose names agree up to the first integer
(`blocks.3.…`). Parameters in no block (embeddings, head, last norm) go, largest first, to the
fragment with the fewest bytes. The last fragment is applied with the round's last step, so no
fragment is in flight when a round ends. A fragment is sent only after the previous one was applied,
so one is in flight at a time, however few steps a slow island takes.

Source: Douillard et al. 2025 (streaming DiLoCo), strided fragments; one in flight as torchft's
`local_sgd.py`. There fragment p is sent at ⌊p·H/P⌋ and may be applied in the next round.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shoal.base.errors import ConfigError

Block = tuple[tuple[str, ...], int]
"""(name of a stack of layers, number of a layer in it)."""


@dataclass(frozen=True)
class FragmentSchedule:
    """Schedule of a fragment, in finished inner steps of the round (1 … H).

    Attributes:
        fragment: index, from 0.
        send_after: step after which it is sent; its message is the change until then.
        apply_after: step after which the island waits for it and applies it; at least `send_after`.
    """

    fragment: int
    send_after: int
    apply_after: int


def block_of(name: str) -> Block | None:
    """Return the block of a parameter; None if its name has no integer.

    >>> block_of("model.layers.12.mlp.0.weight"), block_of("head.weight")
    ((('model', 'layers'), 12), None)
    """
    parts = name.split(".")
    for place, part in enumerate(parts):
        if part.isdecimal():
            return tuple(parts[:place]), int(part)
    return None


def partition_parameters(
    bytes_of: Mapping[str, int], fragments: int
) -> tuple[tuple[str, ...], ...]:
    """Partition parameter names into non-empty fragments, whatever their order.

    Args:
        bytes_of: bytes of each whole parameter, the same on all ranks and islands.

    Raises:
        ConfigError: there are fewer parameters than fragments.

    Note:
        A model with fewer blocks than fragments is partitioned by parameters, largest first.

    >>> sizes = {"embed": 8, "blocks.0.w": 4, "blocks.1.w": 4, "blocks.2.w": 4, "norm": 1}
    >>> partition_parameters(sizes, 2)
    (('blocks.0.w', 'blocks.2.w', 'norm'), ('blocks.1.w', 'embed'))
    """
    if fragments > max(1, len(bytes_of)):
        raise ConfigError(
            f"islands.fragments = {fragments}: the model has {len(bytes_of)} parameters to deal; "
            f"try: islands.fragments={max(1, len(bytes_of))}"
        )
    blocks: dict[Block, list[str]] = {}
    loose = []
    for name in bytes_of:
        block = block_of(name)
        if block is None:
            loose.append(name)
        else:
            blocks.setdefault(block, []).append(name)
    if len(blocks) < fragments:
        blocks, loose = {}, list(bytes_of)
    dealt: list[list[str]] = [[] for _ in range(fragments)]
    for place, block in enumerate(sorted(blocks)):
        dealt[place % fragments].extend(blocks[block])
    weights = [sum(bytes_of[name] for name in names) for names in dealt]
    for name in sorted(loose, key=lambda name: (-bytes_of[name], name)):
        lightest = min(range(fragments), key=lambda p: (weights[p], len(dealt[p]), p))
        dealt[lightest].append(name)
        weights[lightest] += bytes_of[name]
    return tuple(tuple(sorted(names)) for names in dealt)


def schedule_fragments(steps: int, fragments: int, overlap: int) -> tuple[FragmentSchedule, ...]:
    """Return the schedule of the fragments in a round of `steps` inner steps, in order.

    Args:
        overlap: τ, inner steps during a transfer; fewer if the round has too few.

    Note:
        With fewer steps than fragments, several travel after the same step, in this order.

    >>> [(m.send_after, m.apply_after) for m in schedule_fragments(50, 4, 1)]
    [(11, 12), (24, 25), (36, 37), (49, 50)]
    >>> [(m.send_after, m.apply_after) for m in schedule_fragments(2, 4, 1)]
    [(1, 1), (1, 1), (1, 1), (1, 2)]
    """
    found = []
    before = 1
    for fragment in range(fragments):
        apply_after = max(1, (fragment + 1) * steps // fragments)
        send_after = max(before, apply_after - overlap)
        found.append(FragmentSchedule(fragment, send_after, apply_after))
        before = apply_after
    return tuple(found)
