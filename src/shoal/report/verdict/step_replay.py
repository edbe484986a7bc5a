"""Replay of steps without one of their costs: which ranks wait, and how long a step would be.

Ranks meet at the sum of gradients. Between two sums a rank works for its own time; the one that
works longest makes the others wait. So with the own times w of ranks r, and a common part c (the
least that any rank waits: the communication itself),

    step  T = max over r of w_r + c
    step without a cost, of which w' are the own times:  T' = T − (max w_r − max w'_r)

T is the measured step, so all that the replay does not know stays in T'. Updates and hooks of a
step come after its sum: they count towards the next one. Means are taken over blocks of steps, and
the median over blocks: a cost of every tenth step counts, one long step does not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shoal.report.order_statistics import median
from shoal.report.verdict.step_seconds import (
    BACKWARD,
    HOOKS,
    OTHER,
    UPDATE,
    WAITING,
    StepSeconds,
)

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

BLOCKS, BLOCK_STEPS = 16, 10
"""Most blocks of steps · fewest steps of a block."""
LATE_SHARE, LATE_TIMES = 0.02, 4.0
"""Share of a step from which one rank's part is later than the others' · seconds of a late rank
above the usual ones, in those of any rank that is not late. Ranks that are late by turns have a few
times as many by chance."""


@dataclass(frozen=True)
class StepReplay:
    """Measured steps, ready to be replayed without some cost.

    Attributes:
        own_s: [steps, ranks, parts] seconds of own work between two sums; no `other`, no waiting.
        wait_s: [steps, ranks] seconds of waiting.
        step_s: [steps] seconds from the last sum to the step's own, without `other`.
        ranks: the ranks.
        has_backward: backward passes are recorded by themselves.
        by_rank: as in `StepSeconds`.
    """

    own_s: Array
    wait_s: Array
    step_s: Array
    ranks: tuple[int, ...]
    has_backward: bool
    by_rank: bool

    def without(self, own_s: Array, common_s: Array | float = 0.0) -> Array:
        """Return the seconds of each step with other own times, and less of the common part."""
        import numpy as np

        now_s, then_s = self.own_s.sum(axis=2).max(axis=1), own_s.sum(axis=2).max(axis=1)
        return np.maximum(self.step_s - (now_s - then_s) - common_s, 0.0)

    def mean_s(self, step_s: Array) -> float:
        """Return the median over blocks of a block's mean step."""
        return float(median(self.block_means_s(step_s)))

    def block_means_s(self, step_s: Array) -> Array:
        """Return the mean step of each block."""
        return self.block_values(step_s, lambda block: block.mean())

    def block_values(self, step_s: Array, value: Callable[[Array], float]) -> Array:
        """Return a value of each block of steps."""
        import numpy as np

        count = max(1, min(BLOCKS, len(step_s) // BLOCK_STEPS))
        return np.array([value(block) for block in np.array_split(step_s, count)])


def prepare_replay(times: StepSeconds) -> StepReplay:
    """Return steps for a replay."""
    import numpy as np

    seconds = times.seconds.astype(np.float64)
    own_s = seconds.copy()
    own_s[:, :, [OTHER, WAITING]] = 0.0
    for part in (UPDATE, HOOKS):  # after the sum of a step: before the next one
        own_s[1:, :, part] = own_s[:-1, :, part].copy()
    step_s = median(own_s.sum(axis=2) + seconds[:, :, WAITING], axis=1)
    return StepReplay(
        own_s,
        seconds[:, :, WAITING],
        step_s,
        times.ranks,
        bool((seconds[:, :, BACKWARD] > 0).any()),
        times.by_rank,
    )


def find_late_ranks(replay: StepReplay, part: int) -> Array:
    """Return a mask of ranks that take longer than the others in a part of most blocks of steps.

    At most half of the ranks are late. Of two ranks the longer one is.
    """
    import numpy as np

    own_s = replay.own_s[:, :, part]
    count = own_s.shape[1]
    mean_s = np.array([replay.block_means_s(own_s[:, rank]) for rank in range(count)])
    usual_s = np.sort(mean_s, axis=0)[(count - 1) // 2]  # [blocks]
    least_s = LATE_SHARE * replay.mean_s(replay.step_s)
    spread_s = median(np.abs(mean_s - usual_s)) if count > 4 else 0.0
    late = (mean_s - usual_s > max(least_s, 4.0 * float(spread_s))).mean(axis=1) >= 0.75
    step_usual_s = np.sort(own_s, axis=1)[:, [(count - 1) // 2]]
    lateness_s = np.maximum(own_s - step_usual_s, 0.0).sum(axis=0)  # [ranks]
    if late.any() and not late.all():
        late &= lateness_s > LATE_TIMES * lateness_s[~late].max()
    return late if late.sum() <= count / 2 else np.zeros(count, bool)


def replace_late_part(own_s: Array, late: Array, part: int) -> Array:
    """Return own times in which late ranks take as long in a part as the others in the median."""
    import numpy as np

    replaced_s = own_s.copy()
    usual_s = median(own_s[:, ~late, part], axis=1)
    replaced_s[:, late, part] = np.minimum(own_s[:, late, part], usual_s[:, None])
    return replaced_s
