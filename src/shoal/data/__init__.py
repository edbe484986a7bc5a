"""Opens data, orders it by one integer, and hands it out step by step, whatever the layout."""

from shoal.data.iterable import IterableLoader, open_loader
from shoal.data.loader import Loader
from shoal.data.sources import Source, open_source
from shoal.data.step import LoadedMicroBatch, StepBatch

__all__ = [
    "IterableLoader",
    "LoadedMicroBatch",
    "Loader",
    "Source",
    "StepBatch",
    "open_loader",
    "open_source",
]
