"""DeepSpeed's monitors: the learning rate, and fp16's loss scale, after each update.

    csv_monitor   OUTPUT_PATH/JOB_NAME/Train_Samples_lr.csv, rows (samples, value)
    tensorboard   OUTPUT_PATH/JOB_NAME/events…
    wandb         wandb.init(project=PROJECT, group=GROUP, entity=TEAM)

Rank 0 writes them. Source: deepspeed/monitor/, 0.19.8.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.neighbours.configs.deepspeed_config import DeepSpeedSettings
from shoal.neighbours.outputs.trackers import Tracker, start_trackers
from shoal.trainer.run import Run

TIMES = "wall_clock_breakdown's elapsed_time_ms are not written; try: steps_per_print, train.trace"


class CsvMonitor(Tracker):
    """Monitor that appends to a file for each name; a start of the script writes a header anew."""

    name = "csv_monitor"

    def __init__(self, folder: Path) -> None:
        super().__init__(self)
        self.folder, self._begun = folder, set[str]()
        folder.mkdir(parents=True, exist_ok=True)

    def log(self, values: Mapping[str, Any], step: int | None = None, **_how: Any) -> None:
        """Append one row for each value."""
        for name, value in values.items():
            path = self.folder / f"{name.replace('/', '_')}.csv"
            with path.open("a", newline="", encoding="utf-8") as file:
                rows = csv.writer(file)
                if name not in self._begun:
                    rows.writerow(["step", name.rpartition("/")[2]])
                rows.writerow([step, value])
            self._begun.add(name)


def start_monitors(settings: DeepSpeedSettings, run: Run) -> list[Tracker]:
    """Start the monitors that a configuration enables; every rank calls it.

    Args:
        settings: of the configuration.
        run: prints lines on what is not written.
    """
    found: list[Tracker] = []
    enabled = {name: block for name, block in settings.monitors.items() if block["enabled"]}
    if enabled and settings.wall_clock_breakdown:
        run.recorder.notice(f"deepspeed: {', '.join(enabled)}: {TIMES}")
    for name, block in enabled.items():
        folder, job = block.get("output_path", ""), block.get("job_name", "")
        if name == "csv_monitor":
            found += [CsvMonitor(Path(folder) / job)] if run.world.is_first else []
            continue
        more = {"wandb": {"group": block.get("group"), "entity": block.get("team")}}
        made, lines = start_trackers(
            name, block.get("project", job), folder, None, more, is_first=run.world.is_first
        )
        found += made
        for what, nearest in lines:
            run.recorder.notice(f"deepspeed: {what}; try: {nearest}")
    return found
