"""One process of `shoal replay`: `python -m shoal.cli.workers.replay_worker FOLDER`.

The supervisor starts it, never a user. It trains the folder's run up to the asked step, as a worker
of `shoal train` would, and rank 0 writes the tensors of the recorded steps into the folder.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from bdb import BdbQuit
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.base.runlog.atomic_files import write_atomically
from shoal.launch import run_and_exit
from shoal.replay.breakpoint_gate import BreakpointGate
from shoal.replay.replay_folder import RECORDED, ReplayRequest
from shoal.wire.phases import phase
from shoal.wire.stack_dumps import start_worker_reports

if TYPE_CHECKING:
    from shoal.fabric import World
    from shoal.replay.step_recorder import StepRecorder
    from shoal.trainer.run import Run


def main() -> int:
    """Repeat the steps that the folder's replay.json asks for."""
    folder = Path(sys.argv[1])
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    start_worker_reports(folder)
    return repeat_steps(folder)


def repeat_steps(folder: Path, world: World | None = None) -> int:
    """Repeat the steps and write the tensors of the recorded ones; return the exit code.

    Args:
        folder: of a replay, filled and with its request.
        world: the processes; None: those that the environment names.
    """
    request = ReplayRequest.read(folder)
    with phase("import"):
        from shoal.replay.step_recorder import StepRecorder

    # The start of the run itself printed the notices on model and settings.
    log = logging.getLogger("shoal")
    was_off, log.disabled = log.disabled, True
    is_alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
    gate = BreakpointGate(request.last_step, has_terminal=is_alone)
    recorder = StepRecorder(
        request.record_from or request.last_step + 1,
        nudge=request.nudge,
        on_step=lambda: setattr(log, "disabled", was_off),
        before_step=gate.begin_step,
    )
    try:
        return _repeat(folder, request, recorder, gate, world)
    except BdbQuit:
        sys.stderr.write("shoal: the debugger ended the replay, so nothing is compared\n")
        return 1
    finally:
        log.disabled = was_off
        gate.close()


def _repeat(
    folder: Path,
    request: ReplayRequest,
    recorder: StepRecorder,
    gate: BreakpointGate,
    world: World | None,
) -> int:
    from shoal.fabric import start_world

    code = 0
    if request.script:
        from shoal.replay.script_replay import ScriptReplay

        done = ScriptReplay(folder, request, recorder)
        done.repeat_steps()
        writes = done.run is not None and done.run.world.is_first
        shape = describe_run(done.run) if done.run is not None else {}
    else:
        from shoal.trainer.islands.island_job import STOPPED
        from shoal.trainer.jobs.replayed_steps import ReplayedSteps
        from shoal.trainer.main_job import train

        world = world or start_world()
        writes = world.is_first
        steps = ReplayedSteps(request.last_step, recorder, request.rewinds)
        code = train(folder, prove_nothing, world=world, replayed=steps)
        code = 0 if code == STOPPED else code  # it was asked to stop there
        shape = {}  # plan.json has it
    if writes:
        found = {**shape, "steps": [asdict(one) for one in recorder.steps]}
        found |= {"environment": recorder.environment, "passed_over": gate.passed_over}
        write_atomically(folder / RECORDED, json.dumps(found) + "\n")
    return code


def describe_run(run: Run) -> dict[str, Any]:
    """Return layout, format and micro-batch of a run, by the keys of a checkpoint's record."""
    plan = run.plan
    return {
        "layout": plan.layout.text(),
        "precision": plan.compute,
        "micro_batch": plan.micro_batch,
        "processes": plan.layout.processes,
    }


def prove_nothing(*arguments: Any) -> str:
    """Return "": a replay repeats a run whose layout was proven at its own start."""
    del arguments
    return ""


if __name__ == "__main__":
    run_and_exit(main)
