"""Step-throughs compute what they show: sums, bytes, times and held memory, against other formulas."""

from __future__ import annotations

import re

import pytest

from shoal.base.errors import BugError, PlanError
from shoal.base.plans.timeline import Timeline
from shoal.teach.calculators import collectives_costs as costs
from shoal.teach.schedules_simulate import timeline_bubble
from shoal.teach.walks import collectives_walk, fsdp_walk, walk_messages, zero_walk
from shoal.teach.walks.pipelines_walk import (
    PipelineCase,
    closed_formula,
    compare_afab_1f1b,
    pipeline,
)
from shoal.teach.walks.shards_walk import first_weights, gradient
from shoal.teach.walks.walk import StepThrough, TableCell
from shoal.teach.walks.walk_messages import ALPHA_S, BYTES_PER_S, ChunkMessage, ChunkSimulation
from traffic_theory import Payload, step_traffic

BETA = 1 / BYTES_PER_S
M = 48 * 2**20


def column(cells: tuple[tuple[TableCell, ...], ...], place: int) -> list[int]:
    return [int(row[place].text) for row in cells if row[place].text]


@pytest.mark.parametrize("ranks", range(2, 17))
def test_every_all_reduce_ends_with_the_totals(ranks: int) -> None:
    walks = [collectives_walk.ring(ranks, M), collectives_walk.tree(ranks, M)]
    if ranks & (ranks - 1) == 0:
        walks.append(collectives_walk.halving(ranks, M))
    for walk in walks:
        for place in range(len(walk.columns)):
            total = sum(column(walk.start, place))
            assert column(walk.steps[-1].cells, place) == [total] * ranks, walk.title
            assert all(row[place].look == "whole" for row in walk.steps[-1].cells)
        assert not any(cell.look == "whole" for row in walk.start for cell in row)


@pytest.mark.parametrize("ranks", range(2, 17))
def test_gather_scatter_broadcast_end_as_they_must(ranks: int) -> None:
    gathered = collectives_walk.all_gather(ranks, M)
    own = [int(gathered.start[rank][rank].text) for rank in range(ranks)]
    assert all([int(c.text) for c in row] == own for row in gathered.steps[-1].cells)
    scattered = collectives_walk.reduce_scatter(ranks, M)
    for rank in range(ranks):
        mine = scattered.steps[-1].cells[rank][rank]
        assert (int(mine.text), mine.look) == (sum(column(scattered.start, rank)), "whole")
    spread = collectives_walk.broadcast(ranks, M)
    assert column(spread.start, 0) == [int(spread.start[0][0].text)]
    assert column(spread.steps[-1].cells, 0) == [int(spread.start[0][0].text)] * ranks
    assert len(spread.steps) == costs.broadcast_rounds(ranks)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 13, 16])
def test_time_is_that_of_the_calculators(ranks: int) -> None:
    ring = collectives_walk.ring(ranks, M).timeline
    assert ring is not None
    assert ring.end_s == pytest.approx(costs.ring_all_reduce_s(ranks, M, ALPHA_S, BETA))
    gather = collectives_walk.all_gather(ranks, M).timeline
    assert gather is not None
    assert gather.end_s == pytest.approx(costs.ring_all_gather_s(ranks, M, ALPHA_S, BETA))
    if ranks & (ranks - 1) == 0:
        halving = collectives_walk.halving(ranks, M).timeline
        assert halving is not None
        expected_s = costs.halving_doubling_s(ranks, M, ALPHA_S, BETA)
        assert halving.end_s == pytest.approx(expected_s)


def test_a_rank_is_never_added_twice() -> None:
    world = ChunkSimulation([{0: 1}, {0: 2}], 1, 8.0)
    world.run_round("there", "send", [ChunkMessage(0, 1, (0,), adds=True)], "")
    with pytest.raises(BugError, match="rank 0 would be counted twice"):
        world.run_round("again", "send", [ChunkMessage(0, 1, (0,), adds=True)], "")


def test_all_messages_of_a_round_leave_at_once() -> None:
    world = ChunkSimulation([{0: 1}, {0: 2}], 1, 8.0)
    world.run_round(
        "swap", "send", [ChunkMessage(0, 1, (0,), True), ChunkMessage(1, 0, (0,), True)], ""
    )
    assert [own[0] for own in world.held] == [3, 3]
    assert world.busiest_bytes == 8.0


def test_a_wrong_result_is_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ring that forgets its last round must be noticed by the walk itself."""
    right = collectives_walk._ring_gather
    monkeypatch.setattr(collectives_walk, "_ring_gather", lambda *a, **k: list(right(*a, **k))[:-1])
    with pytest.raises(BugError, match="chunk"):
        collectives_walk.ring(4)
    with pytest.raises(BugError, match="must be"):
        collectives_walk.all_gather(4)


def test_wrong_bytes_are_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sending one chunk more than needed leaves the sums right: only the bytes tell."""
    right = collectives_walk._doubling_rounds

    def wasteful(ranks: int, log: int) -> list[collectives_walk.Round]:
        rounds = list(right(ranks, log))
        title, kind, sent = rounds[-1]
        return [*rounds[:-1], (title, kind, sent), (title, kind, sent)]

    monkeypatch.setattr(collectives_walk, "_doubling_rounds", wasteful)
    with pytest.raises(BugError, match="bytes sent"):
        collectives_walk.halving(4)


