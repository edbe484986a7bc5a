"""Replay steps of a loop of one's own: the script runs again, with a copy of its run's folder.

    parallelize(folder=…)   gets the replay's folder, the run's layout (or another) and no proof
    run.step, run.update    are observed, and end the script after the last step
    other files             the script runs in a copy of its folder; writes elsewhere are refused

The script itself calls `run.restore`, which finds the nearest checkpoint. A script that never does
begins at its first step.
"""

from __future__ import annotations

import importlib
import os
import re
import runpy
import shutil
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import wraps
from pathlib import Path
from typing import Any

from shoal.base.attribute_patch import patch_attribute
from shoal.proof.script.patched_parallelize import patch_parallelize
from shoal.proof.script.script_end import ScriptEnd
from shoal.proof.script.script_process import enter_script
from shoal.proof.script.write_guard import WriteGuard, guard_writes
from shoal.replay.replay_folder import ReplayRequest
from shoal.replay.run_environment import NEIGHBOURS, read_library
from shoal.replay.step_recorder import StepRecorder
from shoal.trainer.run import Run


@dataclass
class ScriptReplay:
    """One replay of a script, on one rank.

    Attributes:
        folder: the replay's run folder.
        request: the steps, and the script with its arguments.
        recorder: of the tensors of the recorded steps.
        run: the run that is replayed; None before the script makes it.
    """

    folder: Path
    request: ReplayRequest
    recorder: StepRecorder
    run: Run | None = None
    _is_begun: bool = field(default=False, init=False)

    def repeat_steps(self) -> None:
        """Run the script up to the last step.

        Raises:
            Exception: any of the script's.
        """
        script, cwd = self.request.script, self.request.cwd
        guard = WriteGuard([cwd, str(Path(script).parent), str(self.folder)])
        with ExitStack() as stack:
            stack.enter_context(patch_parallelize(self._parallelize))
            stack.enter_context(patch_attribute(Run, "begin_step", self._observe_first_step()))
            for name in ("step", "update"):
                stack.enter_context(
                    patch_attribute(Run, name, self._observe_end(getattr(Run, name)))
                )
            os.environ["SHOAL_FOLDER"] = self.request.run  # of a script of another library
            stack.enter_context(enter_script(script, self.request.words, cwd))
            stack.enter_context(guard_writes(guard))
            with suppress(ScriptEnd):
                import_neighbours(Path(self.request.run), script)
                runpy.run_path(script, run_name="__main__")
        if self.run is not None:
            with suppress(Exception):  # rows are written; a script in mid-step cannot close well
                self.run.close()

    def _parallelize(self, right: Callable[..., Run], arguments: dict[str, Any]) -> Run:
        if not self._is_replayed(arguments.get("folder")):
            return right(**arguments)
        arguments |= {"folder": self.folder, "prove": "off"}
        records: dict[str, Any] = {"trace": ""}
        if self.request.statistics:  # else those that the script asks for
            records["statistics"] = self.request.statistics
        if arguments.get("plan") is not None:
            arguments["plan"] = replace(arguments["plan"], **records)
        else:
            arguments |= records
        if self.request.layout:
            arguments["layout"] = self.request.layout
        self.run = right(**arguments)
        return self.run

    def _is_replayed(self, folder: str | Path | None) -> bool:
        """Return whether a folder that the script names is that of the replayed run."""
        if folder is None or self.run is not None:
            return False
        return Path(self.request.home, folder).resolve() == Path(self.request.run).resolve()

    def _observe_first_step(self) -> Callable[..., Any]:
        right = Run.begin_step

        @wraps(right)
        def begin_step(run: Run, batch: Any, **named: Any) -> Any:
            if run is self.run and not self._is_begun:
                self._is_begun = True
                if not run.step_count:  # the script restores nothing, and begins anew
                    old = self.folder / "checkpoints"
                    run.world.run_local_first(lambda: shutil.rmtree(old, ignore_errors=True))
                self.recorder.begin(run)
            return right(run, batch, **named)

        return begin_step

    def _observe_end(self, right: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(right)
        def end_step(run: Run, *values: Any, **named: Any) -> Any:
            before = run.step_count
            result = right(run, *values, **named)
            if run is self.run and run.step_count > before:
                self.recorder.after_step(run, result)
                if run.step_count >= self.request.last_step:
                    raise ScriptEnd
            return result

        return end_step


LIBRARIES = re.compile(rf"^\s*(?:import|from)\s+({'|'.join(NEIGHBOURS)})\b", re.MULTILINE)


def import_neighbours(run: Path, script: str) -> None:
    """Let Shoal answer the library of a script, as `shoal run --as` did for its run.

    A run folder is Shoal's, so the library itself did not make it. Folders of older versions do not
    name the library: then the script's own imports do.
    """
    found = read_library(run)
    text = Path(script).read_text(encoding="utf-8", errors="replace")
    names = [found["library"]] if found else LIBRARIES.findall(text)
    for name in dict.fromkeys(names):
        importlib.import_module(f"shoal.neighbours.{name}")
    if found.get("exact"):
        importlib.import_module("shoal.neighbours.exact").install()
