"""Knows a dataset that was made anew for an epoch: its loader goes on where the last one ended.

    for _ in range(3):
        for batch in run.loader(TensorDataset(x, y)):      another object each time

Without it each epoch would come in the order of the first one, and a checkpoint would keep a stream
for each. Loaded when a run opens more than one loader.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from shoal.fabric import World
from shoal.trainer.run_folder.resume_checks import look_at, unlike


@runtime_checkable
class Indexed(Protocol):
    """A loader of samples with an index, which stands at one of them."""

    position: int
    samples: int
    under_way: bool

    def state(self) -> dict[str, Any]:
        """Where it stands."""

    def restore(self, state: dict[str, Any]) -> None:
        """Go on there."""


class Streams(Protocol):
    """What of a `Feed` is needed."""

    world: World
    loaders: list[Any]
    settings: list[tuple[Any, int, Any]]
    opened_at: list[int]
    told_of_another: bool

    def notice(self, text: str) -> None:
        """Tell what all ranks find."""

    def seen(self, place: int) -> list[str]:
        """Digests of some samples, on one rank."""


def take_over(feed: Streams, loader: Any, dataset: Any, workers: int, collate: Any) -> bool:
    """Put a new loader in the place of one that came to the end of an epoch over the same samples.

    Every rank calls it; one looks at the samples, and all do as it says.
    """
    if not isinstance(loader, Indexed):
        return False
    for place, known in enumerate(feed.loaders):
        of, by, joined = feed.settings[place]
        if not (
            isinstance(known, Indexed)
            and (type(of), known.samples, by) == (type(dataset), loader.samples, workers)
            and joined is collate
            and not known.under_way
            and known.position > feed.opened_at[place]
            and known.position % known.samples == 0
        ):
            continue
        if feed.world.broadcast_json(_is_same(feed.seen(place), dataset, workers)):
            loader.restore(known.state())
            feed.loaders[place], feed.opened_at[place] = loader, loader.position
            feed.settings[place] = (dataset, workers, collate)
            return True
        if not feed.told_of_another:
            feed.told_of_another = True
            feed.notice(
                f"run.loader: another {type(dataset).__name__} of {loader.samples} samples, and "
                f"other ones: a stream of its own, in the order of a first epoch; try: one "
                f"dataset, made before the loop, if its samples are drawn anew"
            )
    return False


def _is_same(seen: list[str], dataset: Any, workers: int) -> bool:
    """Whether a dataset holds the samples that were seen of another one.

    Both looks last so long, and no longer: on a busy machine one of them sees fewer samples.
    """
    again = look_at(dataset, workers) if seen else []
    return bool(again) and not unlike(seen, again)
