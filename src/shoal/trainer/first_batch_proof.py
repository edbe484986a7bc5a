"""Copies of a model and its loss, with which a run's layout is proven at its first batch.

    shoal.parallelize(model, optimizer, loss, prove="auto")

The copies are made before the layout cuts the model. The loss is copied together with its closure
and the globals that it reads, so that a loss that reads the model reads the copy. The run's own
module and buffers are never run by the proof, which proof/loop_proof.py makes.
"""

from __future__ import annotations

import copy
import functools
import os
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import psutil
import torch
from torch import nn

import shoal
from shoal.base.errors import ConfigError, format_choice_error
from shoal.fabric.rendezvous.process_info import read_process_info
from shoal.trainer.run import Run
from shoal.trainer.step.call_contract import default_loss

MEMORY_SHARE = 0.25
"""Largest share of the free host memory that the copies of all ranks of a machine may take."""

Model = nn.Module | Callable[[], nn.Module]


def parallelize_proven(
    parallelize: Callable[..., Run],
    *,
    prove: str,
    model: Model,
    loss: Any,
    policies: Mapping[str, Any],
    **arguments: Any,
) -> Run:
    """Call `shoal.parallelize` for a run that is proven at its first batch.

    Args:
        parallelize: `shoal.parallelize`.
        prove: "auto"; any other word is refused.
        model, loss, policies, arguments: its other arguments.

    Raises:
        ConfigError: `prove` is another word; or as `shoal.parallelize`.
    """
    if prove != "auto":
        words = {"quick": "auto", "yes": "auto", "true": "auto", "no": "off", "false": "off"}
        raise ConfigError(format_choice_error("prove", prove, ("auto", "off"), words))
    proof = FirstBatchProof(model, loss)
    run = parallelize(model=model, loss=loss, **arguments, **policies)
    proof.attach(run)
    return run


class FirstBatchProof:
    """Proof of one run of the user's own loop.

    Args:
        model, loss: as the user passed them to `shoal.parallelize`, before the model is cut.
        environ: says how many processes this machine has.
    """

    def __init__(self, model: Model, loss: Any, environ: Mapping[str, str] = os.environ) -> None:
        self.reason, self._kept, self._loss = "", (model, loss), loss
        if not isinstance(model, nn.Module):
            return  # a builder makes the model again
        self.reason = _find_memory_shortage(model, read_process_info(environ).local_size)
        try:
            if not self.reason:
                self._kept = copy_model_and_loss(model, loss)
        except (RuntimeError, TypeError, NotImplementedError) as failure:
            self.reason = f"the model cannot be copied: {type(failure).__name__}: {failure}"

    def build(self) -> nn.Module:
        """Return a new model; the proof's loss then refers to this one."""
        model, loss = self._kept
        if not isinstance(model, nn.Module):
            return model()
        copied, self._loss = copy_model_and_loss(model, loss)
        return copied

    def make_loss(self) -> Any:
        """Return a function that calls the run's loss, with its name and module."""
        right = self._kept[1] or default_loss()

        def compute(outputs: Any, targets: Any) -> Any:
            return (self._loss or right)(outputs, targets)

        return functools.update_wrapper(compute, right)

    def attach(self, run: Run) -> None:
        """Prove at the first batch of a run; the run then is as if nothing had been attached."""
        run_passes, micro_batches = run.run_passes, run.micro_batches

        def prove_step(batch: Any) -> None:
            self._prove_once(run, batch, self.make_loss())
            run_passes(batch)

        def prove_written(batch: Any) -> Iterator[Any]:
            self._prove_once(run, batch, None)
            return micro_batches(batch)

        vars(run)["run_passes"], vars(run)["micro_batches"] = prove_step, prove_written

    def _prove_once(self, run: Run, batch: Any, loss: Any) -> None:
        for name in ("run_passes", "micro_batches"):
            vars(run).pop(name, None)
        if run.world.size == 1 or run.step_count:
            return  # there is nothing to compare, or a resumed run was proven at its start
        reasons = [one for one in run.world.gather_json(self.reason) if one]
        if reasons:
            line = f"proof: not proven: {reasons[0]}; training goes on"
        else:
            prove = shoal.__getattr__("prove_first_batch")  # of a room above this one
            line = prove(run, batch, self.build, loss)
        if line:
            run.recorder.notice(line)


def copy_model_and_loss(model: nn.Module, loss: Any) -> tuple[nn.Module, Any]:
    """Copy a model and a loss, which may refer to the same tensors in its closure or globals."""
    memo: dict[int, Any] = {}
    copied = copy.deepcopy(model, memo)
    return copied, copy_function(loss, memo)


def copy_function(function: Any, memo: dict[int, Any]) -> Any:
    """Copy a function with the values of its closure, its defaults, and the globals that it reads.

    Args:
        function: a function; other objects are copied as they are.
        memo: of `copy.deepcopy`: what is copied already.
    """
    if not isinstance(function, types.FunctionType):
        return copy.deepcopy(function, memo)
    if function.__module__.partition(".")[0] in ("torch", "shoal") and not function.__closure__:
        return function
    read = set(function.__code__.co_names) & function.__globals__.keys()
    own = {
        name: copy.deepcopy(value, memo)
        for name, value in function.__globals__.items()
        if name in read and isinstance(value, torch.Tensor | nn.Module)
    }
    cells = [types.CellType(_copy_value(cell, memo)) for cell in function.__closure__ or ()]
    return types.FunctionType(
        function.__code__,
        {**function.__globals__, **own},
        function.__name__,
        copy.deepcopy(function.__defaults__, memo),
        tuple(cells),
    )


def _copy_value(cell: Any, memo: dict[int, Any]) -> Any:
    value = cell.cell_contents
    if isinstance(value, types.FunctionType):
        return copy_function(value, memo)
    return copy.deepcopy(value, memo)


def _find_memory_shortage(model: nn.Module, processes: int) -> str:
    """Return why a copy of the model does not fit the host's memory; "" if it does."""
    tensors = {id(t): t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers())}
    needed, free = sum(tensors.values()) * processes, psutil.virtual_memory().available
    if needed <= MEMORY_SHARE * free:
        return ""
    return (
        f"memory: copies of the model for {processes} processes take {needed / 2**30:.1f} GiB, and "
        f"a quarter of the free host memory is {MEMORY_SHARE * free / 2**30:.1f} GiB"
    )
