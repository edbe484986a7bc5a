"""Rows of a plan say what its run holds, saves and sums: live storages, files and counters agree."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from placed_rows import Told, told_of
from shoal.base.plans.plan import Plan

DEADLINE_S = 300
Recomputed = Callable[[Any], list[tuple[Any, Told]]]
FOUR: list[Any] = [
    "hsdp", {"tp": 2, "pp": 2}, {"pp": 2, "dp_shard": 2, "zero": 1}, {"tp": 2, "dp_shard": 2},
    {"cp": 2, "dp_shard": 2},
]  # fmt: skip
MORE_OF_TWO: list[Any] = ["zero1", "zero2", "fsdp", {"tp": 2}, {"pp": 2}]
MORE_OF_FOUR: list[Any] = [
    "zero2", {"tp": 4}, {"pp": 4}, {"tp": 2, "dp_shard": 2, "zero": 1}, {"pp": 2, "dp_shard": 2},
    {"pp": 2, "dp_shard": 2, "zero": 2},
]  # fmt: skip
SHORT: list[tuple[int, dict[str, Any]]] = [
    *((2, {"model": "our gpt", "layout": layout}) for layout in ("ddp", {"cp": 2})),
    *((4, {"model": "our gpt", "layout": layout}) for layout in (FOUR[0], FOUR[2])),
    (4, {"model": "our moe", "layout": {"dp_shard": 4, "ep": 2}}),
    (2, {"model": "our llama", "layout": "zero1", "precision": "bf16"}),
    (4, {"model": "our gpt", "layout": {"pp": 4, "schedule": "dualpipe"}, "micro_batches": 8}),
    (4, {"model": "rezero", "layout": {"tp": 2, "dp_shard": 2}}),
    (4, {"model": "our gpt", "layout": "fsdp", "reshard": "node", "per_node": 2}),
    (2, {"model": "our llama", "layout": "zero2", "frozen": "attention", "defer_sync": True}),
]  # fmt: skip
"""Each axis, some pairs of them, each kind of model and each policy, once."""
LONG: list[tuple[int, dict[str, Any]]] = [
    (4, {"model": "our llama", "layout": "zero1", "precision": "bf16"}),
    (4, {"model": "our llama", "layout": "zero2", "frozen": "attention", "defer_sync": True}),
    *((2, {"model": "our gpt", "layout": layout}) for layout in MORE_OF_TWO),
    *((4, {"model": "our gpt", "layout": layout}) for layout in [FOUR[1], *FOUR[3:], *MORE_OF_FOUR]),
    *((4, {"model": "our llama", "layout": layout}) for layout in
      ({"tp": 4}, {"pp": 4}, FOUR[1], FOUR[3], MORE_OF_FOUR[3])),
    *((4, {"model": "our moe", "layout": layout}) for layout in
      ({"dp_replicate": 2, "ep": 2, "pp": 2}, {"dp_replicate": 4, "ep": 2},
       {"dp_shard": 4, "ep": 2, "zero": 2})),
    *((4, {"model": "our llama", "layout": layout, "precision": "bf16"}) for layout in
      ("ddp", "zero2", "fsdp")),
    *((4, {"model": model, "layout": "fsdp"}) for model in
      ("attributes", "recurrent", "rezero", "stages", "nested")),
    (4, {"model": "recurrent", "layout": "fsdp", "blocks": "block"}),
    (4, {"model": "our resnet", "layout": "fsdp"}),
    (4, {"model": "our gpt", "layout": "fsdp", "blocks": ["blocks.?.mlp", "blocks.*.attention"]}),
    (4, {"model": "recurrent", "layout": "fsdp", "reshard": "no"}),
    (4, {"model": "our llama", "layout": "fsdp", "frozen": "attention"}),
    *((4, {"model": model, "layout": layout}) for model in ("recurrent", "rezero") for layout in
      ("hsdp", {"pp": 2, "dp_shard": 2})),
    (4, {"model": "our llama", "layout": "fsdp", "reshard": "no", "frozen": "attention"}),
    *((4, {"model": "recurrent", "layout": layout, "reshard": "no"}) for layout in
      ("hsdp", {"tp": 2, "dp_shard": 2})),
    *((4, {"model": "our gpt", "layout": "fsdp", "reshard": "node", "per_node": local})
      for local in (1, 4)),
    (4, {"model": "our moe", "layout": {"dp_shard": 4, "ep": 2}, "reshard": "no"}),
]  # fmt: skip


def label(case: Any) -> str:
    ranks, words = case
    return f"{ranks}-" + "-".join(str(value) for value in words.values())


@pytest.fixture(scope="module")
def measured(
    worlds: Any, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[str, list[Any]]:
    """Case → what every rank told; long ones where tests want them."""
    cases = SHORT if request.config.option.markexpr == "not proof" else SHORT + LONG
    root = tmp_path_factory.mktemp("placed")
    found: dict[str, list[Any]] = {}
    for ranks in (2, 4):
        mine = [case for case in cases if case[0] == ranks]
        wanted = [{**case[1], "folder": str(root / f"{ranks}-{n}")} for n, case in enumerate(mine)]
        told = worlds(ranks).call("placed_case:measure_all", wanted=wanted, deadline_s=DEADLINE_S)
        for n, case in enumerate(mine):
            found[label(case)] = [answer[n] for answer in told]
    return found


@pytest.fixture(scope="module")
def recomputed(measured: dict[str, list[Any]]) -> Recomputed:
    """What each rank measured, beside what the rows of plan.json, rank 0's, say of it. Once per case."""

    @functools.cache
    def rows_of(name: str) -> list[tuple[Any, Told]]:
        answers = measured[name]
        plan = Plan.from_json(answers[0]["plan"])
        return [(answer, told_of(plan, rank)) for rank, answer in enumerate(answers)]

    return lambda case: rows_of(label(case))


