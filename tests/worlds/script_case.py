"""Proofs of whole scripts in a world of processes that is there already, and mends that they find.

`attempt` runs a script of `user_scripts` on every member, then alone on rank 0, and compares.
"""

from __future__ import annotations

import json
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

from shoal.base.errors import ShoalError
from shoal.base.plans.script_side import ScriptSide
from shoal.cli.script_proof_lines import report_lines
from shoal.fabric import World
from shoal.parallel import host_rng, tensor_parallel
from shoal.parallel.data_parallel import fsdp
from shoal.parallel.data_parallel.buckets import BucketReducer
from shoal.parallel.pipeline import stage
from shoal.proof.script.argument_overrides import needs_sample
from shoal.proof.script.record_comparison import compare_sides
from shoal.proof.script.side_process import run_side
from shoal.trainer.guards import state_by_weight
from shoal.trainer.guards.gradient_passes import HookGradients, PassGradients
from shoal.trainer.guards.user_weights import UserWeights
from user_scripts import RIGHT, WRONG


def attempt_right(world: World, name: str, layout: str, lifted: bool = False) -> dict[str, Any]:
    """Prove a right script."""
    return attempt(world, RIGHT[name][0], layout, lifted=lifted)


def attempt_wrong(world: World, name: str) -> dict[str, Any]:
    """Prove a wrong script, with the mend reverted that would make it right."""
    mistake = WRONG[name]
    mend = MENDS[mistake.revert]() if mistake.revert else nullcontext()
    if mistake.revert not in OF_BOTH_SIDES:
        return attempt(world, mistake.text, mistake.layout, mend)
    with mend:
        return attempt(world, mistake.text, mistake.layout)


def attempt(
    world: World, text: str, layout: str, planted: Any = None, *, lifted: bool = False
) -> dict[str, Any]:
    """Return the report on a script, and its lines; the same on every rank."""
    folder = Path(
        world.broadcast_json(tempfile.mkdtemp(prefix="script-") if world.is_first else "")
    )
    before = {key: os.environ.get(key) for key in ("RANK", "WORLD_SIZE")}
    os.environ |= {"RANK": str(world.rank), "WORLD_SIZE": str(world.size)}
    sides = {}
    if world.is_first:
        for one in ("sample", "layout", "alone"):
            (folder / one / "copy").mkdir(parents=True)
            (folder / one / "copy" / "train.py").write_text(text)
            (folder / one / "record").mkdir()
    world.barrier()
    needs = needs_sample(layout) and "sample=" not in text
    layouts = {"sample": "ddp", "layout": layout} if needs else {"layout": layout}
    for one in (*layouts, "alone"):
        home = folder / one
        sides[one] = ScriptSide(
            str(home / "copy" / "train.py"),
            str(home / "copy"),
            str(home / "record"),
            processes=world.size,
            writable=(str(home),),
            lifted=lifted,
            steps=1 if one == "sample" else 4,
            layout=layouts.get(one, ""),
            sample=str(folder / "sample" / "record") if needs and one == "layout" else "",
            batches=str(folder / "layout" / "record") if one == "alone" else "",
        )
    report: dict[str, Any] = {"verdict": "refused", "notes": [], "asked": layout}
    try:
        if needs:
            _run(sides["sample"])
            world.barrier()
        with planted or nullcontext():
            report |= _run(sides["layout"])
            if report["verdict"] != "not proven":
                found = world.run_local_first(lambda: _compare(world, sides))
                report |= world.broadcast_json(found)
    except ShoalError as failure:
        report["reason"] = str(failure)
    finally:
        for key, value in before.items():
            os.environ.pop(key)
            if value is not None:
                os.environ[key] = value
    return {**report, "text": "\n".join(report_lines(report))}


def _run(side: ScriptSide) -> dict[str, Any]:
    """Run a side's script; return its problem, if it has one."""
    recorder = run_side(side)
    for run in recorder.runs:
        run.guards.close()
        for undo in run.program.on_close:
            undo()
    path = Path(side.record) / f"outcome-{os.environ['RANK']}.json"
    outcome = json.loads(path.read_text())
    return {"verdict": "not proven", "reason": outcome["reason"]} if outcome["reason"] else {}


def _compare(world: World, sides: dict[str, ScriptSide]) -> dict[str, Any]:
    if not world.is_first:
        return {}
    try:
        problem = _run(sides["alone"])
        found = compare_sides(Path(sides["alone"].record), Path(sides["layout"].record))
    except Exception:
        return {"verdict": "not proven", "reason": traceback.format_exc()}
    return problem or found


# ---- mends, reverted on the layout's side


@contextmanager
def counted_passes() -> Iterator[None]:
    """A parameter that only passes of weight 0 used counts as unused, an expert's too."""

    def end_backward(self: BucketReducer, counted: bool) -> None:
        if counted:
            self.seen |= self.fresh

    with patch.object(BucketReducer, "end_backward", end_backward):
        yield


@contextmanager
def no_check_of_gradients() -> Iterator[None]:
    """Changes of gradients between written-out passes and the update are not noticed."""
    with ExitStack() as stack:
        for name in ("check", "find_owner", "close", "compare"):
            stack.enter_context(patch.object(PassGradients, name, lambda self, *_: None))
        quiet = patch.object(HookGradients, "watch_hooks", lambda self, *_: nullcontext())
        stack.enter_context(quiet)
        yield


@contextmanager
def reentrant_checkpoints() -> Iterator[None]:
    """A stage runs a model's own reentrant checkpoints as they are, without a graph."""
    with (
        patch.object(stage, "_no_reentrant_checkpoints", nullcontext),
        patch.object(stage, "_in_autograd_function", lambda: False),
    ):
        yield


KEYED_DRAWS = "keyed draws of the host"
OF_BOTH_SIDES = {KEYED_DRAWS}
"""Mends without which one process draws other numbers, too."""
MENDS: dict[str, Callable[[], Any]] = {
    "joined units": lambda: patch.object(fsdp, "make_unit_visits", lambda program, units: None),
    "weights in the user's hands": lambda: patch.object(UserWeights, "show", lambda self: None),
    "state by weight": lambda: patch.object(state_by_weight, "watch_state", lambda *_: None),
    KEYED_DRAWS: lambda: patch.object(host_rng, "watch_blocks", lambda *_: []),
    "checked splits": lambda: patch.object(
        tensor_parallel, "check_blocks", lambda module, split, *_, strict: split
    ),
    "counted passes of experts": counted_passes,
    "changes of gradients": no_check_of_gradients,
    "reentrant checkpoints": reentrant_checkpoints,
}
