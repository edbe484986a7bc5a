"""Record of a script's run: what each rank computed on, and every number that must agree.

    N-S-batch-D    micro-batches of data rank D in step S of run N: (index in the step, value)
    N-S-state      weights and buffers before the step, if the script changed them since the update
    N-S-update     mean gradients as the optimizer saw them; the optimizer's state and
                   `run.state_dict()` afterwards
    N-S-own-R      tensors that optimizers of the script's own step, outside of any run, on rank R
    events.jsonl   one line for each of these points in time, written by rank 0
    runs.json      one entry for each run: layout, optimizer, and which rank holds what

All ranks of a layout call the recorder at the same points: inside `run.step`, and the calls that it
consists of. The one process records itself with the same code.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import torch

from shoal.base.attribute_patch import patch_attribute
from shoal.base.errors import ConfigError
from shoal.base.plans.script_side import ScriptSide
from shoal.fabric import World
from shoal.optim.named_state import group_settings, split_state
from shoal.parallel.build.full_state import assemble_tensors, gather_weights, iterate_gradients
from shoal.parallel.compare_weights import tensor_digest
from shoal.parallel.program import Part, Program
from shoal.proof.ownership_mismatch import find_unequal_ranks
from shoal.proof.script.loop_replay import LoopPasses
from shoal.proof.script.script_actions import ScriptActions, digest_loss_tensors
from shoal.proof.script.script_end import ScriptEnd, UnrecordableError
from shoal.proof.script.value_files import digest_value, write_tensors, write_values
from shoal.trainer.full_state_dict import gather_full_state_dict
from shoal.trainer.passes.step_runner import StepRunner
from shoal.trainer.run import Run
from shoal.trainer.state.run_state import OPTIMIZER, collect_optimizer_state
from shoal.trainer.step.optimizer_step import StepResult
from shoal.trainer.step.rank_share import RankShare

LONGEST = 4
"""A run may take so many times the steps of the proof, while another has not taken them yet."""


class ScriptRecorder:
    """Recorder of one run of a script.

    Args:
        side: settings of this run of the script.

    Attributes:
        runs: the script's runs, in the order of their `shoal.parallelize`.
        actions: what the script does between the calls of its runs.
    """

    def __init__(self, side: ScriptSide) -> None:
        self.side, self.folder = side, Path(side.record)
        self.runs: list[Run] = []
        self.actions = ScriptActions(is_alone=side.is_alone)
        self._digests: dict[int, dict[str, list[str]]] = {}
        self._described: list[dict[str, Any]] = []
        self._ended: ScriptEnd | None = None
        self.passes = LoopPasses(side, self.runs, self._record_loop_start)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the runs of the script while it is open."""
        with ExitStack() as stack:
            for owner, name, method in (
                (StepRunner, "begin_batch", self._wrap_share(StepRunner.begin_batch)),
                (Run, "update_weights", self._wrap_update(Run.update_weights)),
                (Run, "total", self._wrap_total(Run.total)),
            ):
                stack.enter_context(patch_attribute(owner, name, method))
            stack.enter_context(self.passes.recording())
            stack.enter_context(self.actions.watching(self.runs))
            yield

    def add_run(self, run: Run, arguments: Mapping[str, Any]) -> None:
        """Describe a new run.

        Args:
            run: the run.
            arguments: of the script's `shoal.parallelize`, by name.
        """
        number, program, world = len(self.runs), run.program, run.world
        self.runs.append(run)
        shards = {
            name: [list(map(list, box)) for box in local.shard.slices]
            for name, local in program.local.items()
        }
        entry = {
            "layout": run.plan.layout.text(),
            "processes": world.size,
            "optimizer": type(run.optimizer).__name__,
            "is_sgd": isinstance(run.optimizer, torch.optim.SGD),
            "names": list(program.names),
            "weights": [name for name, _ in run.model.named_parameters(remove_duplicate=False)],
            "data_ranks": world.gather_json(program.data.rank),
            "shards": world.gather_json(shards),
        }
        self._described.append(entry)
        if world.is_first:
            text = json.dumps(self._described)
            (self.folder / "runs.json").write_text(text, encoding="utf-8")
        self.actions.add_run(number, run, arguments)

    def get_share(self, run: Run, batch: Any, begin: Callable[..., RankShare]) -> RankShare:
        """Return this rank's micro-batches of a step, and record them.

        Args:
            run: the run that begins a step.
            batch: as the script handed it to the run.
            begin: `StepRunner.begin_batch`.
        """
        number = self.runs.index(run)
        self._check_batch(run, batch, number)
        share = begin(run, batch)
        ranks = self._described[number]["data_ranks"]
        if ranks.index(run.program.data.rank) == run.world.rank:
            path = self.folder / f"{number}-{run.step_count + 1}-batch-{run.program.data.rank}"
            digests = self._write_batch(path, share)
            indices = [index for index, _ in share.micro_batches]
            entries = list(zip(indices, digests, strict=True))
            path.with_suffix(".keys").write_text(json.dumps(entries), encoding="utf-8")
        return share

    def get_total(self, run: Run, total: float) -> float:
        """Record the result of a `run.total`, and return it."""
        self._write_event(run.world, {"event": "total", "value": total})
        return total

    def _wrap_share(self, begin: Callable[..., RankShare]) -> Callable[..., RankShare]:
        @wraps(begin)
        def begin_batch(run: Run, batch: Any) -> RankShare:
            self._raise_ended()
            self._record_state(run)
            return self.get_share(run, batch, begin)

        return begin_batch

    def _record_loop_start(self, run: Run) -> None:
        """Record the state at the start of a step of another library's loop, on all ranks."""
        self._raise_ended()
        self._record_state(run)

    def _wrap_update(self, update: Callable[..., StepResult]) -> Callable[..., StepResult]:
        @wraps(update)
        def update_weights(run: Run) -> StepResult:
            self._raise_ended()
            actions = self.actions.list_hooks(run)
            result = update(run)
            self._record_update(run, result, actions)
            if self._is_finished():
                self._ended = ScriptEnd()
                self._raise_ended()
            return result

        return update_weights

    def _wrap_total(self, total: Callable[..., float]) -> Callable[..., float]:
        @wraps(total)
        def recorded(run: Run, count: Any) -> float:
            return self.get_total(run, total(run, count))

        return recorded

    def _raise_ended(self) -> None:
        """End the script; once more, if the script caught the end with a bare `except:`."""
        if self._ended is not None:
            raise self._ended

    def _is_finished(self) -> bool:
        steps = [run.step_count for run in self.runs]
        return min(steps) >= self.side.steps or max(steps) >= LONGEST * self.side.steps

    def _check_batch(self, run: Run, batch: Any, number: int) -> None:
        """End the script where ranks that share one copy of the model have different batches."""
        if run.program.data.size == run.world.size or hasattr(batch, "micro_batches"):
            return
        try:
            digest = digest_value(batch)
        except UnrecordableError as failure:
            digest = str(failure)
        by_rank = run.world.gather_json(digest)
        ranks = self._described[number]["data_ranks"]
        pairs = zip(by_rank, ranks, strict=True)
        if any(one != by_rank[ranks.index(data)] for one, data in pairs):
            raise ScriptEnd(
                f"the script cuts its batches by rank, and {run.plan.layout.text()} needs the same "
                f"batch on all ranks that share one copy of the model; try: run.loader(dataset)"
            )

    def _write_batch(self, path: Path, share: RankShare) -> list[str]:
        try:
            return write_values(path, share.micro_batches)
        except UnrecordableError as failure:
            raise ScriptEnd(
                f"a micro-batch holds {failure}, which the proof cannot hand out again; try: "
                f"tensors, numbers and texts in tuples, lists, dicts or dataclasses"
            ) from failure

    def _record_state(self, run: Run) -> None:
        """Record weights and buffers before a step, if they are not those after the last update."""
        number, step, world = self.runs.index(run), run.step_count + 1, run.world
        now, before = digest_parts(run.program), self._digests.get(number, {})
        changed = not world.all_true(now == before)
        if changed:
            state = gather_weights(run.program, only_first=True)
            if world.is_first:
                write_tensors(self.folder / f"{number}-{step}-state.safetensors", state)
        event = {
            "event": "state",
            "run": number,
            "variable": _find_variable(run),
            "step": step,
            "changed": changed,
            "own": self._write_own_parameters(number, step, world),
            "actions": self.actions.list_between(run, number),
        }
        self._write_event(world, event)

    def _write_own_parameters(self, number: int, step: int, world: World) -> list[str]:
        """Write the tensors that the script's own optimizers step; return their names."""
        own = self.actions.own_parameters()
        if own:
            path = self.folder / f"{number}-{step}-own-{world.rank}.safetensors"
            write_tensors(path, own)
        return list(own)

    def _record_update(self, run: Run, result: StepResult, actions: list[str]) -> None:
        """Record a step after its update (collective)."""
        number, world, program = self.runs.index(run), run.world, run.program
        kept: dict[str, torch.Tensor] = {}
        if not result.skipped:
            named, used = iterate_gradients(program)
            kept |= {f"gradient/{name}": one.clone() for name, one in named if name in used}
        state = gather_full_state_dict(program)
        kept |= {f"state/{name}": one for name, one in state.items()}
        parts, numbers = collect_shared_state(run)
        whole = assemble_tensors(parts, world, only_first=True)
        kept |= {f"optimizer/{name}": one for name, one in whole.items()}
        if world.is_first:
            write_tensors(self.folder / f"{number}-{result.step}-update.safetensors", kept)
        self._digests[number] = digest_parts(program)
        self.passes.write(run, result.step)
        loss, norm = (v if math.isfinite(v) else None for v in (result.loss, result.grad_norm))
        if id(run) in self.passes.loops:
            loss = None  # the mean over ranks; the one process has that of rank 0
        own = self.passes.list_rank_buffers(run)
        digests = {n: ["", tensor_digest(one)] for n, one in state.items() if n not in own}
        held = {n: one for n, one in self._digests[number].items() if n not in own}
        held |= {
            f"{OPTIMIZER}{name}": [str(shard.slices), tensor_digest(one)]
            for name, (one, shard) in parts.items()
        }
        event = {
            "event": "update",
            "run": number,
            "variable": _find_variable(run),
            "step": result.step,
            "loss": loss,
            "grad_norm": norm,
            "targets": float(result.targets),
            "skipped": result.skipped,
            "groups": world.gather_json(group_settings(run.optimizer)),
            "numbers": numbers,
            "state_dict_ranks": find_unequal_ranks(world, digests),
            "replica_ranks": find_unequal_ranks(world, held),
            "loss_ranks": find_unequal_ranks(world, digest_loss_tensors(run)),
            "actions": [*self.actions.pop_gradient_edits(), *actions],
        }
        self.actions.note_update(run, number)
        self._write_event(world, event)

    def _write_event(self, world: World, event: dict[str, Any]) -> None:
        if world.is_first:
            with (self.folder / "events.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(event) + "\n")


def collect_shared_state(run: Run) -> tuple[dict[str, Part], dict[str, dict[str, Any]]]:
    """Return this rank's shards of the optimizer's state, and the numbers in it, by parameter.

    State that no checkpoint could keep is left out, on all ranks; a run refuses it at its first
    step, unless the script has switched its guards off.
    """
    local, frozen = run.program.local, run.program.frozen
    names: dict[Any, str] = {one.parameter: name for name, one in local.items()}
    names.update({parameter: name for name, parameter in frozen.items()})
    try:
        split_state(run.optimizer, names)
        is_kept = True
    except ConfigError:
        is_kept = False
    if not run.world.all_true(is_kept):
        return {}, {}
    parts, record = collect_optimizer_state(run)
    return {name.removeprefix(OPTIMIZER): part for name, part in parts.items()}, record["scalars"]


def digest_parts(program: Program) -> dict[str, list[str]]:
    """Return [part, digest] of this rank's weights and buffers; equal parts must be equal.

    A gathered parameter is not read, only this rank's part: torch resizes the storage of a gathered
    one, and an array that shares the storage prevents that.
    """
    module = program.module
    found: dict[str, tuple[str, torch.Tensor]] = {
        name: (str(program.shard_of(name).slices) if name in program.cuts else "", one)
        for name, one in (*module.named_parameters(), *module.named_buffers())
        if name not in program.parts and not hasattr(one, "to_local") and not one.is_meta
    }
    for name, (tensor, shard) in program.parts.items():
        if shard.slices:
            found[name] = (str(shard.slices), tensor)
    return {name: [part, tensor_digest(tensor)] for name, (part, tensor) in found.items()}


def _find_variable(thing: Any) -> str:
    """Return the script's global variable that holds an object; "" if none does."""
    main = vars(sys.modules["__main__"])
    return next((name for name, value in list(main.items()) if value is thing), "")
