"""Epoch counter of a run, so that a resumed run ends where an uninterrupted one would.

    for epoch in run.epochs(3):        # 0, 1, 2; after a restore only what is left
        for batch in run.loader(data): ...
        run.save()

One turn of the loop is one epoch. A checkpoint counts the turn in which it was written as done if
the training of that turn was over: its loader had reached its end, or the user's code left the loop
early, and not because of a stop. With the user's own batches Shoal cannot see where an epoch ends.
Such a turn is over after as many steps as an earlier turn took, and in the first epoch with the
first save.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from shoal.base.errors import ConfigError
from shoal.trainer.loaders.run_loaders import RunLoaders


class EpochCounter:
    """Counter of the turns of `run.epochs`.

    Attributes:
        done: finished turns.
        steps: steps taken in the current turn.
        length: steps of an earlier turn; 0 before the first one ends.
        used: the user's code has called `run.epochs`.
    """

    def __init__(self, feed: RunLoaders) -> None:
        self.feed = feed
        self.done = self.steps = self.length = 0
        self.used = False
        self._stopping: Callable[[], bool] = lambda: False

    @property
    def current(self) -> int:
        """Finished turns; without `turns`, how often the first loader reached its end."""
        return self.done if self.used else self.feed.count_epochs()

    def iter_epochs(
        self, count: int, stopping: Callable[[], bool], notice: Callable[[str], None]
    ) -> Iterator[int]:
        """Yield the numbers of the remaining turns out of `count`.

        Args:
            count: turns of the whole run.
            stopping: returns whether a stop was requested.
            notice: is called with a line if a restored run has no turn left.

        Raises:
            ConfigError: `count` is no count.
        """
        if not isinstance(count, int) or count < 0:
            raise ConfigError(f"run.epochs({count!r}): a count of epochs is wanted; try: 1")
        if not self.used:
            self.used, self.done, self.steps = True, self.feed.count_epochs(), 0
        self._stopping = stopping
        if self.done >= count > 0:
            notice(
                f"run.epochs({count}): {self.done} of them are trained already, so nothing is "
                f"left; to train on, try: run.epochs({self.done + count})"
            )
        while self.done < count and not stopping():
            yield self.done
            if self._is_cut_short():
                return
            self.length = self.steps or self.length
            self.done += 1
            self.steps = 0

    def state(self) -> dict[str, int]:
        """Return the JSON state for a checkpoint; {} if turns are not counted."""
        if not self.used:
            return {}
        over = self._is_epoch_over()
        return {
            "done": self.done + over,
            "steps": 0 if over else self.steps,
            "length": self.steps if over else self.length,
        }

    def restore(self, kept: dict[str, Any], notice: Callable[[str], None]) -> None:
        """Continue from a `state()`; report through `notice` which steps will be repeated."""
        self.used = self.used or "done" in kept
        self.done = int(kept.get("done", self.feed.count_epochs()))
        self.steps = int(kept.get("steps", 0))
        self.length = int(kept.get("length", 0))
        if not self.steps or self.feed.state:
            return
        of = f" of its {self.length}" if self.length else ""
        notice(
            f"epoch {self.done} is begun again, and {self.steps}{of} steps are "
            f"repeated: batches of your own cannot be entered in the middle; run.loader's can"
        )
        self.steps = 0

    def _is_cut_short(self) -> bool:
        """Return whether a stop ended this turn before its end; the next start does the rest."""
        whole = self.feed.at_end() if self.feed.state else 0 < self.length <= self.steps
        return bool(self.steps) and self._stopping() and not whole

    def _is_epoch_over(self) -> bool:
        if not self.steps or self._is_cut_short():
            return False
        if self.feed.state:
            return self.feed.at_end() or not self.feed.under_way
        return not self.feed.under_way and self.steps >= self.length
