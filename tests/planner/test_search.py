"""The search proposes only what is legal, ranks by time, and says why; the cheapest fix fits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shoal.base.errors import PlanError
from shoal.base.layout import Layout, planned_degrees
from shoal.planner.explain import ask_guide, dies_first, guide_layout, why_before
from shoal.planner.machines import parse_machines
from shoal.planner.published import published
from shoal.planner.record import plan_record
from shoal.planner.search import Asked, Candidate, fixes, search
from shoal.planner.transformer import model_facts

NODE = parse_machines("8xH100-80GB")
SMALL = model_facts(published("gpt-3-1.3b"), 2048, 2)
LLAMA = model_facts(published("llama-3-8b"), 8192, 2)


@pytest.fixture(scope="module")
def found() -> list[Candidate]:
    return search(LLAMA, NODE, Asked(batch=64))


def test_only_legal_layouts_are_proposed(found: list[Candidate]) -> None:
    for candidate in found:
        layout, case = candidate.case.layout, candidate.case
        assert layout.processes == 8
        assert LLAMA.heads % layout.tp == 0
        assert LLAMA.blocks >= layout.pp * case.chunks
        assert case.batch % (layout.data_degree * case.micro_batch) == 0
        assert not (layout.pp > 1 and layout.zero == 3)
        assert case.schedule != "zero-bubble" or case.accumulate >= layout.pp


def test_what_fits_comes_first_by_time(found: list[Candidate]) -> None:
    words = [candidate.verdict.word for candidate in found]
    assert words == sorted(words, key=["fits", "tight", "no"].index)
    fitting = [candidate.time.step_s for candidate in found if candidate.verdict.word == "fits"]
    assert fitting[0] <= 1.02 * min(fitting)
    assert fitting[1:] == sorted(fitting[1:])


def test_layouts_of_this_version_alone() -> None:
    found = search(LLAMA, NODE, Asked(batch=64, built=True))
    assert {c.case.layout.tp * c.case.layout.pp * c.case.layout.cp for c in found} == {1}
    assert {"ddp", "zero1", "zero2", "fsdp"} <= {c.case.layout.strategy for c in found}


def test_a_fixed_layout_is_the_only_one() -> None:
    layout = planned_degrees({"tp": 4}, 8)
    found = search(LLAMA, NODE, Asked(batch=64, layout=layout, micro_batch=2))
    assert {c.case.layout for c in found} == {Layout(dp_replicate=2, tp=4)}
    assert {c.case.micro_batch for c in found} == {2}


def test_a_batch_that_nothing_divides_is_told() -> None:
    with pytest.raises(PlanError, match=r"nothing divides batch 13 .* train\.batch=8"):
        search(LLAMA, NODE, Asked(batch=13, built=True))


def test_degrees_that_do_not_divide_are_told() -> None:
    with pytest.raises(PlanError, match=r"tp 3 = 3 devices, but there are 8"):
        planned_degrees({"tp": 3}, 8)


def test_fixes_fit_and_the_cheapest_is_first() -> None:
    asked = Asked(batch=64, layout=Layout(dp_replicate=8), micro_batch=4, recompute="none")
    best = search(LLAMA, NODE, asked)[0]
    assert not best.fits
    made = fixes(best.case)
    assert made
    assert all(candidate.fits for _, candidate in made)
    times = [candidate.time.step_s for _, candidate in made]
    assert times == sorted(times)
    assert any("fsdp" in text for text, _ in made)


def test_a_reason_names_what_differs(found: list[Candidate]) -> None:
    assert "faster than" in why_before(found[0], found[-40]) or "lacks" in why_before(
        found[0], found[-1]
    )
    slow = replace(found[0], time=replace(found[0].time, step_s=2 * found[0].time.step_s))
    assert why_before(found[0], slow).startswith("100% faster than")
    assert why_before(found[0], found[0]).startswith("within 2%")
    assert "% of the peak" in dies_first(found[0])


def test_the_guide_is_predicted_too(found: list[Candidate]) -> None:
    text, other = ask_guide(found[0])
    assert "1–10B: fsdp" in text
    assert other is not None
    assert other.case.layout.strategy == "fsdp"
    assert guide_layout(SMALL.trainable, NODE, SMALL.heads, SMALL.blocks).strategy == "fsdp"
    assert guide_layout(70 * 10**9, parse_machines("8x8xH100-80GB"), 64, 80).strategy == "3d"


def test_the_document_holds_every_layout_once(found: list[Candidate]) -> None:
    record = plan_record(found, top=4, notes=["said"], given=False)
    assert [row["rank"] for row in record["layouts"]] == [1, 2, 3, 4]
    shapes = [(tuple(row["degrees"].items()), row["zero"]) for row in record["layouts"]]
    assert len(set(shapes)) == 4
    first = record["layouts"][0]
    assert sum(first["time"].values()) == pytest.approx(first["step_s"])
    assert sum(first["memory"].values()) == pytest.approx(first["peak_bytes"])
    assert record["searched"] == len(found)
    assert record["fixes"] == []
