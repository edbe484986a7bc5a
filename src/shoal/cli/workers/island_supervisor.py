"""Supervisor of one island's workers, which `shoal train` starts for each island of a machine.

    python -m shoal.cli.workers.island_supervisor FOLDER ATTEMPT [CHANNEL]

Its workers are forked from a process that all islands share, by the open file CHANNEL. It imports
nothing that draws or plans: each supervisor is a process, and imports for itself.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from shoal.base.errors import UNSAVED_CODE, ShoalError
from shoal.base.runlog.events import EventLog
from shoal.checkpoint.format.lease import RunLease
from shoal.checkpoint.format.listing import list_checkpoints
from shoal.cli.workers.worker import worker_imports
from shoal.config.load import load_config
from shoal.config.sections import Config
from shoal.launch import RunOutcome, supervise

EPOCH_STEPS = 2000
"""Steps of a round of epochs, whose number the launcher does not know, for a stop's deadline."""
REFUSED = "shoal: this island was not started: "
"""Prefix of the error line of an island's supervisor."""


def main() -> int:
    """Supervise the workers of the island whose folder the command line names."""
    folder, attempt = Path(sys.argv[1]), int(sys.argv[2])
    channel = int(sys.argv[3]) if len(sys.argv) > 3 else -1
    try:
        config = load_config(folder / "run.toml").config
        with RunLease(folder, config.run.name):
            outcome = _supervise(folder, config, attempt, channel)
    except ShoalError as failure:
        sys.stderr.write(f"{REFUSED}{failure}\n")
        return failure.exit_code
    if outcome.message:
        sys.stderr.write(f"shoal: {outcome.message}\n")
    return UNSAVED_CODE if outcome.status == "unsaved" else outcome.exit_code


def _supervise(folder: Path, config: Config, attempt: int, channel: int) -> RunOutcome:
    processes = config.launch.processes
    events = EventLog(folder / "events.jsonl", None)
    resumed = bool(list_checkpoints(folder / "checkpoints"))
    events.emit("run_started", processes=processes, resumed=resumed, attempt=attempt)
    return supervise(
        [sys.executable, "-m", "shoal.cli.workers.worker", str(folder)],
        processes=processes,
        folder=folder,
        restarts=0,
        emit=events.emit,
        environ=dict(os.environ),
        imports=worker_imports(config.model),
        patience_s=config.launch.patience_s,
        grace_s=config.launch.grace_s,
        steps_to_save=count_steps_to_save(config),
        fork_channel=channel,
    )


def count_steps_to_save(config: Config) -> int:
    """Return the steps until a save: islands stop only where they merge, up to a round later."""
    return 2 + (config.islands.resolved().period if not config.islands.epochs else EPOCH_STEPS)


if __name__ == "__main__":
    sys.exit(main())
