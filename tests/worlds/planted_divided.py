"""Bugs that tensor and pipeline parallelism are known for, planted for the battery to find.

The check at the start, which looks at blocks alone, is put aside: the whole proof must find them
too. As in planted.py, a bug patches the one place of ours that does it right, on the layout's side.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

import any_case
from planted import prove_large
from shoal.fabric import World
from shoal.parallel import pipeline, tensor_parallel
from shoal.parallel.data_parallel import shared_parameters
from shoal.parallel.pipeline.runtime import PipeRuntime, _PipelineStep
from shoal.parallel.spmd import autograd_collectives
from shoal.parallel.spmd.labelling.labels import Split, Tiled
from shoal.proof import Battery
from shoal.proof.battery import SGD
from shoal.trainer.step import optimizer_step as stepping

GPT = {"dim": 16, "layers": 2, "heads": 4}
LLAMA = {"dim": 16, "layers": 2, "heads": 4}
MODELS: dict[str, tuple[str, dict[str, Any], int]] = {
    "gpt": ("gpt", GPT, 61),
    "deep": ("gpt", {**GPT, "layers": 4}, 61),
    "untied": ("gpt", {**GPT, "layers": 4, "dropout": 0.1, "tied": False}, 61),
    "one head": ("llama", {**LLAMA, "kv_heads": 1}, 61),
    "two heads": ("llama", {**LLAMA, "kv_heads": 2}, 61),
}


@functools.cache
def battery(model: str) -> Battery:
    """One battery per model and process: the twin's record serves every layout."""
    with patch.dict(any_case.OURS, {model: MODELS[model]}):
        trial = any_case.trial_of(model)
    made = Battery(trial, steps=1)
    return replace(made, optimizers={SGD: made.optimizers[SGD]})


def prove(
    world: World,
    bug: str,
    model: str,
    layout: dict[str, Any],
    in_files: bool = False,
    by_blocks: bool = False,
) -> dict[str, Any]:
    """The report on a layout with a planted bug, at the first step.

    in_files, by_blocks  as for large models
    """
    torch.set_num_threads(1)
    unchecked = patch.object(
        tensor_parallel, "check_blocks", lambda module, split, axis, strict: split
    )
    with unchecked, BUGS[bug]():
        return prove_large(battery(model), world, layout, in_files, by_blocks)


@contextmanager
def nothing() -> Iterator[None]:
    """No bug: the same battery must then be content."""
    yield


@contextmanager
def backward_not_summed() -> Iterator[None]:
    """What enters split work gets the gradient of one rank's part back."""

    def backward(context: Any, upstream: torch.Tensor) -> Any:
        return upstream, None

    with patch.object(autograd_collectives._Enter, "backward", staticmethod(backward)):
        yield


@contextmanager
def backward_not_scattered() -> Iterator[None]:
    """The same under sequence parallelism: parts of the gradient are cut and not summed."""
    right = autograd_collectives.gather

    def gather(value: Any, axis: Any, split: Any, part_gradients: bool) -> Any:
        return right(value, axis, split, False)

    with patch.object(autograd_collectives, "gather", gather):
        yield


@contextmanager
def forward_not_summed() -> Iterator[None]:
    """Summands of a row-parallel layer go on as if they were the whole."""

    def forward(context: Any, value: torch.Tensor, axis: Any) -> torch.Tensor:
        return value.clone()

    with patch.object(autograd_collectives._Reduce, "forward", staticmethod(forward)):
        yield


@contextmanager
def row_bias() -> Iterator[None]:
    """Every rank adds the bias of a row-parallel layer to its summand."""
    with patch.object(autograd_collectives, "_Zeros", SimpleNamespace(apply=lambda value: value)):
        yield


def on_split(change: Any) -> Any:
    """A split of which every parameter is changed, before anything is cut."""
    right = tensor_parallel.plan

    def plan(*given: Any) -> Any:
        split = right(*given)
        if split is None:
            return None
        return replace(split, parameters={n: change(one) for n, one in split.parameters.items()})

    return patch.object(tensor_parallel, "plan", plan)


@contextmanager
def qkv_in_one() -> Iterator[None]:
    """Fused weights are cut as if they had one segment."""

    def plain(one: Any) -> Any:
        return replace(one, label=Split(one.label.dim)) if isinstance(one.label, Split) else one

    with on_split(plain):
        yield


@contextmanager
def parts_not_summed() -> Iterator[None]:
    """Key/value weights that ranks share keep the gradient of a rank's own query heads."""
    with on_split(lambda one: replace(one, partial=False)):
        yield


@contextmanager
def neighbours_heads() -> Iterator[None]:
    """Query heads meet the key/value heads of other ranks."""
    right = autograd_collectives.cut_tensor

    def cut(value: Any, label: Any, rank: int, degree: int) -> Any:
        return right(
            value, label, (rank + 2) % degree if isinstance(label, Tiled) else rank, degree
        )

    with patch.object(autograd_collectives, "cut_tensor", cut):
        yield


