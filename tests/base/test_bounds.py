"""Values outside of a list or a bound are refused by one line that names them."""

from __future__ import annotations

import math

import pytest

from shoal.base.errors import (
    ConfigError,
    PlanError,
    check_choice,
    check_not_negative,
    check_positive,
)


def test_a_word_outside_a_list_is_refused() -> None:
    """By the class that the caller names, with the nearest word."""
    check_choice("layout.context", "ring", ("ring", "ulysses"))
    with pytest.raises(ConfigError, match=r"^layout.context = rng: not one of .*; try: ring$"):
        check_choice("layout.context", "rng", ("ring", "ulysses"))
    with pytest.raises(PlanError, match="not one of ring"):
        check_choice("layout.context", "rng", ("ring", "ulysses"), kind=PlanError)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan])
def test_a_number_that_is_not_more_than_0_is_refused(value: float) -> None:
    """NaN too: no comparison with it holds."""
    check_positive(step_s=0.5)
    with pytest.raises(PlanError, match=r"^seconds = .*: must be more than 0; try: seconds=1e-6$"):
        check_positive("1e-6", step_s=0.5, seconds=value)


@pytest.mark.parametrize("value", [-1.0, math.nan])
def test_a_number_below_0_is_refused(value: float) -> None:
    """NaN too; 0 is allowed."""
    check_not_negative(stall_s=0.0)
    with pytest.raises(PlanError, match=r"^write_s = .*: must be 0 or more; try: write_s=0$"):
        check_not_negative(stall_s=0.0, write_s=value)
