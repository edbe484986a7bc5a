"""Records of what each rank of a node did in each step, from its page, in the run folder.

Ranks write no file for it: the watch reads their pages anyway (`hang_watch.py`), and appends rows
to one file (base/runlog/rank_records.py). A step that was overwritten in a page before it was read,
at over 600 steps a second, is missing. After `KEPT` steps the older half is averaged in groups of
`GROUP` steps. So a file holds at most `KEPT` rows per rank and a hundredth of a row for each step
before. A repeated step, after a resume, replaces the rows of that step and of later ones.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from shoal.base.runlog.folder_owner import FolderOwner
from shoal.base.runlog.rank_records import (
    FOLDER,
    RankStep,
    average_steps,
    decode_rank_steps,
    encode_header,
)
from shoal.launch.watch.page_reader import PageReader

KEPT, GROUP = 10_000, 100


class StepRecordFile:
    """File of the step records of one node's ranks.

    Attributes:
        folder: the run's; without one nothing is written.
        node: the node's number.
    """

    def __init__(self, folder: Path, node: int = 0) -> None:
        self.folder, self.node = folder, node
        self._owner = FolderOwner(folder)
        self.reset()

    def reset(self) -> None:
        """Reset at a start of the ranks: the next steps may repeat earlier ones."""
        self._last: dict[int, RankStep] = {}
        self._rows = -1  # in the file; −1: not read yet

    def current_folder(self) -> Path:
        """Return the present path of the run's folder, also if it was moved meanwhile."""
        return self._owner.current_path()

    def append_steps(self, pages: Mapping[int, PageReader]) -> None:
        """Append the steps that ranks have done since the last call.

        Args:
            pages: by rank.
        """
        if not self.folder.is_dir():  # not made yet, or deleted: pages keep the last steps
            return
        rows: list[RankStep] = []
        again: dict[int, int] = {}  # by rank, the first of steps that were made before
        for rank, page in pages.items():
            last = self._last.get(rank)
            found = page.rank_steps(rank, after_s=last.end_s if last else 0.0)
            if found:
                if last and found[0].step <= last.step:
                    again[rank] = found[0].step
                rows += found
                self._last[rank] = found[-1]
        if rows:
            rows.sort(key=lambda one: (one.step, one.rank))
            with contextlib.suppress(OSError):  # a full disk must not stop the run
                self._write(rows, again)

    def _write(self, rows: list[RankStep], again: Mapping[int, int]) -> None:
        place = self._owner.current_path() / FOLDER
        path = place / f"node-{self.node}.bin"
        if self._rows < 0 or not path.exists():
            place.mkdir(exist_ok=True)
            kept = list(decode_rank_steps(path.read_bytes())) if path.exists() else []
            self._replace(path, [one for one in kept if one.step < rows[0].step])
        elif again:
            kept = list(decode_rank_steps(path.read_bytes()))
            self._replace(path, [o for o in kept if o.step < again.get(o.rank, o.step + 1)])
        with path.open("ab") as file:
            file.write(b"".join(one.encode() for one in rows))
        self._rows += len(rows)
        if self._rows > 2 * KEPT * len(self._last):
            kept = list(decode_rank_steps(path.read_bytes()))
            newest = max(one.step for one in kept)
            old = [one for one in kept if one.step <= newest - KEPT]
            recent = [one for one in kept if one.step > newest - KEPT]
            self._replace(path, average_steps(old, GROUP) + recent)

    def _replace(self, path: Path, rows: list[RankStep]) -> None:
        fresh = path.with_name(f".{path.name}.{os.getpid()}")
        fresh.write_bytes(encode_header(self.node) + b"".join(one.encode() for one in rows))
        os.replace(fresh, path)
        self._rows = len(rows)
