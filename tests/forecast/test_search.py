"""The search proposes only what is legal, ranks by time, and says why; the cheapest fix fits."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planned_case import case_of, run_of

from shoal.base.errors import PlanError
from shoal.base.layouts.degrees import check_combination, layout_for_planning
from shoal.base.layouts.layout import Layout
from shoal.base.layouts.parameter_servers import make_server_layout
from shoal.base.layouts.policies import POLICIES
from shoal.forecast.machines.cluster_syntax import parse_machines
from shoal.forecast.models.published_models import published_shape
from shoal.forecast.models.transformer_costs import transformer_facts
from shoal.forecast.search.layout_reasons import (
    PART_WORDS,
    compare_with_guide,
    explain_order,
    explain_peak,
    guide_layout,
    layout_text,
)
from shoal.forecast.search.layout_search import LayoutCandidate, search_layouts
from shoal.forecast.search.memory_suggestions import suggest_settings
from shoal.forecast.search.plan_document import plan_record
from shoal.forecast.search.search_space import SearchSpace

NODE = parse_machines("8xH100-80GB")
SMALL = transformer_facts(published_shape("gpt-3-1.3b"), 2048, 2)
LLAMA = transformer_facts(published_shape("llama-3-8b"), 8192, 2)


@pytest.fixture(scope="module")
def found() -> list[LayoutCandidate]:
    return search_layouts(run_of(LLAMA, NODE), SearchSpace())


def test_only_legal_layouts_are_proposed(found: list[LayoutCandidate]) -> None:
    for candidate in found:
        layout, case = candidate.case.layout, candidate.case
        assert layout.processes == 8
        assert LLAMA.heads % layout.tp == 0
        assert LLAMA.blocks >= layout.pp * case.chunks
        assert case.batch % (layout.data_degree * case.micro_batch) == 0
        assert not (layout.pp > 1 and layout.zero == 3)
        assert case.schedule != "zero-bubble" or case.accumulate >= layout.pp


def test_what_fits_comes_first_by_time(found: list[LayoutCandidate]) -> None:
    words = [candidate.verdict.word for candidate in found]
    assert words == sorted(words, key=["fits", "tight", "no"].index)
    fitting = [candidate.time.step_s for candidate in found if candidate.verdict.word == "fits"]
    assert fitting[0] <= 1.02 * min(fitting)
    assert fitting[1:] == sorted(fitting[1:])


def test_layouts_of_this_version_alone() -> None:
    found = search_layouts(run_of(LLAMA, NODE), SearchSpace(built=True))
    assert {c.case.layout.tp * c.case.layout.pp * c.case.layout.cp for c in found} == {1}
    assert {"ddp", "zero1", "zero2", "fsdp"} <= {c.case.layout.strategy for c in found}


def test_other_axes_where_no_data_parallel_layout_fits() -> None:
    """Sequences of which no device can hold one: `auto` shares tokens, layers, or both."""
    long = transformer_facts(published_shape("llama-3-8b"), 131072, 2)
    found = search_layouts(run_of(long, NODE, batch=8), SearchSpace(built=True, micro_batch=1))
    assert found[0].fits
    fitting = [c.case.layout for c in found if c.fits]
    assert all(layout.tp * layout.pp * layout.cp > 1 for layout in fitting)
    assert any(layout.cp > 1 < layout.tp and layout.zero == 3 for layout in fitting)


def test_tokens_that_do_not_divide_are_not_shared() -> None:
    odd = transformer_facts(published_shape("llama-3-8b"), 32769, 2)
    found = search_layouts(run_of(odd, NODE), SearchSpace())
    assert {c.case.layout.cp for c in found} == {1}


def test_degrees_of_two_kinds_are_proposed_as_given() -> None:
    space = SearchSpace(degrees=(("dp_replicate", 4), ("dp_shard", 2)))
    found = search_layouts(run_of(LLAMA, NODE), space)
    assert {c.case.layout for c in found} == {Layout(dp_replicate=4, dp_shard=2, zero=3)}


def test_accumulation_fixes_the_micro_batch_of_each_layout() -> None:
    found = search_layouts(run_of(LLAMA, NODE), SearchSpace(accumulate=4))
    assert {c.case.accumulate for c in found} == {4}
    assert len({c.case.micro_batch for c in found}) > 2


def test_a_fixed_layout_is_the_only_one() -> None:
    layout = layout_for_planning({"tp": 4}, 8)
    found = search_layouts(run_of(LLAMA, NODE), SearchSpace(layout=layout, micro_batch=2))
    assert {c.case.layout for c in found} == {Layout(dp_replicate=2, tp=4)}
    assert {c.case.micro_batch for c in found} == {2}


def test_a_batch_that_nothing_divides_is_told() -> None:
    with pytest.raises(
        PlanError, match=r"train\.batch = 13: nothing divides it .* train\.batch=16"
    ):
        search_layouts(run_of(LLAMA, NODE, batch=13), SearchSpace(built=True))
    served = make_server_layout(8)
    with pytest.raises(PlanError, match=r"divides it over 7 workers; try: train\.batch=14"):
        search_layouts(run_of(LLAMA, NODE, batch=13), SearchSpace(layout=served))


def test_a_schedule_that_cannot_run_is_told() -> None:
    """Where it was asked for; the search itself recomputes nothing in halves of a backward."""
    space = SearchSpace(degrees=(("pp", 8),), schedule="dualpipe", micro_batch=2)
    found = search_layouts(run_of(LLAMA, NODE), space)
    assert {(c.case.schedule, c.case.chunks, c.case.plan.recompute) for c in found} == {
        ("dualpipe", 1, "none")
    }
    for change, said in (
        ({"given": frozenset(POLICIES)}, r"schedule = dualpipe runs a backward in two halves"),
        ({"micro_batch": 8}, r"at least 16 \(twice layout\.pp\), got 8 .* train\.micro_batch=4"),
    ):
        with pytest.raises(PlanError, match=said):
            search_layouts(run_of(LLAMA, NODE, recompute="full"), replace(space, **change))
    halved = [
        c
        for c in search_layouts(run_of(LLAMA, NODE), SearchSpace())
        if c.case.schedule == "zero-bubble"
    ]
    assert {c.case.plan.recompute for c in halved} <= {"none"}


def test_two_copies_are_twice_the_states_and_one_more_sum() -> None:
    one, both = (
        search_layouts(
            run_of(LLAMA, NODE), SearchSpace(layout=Layout(pp=8), schedule=name, micro_batch=1)
        )[0]
        for name in ("zbv", "dualpipe")
    )
    for kind in ("weights", "gradients", "optimizer"):
        assert both.memory.parts[kind] > 1.8 * one.memory.parts[kind]
    assert "gradients" not in one.time.parts
    assert both.time.parts["gradients"] > 0


def test_degrees_that_do_not_divide_are_told() -> None:
    with pytest.raises(PlanError, match=r"tp 3 = 3 devices, but there are 8"):
        layout_for_planning({"tp": 3}, 8)


def test_what_fits_for_sure_is_proposed_first_and_of_it_the_cheapest() -> None:
    space = SearchSpace(layout=Layout(dp_replicate=8), micro_batch=4, given=frozenset(POLICIES))
    best = search_layouts(run_of(LLAMA, NODE, recompute="none"), space)[0]
    assert not best.fits
    made = suggest_settings(best.case)
    words = [candidate.verdict.word for _, candidate in made]
    assert words == sorted(words)  # fits, tight
    assert set(words) == {"fits", "tight"}
    times = [candidate.time.step_s for _, candidate in made if candidate.verdict.word == "fits"]
    assert times == sorted(times)
    assert any("fsdp" in text for text, _ in made)


def test_a_fix_is_what_a_user_can_type() -> None:
    """Beside other axes a stage is degrees: a strategy is a whole layout."""
    layout = Layout(dp_replicate=4, tp=2)
    space = SearchSpace(layout=layout, micro_batch=8, given=frozenset(POLICIES))
    best = search_layouts(run_of(LLAMA, NODE, recompute="none"), space)[0]
    assert not best.fits
    texts = [text for text, _ in suggest_settings(best.case)]
    assert any("layout.dp_shard=4 layout.zero=" in text for text in texts)
    assert len(texts) == len(set(texts))
    assert not any("strategy" in text for text in texts)


def test_a_reason_names_what_differs(found: list[LayoutCandidate]) -> None:
    assert "faster than" in explain_order(found[0], found[-40]) or "lacks" in explain_order(
        found[0], found[-1]
    )
    slow = replace(found[0], time=replace(found[0].time, step_s=2 * found[0].time.step_s))
    assert explain_order(found[0], slow).startswith("100% faster than")
    assert explain_order(found[0], found[0]).startswith("within 2%")
    assert "% of the peak" in explain_peak(found[0])


def test_the_guide_is_predicted_too(found: list[LayoutCandidate]) -> None:
    text, other = compare_with_guide(found[0], SearchSpace())
    assert "1–10B: fsdp" in text
    assert other is not None
    assert other.case.layout.strategy == "fsdp"
    assert guide_layout(SMALL.trainable, NODE, SMALL.heads, SMALL.blocks).strategy == "fsdp"
    assert guide_layout(70 * 10**9, parse_machines("8x8xH100-80GB"), 64, 80).strategy == "3d"


def test_the_document_holds_every_layout_once(found: list[LayoutCandidate]) -> None:
    record = plan_record(found, SearchSpace(), top=4, notes=["said"])
    assert [row["rank"] for row in record["layouts"]] == [1, 2, 3, 4]
    shapes = [(tuple(row["degrees"].items()), row["zero"]) for row in record["layouts"]]
    assert len(set(shapes)) == 4
    first = record["layouts"][0]
    assert sum(first["time"].values()) == pytest.approx(first["step_s"])
    assert sum(first["memory"].values()) == pytest.approx(first["peak_bytes"])
    assert record["searched"] == len(found)
    assert record["fixes"] == []


def test_given_degrees_leave_the_rest_open() -> None:
    found = search_layouts(run_of(LLAMA, NODE), SearchSpace(degrees=(("tp", 2),)))
    assert {c.case.layout.tp for c in found} == {2}
    assert {0, 1, 2, 3} <= {c.case.layout.zero for c in found}
    found = search_layouts(run_of(LLAMA, NODE), SearchSpace(zero=1))
    assert {c.case.layout.zero for c in found} == {1}


@pytest.mark.parametrize(
    ("space", "said"),
    [
        (SearchSpace(layout=Layout(tp=8)), r"layout\.tp = 8: does not divide the 12 heads"),
        (SearchSpace(degrees=(("pp", 16),)), r"layout\.pp = 16: .* has 12 blocks"),
        (SearchSpace(layout=Layout(dp_replicate=8), micro_batch=5), r"micro-batches of 5"),
    ],
)
def test_what_cannot_be_cut_is_told(space: SearchSpace, said: str) -> None:
    gpt = transformer_facts(published_shape("gpt-2"), 1024, 2)
    cluster = parse_machines("2x8xH100-80GB") if space.degrees else NODE
    with pytest.raises(PlanError, match=said):
        search_layouts(run_of(gpt, cluster), space)


def test_every_stage_of_a_mixed_model_is_looked_at() -> None:
    from shoal.forecast.fit.peak_memory import predict_memory

    cluster = parse_machines("16x8xH100-80GB")
    facts = transformer_facts(published_shape("deepseek-v3"), 4096, 2)
    case = case_of(facts, Layout(pp=16, dp_replicate=8), cluster, 128, 1, recompute="full")
    each = [predict_memory(case, stage).peak_bytes for stage in range(16)]
    assert predict_memory(case).peak_bytes == pytest.approx(max(each), rel=0.02)


def test_compiled_blocks_are_not_planned_with_selective_recompute() -> None:
    found = search_layouts(run_of(LLAMA, NODE, compile="blocks"), SearchSpace())
    assert "selective" not in {c.case.plan.recompute for c in found}


def test_micro_batches_grow_until_memory_is_full() -> None:
    vit = transformer_facts(published_shape("vit-b"), 197, 2)
    found = search_layouts(run_of(vit, NODE, batch=16384), SearchSpace(built=True))
    assert max(c.case.micro_batch for c in found) >= 256
    best = found[0]
    text, other = compare_with_guide(best, SearchSpace(built=True))
    assert other is not None
    assert best.time.step_s <= 1.02 * other.time.step_s, text


MIXTURE = transformer_facts(published_shape("mixtral-8x7b"), 8192, 2)
NODES = parse_machines("2x8xH100-80GB")


def test_experts_are_dealt_to_data_parallel_ranks() -> None:
    """Of a mixture: in whole shards, evenly, never beside tp, which may have cut them already."""
    layouts = [c.case.layout for c in search_layouts(run_of(MIXTURE, NODES), SearchSpace())]
    dealt = [layout for layout in layouts if layout.ep > 1]
    assert {layout.strategy for layout in dealt} >= {"fsdp + ep", "zero1 + pp + ep"}
    for layout in dealt:
        check_combination(layout)
        assert MIXTURE.experts % layout.ep == 0
        assert layout.tp == 1
    assert {layout.ep for layout in layouts} == {1, 2, 4, 8}, "one is tried, and what lends most"
    assert {c.case.layout.ep for c in search_layouts(run_of(LLAMA, NODE), SearchSpace())} == {1}


def test_experts_that_are_dealt_are_given_or_found() -> None:
    two = SearchSpace(degrees=(("ep", 2),))
    assert {c.case.layout.ep for c in search_layouts(run_of(MIXTURE, NODES), two)} == {2}
    first = SearchSpace(built=True)
    assert {c.case.layout.ep for c in search_layouts(run_of(MIXTURE, NODES), first)} == {1}, (
        "it fits"
    )


def test_time_on_the_way_to_experts_has_a_name() -> None:
    found = search_layouts(run_of(MIXTURE, NODES), SearchSpace())
    ours = next(c for c in found if c.case.layout.ep > 1)
    assert 0 < ours.time.parts["experts"] < ours.time.step_s
    assert not ours.time.parts.keys() - PART_WORDS.keys()
    assert "ep 8" in layout_text(replace(ours.case.layout, ep=8))


def test_of_tight_layouts_those_below_the_limit_come_first() -> None:
    """A row that would probably end out of memory is no first row, and a surer setting is named."""
    cluster = parse_machines("2x8xH100-80GB")
    facts = transformer_facts(published_shape("llama-3-70b"), 8192, 2)
    found = search_layouts(case_of(facts, Layout(), cluster, 512, 1), SearchSpace())
    margins = [c.verdict.margin_bytes for c in found if c.verdict.word == "tight"]
    assert not any(c.verdict.word == "fits" for c in found)
    assert margins[0] > 0 > margins[-1]
    assert [m >= 0 for m in margins] == sorted((m >= 0 for m in margins), reverse=True)
    record = plan_record(found, SearchSpace(), top=2, notes=[])
    assert " over, which would be " in record["layouts"][0]["why"]
    assert record["guide"].endswith("over, so overruled")
    assert [fix["set"] for fix in record["fixes"]][:1] == ["memory.offload=optimizer"]
