"""Run one phase of work on every rank, and raise on all ranks if it failed on one.

Each rank does its local work, then all gather (value, problem). If any rank has a problem, every
rank raises the same `RankFailed`, naming the lowest such rank. Between two phases no rank can be
ahead of another, and a failed rank has always reached the gather: no peer waits for it for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shoal.base.errors import ClusterError
from shoal.checkpoint.format.checkpoint_faults import RankFailed, describe_failure
from shoal.fabric import World


def gather_results(world: World, work: Callable[[], Any]) -> list[Any]:
    """Run `work` on every rank, and return every rank's result (a JSON value), by rank.

    Raises:
        RankFailed: on all ranks if `work` raised on any; on that rank the cause is chained.
        ClusterError: this rank has left the world meanwhile, so that it cannot reach the others.
    """
    failure: Exception | None = None
    message: dict[str, Any] = {"problem": None}
    try:
        message["value"] = work()
    except Exception as caught:  # whatever it is, the peers wait for this rank's word
        failure = caught
        message["problem"] = describe_failure(caught)
    answers = world.gather_json(message)
    if len(answers) != world.size:
        raise ClusterError(
            f"rank {world.rank}: the process group was left while a checkpoint was being saved; "
            f"call run.close(), which waits for it"
        )
    for rank, answer in enumerate(answers):
        if answer["problem"] is not None:
            reason = answer["problem"]
            text = reason if world.size == 1 else f"rank {rank}: {reason}"
            raise RankFailed(rank, reason, text) from failure
    return [answer["value"] for answer in answers]


def run_on_first_rank(world: World, work: Callable[[], Any]) -> Any:
    """Run `work` on rank 0, and return its result on every rank.

    Raises:
        RankFailed, ClusterError: as `gather_results`.
    """
    return gather_results(world, lambda: work() if world.is_first else None)[0]
