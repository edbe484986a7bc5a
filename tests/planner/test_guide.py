"""`auto` by rule: what fits, then the guide; every refusal names what can be done."""

from __future__ import annotations

import pytest

from shoal.base.errors import PlanError
from shoal.base.facts import MachineFacts
from shoal.planner.guide import choose_layout

LAPTOP = MachineFacts(cores=4, memory_bytes=8 * 2**30, gpus=0)
SERVER = MachineFacts(cores=96, memory_bytes=2**40, gpus=8)


def test_what_does_not_fit_is_refused_with_the_figures() -> None:
    with pytest.raises(PlanError, match="26.8 GiB, this machine has 8.0 GiB; nearest: launch.proc"):
        choose_layout("auto", {}, 2, 900_000_000, LAPTOP)


def test_below_a_billion_is_ddp_and_says_what_else() -> None:
    layout, why = choose_layout("auto", {}, 8, 900_000_000, SERVER)
    assert layout.dp_replicate == 8
    assert why == "auto: 900.0M parameters, below 1B: ddp on 8 processes; also possible: single"


@pytest.mark.parametrize(("parameters", "rule"), [(8e9, "fsdp"), (70e9, "3d (tp × pp × dp)")])
def test_larger_ones_name_the_rule_that_is_not_built(parameters: float, rule: str) -> None:
    with pytest.raises(PlanError) as caught:
        choose_layout("auto", {}, 8, int(parameters), SERVER)
    assert f"the guide says {rule}, which this version does not build" in str(caught.value)


def test_a_layout_that_is_given_is_not_judged_by_the_guide() -> None:
    assert choose_layout("ddp", {}, 2, int(8e9), LAPTOP)[0].dp_replicate == 2


def test_unknown_axes_and_sizes() -> None:
    with pytest.raises(PlanError, match="layout = dp_replicat: not one of .*; nearest: dp_replica"):
        choose_layout("auto", {"dp_replicat": 2}, 2, None, LAPTOP)
    with pytest.raises(PlanError, match="nearest legal: layout.dp_replicate=4"):
        choose_layout("auto", {"dp_replicate": 3}, 4, None, LAPTOP)
