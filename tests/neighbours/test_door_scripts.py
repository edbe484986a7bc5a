"""Rows of whole scripts by their libraries (tests/proof/door_scripts.py), and how they are compared."""

from __future__ import annotations

import copy
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
ROWS: dict[str, dict[str, Any]] = json.loads((ROOT / "proof/results/doors.json").read_text())


@pytest.fixture(scope="module")
def program() -> Any:
    spec = importlib.util.spec_from_file_location("doors", ROOT / "tests/proof/door_scripts.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_script_has_a_row_of_its_library(program: Any) -> None:
    assert list(ROWS) == program.scripts()
    doors = [name.partition("/")[0] for name in ROWS]
    assert {door: doors.count(door) for door in doors} == dict.fromkeys(program.LIBRARIES, 10)
    for name, row in ROWS.items():
        assert "fails" not in row, name
        assert [bool(one["lines"] and one["files"]) for one in row["starts"]] == [True, True], name
        assert row["starts"][0]["lines"] != row["starts"][1]["lines"], "it resumed"


@pytest.mark.parametrize("name", ["deepspeed/zero2_lm", "lightning/early_stop"])
def test_a_number_or_file_that_differs_is_found(program: Any, name: str) -> None:
    row = ROWS[name]
    assert program.compare(name, row, row) == []
    other = copy.deepcopy(row)
    first = other["starts"][1]
    first["lines"][-1] = first["lines"][-1].replace("1", "2").replace("3", "4")
    assert program.compare(name, other, row)
    for file, content in row["starts"][0]["files"].items():
        other = copy.deepcopy(row)
        del other["starts"][0]["files"][file]
        assert program.compare(name, other, row) == [f"start 1: file {file}: only theirs"]
        if isinstance(content, dict):
            tensor = next(key for key, value in content.items() if isinstance(value, list))
            other = copy.deepcopy(row)
            other["starts"][0]["files"][file][tensor][1] += 0.01
            assert program.compare(name, other, row)
