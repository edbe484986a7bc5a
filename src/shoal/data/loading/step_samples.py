"""Output of a loader: the samples of one optimizer step on one rank.

loader ── StepBatch ──> trainer          one per optimizer step, also on a rank with no work
             └─ LoadedMicroBatch 1, 3, 5 …   those of the step's `total` that this rank owns
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shoal.base.errors import ConfigError

if TYPE_CHECKING:
    from shoal.data.loading.read_retries import UnreadableSample


@dataclass(slots=True)  # frozen, eight of them take three times as long
class LoadedMicroBatch:
    """One micro-batch with its samples joined, ready for one forward pass.

    Attributes:
        index: its number in the step, over all ranks.
        start, stop: its positions in the stream: start … stop − 1.
        value: result of collate, e.g. (inputs, targets), samples along dim 0.
        apart: its positions if they are not contiguous, in turns of several streams; ():
            contiguous.
    """

    index: int
    start: int
    stop: int
    value: Any
    apart: tuple[int, ...] = ()

    @property
    def positions(self) -> Sequence[int]:
        """Stream positions of its samples."""
        return self.apart or range(self.start, self.stop)


@dataclass(frozen=True)
class StepBatch:
    """One optimizer step's samples on one rank, to be passed to `run.step` whole.

    Attributes:
        micro_batches: micro-batches of this rank, in order; empty if the short last step of an
            epoch has none for it (it still joins the collectives, weight 0).
        position, next_position: where the step starts and ends in the stream, samples over all
            ranks.
        total: micro-batches of the whole step, over all ranks.
        epoch: pass over the data, from 0.
        by_rank: micro-batches of each data rank; (): dealt in turn, rank 0 first.
        after: the loader's state once this step is committed; JSON values.
        stream: identity of the loader that made it.
        probe: texts on the data that ranks compare at a loader's first step; else ().
        sample_ids: dataset indices of each micro-batch (iterables: numbers in the epoch).
        left_out: unreadable samples of this rank, which are in none of them.
        wait_s: seconds in which the loader made it, while the loop waited; None: unknown.

    `values` are the joined samples, one per micro-batch, and `len()` their number; iterating or
    indexing raises a ConfigError.
    """

    micro_batches: tuple[LoadedMicroBatch, ...]
    position: int
    next_position: int
    total: int
    epoch: int
    sample_ids: tuple[tuple[int, ...], ...]
    after: dict[str, Any] = field(default_factory=dict)
    stream: int = 0
    probe: tuple[Any, ...] = ()
    by_rank: tuple[int, ...] = ()
    left_out: tuple[UnreadableSample, ...] = ()
    wait_s: float | None = field(default=None, compare=False)

    @property
    def values(self) -> list[Any]:
        """Joined samples of each micro-batch, mostly (inputs, targets)."""
        return [micro_batch.value for micro_batch in self.micro_batches]

    def __iter__(self) -> Iterator[Any]:
        """Raise ConfigError: a step is no pair, and parts of it cannot be resumed."""
        raise ConfigError(
            "run.loader: a batch is one whole step, several micro-batches, and cannot be taken "
            "apart; try: for batch in run.loader(data): run.step(batch); what is inside, one "
            "per micro-batch, is batch.values"
        )

    def __getitem__(self, key: Any) -> Any:
        """Raise ConfigError, as `__iter__` does."""
        return iter(self)

    def __len__(self) -> int:
        """Return the number of micro-batches of this rank."""
        return len(self.micro_batches)
