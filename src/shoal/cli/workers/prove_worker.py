"""One process of `shoal prove`: `python -m shoal.cli.workers.prove_worker RUN_FOLDER [MODES]`.

Modes: --quick, --by-blocks, --script.
The supervisor starts it, never a user. Rank 0 writes the report into the folder as proof.json. With
--script the folder holds side.json, one run of a user's script (`shoal prove -- train.py`); the one
process compares its record with those of the layouts, and writes report-N.json into it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.launch import run_and_exit
from shoal.wire.phases import phase
from shoal.wire.stack_dumps import start_worker_reports

if TYPE_CHECKING:
    from shoal.fabric import World
    from shoal.proof import Battery
    from shoal.proof.proof_case import ProofCase


SCRIPT_IMPORTS = (
    *("shoal.proof.script.side_process", "shoal.trainer.parallelize", "torch._dynamo"),
    *("shoal.parallel.data_parallel.ddp", "shoal.checkpoint.save.write"),
)
"""Slow imports that every process of a script's proof needs."""


def main() -> int:
    """Run the proof for the run.toml, or the script, of the folder."""
    folder = Path(sys.argv[1])
    start_worker_reports(folder)
    if "--script" in sys.argv[2:]:
        return run_script_side(folder)
    with phase("import"):
        from shoal.base.plans.plan import Plan
        from shoal.base.runlog.atomic_files import write_atomically
        from shoal.proof import Battery
        from shoal.proof.proof_case import make_case
        from shoal.proof.start_proof import quick_battery
        from shoal.trainer.jobs.configured_run import open_world_and_source

    config, world, source = open_world_and_source(folder)
    case = make_case(
        config, source, Plan.from_json((folder / "plan.json").read_text(encoding="utf-8"))
    )
    if "--quick" in sys.argv[2:]:
        battery = quick_battery(case, world.size, folder)
    else:
        battery = Battery(case.trial(), seed=config.train.seed, folder=folder)
    battery.by_blocks = "--by-blocks" in sys.argv[2:]
    reason = ""
    if not battery.by_blocks:
        reason = world.broadcast_json(
            world.run_local_first(lambda: whole_proof_obstacle(case, battery, world))
        )
        battery.by_blocks = bool(reason)
    report = battery.prove(world, case.layout, case.policies)
    if reason:
        report["said"].append(f"not as a whole: {reason}")
    if world.is_first:
        write_atomically(folder / "proof.json", json.dumps(report))
    world.close()
    return 0


def run_script_side(folder: Path) -> int:
    """Run the script of the folder's settings, and compare its record with others."""
    with phase("import"):
        from shoal.base.plans.script_side import ScriptSide
        from shoal.proof.script.record_comparison import compare_sides
        from shoal.proof.script.side_process import run_side

    side = ScriptSide.read(folder / "side.json")
    recorder = run_side(side)
    for number, compared in enumerate(side.compared):
        report = compare_sides(Path(side.record), Path(compared))
        path = Path(side.record) / f"report-{number}.json"
        path.write_text(json.dumps(report), encoding="utf-8")
    for run in recorder.runs:
        run.world.close()
    return 0


def whole_proof_obstacle(case: ProofCase, battery: Battery, world: World) -> str:
    """Return on rank 0 why the model does not fit this machine for a whole proof; "" if it does.

    A model that cannot be built without numbers (on the meta device) is tried as a whole.
    """
    import torch

    from shoal.proof.reference_limits import ProofResources
    from shoal.trace.isolation.collective_ban import forbid_collectives
    from shoal.trainer.parallelize import build_module

    if not world.is_first:
        return ""
    try:
        with forbid_collectives(), torch.device("meta"):
            module = build_module(case.build, case.plan.seed)
    except Exception:  # any error of the user's build function, which the proof reports later
        return ""
    room = ProofResources.of(world, case.layout, battery.steps, battery.folder)
    return room.find_shortage([p.numel() * torch.float64.itemsize for p in module.parameters()])


if __name__ == "__main__":
    run_and_exit(main)
