"""Owners of one dataset (`data.split`): held-out samples, steps and merges of a real run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.base.errors import ConfigError
from shoal.cli.start import prepare_run, write_run_folder
from shoal.fabric import World
from shoal.fabric.rendezvous.process_info import ProcessInfo
from shoal.trainer.main_job import train

WORDS = (
    "data.source=digits", "model.name=mlp", "islands.data=own", "islands.method=fedavg",
    "islands.concurrent=1", "launch.processes=1", "layout.strategy=single", "train.prove=off",
    "optimizer.name=sgd", "optimizer.lr=0.1",
)  # fmt: skip


def train_owners(folder: Path, *words: str) -> tuple[Path, list[dict[str, Any]]]:
    """Train in this process; return the run's folder and its events."""
    prepared = prepare_run(
        [*WORDS, *words, f"run.folder={folder}", "run.name=one"], None, trust=True
    )
    prepared.folder.mkdir(parents=True)
    write_run_folder(prepared)
    alone = World(ProcessInfo(), torch.device("cpu"), None)
    assert train(prepared.folder, lambda *_: "", world=alone) == 0
    lines = (prepared.folder / "events.jsonl").read_text().splitlines()
    return prepared.folder, [json.loads(line) for line in lines]


def test_each_held_out_sample_validates_one_owner(tmp_path: Path) -> None:
    """The mean over owners is the validation on all of them; the steps are foreseen exactly."""
    folder, events = train_owners(
        tmp_path, "data.split=dirichlet:0.1", "islands.count=12", "islands.sample=0.5",
        "islands.period=1 epoch", "train.epochs=3", "train.batch=64", "islands.merge=median",
    )  # fmt: skip
    (validated,) = [event for event in events if event["event"] == "validated"]
    owners = validated["by_source"]
    targets = {name: row["targets"] for name, row in owners.items()}
    assert sum(targets.values()) == validated["targets"] == 359
    assert all(targets.values())
    for key in ("loss", "accuracy"):
        mean = sum(row[key] * targets[name] for name, row in owners.items()) / 359
        assert mean == pytest.approx(validated[key], rel=1e-6)
    assert owners[validated["worst"]]["loss"] == max(row["loss"] for row in owners.values())
    texts = [event["text"] for event in events if event["event"] == "notice"]
    assert any(f"{len(owners)} of 12 owners have some" in text for text in texts)
    assert sum("islands.merge = median: owners are unlike (data.split = " in t for t in texts) == 1
    plan = json.loads((folder / "plan.json").read_text())
    assert plan["steps"] == events[-1]["step"]


def test_owners_without_a_sample_send_no_change_that_a_trimmed_mean_could_drop(
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match=r"drops none of \d+ changes .*owners have samples"):
        train_owners(
            tmp_path, "data.split=dirichlet:0.01", "islands.count=20", "islands.merge=trimmed",
            "islands.trim=0.05", "train.steps=4", "islands.period=2",
        )  # fmt: skip
