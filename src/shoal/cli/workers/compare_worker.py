"""Run one worker of `shoal compare`: `python -m shoal.cli.workers.compare_worker FOLDER ROW,ROW`.

Started by the supervisor, never by hand. All rows of one process count share the process, since
importing torch costs seconds. The worker measures each row in turn, and rank 0 writes when a row
begins (`{"began": ROW}`) and its result (`{"row": ROW, …}`), so that a crash can be assigned to a
row.
"""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path

from shoal.base.estimates.facts import usable_cores
from shoal.base.runlog.atomic_files import cache_folder
from shoal.base.runlog.events import append_line
from shoal.launch import run_and_exit
from shoal.wire.phases import NOWHERE, phase, record_step_part
from shoal.wire.stack_dumps import start_worker_reports


def main() -> int:
    """Measure the rows named on the command line."""
    folder, numbers = Path(sys.argv[1]), [int(word) for word in sys.argv[2].split(",")]
    start_worker_reports(folder)
    with phase("import"):
        import torch

        from shoal.machine.measure import measure_machine, quick_sizes
        from shoal.trainer.jobs.benchmark_row import measure_row
        from shoal.trainer.jobs.configured_run import open_world_and_source

    request = json.loads((folder / "request.json").read_text(encoding="utf-8"))
    config, world, source = open_world_and_source(folder)
    if world.size <= usable_cores():  # so that the planner can predict the rows
        measure_machine(world, cache_folder(), quick_sizes(world.device))

    def write_record(**record: object) -> None:
        if world.is_first:
            append_line(folder / "rows.jsonl", record)

    threads = torch.get_num_threads()
    machine = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": world.device.type,
        "threads": threads,
    }
    write_record(machine=machine, unit="tokens" if source.kind == "tokens" else "samples")
    for number in numbers:
        write_record(began=number)
        record_step_part(
            NOWHERE
        )  # the steps of the previous row are over, and building may take long
        layout, steps = request["rows"][number]["run"], request["steps"]
        compared = request["compared_steps"]
        # dp's threads are the parts of one process: it gets the cores of as many processes.
        parts = request["rows"][number]["parts"] if is_thread_parallel(layout) else 1
        torch.set_num_threads(threads * parts)
        figures = measure_row(
            config, source, world, layout, steps=steps, compared=compared, folder=folder
        )
        write_record(row=number, **figures)
    world.close()
    return 0


def is_thread_parallel(layout: object) -> bool:
    """Return whether a row's layout runs in threads of one process."""
    return layout == "dp" or (isinstance(layout, dict) and "threads" in layout)


if __name__ == "__main__":
    run_and_exit(main)
