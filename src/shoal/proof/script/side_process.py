"""Run a script as one side of its proof, in this process.

    under a layout   every rank runs the script, with its own part of the micro-batches
    alone            one process runs it on the micro-batches of all ranks

The script runs as `python script.py ARGUMENTS` would, in a copy of its folder, in float64. It ends
after its last step of the proof. `outcome-RANK.json` says why it cannot be proven, if it cannot.
"""

from __future__ import annotations

import json
import os
import random
import runpy
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path

import numpy as np
import torch

from shoal.base.plans.script_side import ScriptSide
from shoal.proof.script.argument_overrides import override_arguments
from shoal.proof.script.batch_replay import BatchReplay
from shoal.proof.script.lone_process import answer_alone
from shoal.proof.script.script_end import ScriptEnd
from shoal.proof.script.script_process import enter_script
from shoal.proof.script.script_recorder import ScriptRecorder
from shoal.proof.script.write_guard import WriteGuard, guard_writes
from shoal.trace.isolation.lifted_casts import LiftedCasts

NO_STEP = "the script took no step of a run; try: run.step, or run.micro_batches and run.update"


def run_side(side: ScriptSide) -> ScriptRecorder:
    """Run the script of a side to its last step, and write its record.

    Args:
        side: settings; every rank of a layout calls this with the same ones.

    Returns:
        The recorder, with the script's runs, which are not closed.

    Raises:
        Exception: any of the script's.
    """
    record = Path(side.record)
    record.mkdir(parents=True, exist_ok=True)
    recorder = BatchReplay(side) if side.is_alone else ScriptRecorder(side)
    guard = WriteGuard([side.cwd, str(Path(side.script).parent), *side.writable, side.record])
    lift = LiftedCasts() if side.lifted else None
    rank = int(os.environ.get("RANK") or 0)
    end = ScriptEnd()
    try:
        with ExitStack() as stack:
            stack.enter_context(_script_process(side, rank))
            stack.enter_context(recorder.recording())
            stack.enter_context(override_arguments(side, recorder.add_run))
            if side.is_alone:
                stack.enter_context(answer_alone(side.processes))
            stack.enter_context(guard_writes(guard))
            stack.enter_context(lift or nullcontext())
            end = _run_script(side)
    finally:
        reason = end.reason
        if not reason and not end.needs_sample and not any(r.step_count for r in recorder.runs):
            reason = NO_STEP
        outcome = {
            "reason": reason,
            "needs_sample": end.needs_sample,
            "writes": list(guard.refused),
            "casts": sorted(lift.lifted) if lift else [],
        }
        path = record / f"outcome-{rank}.json"
        path.write_text(json.dumps(outcome), encoding="utf-8")
    return recorder


def _run_script(side: ScriptSide) -> ScriptEnd:
    """Run the script; return how it ended."""
    try:
        runpy.run_path(side.script, run_name="__main__")
    except ScriptEnd as end:
        return end
    except SystemExit as ended:
        if ended.code not in (None, 0):
            raise
    return ScriptEnd()


@contextmanager
def _script_process(side: ScriptSide, rank: int) -> Iterator[None]:
    """Set the process up as Python would for the script, with float64 as the default dtype."""
    dtype, bytecode = torch.get_default_dtype(), sys.dont_write_bytecode
    modules = set(sys.modules)
    sys.dont_write_bytecode = True  # modules may lie outside of the copy
    torch.set_default_dtype(torch.float64)
    # Where the script sets no seed, the one process draws the numbers of rank 0.
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(rank)
    try:
        with enter_script(side.script, side.words, side.cwd):
            yield
    finally:
        torch.set_default_dtype(dtype)
        sys.dont_write_bytecode = bytecode
        for name in set(sys.modules) - modules:
            file = getattr(sys.modules[name], "__file__", None) or ""
            if file.startswith((side.cwd, str(Path(side.script).parent))):
                del sys.modules[name]  # the other side imports the modules of its own copy
