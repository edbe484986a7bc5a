"""Experts on other ranks compute what one process computes; what cannot be dealt is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import expert_case
from shoal.base.text.argument_names import use_argument_names
from shoal.fabric import start_world
from shoal.view.proof_lines import proof_text

EXACT = 1e-12

ROWS = [
    (2, "moe with capacity", "ep2"),
    (2, "own one-sided", "ep2"),  # one of the ranks never gets a token
    (4, "own", "hsdp ep4"),
    (4, "moe", "pp2 fsdp2 ep2"),
    (2, "own list", "fsdp2 ep2"),
    (2, "own list, busy ones", "ep2"),  # ranks call different experts, and some none at all
]
LONG = [
    (4, "moe", "ddp4 ep2"),
    (4, "moe", "fsdp4 ep2"),
    (4, "moe", "ep4"),
    (4, "own list, busy ones", "zero1 ep2"),
    (4, "moe", "zero1 ep2"),
    (4, "moe", "zero2 ep2"),
    (4, "moe", "hsdp ep2"),
    (4, "moe of one", "fsdp4 ep4"),
    (4, "moe without dropout", "tp2 ep2"),
    (4, "hf mixtral", "fsdp4 ep2"),
    (4, "own list", "zero2 ep2"),
    (4, "own list", "ep4"),
]
"""Rows that others hold most of."""
ROWS += [pytest.param(*row, marks=pytest.mark.proof) for row in LONG]


@pytest.mark.parametrize(("size", "model", "layout"), ROWS)
def test_equals_one_process(worlds, size: int, model: str, layout: str) -> None:
    if model.startswith("hf "):
        pytest.importorskip("transformers")
    reports = worlds(size).call("expert_case:prove", steps=3, model=model, layout=layout)
    assert all(r["verdict"] == "equal" for r in reports), proof_text(reports[0])
    for told in reports[0]["trajectories"]:
        assert max(told["largest"].values()) <= EXACT
    assert any("experts, " in line for line in reports[0]["notices"])


IDLE = [
    ((2, {"dp_replicate": 2, "ep": 2}), "step", 3),
    ((4, {"strategy": "ep"}), "passes", 3),
    ((2, {"dp_shard": 2, "ep": 2}), "step", 2),
]
IDLE_LONG = [
    (where, how, last)
    for where in (
        *(one for one, *_ in IDLE),
        (4, {"dp_shard": 4, "zero": 1, "ep": 2}),
        (4, {"dp_shard": 4, "zero": 2, "ep": 2}),
    )
    for how in ("step", "passes")
    for last in (3, 2)  # an expert that no earlier step called, and one that all of them did
    if (where, how, last) not in IDLE
]


@pytest.mark.parametrize(
    ("where", "how", "last"),
    [*IDLE, *(pytest.param(*row, marks=pytest.mark.proof("faults")) for row in IDLE_LONG)],
    ids=str,
)
def test_a_rank_without_samples_trains_its_experts(worlds, where, how: str, last: int) -> None:
    """Its experts get the others' tokens; its own pass counts for nothing, and calls no expert."""
    size, layout = where
    wanted = expert_case.uneven(start_world({}), {"strategy": "single"}, how, last)
    for found in worlds(size).call("expert_case:uneven", layout=layout, how=how, last=last):
        for name, values in wanted.items():
            off = torch.tensor(found[name], dtype=torch.float64) - torch.tensor(
                values, dtype=torch.float64
            )
            assert float(off.abs().max()) <= EXACT, name


@pytest.mark.parametrize(
    ("size", "bug", "layout", "cause", "words"),
    [
        pytest.param(
            2,
            "over all ranks",
            "ep2",
            "factor of ep",
            "the sum over the experts of 2 ranks",
            marks=pytest.mark.proof,
        ),
        pytest.param(
            4,
            "averaged",
            "ddp4 ep2",
            "factor of ep",
            "is 0.5 × that of one process",
            marks=pytest.mark.proof,
        ),
        (4, "never summed", "ddp4 ep2", "experts not summed", "data-parallel ranks 0, 1 only"),
    ],
)
def test_a_planted_bug_is_named(planted, size, bug, layout, cause, words) -> None:
    report = planted(size, "expert_case:planted", bug=bug, layout=layout)[0]
    assert report["verdict"] == "different"
    assert report["cause"]["name"] == cause, report["cause"]["text"]
    assert words in report["cause"]["text"]
    assert "blocks.0.mixture.experts.gate" in report["cause"]["text"]


