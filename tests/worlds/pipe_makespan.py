"""Step times of pipelines over 2, 4 and 8 processes against their action lists, work asleep.

Every forward and every half of a backward of a stage sleeps 50 ms, so eight ranks fit on two cores.
Prints measured and planned seconds; fails where the best of three runs is more than 10 % longer,
or shorter than it can be. For `make proof`: it takes three minutes.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from worlds import Members

ACTION_S = 0.05
SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero-bubble": 1, "zbv": 2, "dualpipe": 1}


def main() -> int:
    worst = 0.0
    for ranks in (2, 4, 8):
        with tempfile.TemporaryDirectory() as logs:
            world = Members(ranks, Path(logs))
            try:
                for schedule in SCHEDULES:
                    shares = [measure(world, schedule)]
                    while min(shares) > 1.1 and len(shares) < 3:  # other work only adds
                        shares.append(measure(world, schedule))
                    share = min(shares)
                    print(f"{ranks} ranks, {schedule}: {share:.3f} of the plan", flush=True)
                    worst = max(worst, abs(share - 1))
            finally:
                world.close()
    return 1 if worst > 0.1 else 0


def measure(world: Members, schedule: str) -> float:
    """Measured over planned makespan of a step of two micro-batches per rank."""
    stages = SCHEDULES[schedule]
    told = world.call(
        "pipe_case:makespan",
        schedule=schedule,
        micro_batches=2 * world.size,
        chunks=stages if schedule == "interleaved" else 1,
        seconds=[ACTION_S * stages] * 3,
    )
    took_s = max(one["ended"] for one in told) - min(one["began"] for one in told)
    return took_s / told[0]["planned"]


if __name__ == "__main__":
    sys.exit(main())
