"""A plan is settled by one function, for every entrance; what cannot go together is refused there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from shoal.base.errors import ConfigError, PlanError
from shoal.base.estimates.facts import MachineFacts
from shoal.base.layouts.layout import Layout
from shoal.base.layouts.strategies import expand_strategy
from shoal.base.plans.plan import Plan
from shoal.planning.recorded_plan import read_recorded_plan
from shoal.planning.settle import Words, layout_keys, settle_plan

SERVER = MachineFacts(cores=64, memory_bytes=2**40, gpus=8)
OPEN = Plan(Layout(), 48)


@pytest.mark.parametrize(
    ("said", "processes"),
    [
        *[(name, 4) for name in ("ddp", "zero1", "zero2", "fsdp", "hsdp", "tp", "cp", "ep", "3d")],
        *[(name, 4) for name in ("gpipe", "1f1b", "interleaved", "zero-bubble", "zbv")],
        ("dualpipe", 2), ("single", 1), ("dp", 1), ("auto", 4), ("auto", 1),
        ({"tp": 2, "dp_shard": 2, "zero": 1}, 4), ({"dp_replicate": 4, "ep": 2}, 4),
        ({"pp": 2, "schedule": "interleaved", "chunks": 3, "dp_replicate": 2}, 4),
        ({"strategy": "auto", "threads": 3}, 1),
    ],
)  # fmt: skip
def test_a_settled_plan_settles_to_itself(said: Words, processes: int) -> None:
    plan = settle_plan(replace(OPEN, micro_batch=2), said, processes, 1000, SERVER)
    assert plan.batch == plan.micro_batch * plan.accumulate * plan.layout.data_degree
    again = settle_plan(plan, layout_keys(plan.layout), processes, 1000, SERVER)
    assert again == plan
    assert Plan.from_json(plan.to_json({"chosen": True})) == plan


def test_words_of_a_layout_win_over_the_plans_own() -> None:
    said = {"tp": 2, "sequence_parallel": "off", "split": ["*.q=row"]}
    plan = settle_plan(replace(OPEN, strict=True), said, 2, None, SERVER)
    assert (plan.sequence_parallel, plan.split, plan.strict) == ("off", ("*.q=row",), True)


@pytest.mark.parametrize(
    ("said", "policies", "line"),
    [
        ("ddp", {"compile": "blocks", "recompute": "selective"},
         "train.compile = blocks: memory.recompute = selective looks at single operations, which a "
         "compiled block no longer has; try: memory.recompute=full"),
        ("zbv", {"recompute": "full"}, "try: memory.recompute=none, or layout.schedule=1f1b"),
        ("fsdp", {"compress": "topk"}, "try: layout.compress=int8, or layout.strategy=ddp"),
        ("ep", {"compress": "int8"}, "layout.compress = int8: sums over all data-parallel ranks, and "
         "layout.ep = 4 sums experts over some; try: layout.compress=none"),
        ("ddp", {"compress": "int8", "compute": "fp16"}, "try: precision.compute=bf16"),
        ("ddp", {"split": ("*.q=row",)}, "try: layout.tp=2, or leave layout.split out"),
        ("ddp", {"context": "ring"}, "try: layout.cp=2, or layout.context=auto"),
        ("ddp", {"batch": 47}, "train.batch = 47"),
    ],
)  # fmt: skip
def test_what_cannot_go_together_is_one_line(
    said: str, policies: dict[str, object], line: str
) -> None:
    with pytest.raises((PlanError, ConfigError)) as failure:
        settle_plan(replace(OPEN, **policies), said, 4, None, SERVER)  # type: ignore[arg-type]
    assert line in str(failure.value)
    assert "\n" not in str(failure.value)


def test_a_choice_of_another_number_of_ranks_is_none(tmp_path: Path) -> None:
    plan = settle_plan(OPEN, "zero1", 4, None, SERVER)
    (tmp_path / "plan.json").write_text(plan.to_json({"chosen": True}))
    assert read_recorded_plan(tmp_path, 4) == plan
    assert read_recorded_plan(tmp_path, 2) is None
    (tmp_path / "plan.json").write_text(plan.to_json({"chosen": False}))
    assert read_recorded_plan(tmp_path, 4) is None
    for damaged in (
        "",
        "[]",
        '{"chosen": true}',
        '{"chosen": true, "layout": {"tp": "x", "a": 1}}',
    ):
        (tmp_path / "plan.json").write_text(damaged)
        assert read_recorded_plan(tmp_path, 4) is None


def test_every_layout_is_spelled_out() -> None:
    for name, ranks in (("hsdp", 8), ("3d", 8), ("interleaved", 4), ("dp", 1), ("single", 1)):
        layout = expand_strategy(name, ranks)
        assert settle_plan(OPEN, layout_keys(layout), ranks, None, SERVER).layout == layout


def test_dp_takes_every_gpu_of_the_machine() -> None:
    assert settle_plan(OPEN, "dp", 1, None, SERVER).layout.threads == SERVER.gpus
    assert settle_plan(OPEN, {"strategy": "dp", "threads": 2}, 1, None, SERVER).layout.threads == 2