@pytest.mark.parametrize(
    ("make", "ranks", "said"),
    [
        (collectives_walk.ring, 1, "try: --ranks 2"),
        (collectives_walk.ring, 17, "try: --ranks 16"),
        (collectives_walk.halving, 6, "try: --ranks 4 or --ranks 8"),
        (collectives_walk.halving, 12, "try: --ranks 8 or --ranks 16"),
        (fsdp_walk.fsdp, 1, "try: --ranks 2"),
        (zero_walk.zero, 99, "try: --ranks 16"),
    ],
)
def test_ranks_that_cannot_be_shown(make, ranks: int, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        make(ranks)


def lanes(line: Timeline) -> dict[tuple[int, str], list[tuple[float, float, str, str]]]:
    found: dict[tuple[int, str], list[tuple[float, float, str, str]]] = {}
    for s in line.spans:
        found.setdefault((s.rank, s.lane), []).append((s.start_s, s.end_s, s.kind, s.label))
    return {key: sorted(spans) for key, spans in found.items()}


def timeline(walk: StepThrough) -> Timeline:
    assert walk.timeline is not None
    return walk.timeline


@pytest.mark.parametrize(
    ("ranks", "turns", "forward_s"), [(2, 1, 3e-3), (4, 3, 3e-3), (8, 1, 1e-5)]
)
def test_fsdp_obeys_its_own_rules(ranks: int, turns: int, forward_s: float) -> None:
    line = timeline(fsdp_walk.fsdp(ranks, turns, forward_s, 2 * forward_s))
    for spans in lanes(line).values():
        assert all(a[1] <= b[0] + 1e-12 for a, b in zip(spans, spans[1:], strict=False))
    link, work = lanes(line)[0, "link"], lanes(line)[0, "compute"]
    for start_s, _, kind, unit in work:
        if kind == "update":
            assert start_s >= max(end_s for _, end_s, _, _ in link) - 1e-12
            continue
        gathers = [g for g in link if g[2] == "all-gather" and g[3] == unit and g[0] <= start_s]
        assert gathers, f"{kind} {unit} has never been gathered"
        assert gathers[-1][1] <= start_s + 1e-12
    for start_s, _, kind, unit in link:
        if kind == "reduce-scatter":
            assert any(w[2:] == ("backward", unit) and w[1] <= start_s + 1e-12 for w in work)
    unit_bytes = fsdp_walk.UNIT_PARAMETERS * fsdp_walk.GATHERED_BYTES
    most = max(held.parts.get("gathered", 0.0) for held in line.memory)
    assert most <= 2 * unit_bytes
    last = line.memory[-1].parts
    assert set(last) == {"shards", "gradient shards"}, "nothing else is held in the end"


@pytest.mark.parametrize(("ranks", "turns"), [(2, 1), (4, 2), (16, 1)])
def test_fsdp_sends_what_the_planner_says(ranks: int, turns: int) -> None:
    """The walk counts gathers and scatters; forecast/time/step_traffic.py knows the formula."""
    units = [fsdp_walk.UNIT_PARAMETERS * 2] * fsdp_walk.UNITS
    payload = Payload(gradient_bytes=sum(units), unit_bytes=sum(units))
    expected = step_traffic(traffic_layout(ranks), payload, accumulate=turns).total_bytes
    world_bytes = sum(
        (s.end_s - s.start_s - (ranks - 1) * ALPHA_S) * BYTES_PER_S
        for s in timeline(fsdp_walk.fsdp(ranks, turns)).spans
        if s.rank == 0 and s.lane == "link"
    )
    assert world_bytes == pytest.approx(expected)


def traffic_layout(ranks: int):
    from shoal.base.layouts.layout import Layout

    return Layout(dp_shard=ranks, zero=3)


def test_a_gradient_by_hand() -> None:
    """loss = 5·(1 + 2)·(2 + 2): raising a weight by one raises it by 5·4 or 5·3."""
    weights = [[1, 2], [2, 2]]
    for unit in range(2):
        raised = [row[:] for row in weights]
        raised[unit][0] += 1
        before, after = (5 * sum(w[0]) * sum(w[1]) for w in (weights, raised))
        assert gradient(weights, 5)[unit] == after - before


def test_fsdp_notices_a_wrong_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backward that runs with another unit's weights freed away would be found."""
    monkeypatch.setattr(fsdp_walk, "summed_gradient", lambda weights, batch: [1] * fsdp_walk.UNITS)
    with pytest.raises(BugError, match="gradients of rank 0"):
        fsdp_walk.fsdp(2)


@pytest.mark.parametrize("ranks", [2, 3, 8, 16])
def test_zero_holds_less_by_stage(ranks: int) -> None:
    walk = zero_walk.zero(ranks)
    assert [step.title[:7] for step in walk.steps] == [f"stage {n}" for n in range(4)]
    for stage, step in enumerate(walk.steps):
        for rank, row in enumerate(step.cells):
            own = f"{rank:x}"
            whole = [not re.search("·", cell.text) for cell in row[:3]]
            assert whole == [stage < 3, stage < 2, stage < 1]
            assert all(own in cell.text for cell in row[:3])
    sizes = [zero_walk.formula_bytes(stage, ranks, 1.0) for stage in range(4)]
    assert sizes == sorted(sizes, reverse=True)


def test_zero_notices_a_stage_that_forgets_to_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    right = zero_walk._StageTraining._update

    def forgets(self: zero_walk._StageTraining) -> None:
        stage, self.stage = self.stage, 0
        if stage == 1:
            for mine in self.ranks:  # update the own part, tell nobody
                for pair in mine.optimizer:
                    mine.optimizer[pair] += mine.gradients[pair]
                    mine.weights[pair] += mine.optimizer[pair]
        else:
            self.stage = stage
            right(self)
        self.stage = stage

    monkeypatch.setattr(zero_walk._StageTraining, "_update", forgets)
    with pytest.raises(BugError, match="stage 1: weights"):
        zero_walk.zero(4)


def test_first_weights_are_small_and_differ_between_units() -> None:
    weights = first_weights(3, 4)
    assert {number for row in weights for number in row} == {1, 2, 3}
    assert len({tuple(row) for row in weights}) == 3


@pytest.mark.parametrize(("p", "m"), [(2, 2), (4, 8), (4, 3), (8, 16)])
def test_afab_beside_1f1b(p: int, m: int) -> None:
    (afab, other), lines = compare_afab_1f1b(PipelineCase(ranks=p, micro_batches=m, input_s=0.5))
    assert [afab.peak_bytes(r) for r in range(p)] == [m] * p
    assert [other.peak_bytes(r) for r in range(p)] == [min(m, p - r) for r in range(p)]
    assert afab.held_unit == other.held_unit == "micro-batches"
    bubble_s = (p - 1) * (1 + 0.5 + 1)
    assert lines[0] == f"Same bubble: afab {bubble_s:.1f} s, 1f1b {bubble_s:.1f} s."


def test_facts_of_a_schedule() -> None:
    facts = pipeline("zero-bubble", PipelineCase(4, 8)).facts
    assert facts["bubble"] == "3.0 s = 12.5% of it, formula (p−1)(F+B−W): 3.0 s"
    assert facts["work of a rank"] == "24.0 s"
    assert facts["step up to the optimizer's barrier"] == "27.0 s"
    chunks = pipeline("interleaved", PipelineCase(4, 8, chunks=3))
    assert "3 pieces of the model per rank" in chunks.title
    uneven = pipeline("zbv", PipelineCase(4, 8, 1.0, 2.0, 0.5)).facts
    assert uneven["bubble"].endswith("counted"), "there is no formula for this"


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zero-bubble", "zbv", "dualpipe"])
@pytest.mark.parametrize(("p", "m"), [(2, 2), (2, 4), (4, 4), (4, 8), (4, 12), (6, 12), (8, 16)])
@pytest.mark.parametrize("seconds", [(1.0, 1.0, 1.0), (1.0, 2.0, 0.5)])
def test_a_formula_that_is_shown_is_what_the_drawing_shows(name, p, m, seconds) -> None:
    asked = PipelineCase(p, m, 2, *seconds)
    closed = closed_formula(name, asked, 2)
    if closed is None or (name == "interleaved" and m % p):
        assert name not in ("gpipe", "1f1b")
        return
    assert timeline_bubble(pipeline(name, asked)) == pytest.approx(closed[1], abs=1e-9)


def test_too_much_to_draw_is_said() -> None:
    with pytest.raises(PlanError, match="too much to draw; try: --micro-batches"):
        pipeline("1f1b", PipelineCase(ranks=16, micro_batches=100_000))


def test_numbers_at_the_start_are_small() -> None:
    numbers = {walk_messages.first_number(r, c) for r in range(16) for c in range(16)}
    assert min(numbers) >= 1
    assert max(numbers) <= 9


def test_activations_are_drawn_in_every_micro_batch() -> None:
    walk = fsdp_walk.fsdp(2, 3)
    row = walk.rows.index("activations")
    kept = [[cell.look for cell in step.cells[row]].count("own") for step in walk.steps]
    up = list(range(1, fsdp_walk.UNITS + 1))
    assert kept == (up + up[::-1]) * 3 + [0]


def test_figures_of_a_drawing_are_rounded_and_one_is_one() -> None:
    assert pipeline("1f1b", PipelineCase(2, 1)).facts["held at most"] == "1 micro-batch"
    for line in (pipeline(name, PipelineCase(4, 12)) for name in ("zbv", "interleaved")):
        assert re.fullmatch(r"\d+(\.\d\d?)? micro-batch(es)?", line.facts["held at most"])
