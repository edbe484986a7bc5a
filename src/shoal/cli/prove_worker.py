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
        from shoal.config.load import load
        from shoal.data.sources import open_source
        from shoal.fabric import start_world
        from shoal.proof import Battery
        from shoal.proof.material import material_of
        from shoal.proof.quick import quick_battery

    config = load(folder / "run.toml").config
    world = start_world()
    source = world.local_first(lambda: open_source(config.data, config.train.seed))
    material = material_of(config, source)
    if "--quick" in sys.argv[2:]:
        battery = quick_battery(material, world.size)
    else:
        battery = Battery(material.trial(), seed=config.train.seed)
    report = battery.prove(world, material.layout, material.policies)
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
