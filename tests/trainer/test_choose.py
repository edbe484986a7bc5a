"""`auto` takes what the planner ranks first, keeps it over restarts, and leaves the rest alone."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shoal.base.facts import MachineFacts
from shoal.base.layout import Layout
from shoal.config.load import load
from shoal.data.sources import open_source
from shoal.planner.measured import this_cluster
from shoal.trainer import choose as room
from shoal.trainer.foresee import case_of, facts_of, prediction


class TwoRanks(SimpleNamespace):
    """Stands in for a world of two: rank 0 alone looks."""

    size, is_first, device = 2, True, torch.device("cpu")

    def broadcast_json(self, value: Any) -> Any:
        return json.loads(json.dumps(value))


@pytest.fixture
def digits() -> tuple[Any, Any]:
    words = ["model.name=mlp", "data.source=digits", "train.batch=16", "train.micro_batch=2"]
    config = load(None, words).config
    return config, open_source(config.data, 0)


@pytest.fixture(autouse=True)
def known_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = MachineFacts(cores=2, memory_bytes=2**34, gpus=0)
    monkeypatch.setattr(
        room, "read_measured", lambda cache, ranks, **more: this_cluster(machine, ranks)
    )


def test_the_planner_chooses_and_says_what_else(digits, tmp_path: Path) -> None:
    config, source = digits
    layout, why = room.choose(config, source, TwoRanks(), tmp_path)
    assert layout in ({"dp_replicate": 2}, {"dp_shard": 2, "zero": 1})
    assert why.startswith("auto: ")
    assert "per step foreseen; also possible: " in why


def test_a_restart_keeps_its_layout(digits, tmp_path: Path) -> None:
    config, source = digits
    kept = {"layout": asdict(Layout(dp_shard=2, zero=2)), "why": "as before", "chosen": True}
    (tmp_path / "plan.json").write_text(json.dumps(kept))
    assert room.choose(config, source, TwoRanks(), tmp_path) == (
        {"dp_shard": 2, "zero": 2},
        "as before",
    )
    kept["layout"] = asdict(Layout(dp_shard=4, zero=2))
    (tmp_path / "plan.json").write_text(json.dumps(kept))
    assert room.choose(config, source, TwoRanks(), tmp_path)[1] != "as before"


def test_what_was_asked_for_is_taken(digits, tmp_path: Path) -> None:
    config, source = digits
    given = load(None, ["layout.strategy=zero2"]).config
    assert room.choose(given, source, TwoRanks(), tmp_path) == ({"strategy": "zero2"}, "")
    alone = TwoRanks(size=1)
    assert room.choose(config, source, alone, tmp_path) == ({"strategy": "auto"}, "")


def test_compression_rules_out_what_cannot_carry_it(tmp_path: Path) -> None:
    words = ["model.name=mlp", "data.source=digits", "train.batch=16", "train.micro_batch=2"]
    config = load(None, [*words, "layout.compress=powersgd"]).config
    source = open_source(config.data, 0)
    assert room.choose(config, source, TwoRanks(), tmp_path)[0] == {"dp_replicate": 2}


def test_an_unknown_machine_leaves_it_to_the_guide(
    digits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, source = digits
    monkeypatch.setattr(room, "read_measured", lambda cache, ranks, **more: None)
    assert room.choose(config, source, TwoRanks(), tmp_path) == ({"strategy": "auto"}, "")


def test_a_prediction_adds_up(digits) -> None:
    config, source = digits
    facts = facts_of(config, source, kernels="cpu", element_bytes=4)
    cluster = this_cluster(MachineFacts(2, 2**34, 0), 2)
    from shoal.base.plan import Plan

    plan = Plan(Layout(dp_replicate=2), "", 16, 2, 4, "fp32", facts.trainable)
    said = prediction(case_of(config, plan, facts, cluster))
    assert sum(said["time"].values()) == pytest.approx(said["step_s"])
    # 2(n−1)/n times 4 bytes per parameter
    assert said["sent_bytes"] == pytest.approx(4 * facts.trainable)
