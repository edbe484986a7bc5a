"""Names and degrees of layouts: what they expand to, what they are called, and every refusal."""

from __future__ import annotations

import json

import pytest

from shoal.base.errors import ConfigError, PlanError
from shoal.base.estimates.facts import MachineFacts
from shoal.base.layouts.compression import check_compression
from shoal.base.layouts.degrees import BUILT_AXES, check_degrees
from shoal.base.layouts.layout import AXES, PIPELINES, STRATEGIES, Layout
from shoal.base.layouts.policies import TensorPolicy
from shoal.base.layouts.schedule_names import (
    SCHEDULES,
    SPLIT_BACKWARD,
    check_recompute,
    model_copies,
    stages_per_rank,
)
from shoal.base.layouts.strategies import expand_strategy
from shoal.base.plans.plan import Plan
from shoal.planning.pipeline_bubble import describe_bubble
from shoal.planning.pipeline_schedules import check_micro_batches, make_schedule
from shoal.planning.settle import choose_layout

LAPTOP = MachineFacts(cores=4, memory_bytes=8 * 2**30, gpus=0)
SAME = {"zero3": "fsdp"}


def choose(strategy: str, degrees: dict[str, int], processes: int, **given: object) -> Layout:
    return choose_layout(strategy, degrees, processes, 1000, LAPTOP, **given)[0]  # type: ignore[arg-type]


def refused(strategy: str, degrees: dict[str, int], processes: int, **given: object) -> str:
    with pytest.raises(PlanError) as caught:
        choose(strategy, degrees, processes, **given)
    assert "\n" not in str(caught.value)
    return str(caught.value)


NO_DEGREES = ("single", "dp", "parameter-server")
"""Strategies that are no degrees of axes; of the last, tests/base/test_servers.py."""


@pytest.mark.parametrize("name", [name for name in STRATEGIES if name not in NO_DEGREES])
@pytest.mark.parametrize("processes", [4, 8])
def test_a_name_and_its_degrees_are_the_same_layout(name: str, processes: int) -> None:
    layout = expand_strategy(name, processes)
    assert layout.processes == processes
    wanted = "pp" if name in PIPELINES else SAME.get(name, name)
    assert layout.strategy == wanted
    assert layout.text().startswith(f"{wanted} (")
    degrees = {axis: n for axis, n in {**layout.degrees, "ep": layout.ep}.items() if n > 1}
    again = choose(
        "auto", degrees, processes,
        zero=layout.zero or None, schedule=layout.schedule, chunks=layout.chunks,
    )  # fmt: skip
    assert again == layout
    assert choose(name, degrees, processes) == layout, (
        "a name beside its own degrees is no conflict"
    )


def test_what_people_read() -> None:
    assert expand_strategy("tp", 2).text() == "tp (tp = 2)"
    assert expand_strategy("pp", 2).text() == "pp (pp = 2, schedule = 1f1b)"
    assert expand_strategy("afab", 2).text() == "pp (pp = 2, schedule = gpipe)"
    assert (
        expand_strategy("interleaved", 2).text()
        == "pp (pp = 2, schedule = interleaved, chunks = 2)"
    )
    assert expand_strategy("3d", 4).text() == "3d (pp = 2, tp = 2, schedule = 1f1b)"
    assert (
        expand_strategy("3d", 8).text() == "3d (pp = 2, dp_replicate = 2, tp = 2, schedule = 1f1b)"
    )
    mixed = choose("auto", {"tp": 2, "dp_shard": 2}, 4)
    assert mixed.text() == "fsdp + tp (dp_shard = 2, tp = 2)"
    mixed = choose("auto", {"pp": 2, "dp_shard": 2}, 4, zero=1, schedule="zbv")
    assert mixed.text() == "zero1 + pp (pp = 2, dp_shard = 2, schedule = zbv)"
    assert choose("ep", {"dp_replicate": 4, "ep": 2}, 4).text() == "ep (dp_replicate = 4, ep = 2)"
    mixed = choose("auto", {"dp_shard": 4, "ep": 2}, 4)
    assert mixed.text() == "fsdp + ep (dp_shard = 4, ep = 2)"
    three = choose("3d", {"pp": 2, "tp": 2, "dp_shard": 2}, 8)
    assert three.text() == "3d (pp = 2, dp_shard = 2, tp = 2, zero = 3, schedule = 1f1b)"


