"""State of a watched run, as values: everything that a screen shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from shoal.view.phase_lines import CurrentPhases
from shoal.view.progress import RunProgress
from shoal.view.run_table import RunRow


@dataclass(frozen=True)
class RankState:
    """A rank in its newest steps.

    Attributes:
        name: its number; among islands with the island's before it ("1/3").
        host: host name, or the node's number.
        device: name of the device, "" if unknown.
        role: server, or the pipeline stage; "" otherwise.
        step: its last step.
        seconds: by part, the mean of its newest steps, in the order of rank_records.PARTS.
        late_s: how long the others wait for it in a usual step.
        memory_bytes: its peak.
        note: dead, hung; "" otherwise.
        sample: utilisation, memory, power and temperature of its device; "" if unknown.
    """

    name: str
    host: str
    device: str
    role: str
    step: int
    seconds: tuple[float, ...]
    late_s: float
    memory_bytes: int
    note: str = ""
    sample: str = ""

    @property
    def step_s(self) -> float:
        """Return the mean seconds of the newest steps, waiting included."""
        return sum(self.seconds)


@dataclass(frozen=True)
class StepPoint:
    """Figures of one step for the curves; NaN: unknown."""

    step: int
    loss: float
    grad_norm: float
    step_s: float


@dataclass(frozen=True)
class EventLine:
    """An event as a sentence; `time_s` is 0.0 if unknown."""

    time_s: float
    text: str
    style: str = ""


@dataclass(frozen=True)
class IslandState:
    """An island of a run.

    Attributes:
        row: state, step, loss and rate.
        rounds: rounds that it merged in.
        discarded: rounds that were discarded.
        exposed_share: share of the rounds' time in waiting for others; None: no round yet.
    """

    row: RunRow
    rounds: int
    discarded: int
    exposed_share: float | None


@dataclass(frozen=True)
class WatchedRun:
    """A run at one moment.

    Attributes:
        name: of its folder.
        message: reported instead of figures, as of a folder that does not exist yet.
        row: the row of `shoal runs`; None without a folder.
        progress: figures of the newest steps.
        phases: what the first rank does at the moment.
        points: the curves, by step.
        validations: step and loss.
        ranks: by rank; [] if the run records none.
        forecast: foreseen and measured figures, each as a text.
        comment: why the forecast may be far off; "" if it is not.
        waits: what a step waits for, each as a text.
        left: time until the end, as a text; "" if unknown.
        done: when that is; "" if it is soon or unknown.
        events: the newest ones, oldest first.
        islands: of a run with islands.
    """

    name: str
    message: str = ""
    row: RunRow | None = None
    progress: RunProgress = field(default_factory=lambda: RunProgress(None))
    phases: CurrentPhases = CurrentPhases((), 0.0)
    points: Sequence[StepPoint] = ()
    validations: Sequence[tuple[float, float]] = ()
    ranks: Sequence[RankState] = ()
    forecast: Sequence[str] = ()
    comment: str = ""
    waits: Sequence[str] = ()
    left: str = ""
    done: str = ""
    events: Sequence[EventLine] = ()
    islands: Sequence[IslandState] = ()
