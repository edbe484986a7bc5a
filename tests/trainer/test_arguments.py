"""Arguments of `shoal.parallelize` that mean nothing: one line each, with what was meant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoal


def started(**arguments: Any) -> shoal.Run:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return shoal.parallelize(model, optimizer, **{"layout": "single", **arguments})


def told(**arguments: Any) -> str:
    """The line of the refusal."""
    with pytest.raises(shoal.ConfigError) as failure:
        started(**arguments)
    return str(failure.value)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"batch": -4}, "batch = -4: a whole number of at least 1 is wanted; try: batch=32"),
        ({"batch": "x"}, "batch = 'x': a whole number of at least 1 is wanted, got str; try: batch=32"),
        ({"batch": 2.5}, "batch = 2.5: a whole number of at least 1 is wanted; try: batch=32"),
        ({"micro_batch": 0}, "micro_batch = 0: a whole number of at least 1 is wanted; try: micro_batch=4"),
        ({"seed": "a"}, "seed = 'a': a whole number of at least 0 is wanted, got str; try: seed=0"),
        ({"keep": 0}, "keep = 0: a whole number of at least 1 is wanted; try: keep=2"),
        ({"skip_limit": True}, "skip_limit = True: a whole number of at least 1 is wanted; try: skip_limit=5"),
        ({"total_steps": -1}, "total_steps = -1: a whole number of at least 0 is wanted; try: total_steps=0"),
        ({"clip": -1}, "clip = -1: at least 0 is wanted; try: clip=1.0"),
        ({"clip": None}, "clip = None: a number of at least 0 is wanted; try: clip=1.0"),
        ({"clip": float("nan")}, "clip = nan: at least 0 is wanted; try: clip=1.0"),
        ({"clip": "1.0"}, "clip = '1.0': a number of at least 0 is wanted, got str; try: clip=1.0"),
        ({"batch": torch.tensor(16)}, "batch = tensor(16): a whole number of at least 1 is wanted, got Tensor; try: batch=32"),
        ({"coupled": "True"}, "coupled = 'True': True or False is wanted, got str; try: coupled=True"),
        ({"average": "ema"}, "average = 'ema': a number of at least 0 is wanted, got str; try: average=0.999"),
        ({"loss_scale": 8.0}, 'loss_scale = 8.0: only fp16 has a loss scale, precision = auto; try: precision="fp16"'),
        ({"residual": "bf16"}, 'residual = bf16: only bf16 products have a bf16 residual stream, precision = auto; try: precision="bf16"'),
        ({"residual": "bfloat16"}, "residual = bfloat16: not one of fp32, bf16; try: bf16"),
        ({"schedule": "cosine"}, "schedule = 'cosine': an OptimizerPolicy, or None is wanted, got str; try: schedule=shoal.OptimizerPolicy(schedule=\"cosine\") with total_steps"),
        ({"precision": torch.bfloat16}, "precision = torch.bfloat16: not one of auto, fp64, fp32, bf16, fp16; try: bf16"),
        ({"precision": "fp8"}, "precision = fp8: not one of auto, fp64, fp32, bf16, fp16; try: bf16"),
        ({"recompute": True}, "recompute = True: not one of none, selective, full; try: full"),
        ({"compile": True}, "compile = True: not one of none, blocks; try: blocks"),
        ({"call": "args"}, "call = args: not one of single, kwargs; try: single"),
        ({"layout": ["tp"]}, "layout = ['tp']: the name of a layout, or its degrees, is wanted, got list; try: layout={\"tp\": 2}"),
        ({"layout": None}, 'layout = None: the name of a layout, or its degrees, is wanted; try: layout="auto"'),
        ({"layout": {"tp": "x"}}, "layout.tp = 'x': a whole number is wanted, got str; try: layout={\"tp\": 2}"),
        ({"loss": "mse"}, "loss = 'mse': a function (outputs, targets) → (sum, count) or unreduced values is wanted, got str; try: loss=torch.nn.CrossEntropyLoss(reduction=\"none\")"),
        ({"learning_rate": 1e-3}, "shoal.parallelize has no argument learning_rate; try: torch.optim.AdamW(model.parameters(), lr=…) as the optimizer"),
        ({"num_epochs": 3}, "shoal.parallelize has no argument num_epochs; try: for epoch in run.epochs(…)"),
        ({"remote": "memory://far"}, 'remote = memory://far: copies what is written into the run folder; try: folder="runs/mine"'),
        ({"remote": Path("/mnt/far"), "folder": "runs/x"}, "remote = /mnt/far: an address is wanted, as s3://bucket/run; try: file:///mnt/far"),
        ({"remote": "s4://far", "folder": "runs/x"}, "remote = s4://far: Protocol not known: s4; try: s3://…"),
        ({"layuot": "ddp"}, "shoal.parallelize has no argument layuot; try: layout"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)  # fmt: skip
def test_what_means_nothing_is_one_line(arguments: dict[str, Any], line: str) -> None:
    assert told(**arguments) == line


def test_a_file_in_the_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    line = told(folder=tmp_path / "notes")
    assert line == (
        f"folder = {tmp_path}/notes: is a file, a folder is wanted; try: {tmp_path}/notes-run"
    )
    assert (tmp_path / "notes").read_text() == "mine"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"batch_size": 4}, "run.loader has no argument batch_size; try: shoal.parallelize(…, batch=…)"),
        ({"num_workers": 4}, "run.loader has no argument num_workers; try: workers"),
        ({"shuffle": True}, "run.loader has no argument shuffle; leave it out: the order is drawn anew every epoch, by the seed of shoal.parallelize"),
        ({"pin_memory": True}, "run.loader has no argument pin_memory; there are dataset, workers, collate"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)  # fmt: skip
def test_what_a_dataloader_takes_is_said_elsewhere(arguments: dict[str, Any], line: str) -> None:
    with started() as run, pytest.raises(shoal.ConfigError) as failure:
        run.loader([0] * 8, **arguments)
    assert str(failure.value) == line


@pytest.mark.parametrize("count", [-1, "3", 2.5])
def test_epochs_want_a_count(count: Any) -> None:
    with started() as run, pytest.raises(shoal.ConfigError) as failure:
        list(run.epochs(count))
    assert str(failure.value) == f"run.epochs({count!r}): a count of epochs is wanted; try: 1"