@pytest.mark.parametrize("name", [n for n in STRATEGIES if n not in ("single", "dp")])
def test_on_one_process_every_name_is_single(name: str) -> None:
    assert choose(name, {}, 1) == Layout()


@pytest.mark.parametrize("name", ["ddp", "zero1", "zero2", "fsdp", "tp", "cp"])
@pytest.mark.parametrize("processes", [1, 2])
def test_a_schedule_beside_a_name_without_stages_is_refused(name: str, processes: int) -> None:
    with pytest.raises(PlanError, match="schedule = zbv: is about the stages of a pipeline"):
        expand_strategy(name, processes, schedule="zbv")


def test_what_a_schedule_makes_is_what_its_name_promises() -> None:
    for name in SCHEDULES:
        chunks = 3 if name == "interleaved" else 1
        made = make_schedule(name, 2, 4, chunks)
        assert made.stages_per_copy == Layout(pp=2, schedule=name, chunks=chunks).stages
        assert made.copies == model_copies(name)
        assert stages_per_rank(name, chunks) * 2 == made.stages
        kinds = {action.kind for rank in made.ranks for action in rank}
        assert ("W" in kinds) == (name in SPLIT_BACKWARD), name


@pytest.mark.parametrize(
    ("degrees", "processes", "given", "said"),
    [
        ({"tp": 3}, 4, {}, "try: layout.tp=2 layout.dp_replicate=2, or launch.processes=3"),
        ({"tp": 2}, 4, {}, "try: layout.dp_replicate=2, or launch.processes=2"),
        ({"tp": 2, "pp": 3}, 8, {}, "try: layout.pp=2 layout.dp_replicate=2"),
        ({"tp": 2, "dp_shard": 2}, 8, {}, "try: layout.dp_replicate=2"),
        ({"islands": 2}, 2, {}, "layout.islands = 2: islands are runs of their own, each with a layout"),
        ({"tp": -2}, 2, {}, "layout.tp = -2: at least 1; try: layout.tp=1"),
        ({"tp": 2}, 2, {"threads": 2}, "layout.threads = 2: replicas in threads are one process"),
        ({"tp": 2}, 2, {"zero": 1}, "layout.zero = 1: splits over layout.dp_shard, which is 1"),
        ({"tp": 2, "dp_shard": 2}, 4, {"zero": 0}, "layout.zero=3, or layout.dp_replicate=2"),
        ({"dp_replicate": 2}, 2, {"schedule": "1f1b"},
         "layout.schedule = 1f1b: is about the stages of a pipeline, and layout.pp is 1; try: "
         "layout.pp=2, or leave layout.schedule out"),
        ({"tp": 2}, 2, {"chunks": 2}, "layout.chunks = 2: is about the stages of a pipeline"),
        ({"pp": 2}, 2, {"schedule": "1f1"}, "layout.schedule = 1f1: not one of gpipe, 1f1b"),
        ({"pp": 3}, 3, {"schedule": "dualpipe"},
         "layout.schedule = dualpipe: is fed from both ends, with two stages on every rank, so "
         "layout.pp is even, got 3; try: layout.pp=2, or layout.pp=4, or layout.schedule=zbv"),
        ({"pp": 2, "dp_shard": 2}, 4, {"schedule": "dualpipe"},
         "try: layout.schedule=1f1b, or layout.zero=2"),
        ({"pp": 2}, 2, {"chunks": 2}, "1f1b gives every rank one stage; try: layout.schedule=int"),
        ({"pp": 2}, 2, {"schedule": "zbv", "chunks": 3}, "zbv gives every rank 2 stages"),
        ({"pp": 2}, 2, {"schedule": "interleaved", "chunks": 1}, "try: layout.chunks=2"),
        ({"pp": 2, "dp_shard": 2}, 4, {"schedule": "zbv"},
         "layout.schedule = zbv: runs a backward in two halves, and fsdp frees the gathered "
         "parameters between them; try: layout.schedule=1f1b, or layout.zero=2"),
        ({"pp": 2, "dp_shard": 2, "dp_replicate": 2}, 8, {"schedule": "zero-bubble"},
         "and hsdp frees the gathered parameters between them; try: layout.schedule=1f1b"),
    ],
)  # fmt: skip
def test_degrees_that_cannot_be(
    degrees: dict[str, int], processes: int, given: dict[str, object], said: str
) -> None:
    assert said in refused("auto", degrees, processes, **given)


