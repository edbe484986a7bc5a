"""The gate on published runs: predicted peaks of runs that the constants were not fitted to."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "planner"


def load(name: str) -> ModuleType:
    """A program of benchmarks/planner, under a name that collides with nothing."""
    spec = importlib.util.spec_from_file_location(f"planner_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def program() -> ModuleType:
    sys.path.insert(0, str(FOLDER))
    try:
        return load("memory")
    finally:
        sys.path.remove(str(FOLDER))


@pytest.fixture(scope="module")
def results(program: ModuleType) -> list[Any]:
    return list(program.evaluate(program.memory_rows()))


def test_no_row_is_lost(program: ModuleType) -> None:
    rows = program.memory_rows()
    assert len(rows) == 59
    assert all(row.why for row in rows if not row.gated)
    gated = [row for row in rows if row.gated]
    assert len(gated) == 17
    assert len({row.group for row in gated}) == 9
    assert all(row.filled for row in gated)


def test_errors_are_within_the_gate(program: ModuleType, results: list[Any]) -> None:
    gated = [result for result in results if result.row.gated]
    groups = program.group_errors(gated)
    assert median(abs(result.error) for result in gated) <= 0.05
    assert median(groups.values()) <= 0.05
    assert sum(error > 0.12 for error in groups.values()) <= 1


def test_the_gate_holds_without_the_runs_whose_gpu_count_was_inferred(
    program: ModuleType, results: list[Any]
) -> None:
    sure = [
        result
        for result in results
        if result.row.gated and not any(program.STEADY in text for text in result.row.filled)
    ]
    groups = program.group_errors(sure)
    assert len(groups) == 5
    assert max(groups.values()) <= 0.05


def test_verdicts_never_promise_too_much(program: ModuleType, results: list[Any]) -> None:
    found = program.sweep([result for result in results if result.row.gated])
    assert found.false_fits == 0
    assert found.false_no <= 0.10
    assert found.reserve <= 0.10
    every = program.sweep(results)  # those of which something is assumed or not counted, too
    assert (len(results), every.false_fits, every.false_no) == (44, 0, 0.0)


def test_shipped_constants_are_the_fitted_ones(program: ModuleType) -> None:
    gated = [row for row in program.memory_rows() if row.gated]
    shipped = program.framework_memory("shoal")
    assert shipped.allocator == pytest.approx(program.fit(gated, "allocator"), abs=0.005)
    assert shipped.imbalance == pytest.approx(program.fit(gated, "imbalance"), abs=0.01)


def test_small_runs_that_nothing_was_fitted_to(results: list[Any]) -> None:
    """Megatron's tests below 7B: their own estimator is 20 to 59 % too low."""
    small = [result for result in results if result.row.why.startswith("below 7B")]
    assert len(small) == 20
    assert median(abs(result.error) for result in small) <= 0.05
    assert max(abs(result.error) for result in small) <= 0.08
