"""Which epoch a loop is in, so that a run that goes on ends where one without a break would.

    for epoch in run.epochs(3):        # 0, 1, 2; after a restore only what is left
        for batch in run.loader(data): ...
        run.save()

A turn of the loop is an epoch. A checkpoint counts the turn it was written in as done if the turn's
training was over: the loader had come to its end, or was left early, and not for a stop. With
batches of the user's own nobody tells where an epoch ends: it is over if as many steps were taken
as in an earlier one, and in the first epoch with the first save.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from shoal.base.errors import ConfigError
from shoal.trainer.loaders.run_loaders import Feed


class Epochs:
    """Counts turns of `run.epochs`.

    Attributes:
        done: turns that are over.
        steps: taken in the turn that is under way.
        length: steps of an earlier turn, 0 while there was none.
        used: somebody asked for turns.
    """

    def __init__(self, feed: Feed) -> None:
        self.feed = feed
        self.done = self.steps = self.length = 0
        self.used = False
        self._stopping: Callable[[], bool] = lambda: False

    @property
    def current(self) -> int:
        """Turns that are over; without `turns`, how often the first loader came to its end."""
        return self.done if self.used else self.feed.passes()

    def turns(self, count: int, stopping: Callable[[], bool]) -> Iterator[int]:
        """The numbers of the turns that are left of `count`. Errors: ConfigError for no count."""
        if not isinstance(count, int) or count < 0:
            raise ConfigError(f"run.epochs({count!r}): a count of epochs is wanted; try: 1")
        if not self.used:
            self.used, self.done, self.steps = True, self.feed.passes(), 0
        self._stopping = stopping
        while self.done < count and not stopping():
            yield self.done
            if self._is_cut_short():
                return
            self.length = self.steps or self.length
            self.done += 1
            self.steps = 0

    def state(self) -> dict[str, int]:
        """What a checkpoint keeps; nothing where turns are not counted."""
        if not self.used:
            return {}
        over = self._over()
        return {
            "done": self.done + over,
            "steps": 0 if over else self.steps,
            "length": self.steps if over else self.length,
        }

    def restore(self, kept: dict[str, Any], notice: Callable[[str], None]) -> None:
        """Go on from `state()`; `notice` is told what will be done twice."""
        self.used = self.used or "done" in kept
        self.done = int(kept.get("done", self.feed.passes()))
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
        """Whether a stop ended this turn before its end: the rest of it is for the next start."""
        whole = self.feed.at_end() if self.feed.state else 0 < self.length <= self.steps
        return bool(self.steps) and self._stopping() and not whole

    def _over(self) -> bool:
        if not self.steps or self._is_cut_short():
            return False
        if self.feed.state:
            return self.feed.at_end() or not self.feed.under_way
        return not self.feed.under_way and self.steps >= self.length
