"""One process of `shoal prove`: `python -m shoal.cli.prove_worker RUN_FOLDER [--quick]`.

Started by the supervisor, never by hand. Rank 0 leaves the report in the folder as proof.json.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from shoal.base.phases import phase, tell_folder
from shoal.launch import run_worker


def main() -> int:
    """Prove the run that the folder's run.toml describes."""
    folder = Path(sys.argv[1])
    if os.environ.get("RANK", "0") == "0":
        tell_folder(folder)
    with phase("import"):
        from shoal.base.files import write_whole
        from shoal.base.plan import Plan
        from shoal.config.load import load
        from shoal.data.sources import open_source
        from shoal.fabric import start_world
        from shoal.proof import Battery
        from shoal.proof.proof_case import case_of
        from shoal.proof.quick import quick_battery

    config = load(folder / "run.toml").config
    world = start_world()
    source = world.local_first(lambda: open_source(config.data, config.train.seed))
    case = case_of(config, source, Plan.from_json((folder / "plan.json").read_text()))
    if "--quick" in sys.argv[2:]:
        battery = quick_battery(case, world.size)
    else:
        battery = Battery(case.trial(), seed=config.train.seed)
    report = battery.prove(world, case.layout, case.policies)
    if world.is_first:
        write_whole(folder / "proof.json", json.dumps(report))
    world.close()
    return 0


if __name__ == "__main__":
    code = run_worker(main)
    sys.stdout.flush()
    sys.stderr.flush()
    # As in worker.py: the interpreter's teardown could abort in gloo's threads after a failure.
    os._exit(code)
