"""Rules for what fsdp gathers at once, and where gathered weights stay between passes."""

from __future__ import annotations

import math

from shoal.base.errors import PlanError

MANY_BLOCKS = 32
"""Least number of blocks whose waits matter, whatever their size."""

FEW_ELEMENTS = 2**20
"""Most weights of all blocks that may stay whole for a pass: 4 MiB of fp32."""


def gathers_all_blocks(blocks: int, elements: float, names_blocks: bool) -> bool:
    """Return whether fsdp gathers all blocks of a model at once, with the root's parameters.

    Many small blocks wait for messages longer than they send: 300 blocks of 272 weights took 14
    times the step of ddp on two ranks. The rule depends on the model alone, so all ranks, the
    planner and later starts agree.

    Args:
        blocks: number of blocks of the model, without experts.
        elements: weights of all blocks, unsplit.
        names_blocks: the user names the blocks, so they stay separate.

    >>> gathers_all_blocks(300, 300 * 272, False), gathers_all_blocks(12, 12 * 272, False)
    (True, False)
    """
    return blocks >= MANY_BLOCKS and elements <= FEW_ELEMENTS and not names_blocks


def ranks_after_reshard(reshard: str, shards: int, per_node: int, apart: int = 1) -> int:
    """Return over how many ranks a block is sharded between its passes: all, some, or 1.

    Args:
        reshard: yes, no, node (`FsdpPolicy`).
        shards: ranks over which a block is cut.
        per_node: ranks of a node.
        apart: rank distance from one shard to the next.

    >>> [ranks_after_reshard(word, 16, 8, 2) for word in ("yes", "no", "node")]
    [16, 1, 4]
    """
    inside = math.gcd(shards, max(1, per_node // apart))
    return {"yes": shards, "no": 1, "node": inside}[reshard]


def check_reshard(reshard: str, zero: int, pp: int) -> None:
    """Refuse `fsdp.reshard` = no or node unless the layout is fsdp without a pipeline.

    Args:
        reshard: yes frees a gathered block after each pass, no keeps it whole, node keeps it
            sharded over the ranks of a node.
        zero: ZeRO stage; 3 is fsdp and hsdp.
        pp: pipeline degree.

    Raises:
        PlanError: with the nearest legal choice.
    """
    if reshard == "yes":
        return
    if zero != 3:
        raise PlanError(
            f"fsdp.reshard = {reshard}: says what becomes of gathered blocks, and only fsdp and "
            f"hsdp gather any; try: layout.strategy=fsdp, or fsdp.reshard=yes"
        )
    if pp > 1:
        raise PlanError(
            f"fsdp.reshard = {reshard}: a stage runs other micro-batches between a block's passes, "
            f"so what stays would depend on the schedule; try: fsdp.reshard=yes"
        )