each = pytest.mark.parametrize(
    "case", [*SHORT, *(pytest.param(case, marks=pytest.mark.proof) for case in LONG)], ids=label
)


@each
def test_one_row_per_parameter(measured: dict[str, list[Any]], case: Any) -> None:
    for answer in measured[label(case)]:
        rows = Plan.from_json(answer["plan"]).placements
        assert [row.name for row in rows if not row.is_buffer] == answer["names"]


@each
def test_states_are_what_the_rows_say(recomputed: Recomputed, case: Any) -> None:
    """To the byte, of weights, gradients and SGD's momentum; and the planner says it too."""
    for answer, told in recomputed(case):
        expected = [told.weights, told.gradients, told.masters + told.stepped]
        assert answer["states"] == expected
        assert answer["planned states"] == expected


@each
def test_sums_and_buckets_are_what_the_rows_say(recomputed: Recomputed, case: Any) -> None:
    for answer, told in recomputed(case):
        assert [tuple(names) for names in answer["buckets"]] == told.buckets
        for source in ("sums", "planned sums"):
            heard = Counter({tuple(call): times for *call, times in answer[source]})
            assert heard == told.sums, source


@each
def test_gathers_of_weights_are_what_the_planner_says(
    measured: dict[str, list[Any]], case: Any
) -> None:
    for answer in measured[label(case)]:
        heard, planned = (
            Counter({tuple(call): times for *call, times in answer[source]})
            for source in ("gathers", "planned gathers")
        )
        assert heard == planned


@each
def test_slices_are_what_the_rows_say(
    measured: dict[str, list[Any]], recomputed: Recomputed, case: Any
) -> None:
    """Of every rank; and a file's slice is one that some rank's row names, all of them once."""
    answers = measured[label(case)]
    kept: dict[str, list[set[int]]] = {}
    shapes = {row.name: row.shape for row in Plan.from_json(answers[0]["plan"]).placements}
    for answer, told in recomputed(case):
        for name, slices in answer["slices"].items():
            assert places(shapes[name], slices) == told.slices[name], name
            kept.setdefault(name, []).append(told.slices[name])
    for name, (shape, slices) in answers[0]["file"].items():
        assert tuple(shape) == shapes[name]
        for box in slices:
            assert any(places(shape, [box]) <= part for part in kept[name]), name
        sizes = [len(places(shape, [box])) for box in slices]
        assert sum(sizes) == len(places(shape, slices)) == math.prod(shape), name


def places(shape: Any, boxes: Any) -> set[int]:
    """Flat places of a tensor's elements that lie in some boxes."""
    flat = torch.arange(math.prod(shape)).reshape(shape)
    found: set[int] = set()
    for box in boxes:
        assert all(a >= b or 0 <= a < b <= size for (a, b), size in zip(box, shape, strict=True))
        found.update(flat[tuple(slice(*ends) for ends in box)].flatten().tolist())
    return found
