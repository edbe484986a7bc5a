"""plan.json of a training loop of the user's own, for `shoal runs`, `watch`, `report` and verdicts.

It holds the run's plan like that of `shoal train`, without a forecast. Batch and micro-batch are 0
while Shoal does not know them: a loop that cuts its own batches may pass any number of samples.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.base.runlog.atomic_files import write_atomically

if TYPE_CHECKING:
    from shoal.trainer.run import Run


def write_loop_plan(run: Run, folder: Path, *, knows_batch: bool = True) -> None:
    """Write plan.json into the folder of a run that `shoal train` did not start.

    Only ranks that keep a folder write; a full disk does not stop the run.

    Args:
        run: the run.
        folder: its folder.
        knows_batch: the batch of the plan is what a step trains on: it was given, or the run's
            loader deals it.
    """
    if not run.world.writes_files or (folder / "run.toml").exists():
        return
    plan = run.plan if knows_batch else replace(run.plan, batch=0, micro_batch=0, accumulate=0)
    total = run.rate.length.total_steps
    steps = {"steps": total} if total else {}
    about = {"chosen": False, "unit": "targets", "device": run.world.device.type}
    with contextlib.suppress(OSError):
        write_atomically(folder / "plan.json", plan.to_json({**steps, **about}))
