"""Recognition of a dataset that was rebuilt for an epoch, so that its loader continues the stream.

    for _ in range(3):
        for batch in run.loader(TensorDataset(x, y)):      another object each time

Without this check each epoch would come in the order of the first one, and a checkpoint would hold
one stream per object. The module is loaded when a run opens more than one loader.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from shoal.fabric import World
from shoal.trainer.run_folder.resume_checks import count_different, digest_samples


@runtime_checkable
class IndexedLoader(Protocol):
    """A loader over an indexed dataset, with a position in the stream of samples."""

    position: int
    samples: int
    under_way: bool

    def state(self) -> dict[str, Any]:
        """Return the position of the loader as JSON."""

    def restore(self, state: dict[str, Any]) -> None:
        """Continue at the position of a saved state."""


class LoadersView(Protocol):
    """The attributes of a `RunLoaders` that this module uses."""

    world: World
    loaders: list[Any]
    settings: list[tuple[Any, int, Any]]
    opened_at: list[int]
    told_of_another: bool

    def notice(self, text: str) -> None:
        """Report a line that holds for all ranks."""

    def sample_digests(self, place: int) -> list[str]:
        """Return digests of some samples of a loader's dataset, computed on one rank."""


def replace_finished_loader(
    feed: LoadersView, loader: Any, dataset: Any, workers: int, collate: Any
) -> bool:
    """Continue an ended loader's stream of samples with a new loader over the same samples.

    Every rank calls it. One rank compares the samples, and all ranks follow its decision.

    Args:
        feed: the run's loaders; the new loader takes the place of the ended one.
        loader: the new loader over `dataset`.
        dataset, workers, collate: its settings; all must equal those of the ended loader.

    Returns:
        True if `loader` continues an earlier stream; False: it is a new stream.
    """
    if not isinstance(loader, IndexedLoader):
        return False
    for place, known in enumerate(feed.loaders):
        of, by, joined = feed.settings[place]
        if not (
            isinstance(known, IndexedLoader)
            and (type(of), known.samples, by) == (type(dataset), loader.samples, workers)
            and joined is collate
            and not known.under_way
            and known.position > feed.opened_at[place]
            and known.position % known.samples == 0
        ):
            continue
        if feed.world.broadcast_json(
            _has_same_samples(feed.sample_digests(place), dataset, workers)
        ):
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


def _has_same_samples(seen: list[str], dataset: Any, workers: int) -> bool:
    """Return whether a dataset holds the samples whose digests are given.

    Both readings are limited in time: on a busy machine one of them reads fewer samples.
    """
    again = digest_samples(dataset, workers) if seen else []
    return bool(again) and not count_different(seen, again)
