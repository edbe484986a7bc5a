"""`auto` takes what the planner ranks first, keeps it over restarts, and leaves the rest alone."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shoal.base.estimates.facts import MachineFacts
from shoal.base.layouts.layout import Layout
from shoal.base.plans.plan import Plan
from shoal.config.load import load_config
from shoal.config.resolve import make_plan
from shoal.config.sections import Config
from shoal.data.loading.sample_inspection import first_samples
from shoal.data.sources import open_source
from shoal.forecast.machines.measured_machine import estimate_this_machine
from shoal.planning.recorded_plan import restore_choice
from shoal.trainer.autotune import rank_layouts
from shoal.trainer.jobs.configured_run import build_model, import_loss
from shoal.trainer.jobs.run_forecast import collect_model_facts, make_case, predict_figures


class TwoRanks(SimpleNamespace):
    """Stands in for a world of two: rank 0 alone looks."""

    size, is_first, device = 2, True, torch.device("cpu")

    def broadcast_json(self, value: Any) -> Any:
        return json.loads(json.dumps(value))


@pytest.fixture
def digits() -> tuple[Any, Any]:
    words = ["model.name=mlp", "data.source=digits", "train.batch=16", "train.micro_batch=2"]
    config = load_config(None, words).config
    return config, open_source(config.data, 0)


@pytest.fixture(autouse=True)
def known_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = MachineFacts(cores=2, memory_bytes=2**34, gpus=0)
    monkeypatch.setattr(
        rank_layouts,
        "read_measured_cluster",
        lambda ranks, device: estimate_this_machine(machine, ranks),
    )


def chosen(config: Config, source: Any, folder: Path, ranks: int = 2) -> tuple[Plan, Any]:
    """What `choose` makes of the plan that a start without torch left in the folder."""
    if not (folder / "plan.json").exists():
        (folder / "plan.json").write_text(make_plan(config).to_json({"chosen": False}))
    return rank_layouts.choose_run_layout(
        config, partial(collect_model_facts, config, source), TwoRanks(size=ranks), folder
    )


def test_the_planner_chooses_and_says_what_else(digits, tmp_path: Path) -> None:
    config, source = digits
    plan, said = chosen(config, source, tmp_path)
    assert plan.layout in (Layout(dp_replicate=2), Layout(dp_shard=2, zero=1))
    assert (said, plan.accumulate) == (None, 4)
    assert plan.why.startswith("auto: ")
    assert "per step foreseen; also possible: " in plan.why


def test_a_restart_keeps_its_layout(digits, tmp_path: Path) -> None:
    config, source = digits
    kept = replace(
        make_plan(config), layout=Layout(dp_shard=2, zero=2), accumulate=4, why="as before"
    )
    (tmp_path / "plan.json").write_text(kept.to_json({"chosen": True}))
    assert chosen(config, source, tmp_path) == (kept, None)
    other = replace(kept, layout=Layout(dp_shard=4, zero=2))
    (tmp_path / "plan.json").write_text(other.to_json({"chosen": True}))
    assert chosen(config, source, tmp_path)[0].why != "as before"


def test_a_resumed_run_keeps_its_layout_and_takes_a_new_batch(digits, tmp_path: Path) -> None:
    config, _ = digits
    kept = replace(
        make_plan(config), layout=Layout(dp_shard=2, zero=2), accumulate=4, why="as before"
    )
    (tmp_path / "plan.json").write_text(kept.to_json({"chosen": True}))
    now = replace(make_plan(config), layout=Layout(dp_replicate=2), batch=32, accumulate=0)
    plan, known = restore_choice(now, {"strategy": "auto"}, tmp_path)
    assert (plan.layout, plan.why, plan.batch, plan.accumulate, known) == (
        kept.layout, "as before", 32, 0, True,
    )  # fmt: skip
    assert restore_choice(now, {"strategy": "ddp"}, tmp_path) == (now, False)
    assert restore_choice(now, {"strategy": "auto", "zero": 2}, tmp_path)[1]
    assert restore_choice(now, {"strategy": "auto", "zero": 1}, tmp_path) == (now, False)
    cannot = replace(now, compress="topk")
    assert restore_choice(cannot, {"strategy": "auto"}, tmp_path) == (cannot, False)
    (tmp_path / "plan.json").write_text("{half")
    assert restore_choice(now, {"strategy": "auto"}, tmp_path) == (now, False)


def test_what_was_asked_for_is_taken(digits, tmp_path: Path) -> None:
    config, source = digits
    given = load_config(None, ["layout.strategy=zero2"]).config
    plan, said = chosen(given, source, tmp_path)
    assert (plan, said) == (make_plan(given), None)
    assert chosen(config, source, tmp_path, ranks=1) == (plan, {"strategy": "auto"})


def test_compression_rules_out_what_cannot_carry_it(tmp_path: Path) -> None:
    words = ["model.name=mlp", "data.source=digits", "train.batch=16", "train.micro_batch=2"]
    config = load_config(None, [*words, "layout.compress=powersgd"]).config
    source = open_source(config.data, 0)
    assert chosen(config, source, tmp_path)[0].layout == Layout(dp_replicate=2)


def test_an_unknown_machine_leaves_it_to_the_guide(
    digits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, source = digits
    monkeypatch.setattr(rank_layouts, "read_measured_cluster", lambda ranks, device: None)
    assert chosen(config, source, tmp_path) == (make_plan(config), {"strategy": "auto"})


def test_a_prediction_adds_up(digits) -> None:
    config, source = digits
    facts = collect_model_facts(config, source, kernels="cpu", element_bytes=4)
    cluster = estimate_this_machine(MachineFacts(2, 2**34, 0), 2)
    plan = Plan(Layout(dp_replicate=2), 16, 2, 4, compute="fp32")
    said = predict_figures(make_case(config, plan, facts, cluster))
    assert sum(said["time"].values()) == pytest.approx(said["step_s"])
    # 2(n−1)/n times 4 bytes per parameter
    assert said["sent_bytes"] == pytest.approx(4 * facts.trainable)
    # A save beside training copies this rank's half of weights and AdamW's two states.
    copied = 4 * 3 * facts.trainable / 2
    case = make_case(config, plan, facts, cluster)
    saving = predict_figures(case, saves=True)["peak_memory_bytes"]
    assert saving == pytest.approx(sum(said["memory"].values()) + copied, rel=0.01)
    on_gpu = replace(case, cluster=replace(cluster, device=replace(cluster.device, kind="gpu")))
    assert len({predict_figures(on_gpu, saves=s)["peak_memory_bytes"] for s in (False, True)}) == 1


def test_an_own_loop_gets_the_answer_of_the_command(digits, tmp_path: Path) -> None:
    """`auto` is one answer: the same model, batch, loss and optimizer, by its sample."""
    config, source = digits
    plan, _ = chosen(config, source, tmp_path)
    module = build_model(config, source)
    optimizer = torch.optim.AdamW(module.parameters())
    sample = first_samples(source.train, source.collate)
    asked = replace(make_plan(config), compute="fp32")
    told = [module, lambda: sample, import_loss(config.model), optimizer, asked]
    own = rank_layouts.choose_loop_layout(*told, "auto", TwoRanks())
    assert own is not None
    assert (own.layout, own.accumulate, own.why) == (plan.layout, plan.accumulate, plan.why)
    staged = rank_layouts.choose_loop_layout(*told, {"zero": 2}, TwoRanks())
    assert staged is not None
    assert staged.layout.zero == 2


def test_the_guide_speaks_of_the_model_that_it_counted(
    digits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start without torch could not count a model of the user's own."""
    config, source = digits
    monkeypatch.setattr(rank_layouts, "read_measured_cluster", lambda ranks, device: None)
    said = replace(make_plan(config), why="auto: a model of unknown size")
    (tmp_path / "plan.json").write_text(said.to_json({"chosen": False}))
    assert (
        rank_layouts.choose_run_layout(
            config, partial(collect_model_facts, config, source), TwoRanks(), tmp_path
        )[0].why
        == ""
    )
