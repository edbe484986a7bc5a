"""Where fsdp's gathered blocks lie between their passes: on all ranks, whole, or in each node."""

from __future__ import annotations

import math

from shoal.base.errors import PlanError


def kept_over(reshard: str, shards: int, per_node: int, apart: int = 1) -> int:
    """Returns the ranks that hold a block between its passes: all shards, 1 (whole), or some.

    reshard    yes, no, node (`FsdpPolicy`) · shards  ranks that a block is cut over
    per_node   ranks of a node · apart  ranks from one of the shards to the next

    >>> [kept_over(word, 16, 8, 2) for word in ("yes", "no", "node")]
    [16, 1, 4]
    """
    inside = math.gcd(shards, max(1, per_node // apart))
    return {"yes": shards, "no": 1, "node": inside}[reshard]


def check_reshard(reshard: str, zero: int, pp: int) -> None:
    """Refuse to keep blocks where none is gathered, and in a pipeline.

    Errors: PlanError with the nearest legal choice
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
