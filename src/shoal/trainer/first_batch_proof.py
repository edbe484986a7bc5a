"""Copies of a model and its loss, with which a run's layout is proven at its first batch.

    shoal.parallelize(model, optimizer, loss)          prove="auto", on several processes

The copies are made in host memory, before the layout cuts the model. The loss is copied together
with its closure and the globals that it reads, so that a loss that reads the model reads the copy,
and one that counts its calls counts them elsewhere. The run's own module and buffers are never run
by the proof, which proof/loop_proof.py makes.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import re
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

import shoal
from shoal.base.errors import ConfigError, format_choice_error
from shoal.data.loading.dataset_kind import is_indexed
from shoal.data.loading.sample_seeds import preserved_rng
from shoal.data.loading.step_samples import StepBatch
from shoal.fabric.rendezvous.process_info import read_process_info
from shoal.machine.free_memory import free_bytes
from shoal.planning.settle import layout_keys
from shoal.trace.isolation.collective_ban import forbid_collectives
from shoal.trainer._torch import pytree
from shoal.trainer.batches.batch_columns import BatchColumns
from shoal.trainer.known_proofs import keep_proof, proof_key, read_known_proofs
from shoal.trainer.run import Run
from shoal.trainer.step.call_contract import default_loss, unwrap_model

MEMORY_SHARE = 0.25
"""Largest share of the free host memory that the copies of all ranks of a machine may take."""
TRANSIENT = re.compile("not proven: (memory|time|disk):")
"""Reasons that the next start may not meet."""

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
    run = parallelize(model=model, loss=loss, prove="off", **arguments, **policies)
    proof.attach(run)
    return run


class FirstBatchProof:
    """Proof of one run of the user's own loop.

    Args:
        model, loss: as the user passed them to `shoal.parallelize`, before the model is cut.
        environ: says how many processes this machine has.
    """

    def __init__(self, model: Model, loss: Any, environ: Mapping[str, str] = os.environ) -> None:
        self.reason, self._kept = "", (model, loss)
        self._loss: Any = loss
        if not isinstance(model, nn.Module):
            return  # a builder makes the model again
        model, _ = unwrap_model(model)
        self.reason = _find_memory_shortage(model, read_process_info(environ).local_size)
        try:
            if not self.reason:
                self._kept = copy_model_and_loss(model, loss)
        except Exception as failure:  # any of the user's own __deepcopy__
            self.reason = f"the model cannot be copied: {type(failure).__name__}: {failure}"

    def build(self) -> nn.Module:
        """Return a new model; the proof's loss then refers to this one."""
        model, loss = self._kept
        if isinstance(model, nn.Module):
            model, loss = copy_model_and_loss(model, loss)
        else:
            model = model()
        self._loss = default_loss(model) if loss is None else loss
        return model

    def make_loss(self) -> Any:
        """Return a function that calls the run's loss, with its name and module."""
        loss = self._kept[1]

        def compute(outputs: Any, targets: Any) -> Any:
            return self._loss(outputs, targets)

        return functools.update_wrapper(compute, default_loss() if loss is None else loss)

    def attach(self, run: Run) -> None:
        """Prove at the first batch of a run; the run then is as if nothing had been attached."""
        run_passes, micro_batches = run.run_passes, run.micro_batches

        def prove_step(batch: Any) -> None:
            self._prove_once(run, batch, self.make_loss())
            run_passes(batch)

        def prove_written(batch: Any) -> Iterator[Any]:
            with run.meeting.at("run.micro_batches"):
                self._prove_once(run, batch, weigh_outputs)
            return micro_batches(batch)

        vars(run)["run_passes"], vars(run)["micro_batches"] = prove_step, prove_written

    def _prove_once(self, run: Run, batch: Any, loss: Any) -> None:
        for name in ("run_passes", "micro_batches"):
            vars(run).pop(name, None)
        if run.world.size == 1 or run.step_count or run.plan.layout.serves:
            return  # nothing to compare, or a resumed run, which was proven at its start
        reasons = [one for one in run.world.gather_json(self.reason) if one]
        key, known = self._find_known(run, batch, loss)
        known = run.world.broadcast_json(known)
        if reasons:
            line = f"proof: not proven: {reasons[0]}; training goes on"
        elif known is not None:
            line = known.get("line", "")
        else:
            prove = shoal.__getattr__("prove_first_batch")  # of a room above this one
            line = prove(run, batch, self.build, loss, key)
            if key and line.startswith("proof: not proven: ") and not TRANSIENT.search(line):
                keep_proof(key, {"verdict": "not proven", "line": line})
        if line:
            run.recorder.notice(line)

    def _find_known(self, run: Run, batch: Any, loss: Any) -> tuple[str, dict[str, Any] | None]:
        """Return on rank 0 (key of this proof, what this machine knows of it); else ("", None)."""
        model, dataset = self._kept[0], select_dataset(run, batch)
        if not run.world.is_first or self.reason:
            return "", None
        collate = BatchColumns.join if dataset is None else dataset[1]
        how = {"loss": loss, "collate": collate, "layout": layout_keys(run.plan.layout)}
        try:
            with forbid_collectives(), preserved_rng():  # a builder runs on this rank alone
                whole = model if isinstance(model, nn.Module) else model()
            key = proof_key(whole, **how, plan=run.plan, world=run.world)
        except Exception:  # of the user's own builder or __repr__: the proof itself tells it
            return "", None
        return key, read_known_proofs().get(key)


