"""Origin of a sample: the part of a mixture, and the file or row that it comes from."""

from __future__ import annotations

import bisect
from typing import Any

from shoal.config.sections import DataSection
from shoal.data.inspection.source_facts import part_names
from shoal.data.loading.weighted_mixture import WeightedMixture
from shoal.data.sources import Source


class SampleOrigins:
    """Lookup of a sample's origin by its index in the dataset.

    Args:
        source: the opened data.
        section: [data] of the run.
    """

    def __init__(self, source: Source, section: DataSection) -> None:
        train = source.train
        self.section = section
        is_mixture = isinstance(train, WeightedMixture)
        self.datasets = train.datasets if is_mixture else [train]
        self.firsts = train.firsts if is_mixture else [0]
        self.names = part_names(section.source, len(self.datasets))

    def find(self, index: int) -> dict[str, Any]:
        """Return {"source": name of the part, "part_sample": index in that part}."""
        if len(self.datasets) == 1:
            return {"source": self.names[0], "part_sample": index}
        part = bisect.bisect_right(self.firsts, index) - 1
        part = min(max(part, 0), len(self.datasets) - 1)
        return {"source": self.names[part], "part_sample": index - self.firsts[part]}