@pytest.mark.parametrize(
    ("strategy", "processes", "given", "said"),
    [
        ("3d", 2, {}, "try: launch.processes=4, or degrees: layout.tp, layout.pp"),
        ("3d", 6, {}, "try: launch.processes=4"),
        ("tp", 2, {"zero": 1}, "try: degrees, layout.tp=2 layout.dp_shard=2 layout.zero=1"),
        ("tp", 2, {"threads": 2}, "only layout.strategy=dp runs replicas in threads"),
        ("ddp", 2, {"schedule": "1f1b"}, "layout.schedule = 1f1b: is about the stages"),
        ("auto", 2, {"schedule": "1f1b"}, "layout.schedule = 1f1b: is about the stages"),
        ("dp", 1, {"schedule": "1f1b"}, "layout.schedule = 1f1b: is about the stages"),
        ("1f1b", 2, {"schedule": "gpipe"}, "layout.strategy = 1f1b names another"),
        ("dualpipe", 3, {}, "so layout.pp is even, got 3; try: layout.pp=2, or layout.pp=4"),
        ("dualpipe", 2, {"chunks": 3}, "dualpipe gives every rank 2 stages"),
        ("cp", 2, {"zero": 1}, "try: degrees, layout.cp=2 layout.dp_shard=2 layout.zero=1"),
    ],
)
def test_names_that_cannot_be(
    strategy: str, processes: int, given: dict[str, object], said: str
) -> None:
    assert said in refused(strategy, {}, processes, **given)


def test_a_name_that_says_something_else_than_the_degrees() -> None:
    assert refused("pp", {"pp": 2, "dp_replicate": 2}, 4) == (
        "layout.strategy = pp: the degrees given with it are ddp + pp (pp = 2, dp_replicate = 2, "
        "schedule = 1f1b); try: leave layout.strategy out, or leave the degrees out"
    )
    assert "try: layout.strategy=tp" in refused("pp", {"tp": 2}, 2)
    assert "try: layout.strategy=pp" in refused("1f1b", {"pp": 2}, 2, schedule="gpipe")


def test_a_name_gives_its_schedule_to_degrees() -> None:
    assert choose("zbv", {"pp": 2}, 2).schedule == "zbv"
    assert choose("interleaved", {"pp": 2}, 2).chunks == 2
    assert choose("dualpipe", {}, 4) == Layout(pp=4, schedule="dualpipe")


def test_every_axis_is_built_or_refused() -> None:
    for axis in AXES:
        if axis in BUILT_AXES:
            assert check_degrees({axis: 2}, 2).degrees[axis] == 2
        else:
            with pytest.raises(PlanError, match="islands are runs of their own"):
                check_degrees({axis: 2}, 2)


def test_micro_batches_of_a_pipeline() -> None:
    layout = expand_strategy("interleaved", 4)
    assert describe_bubble(layout, 16, 2) == (
        "pipeline: interleaved over 8 stages, 8 micro-batches per step: 16 % of it is bubble"
    )
    with pytest.raises(PlanError) as caught:
        check_micro_batches(layout, 24, 4)
    assert str(caught.value) == (
        "layout.schedule = interleaved: needs micro-batches per step in a multiple of layout.pp = "
        "4, got 6 per data-parallel rank (train.batch 24, train.micro_batch 4); try: "
        "train.micro_batch=6, or train.batch=32, or layout.schedule=1f1b"
    )
    # What it names is legal.
    check_micro_batches(layout, 24, 6)
    check_micro_batches(layout, 32, 4)
    assert describe_bubble(Layout(dp_replicate=2), 4, 2) == ""
    for name in ("gpipe", "1f1b"):  # fewer micro-batches than stages: legal, and the bubble is said
        check_micro_batches(expand_strategy(name, 4), 2, 1)
        assert describe_bubble(expand_strategy(name, 4), 2, 1) == (
            f"pipeline: {name} over 4 stages, 2 micro-batches per step: 60 % of it is bubble"
        )
    check_micro_batches(expand_strategy("zbv", 2), 8, 1)
    assert "0 % of it is bubble" in describe_bubble(expand_strategy("zbv", 2), 8, 1)


