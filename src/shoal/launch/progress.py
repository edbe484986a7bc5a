"""Whether an attempt got anywhere: did `metrics.jsonl` grow since its workers were started?"""

from __future__ import annotations

from pathlib import Path


class Progress:
    """Whether an attempt added anything to `metrics.jsonl`, which a resume may first cut back."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.made = False
        self.size_bytes = 0

    def begin(self) -> None:
        """A new attempt starts."""
        self.made, self.size_bytes = False, self._size()

    def look(self) -> None:
        """Compare with the last look."""
        size_bytes = self._size()
        self.made = self.made or size_bytes > self.size_bytes
        self.size_bytes = size_bytes

    def _size(self) -> int:
        try:
            return self.path.stat().st_size
        except OSError:
            return 0