@contextmanager
def shared_twice() -> Iterator[None]:
    """What is summed beyond the data ranks is summed once more."""
    right = shared_parameters.all_reduce_shared_gradients

    def twice(*given: Any) -> None:
        right(*given)
        right(*given)

    with patch.object(shared_parameters, "all_reduce_shared_gradients", twice):
        yield


@contextmanager
def tie_not_summed() -> Iterator[None]:
    """The embedding's stage and the head's keep their own share of the tied weight's gradient."""
    with patch.object(shared_parameters, "all_reduce_shared_gradients", lambda *given: None):
        yield


@contextmanager
def replicas_counted() -> Iterator[None]:
    """The gradient norm counts what several ranks hold several times."""

    def squares(program: Any, reducer: Any) -> torch.Tensor:
        return stepping.sum_of_squares(reducer.sums()) / program.data.size

    with patch.object(stepping, "_squared_norm", squares):
        yield


def on_squares(counts: Any) -> Any:
    """The squared norm, of the ranks only for which `counts(program)`."""
    right = stepping._squared_norm

    def squares(program: Any, reducer: Any) -> torch.Tensor:
        return right(program, reducer) * float(program.world.size == 1 or counts(program))

    return patch.object(stepping, "_squared_norm", squares)


@contextmanager
def norm_of_a_stage() -> Iterator[None]:
    """The gradient norm is that of the last stage."""
    with on_squares(lambda program: program.pipe.rank == program.pipe.size - 1):
        yield


@contextmanager
def own_norm() -> Iterator[None]:
    """Every rank clips by the norm over the ranks of its own mesh: all but the pipeline's."""
    right = stepping._reduce_totals

    def tally(program: Any, *rest: Any) -> Any:
        told = right(program, *rest)
        if program.world.size == 1:
            return told
        found = stepping._squared_norm(program, stepping.reducer_of(program))
        square = torch.tensor([float(found)], dtype=torch.float64)
        program.tensor.all_reduce(square)
        return replace(told, norm=float(square) ** 0.5)

    with patch.object(stepping, "_reduce_totals", tally):
        yield


@contextmanager
def stages_exchanged() -> Iterator[None]:
    """The second half of the blocks runs first."""
    right = pipeline.plan

    def plan(program: Any, run: Any) -> Any:
        if program.plan.layout.pp > 1:
            blocks = program.module.blocks._modules
            for name in list(blocks)[: len(blocks) // 2]:
                blocks[name] = blocks.pop(name)  # to the end
        return right(program, run)

    with patch.object(pipeline, "plan", plan):
        yield


def on_backward(number: int, stage: int | None) -> Any:
    """The backward pass of micro-batch `number` does nothing, on one stage or all."""
    right = _PipelineStep._backward

    def backward(self: Any, act: Any, seeds: Any) -> Any:
        if act.micro_batch == number and stage in (None, act.stage):
            leaves = self.runtime.kept.pop((act.stage, act.micro_batch)).leaves
            return [torch.zeros_like(leaf) for leaf in leaves]
        return right(self, act, seeds)

    return patch.object(_PipelineStep, "_backward", backward)


@contextmanager
def dropped() -> Iterator[None]:
    """No stage runs the backward pass of micro-batch 1."""
    with on_backward(1, None):
        yield


@contextmanager
def dropped_on_a_stage() -> Iterator[None]:
    """The first stage does not run it."""
    with on_backward(1, 0):
        yield


@contextmanager
def messages_exchanged() -> Iterator[None]:
    """A stage takes the gradients that belong to another of its arrivals: of the next element."""
    right = _PipelineStep._backward

    def backward(self: Any, act: Any, seeds: Any) -> Any:
        return [gradient.roll(1, 0) for gradient in right(self, act, seeds)]

    with patch.object(_PipelineStep, "_backward", backward):
        yield


@contextmanager
def never_run() -> Iterator[None]:
    """Micro-batch 1 is in nobody's list."""
    right = PipeRuntime.run

    def run(self: Any, program: Any, passes: Any, reducer: Any) -> None:
        right(self, program, [one for one in passes if one.index != 1], reducer)

    with patch.object(PipeRuntime, "run", run):
        yield


@contextmanager
def averaged() -> Iterator[None]:
    """A running average of the micro-batches' gradients instead of their sum."""
    right = PipeRuntime.run

    def run(self: Any, program: Any, passes: Any, reducer: Any) -> None:
        right(self, program, passes, reducer)
        for total in reducer.sums():
            total /= len(passes)

    with patch.object(PipeRuntime, "run", run):
        yield


BUGS = {
    "nothing": nothing,
    "backward not summed": backward_not_summed,
    "backward not scattered": backward_not_scattered,
    "forward not summed": forward_not_summed,
    "row bias": row_bias,
    "qkv in one": qkv_in_one,
    "parts not summed": parts_not_summed,
    "neighbour's heads": neighbours_heads,
    "joined twice": shared_twice,
    "tie not summed": tie_not_summed,
    "replicas counted": replicas_counted,
    "norm of a stage": norm_of_a_stage,
    "own norm": own_norm,
    "stages exchanged": stages_exchanged,
    "never run": never_run,
    "dropped": dropped,
    "dropped on a stage": dropped_on_a_stage,
    "messages exchanged": messages_exchanged,
    "averaged": averaged,
}