def test_a_run_goes_on_without_and_with_experts_dealt_out(worlds, tmp_path: Path) -> None:
    legs = [
        (2, {"strategy": "ep"}),
        (1, {"strategy": "single"}),
        (4, {"dp_shard": 4, "ep": 2}),
        (2, {"dp_shard": 2, "zero": 1, "ep": 2}),
    ]
    unbroken = expert_case.leg(start_world({}), {"strategy": "single"}, str(tmp_path / "a"), 8)
    told, evaluated = [], {}
    for size, layout in legs:
        arguments = {"layout": layout, "folder": str(tmp_path / "b"), "steps": 2}
        if size == 1:
            answers = [expert_case.leg(start_world({}), **arguments)]
        else:
            answers = worlds(size).call("expert_case:leg", **arguments)
        assert all(a["losses"] == answers[0]["losses"] for a in answers)
        assert answers[0]["began"] == len(told)
        told += answers[0]["losses"]
        evaluated = answers[0]["evaluated"]
    for ours, theirs in zip(told, unbroken["losses"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-10)
    assert evaluated == pytest.approx(unbroken["evaluated"], rel=1e-10)


@pytest.mark.parametrize(
    ("size", "layout"),
    [
        pytest.param(2, {"strategy": "ep"}, marks=pytest.mark.proof),
        (4, {"dp_replicate": 4, "ep": 2}),
    ],
)
def test_bytes_that_travel_and_stay(worlds, size, layout) -> None:
    """Rows go to other ranks and back, forward and backward; dropped places do not travel."""
    told = worlds(size).call("expert_case:counted", layout=layout)
    rows = sum(one["sent"] - one["counts_bytes"] for one in told)
    assert rows == sum(one["rows_bytes"] for one in told) > 0
    for one in told:
        assert 2 * one["stored_bytes"] == one["whole_bytes"]


def test_how_tokens_spread_is_told(worlds) -> None:
    """Three steps, told every two of them; of each micro-batch a part has no place."""
    told = worlds(2).call("expert_case:lines", every=2)
    lines = [line for line in told[0] if line.startswith("experts over")]
    assert len(lines) == 1
    assert lines[0].startswith("experts over 2 steps: the fullest of blocks.")
    assert "× the mean of its layer" in lines[0]
    assert "0.0 % of places had none" not in lines[0]


REFUSED = [
    ("dense", {"strategy": "ep"}, {}, "layout.ep = 2: the model has no part whose parameters are "
     "all stacked by expert and that is called with tokens [n, d], chosen experts [n, k] and "
     "weights [n, k], and no list of equal modules that are called with rows [n, d]; try: "
     "layout.ep=1"),
    ("listed dropout", {"strategy": "ep"}, {}, "layout.ep = 2: layers.0.experts.0 is called like an "
     "expert, but it draws random numbers (dropout), which would depend on where its rows are"),
    ("listed mean", {"strategy": "ep"}, {}, "layout.ep = 2: layers.0.experts.0 is called like an "
     "expert, but its rows see each other: apart they are off by "),
    ("listed three", {"strategy": "ep"}, {}, "layout.ep = 2: layers.0 has 3 experts, which cannot "
     "be dealt to 2 ranks evenly; try: layout.ep=1"),
    ("dropout", {"strategy": "ep"}, {}, "layout.ep = 2: layers.0.experts is called like experts, "
     "but it draws random numbers (dropout), which would depend on where its tokens are; try: "
     "layout.ep=1"),
    ("mean", {"strategy": "ep"}, {}, "layout.ep = 2: layers.0.experts is called like experts, but "
     "with its experts apart it is off by "),
    ("three", {"strategy": "ep"}, {}, "layout.ep = 2: layers.0.experts has 3 experts, which cannot "
     "be dealt to 2 ranks evenly; try: layout.ep=1"),
    ("own", {"strategy": "ep"}, {"compress": "int8"}, "layout.compress = int8: sums over all "
     "data-parallel ranks, and layout.ep = 2 sums experts over some; try: "
     "layout.compress=none"),
    ("own", {"strategy": "ep"}, {"optimizer": "Adafactor"}, "layout.ep = 2: cuts stacks of experts "
     "by rows, and Adafactor: a step on some rows"),
    ("own", {"strategy": "ep"}, {"sample": None}, "try: shoal.parallelize(…, sample=batch)"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "layout", "settings", "line"), REFUSED)
def test_refusals(worlds, kind, layout, settings, line) -> None:
    told = worlds(2).call("expert_case:refusal", kind=kind, layout=layout, **settings)
    line = use_argument_names(line)
    assert all(line in one for one in told), told[0]


@pytest.mark.parametrize(
    ("layout", "line"),
    [
        ({"dp_shard": 4, "ep": 2}, "whole on a rank, and layout.dp_shard = 4 would share each; "
         "try: layout.ep=4, or layout.zero=2"),
        ({"dp_shard": 2, "ep": 2, "pp": 2}, "which goes with layout.pp = 2 where nothing is "
         "gathered block by block; try: layout.zero=2"),
    ],
)  # fmt: skip
def test_lists_of_experts_under_zero_3(worlds, layout, line) -> None:
    """Entries are whole on a rank; in a pipeline their block's weights were freed too early."""
    told = worlds(4).call("expert_case:refusal", kind="listed dropout", layout=layout)
    line = use_argument_names(line)
    assert all("layers.0 holds its experts in a list" in one and line in one for one in told), told
