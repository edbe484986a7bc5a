"""`auto` by rule: what fits, then the guide; every refusal names what can be done."""

from __future__ import annotations

import pytest

from shoal.base.errors import PlanError
from shoal.base.estimates.facts import MachineFacts
from shoal.planning.settle import choose_layout

LAPTOP = MachineFacts(cores=4, memory_bytes=8 * 2**30, gpus=0)
SERVER = MachineFacts(cores=96, memory_bytes=2**40, gpus=8)


def test_what_does_not_fit_is_refused_with_the_figures() -> None:
    with pytest.raises(PlanError) as caught:
        choose_layout("auto", {}, 4, 900_000_000, LAPTOP)
    assert str(caught.value) == (
        "layout.strategy = auto: 900.0M parameters take 26.8 GiB of states even with fsdp on 4 "
        "processes, this machine has 8.0 GiB; try: launch.processes=2, or a smaller model"
    )
    with pytest.raises(PlanError, match="with single on 1 process, this machine has 8.0 GiB"):
        choose_layout("auto", {}, 1, 900_000_000, LAPTOP)


def test_below_a_billion_is_ddp_and_says_what_else() -> None:
    layout, why = choose_layout("auto", {}, 8, 900_000_000, SERVER)
    assert layout.dp_replicate == 8
    assert why == (
        "auto: 900.0M parameters, below 1B: ddp on 8 processes; also possible: single, zero1, "
        "zero2, fsdp"
    )


def test_what_fits_only_in_shards_is_fsdp() -> None:
    machine = MachineFacts(cores=4, memory_bytes=24 * 2**30, gpus=0)
    layout, why = choose_layout("auto", {}, 2, 900_000_000, machine)
    assert (layout.dp_shard, layout.zero) == (2, 3)
    assert "too many for 2 replicas: fsdp on 2 processes" in why


def test_the_guide_between_one_and_ten_billion_is_fsdp() -> None:
    layout, why = choose_layout("auto", {}, 8, int(8e9), SERVER)
    assert layout.strategy == "fsdp"
    assert "1–10B: fsdp on 8 processes" in why


def test_above_ten_billion_the_degrees_are_the_users() -> None:
    with pytest.raises(PlanError) as caught:
        choose_layout("auto", {}, 8, int(70e9), SERVER)
    assert "the guide says 3d (tp × pp × dp), whose degrees auto does not choose" in str(
        caught.value
    )
    assert "try: layout.strategy=3d" in str(caught.value)
    assert choose_layout("3d", {}, 8, int(70e9), SERVER)[0].processes == 8


def test_a_layout_that_is_given_is_not_judged_by_the_guide() -> None:
    assert choose_layout("ddp", {}, 2, int(8e9), LAPTOP)[0].dp_replicate == 2


def test_unknown_axes_and_sizes() -> None:
    near = "layout.dp_replicat = 2: no key of a layout; try: layout.dp_replicate=2"
    with pytest.raises(PlanError, match=near):
        choose_layout("auto", {"dp_replicat": 2}, 2, None, LAPTOP)
    with pytest.raises(PlanError, match="try: layout.dp_replicate=4"):
        choose_layout("auto", {"dp_replicate": 3}, 4, None, LAPTOP)


def test_stages_and_what_carries_them() -> None:
    def refused(strategy: str, degrees: dict[str, int], processes: int, **given: int) -> str:
        with pytest.raises(PlanError) as caught:
            choose_layout(strategy, degrees, processes, None, LAPTOP, **given)
        return str(caught.value)

    assert refused("auto", {"dp_replicate": 2, "dp_shard": 2}, 4, zero=2) == (
        "layout.zero = 2: carries dp_shard alone, got dp_replicate = 2 × dp_shard = 2; try: "
        "layout.zero=3 (hsdp), or layout.dp_shard=4"
    )
    assert "try: layout.dp_shard=2" in refused("auto", {"dp_replicate": 2}, 2, zero=1)
    assert "a stage is 0, 1, 2 or 3" in refused("auto", {"dp_shard": 2}, 2, zero=4)
    assert "try: layout.zero=3, or layout.dp_replicate=2" in refused(
        "auto", {"dp_shard": 2}, 2, zero=0
    )
    assert "try: layout.strategy=fsdp" in refused("zero2", {}, 2, zero=3)
    assert "try: launch.processes=4, or layout.strategy=fsdp" in refused("hsdp", {}, 2)
    assert "try: launch.processes=4" in refused("ddp", {}, 2, threads=4)
    assert "is one process, got launch.processes = 2" in refused("dp", {}, 2)
    assert "the degrees given with it are fsdp (dp_shard = 2)" in refused("ddp", {"dp_shard": 2}, 2)


def test_names_expand_to_degrees() -> None:
    layout, why = choose_layout("hsdp", {"dp_replicate": 3, "dp_shard": 2}, 6, None, LAPTOP)
    assert (layout.dp_replicate, layout.dp_shard, layout.zero) == (3, 2, 3)
    assert choose_layout("zero3", {}, 2, None, LAPTOP)[0].strategy == "fsdp"
    assert choose_layout("dp", {}, 1, None, LAPTOP, threads=4)[0].threads == 4
    layout, why = choose_layout("zero2", {}, 1, None, LAPTOP)
    assert (layout.strategy, why) == ("single", "strategy given: zero2 on one process = single")