@pytest.mark.parametrize(("batch", "micro_batch"), [(12, 2), (22, 2), (36, 4)])
def test_micro_batches_that_feed_both_ends(batch: int, micro_batch: int) -> None:
    layout = expand_strategy("dualpipe", 4)
    check_micro_batches(layout, 16, 2)
    assert "dualpipe over 4 stages, 8 micro-batches" in describe_bubble(layout, 16, 2)
    with pytest.raises(PlanError) as caught:
        check_micro_batches(layout, batch, micro_batch)
    said = str(caught.value)
    assert said.startswith(
        "layout.schedule = dualpipe: needs an even number of micro-batches per step, at least 8 "
        f"(twice layout.pp), got {batch // micro_batch} per data-parallel rank"
    )
    # What it names is legal.
    for word in said.partition("try: ")[2].split(", or ")[:-1]:
        key, _, value = word.partition("=")
        changed = {"train.batch": batch, "train.micro_batch": micro_batch, key: int(value)}
        check_micro_batches(layout, *changed.values())


@pytest.mark.parametrize("schedule", SPLIT_BACKWARD)
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_halves_of_a_backward_recompute_nothing(schedule: str, recompute: str) -> None:
    with pytest.raises(PlanError) as caught:
        check_recompute(schedule, recompute)
    assert str(caught.value) == (
        f"memory.recompute = {recompute}: layout.schedule = {schedule} runs a backward in two "
        "halves, so a block would be computed again for every weight in it (2.5 times the work); "
        "try: memory.recompute=none, or layout.schedule=1f1b"
    )
    check_recompute(schedule, "none")
    check_recompute("1f1b", recompute)


def test_compress_speaks_of_the_data_parallel_axes() -> None:
    sharded = choose("3d", {"pp": 2, "tp": 2, "dp_shard": 2}, 8)
    with pytest.raises(PlanError, match="fsdp cuts gradients where no matrix ends"):
        check_compression("powersgd", sharded.data_strategy)
    check_compression("one-bit", sharded.data_strategy)
    check_compression("int8", choose("auto", {"tp": 2, "dp_shard": 2}, 4, zero=2).data_strategy)
    check_compression("powersgd:2", expand_strategy("3d", 8).data_strategy)


def test_what_a_user_says_of_parameters() -> None:
    policy = TensorPolicy(split=("blocks.*.gate.weight=column", "head.weight = whole"))
    assert policy.overrides == {"blocks.*.gate.weight": "column", "head.weight": "whole"}
    for texts, said in [
        (("gate.weight",), "is written PATTERN=WORD; try: layout.split=gate.weight=column"),
        (("*.weight=colum",), "layout.split: *.weight = colum: not one of whole, column, row; "
         "try: column"),
        (("a=row", "a=whole"), "layout.split: a is both row and whole"),
    ]:  # fmt: skip
        with pytest.raises(ConfigError) as caught:
            TensorPolicy(split=texts).check_split()
        assert said in str(caught.value)
    with pytest.raises(ConfigError, match="try: layout.tp=2, or leave layout.split out"):
        policy.check_split(tp=1)
    with pytest.raises(ConfigError, match="splits the sequence over layout.tp, which is 1"):
        TensorPolicy(sequence_parallel="on").check_split(tp=1)
    TensorPolicy().check_split(tp=1)


def test_a_plan_keeps_it_all() -> None:
    layout = expand_strategy("interleaved", 2)
    plan = Plan(layout, 4, 1, 4, strict=True, sequence_parallel="off", split=("*.q=column",))
    assert Plan.from_json(plan.to_json({"steps": 3})) == plan
    # A plan of a run from before these fields.
    plain = Plan(Layout(), 4, 4, 1)
    record = json.loads(plain.to_json())
    del record["split"], record["layout"]["schedule"], record["layout"]["chunks"]
    assert Plan.from_json(json.dumps(record)) == plain
