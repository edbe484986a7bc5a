"""Replay of a layout's micro-batches in one process, in the order of their numbers in a step.

The script runs again, alone. Its own loop makes batches as before, but `run.step` and
`run.micro_batches` get the recorded micro-batches of all ranks instead. So the one process computes
on exactly what the ranks computed on, whoever cut the batches.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shoal.base.plans.script_side import ScriptSide
from shoal.proof.script.script_end import ScriptEnd
from shoal.proof.script.script_recorder import ScriptRecorder
from shoal.proof.script.value_files import read_values
from shoal.trainer.run import Run
from shoal.trainer.step.rank_share import RankShare


class BatchReplay(ScriptRecorder):
    """Recorder of the single-process run, which feeds it the micro-batches of a layout's record."""

    def __init__(self, side: ScriptSide) -> None:
        super().__init__(side)
        self.source = Path(side.batches)
        self._totals = iter(read_totals(self.source))

    def get_share(self, run: Run, batch: Any, begin: Callable[..., RankShare]) -> RankShare:
        """Return the recorded micro-batches of all ranks for a step."""
        step = run.step_count + 1
        found = read_micro_batches(self.source, self.runs.index(run), step)
        if found is None:
            raise ScriptEnd(
                f"alone the script takes step {step}, which it did not take on several processes"
            )
        run.begin_step(batch)
        return RankShare(found, len(found), found[-1][1] if found else None)

    def get_total(self, run: Run, total: float) -> float:
        """Return what `run.total` gave under the layout, if the script cuts the batches itself.

        With `run.loader` the one process has all samples, and its own total counts.
        """
        recorded = next(self._totals, None)
        if recorded is None or run.feed.loaders:
            return super().get_total(run, total)
        return super().get_total(run, recorded)


def read_micro_batches(record: Path, number: int, step: int) -> list[tuple[int, Any]] | None:
    """Return a step's (index, micro-batch) of all data ranks, in order; None without a record."""
    paths = list(record.glob(f"{number}-{step}-batch-*.json"))
    if not paths:
        return None
    pairs = [(int(i), value) for path in paths for i, value in read_values(path.with_suffix(""))]
    return sorted(pairs, key=lambda pair: pair[0])


def read_totals(record: Path) -> list[float]:
    """Return the results of `run.total` in a record, in their order."""
    text = (record / "events.jsonl").read_text(encoding="utf-8")
    events = [json.loads(line) for line in text.splitlines()]
    return [float(one["value"]) for one in events if one["event"] == "total"]
