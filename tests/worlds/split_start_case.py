"""Starts of one training under tp, with labels that are wrong at some of them."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from guards import Lines
from shoal.base.errors import PlanError
from shoal.fabric import World
from shoal.parallel import tensor_parallel
from shoal.parallel.spmd.labelling.labels import Split
from shoal.parallel.spmd.model_split import plan_split
from shoal.parallel.spmd.split_block import ModelSplit
from shoal.trainer.parallelize import parallelize
from tensor_case import built, graphs_with, sample


def mislabelled(*arguments: Any, **settings: Any) -> ModelSplit:
    """The split, with q, k and v in one weight cut as if they were one matrix."""
    split = plan_split(*arguments, **settings)
    classes = []
    for group in split.classes:
        cuts = {n: Split(label.dim) for n, label in group.split.parameters.items()}
        classes.append(replace(group, split=replace(group.split, parameters=cuts)))
    return replace(split, classes=tuple(classes))


def start(world: World, planted: bool, strict: bool) -> str:
    """What a start says of layers that stay whole, or its refusal; empty where all is split."""
    inputs, targets = sample("fused")
    wrong = mock.patch.object(tensor_parallel, "plan_split", mislabelled if planted else plan_split)
    try:
        with Lines() as told, wrong, graphs_with("qkv cut" if planted else "none"):
            run = parallelize(
                lambda: built("fused"),
                lambda p: torch.optim.SGD(p, lr=0.1),
                layout={"tp": world.size, "strict": strict},
                batch=len(inputs),
                precision="fp64",
                sample=(inputs, targets),
                world=world,
            )
    except PlanError as refusal:
        return str(refusal)
    for undo in run.program.on_close:  # as `run.close`, but the world stays for others
        undo()
    return " · ".join(line for line in told.lines if "stays whole" in line)


def starts(world: World, folders: list[str], planted: list[bool], strict: bool) -> list[str]:
    """What starts say, one after another, each with its cache."""
    told = []
    for folder, wrong in zip(folders, planted, strict=True):
        with mock.patch.dict(os.environ, {"SHOAL_CACHE": folder}):
            told.append(start(world, wrong, strict))
    return told
