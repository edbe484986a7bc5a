"""Run a script, and end it once each of its runs has taken a step.

python tests/first_steps.py SCRIPT [WORD …]
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any


def end_after_first_steps() -> None:
    """End the script once each of its runs on two processes has taken a step."""
    from shoal.trainer.run import Run

    runs: list[Run] = []
    begin, update = Run.__init__, Run.update_weights

    def note(run: Run, *values: Any, **named: Any) -> None:
        begin(run, *values, **named)
        if run.world.size == 2:
            runs.append(run)

    def count(run: Run) -> Any:
        result = update(run)
        if run in runs and all(one.step_count for one in runs):
            print(f"{len(runs)} run(s) took a step", flush=True)
            sys.exit(0)
        return result

    Run.__init__, Run.update_weights = note, count  # type: ignore[method-assign]


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    end_after_first_steps()
    runpy.run_path(sys.argv[0], run_name="__main__")