def select_dataset(run: Run, batch: Any) -> tuple[Any, Any] | None:
    """Return (dataset, collate) of a run's loader, if a batch is that loader's.

    None for a batch that the loop has changed or made, and for a stream: reading it again might
    advance it.
    """
    if isinstance(batch, StepBatch) and run.feed.settings:
        dataset, _, collate = run.feed.settings[0]
        if is_indexed(dataset):
            return dataset, collate
    return None


def weigh_outputs(outputs: Any, _targets: Any) -> tuple[torch.Tensor, int]:
    """Return a sum over all outputs, each times a fixed number between −1 and 1."""
    total: torch.Tensor | None = None
    samples = 1
    for leaf in pytree.tree_leaves(outputs):
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.requires_grad:
            numbers = torch.arange(leaf[:1].numel(), device=leaf.device, dtype=leaf.dtype)
            part = (leaf * torch.sin(numbers + 1).reshape(leaf[:1].shape)).sum()
            total = part if total is None else total + part
            samples = max(samples, len(leaf))
    if total is None:
        raise ConfigError("the model's outputs have no gradient")
    return total, samples


def copy_model_and_loss(model: nn.Module, loss: Any) -> tuple[nn.Module, Any]:
    """Copy a model and a loss, which may refer to the same tensors in its closure or globals.

    Weights and buffers on a device are copied to host memory.
    """
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        if not tensor.is_cpu and type(tensor) in (nn.Parameter, torch.Tensor):
            host = tensor.detach().cpu()
            memo[id(tensor)] = (
                nn.Parameter(host, tensor.requires_grad) if type(tensor) is nn.Parameter else host
            )
    copied = copy.deepcopy(model, memo)
    return copied, copy_function(loss, memo)


def copy_function(function: Any, memo: dict[int, Any]) -> Any:
    """Copy a function with the values of its closure, its defaults, and the globals that it reads.

    So are the user's functions that it calls: any of them may read the model, or count its calls.

    Args:
        function: a function; other objects are copied as they are.
        memo: of `copy.deepcopy`: what is copied already.
    """
    if not isinstance(function, types.FunctionType):
        return copy.deepcopy(function, memo)
    if id(function) in memo:
        return memo[id(function)]
    if function.__module__.partition(".")[0] in ("torch", "shoal") and not function.__closure__:
        return function
    cells = [types.CellType() for _ in function.__closure__ or ()]
    copied = types.FunctionType(
        function.__code__, dict(function.__globals__), function.__name__, None, tuple(cells)
    )
    memo[id(function)] = copied
    functools.update_wrapper(copied, function)
    del copied.__wrapped__  # type: ignore[attr-defined]  # set by functools
    copied.__defaults__ = _copy_value(function.__defaults__, memo)
    copied.__kwdefaults__ = _copy_value(function.__kwdefaults__, memo)
    read = _list_names(function.__code__) & function.__globals__.keys()
    copied.__globals__.update(
        {name: _copy_value(function.__globals__[name], memo) for name in read}
    )
    for new, old in zip(cells, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # empty yet
            new.cell_contents = _copy_value(old.cell_contents, memo)
    return copied


def _list_names(code: types.CodeType) -> set[str]:
    """Return the names that a function reads, and the functions that are written inside of it."""
    inner = (one for one in code.co_consts if isinstance(one, types.CodeType))
    return set(code.co_names).union(*map(_list_names, inner))


def _copy_value(value: Any, memo: dict[int, Any]) -> Any:
    """Copy a value that a function reads, as far as a call could meet the run or leave a trace."""
    if isinstance(value, nn.Module) and id(value) not in memo and _is_constant(value):
        return value  # a teacher: a copy would be memory for nothing
    if isinstance(value, torch.Tensor | nn.Module):
        return copy.deepcopy(value, memo)
    if isinstance(value, types.FunctionType):
        return copy_function(value, memo)
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, types.MethodType):
        return types.MethodType(value.__func__, _copy_value(value.__self__, memo))
    if type(value) in (tuple, set, frozenset):
        return type(value)(_copy_value(one, memo) for one in value)
    if type(value) is list:
        copied: list[Any] = []
        memo[id(value)] = copied
        copied += [_copy_value(one, memo) for one in value]
        return copied
    if type(value) is dict:
        named: dict[Any, Any] = {}
        memo[id(value)] = named
        named |= {key: _copy_value(one, memo) for key, one in value.items()}
        return named
    inside = {} if isinstance(value, type | types.ModuleType) else getattr(value, "__dict__", {})
    if not any(isinstance(one, torch.Tensor | nn.Module) for one in inside.values()):
        return value
    memo[id(value)] = holder = copy.copy(value)
    vars(holder).update({key: _copy_value(one, memo) for key, one in inside.items()})
    return holder


def _is_constant(module: nn.Module) -> bool:
    """Return whether no pass changes a module: it is frozen, and in evaluation mode."""
    return not any(one.training for one in module.modules()) and not any(
        one.requires_grad for one in module.parameters()
    )


def _find_memory_shortage(model: nn.Module, processes: int) -> str:
    """Return why a copy of the model does not fit the host's memory; "" if it does."""
    tensors = {id(t): t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers())}
    needed, free = sum(tensors.values()) * processes, free_bytes()
    if needed <= MEMORY_SHARE * free:
        return ""
    return (
        f"memory: copies of the model for {processes} processes take {needed / 2**30:.1f} GiB, and "
        f"a quarter of the free host memory is {MEMORY_SHARE * free / 2**30:.1f} GiB"
    )
