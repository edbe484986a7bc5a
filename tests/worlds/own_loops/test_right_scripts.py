"""Guards stay silent on right scripts, whose numbers equal plain PyTorch's."""

from __future__ import annotations

from typing import Any

import pytest

from right_scripts import TABLE

SHORT = {
    **{name: (control.layouts[-1],) for name, control in TABLE.items() if control.ranks == 2},
    "a_slow_first_batch": ("ddp",),
}
"""Layouts of a script in `make test`, where not all of them: one, fsdp where it is right there."""


def rows(name: str) -> list[Any]:
    """Return the rows of a script; those that are not in `SHORT` are for `make proof`."""
    control = TABLE[name]
    return [
        pytest.param(
            name, layout, id=f"{name}-{layout}",
            marks=[] if layout in SHORT.get(name, control.layouts) else pytest.mark.proof("faults"),
        )
        for layout in control.layouts
    ]  # fmt: skip


def test_the_table_has_24() -> None:
    assert len(TABLE) >= 24


@pytest.mark.parametrize(("name", "layout"), [row for name in TABLE for row in rows(name)])
def test_a_right_script_is_left_alone(worlds, name: str, layout: Any) -> None:
    for answer in worlds(TABLE[name].ranks).call("right_scripts:attempt", name=name, layout=layout):
        assert answer["error"] == ""
        assert answer["lines"] == []
        assert answer["value"] <= 1e-10
