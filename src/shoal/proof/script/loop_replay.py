"""Passes of a loop of another library, recorded on each rank and run again in one process.

    N-S-passes-R    passes of rank R in step S of run N: state of its generators, what the model was
                    called with, and the gradients that arrived at its outputs

In the one process the script runs as rank 0, with rank 0's batches: its model, loss, hooks,
clipping and schedules run as they stand. Before each of its backward passes the same passes of the
other ranks run, on the recorded values, so that the gradient is the mean over all ranks. The
library's own collectives see ranks that agree with rank 0.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.func import functional_call

from shoal import fabric
from shoal.base.attribute_patch import patch_attribute
from shoal.base.plans.script_side import ScriptSide
from shoal.fabric import World
from shoal.fabric.device import select_local_device
from shoal.fabric.rendezvous.process_info import ProcessInfo
from shoal.parallel._torch import pytree
from shoal.proof.script.script_end import ScriptEnd, UnrecordableError
from shoal.proof.script.value_files import digest_value, read_values, write_values
from shoal.trainer.passes.free_passes import FreePasses
from shoal.trainer.run import Run
from shoal.trainer.step.optimizer_step import StepTotals


class LoopPasses:
    """Recorder of the passes of one side.

    Args:
        side: settings of this run of the script.
        runs: the script's runs, a list that grows.
        on_step: called with a run when a step of it begins, on all ranks.

    Attributes:
        loops: ids of the runs that are driven by another library's loop.
    """

    def __init__(self, side: ScriptSide, runs: list[Run], on_step: Callable[[Run], None]) -> None:
        self.side, self.runs, self.on_step = side, runs, on_step
        self._open: dict[int, list[list[Any]]] = {}
        self.loops = set[int]()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record passes, or run those of the other ranks, while it is open."""
        with ExitStack() as stack:
            for name, wrap in (
                ("__init__", self._wrap_init),
                ("forward", self._wrap_forward),
                ("backward", self._wrap_backward),
                ("finish", self._wrap_finish),
            ):
                method = wrap(getattr(FreePasses, name))
                stack.enter_context(patch_attribute(FreePasses, name, method))
            if self.side.is_alone:
                world = MirrorWorld(self.side.processes)
                stack.enter_context(patch_attribute(fabric, "start_world", lambda: world))
            yield

    def write(self, run: Run, step: int) -> None:
        """Write this rank's passes of a step."""
        passes = self._open.pop(id(run), [])
        if not self.side.is_alone and passes:
            rank = run.world.rank
            path = self._path(Path(self.side.record), run, step, rank)
            try:
                write_values(path, passes)
                keys = [[number, digest_value(one[1:3])] for number, one in enumerate(passes)]
                batch = path.with_name(f"{self.runs.index(run)}-{step}-batch-{rank}.keys")
                batch.write_text(json.dumps(keys), encoding="utf-8")
            except UnrecordableError as failure:
                raise ScriptEnd(
                    f"a pass of the model has {failure}, which the proof cannot repeat; try: "
                    f"tensors, numbers and texts in tuples, lists, dicts or dataclasses"
                ) from failure

    def list_rank_buffers(self, run: Run) -> set[str]:
        """Return the buffers that each rank has for itself, as the other library keeps them."""
        return {name for name, _ in run.model.named_buffers()} if id(run) in self.loops else set()

    def _path(self, record: Path, run: Run, step: int, rank: int) -> Path:
        return record / f"{self.runs.index(run)}-{step}-passes-{rank}"

    def _run_of(self, passes: FreePasses) -> Run:
        return next(run for run in self.runs if run.program.module is passes.program.module)

    def _wrap_init(self, right: Callable[..., None]) -> Callable[..., None]:
        @wraps(right)
        def start(passes: FreePasses, *values: Any, **named: Any) -> None:
            right(passes, *values, **named)
            run = self._run_of(passes)
            self._open[id(run)] = []
            self.loops.add(id(run))
            self.on_step(run)

        return start

    def _wrap_forward(self, right: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(right)
        def forward(passes: FreePasses, *inputs: Any, **named: Any) -> Any:
            if not (passes.program.module.training and torch.is_grad_enabled()):
                return right(passes, *inputs, **named)
            entry = [_read_generators(), list(inputs), named, []]
            self._open[id(self._run_of(passes))].append(entry)
            outputs = right(passes, *inputs, **named)
            entry[3] = _record_gradients(outputs)
            return outputs

        return forward

    def _wrap_backward(self, right: Callable[..., None]) -> Callable[..., None]:
        @wraps(right)
        def backward(passes: FreePasses, loss: torch.Tensor, **named: Any) -> None:
            if self.side.is_alone:
                run = self._run_of(passes)
                for rank in range(1, self.side.processes):
                    self._replay(passes, run, rank, passes.count)
            right(passes, loss, **named)

        return backward

    def _wrap_finish(self, right: Callable[..., StepTotals]) -> Callable[..., StepTotals]:
        @wraps(right)
        def finish(passes: FreePasses) -> StepTotals:
            known = passes._tally
            tally = right(passes)
            if self.side.is_alone and known is None:
                tally = replace(tally, count=float(self.side.processes))
                passes._tally = tally
            return tally

        return finish

    def _replay(self, passes: FreePasses, run: Run, rank: int, number: int) -> None:
        """Add the gradients of another rank's pass to those of this process."""
        step = passes.step + 1
        path = self._path(Path(self.side.batches), run, step, rank)
        recorded = read_values(path) if path.with_suffix(".json").exists() else []
        if number >= len(recorded):
            raise ScriptEnd(
                f"alone the script makes pass {number + 1} of step {step}, which rank {rank} did "
                f"not make on several processes"
            )
        state, inputs, named, gradients = recorded[number]
        module, own = passes.program.module, _read_generators()
        # Buffers of this process's own pass are part of a graph that waits for its backward pass.
        buffers = {name: one.detach().clone() for name, one in module.named_buffers()}
        _set_generators(state)
        outputs = _differentiable(functional_call(module, buffers, tuple(inputs), named))
        pairs = zip(outputs, gradients, strict=True)
        arrived = [(output, one) for output, one in pairs if one is not None]
        torch.autograd.backward([output for output, _ in arrived], [one for _, one in arrived])
        _set_generators(own)


def _differentiable(outputs: Any) -> list[torch.Tensor]:
    leaves = pytree.tree_leaves(outputs)
    return [one for one in leaves if isinstance(one, torch.Tensor) and one.requires_grad]


def _record_gradients(outputs: Any) -> list[torch.Tensor | None]:
    """Return a list that receives the sum of the gradients of each output."""
    found: list[torch.Tensor | None] = []
    for place, output in enumerate(_differentiable(outputs)):
        found.append(None)

        def add(gradient: torch.Tensor, place: int = place) -> None:
            before = found[place]
            found[place] = gradient.clone() if before is None else before + gradient

        output.register_hook(add)
    return found


def _read_generators() -> dict[str, Any]:
    kind, keys, *rest = np.random.get_state(legacy=True)
    version, inner, following = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "numpy": [str(kind), torch.as_tensor(np.asarray(keys).astype(np.int64)), *rest],
        "python": [version, torch.tensor(inner), following],
    }


def _set_generators(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    version, inner, following = state["python"]
    random.setstate((version, tuple(inner.tolist()), following))


class MirrorWorld(World):
    """World of a library's facade in the single-process run: rank 0 of ranks with equal values."""

    def __init__(self, size: int) -> None:
        super().__init__(ProcessInfo(0, size, 0, size), select_local_device(0, 1, False), None)

    def all_reduce(self, tensor: torch.Tensor, *, wait: bool = True) -> None:
        """Multiply a tensor by the number of ranks."""
        tensor.mul_(self.size)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return copies of a tensor."""
        return torch.stack([tensor] * self.size)

    gather = all_gather

    def gather_json(self, message: Any) -> list[Any]:
        """Return copies of a message."""
        return super().gather_json(message) * self.size
