"""LLM-Training-Puzzles: the author's scores exactly, ours no worse, the rules enforced."""

from __future__ import annotations

import pytest
from puzzle_search import found_timeline, search

from shoal.base.errors import PlanError
from shoal.teach.costs import AnalyticalCosts
from shoal.teach.puzzles import PUZZLES, puzzle_run_timeline, puzzle_timeline, score
from shoal.teach.puzzles.model import Program, PuzzleRank
from shoal.teach.puzzles.ours import PipelineProgram
from shoal.teach.puzzles.puzzle_world import run_puzzle

AUTHOR = {
    0: (16.5, 2_621_440),
    1: (16.5, 1_966_080),
    2: (5.1, 1_835_008),
    3: (19.9, 2_752_512),
    4: (19.9, 2_359_296),
    5: (66.9, 3_145_728),
    6: (33.3, 4_194_304),
    7: (15.5, 966_656),
}
KNOWN = {2: 1_572_864, 3: 2_621_440, 6: 3_014_656}


@pytest.mark.parametrize("number", range(8))
def test_the_authors_programs_score_exactly(number: int) -> None:
    puzzle = PUZZLES[number]
    assert score(puzzle.reference()) == AUTHOR[number] == puzzle.author


@pytest.mark.parametrize("number", range(8))
def test_ours_are_no_worse_in_anything(number: int) -> None:
    steps, memory = score(PUZZLES[number].run_ours())
    assert steps <= AUTHOR[number][0]
    assert memory <= AUTHOR[number][1]
    if number in KNOWN:
        assert memory <= KNOWN[number] < AUTHOR[number][1]


@pytest.mark.parametrize("number", range(8))
def test_the_search_finds_nothing_that_ours_or_the_author_beat(number: int) -> None:
    ours = score(PUZZLES[number].run_ours())
    found = search(number)
    assert any(f.steps <= ours[0] and f.memory <= ours[1] for f in found)
    for one in found:
        assert (one.steps, one.memory) <= AUTHOR[number]
        plainer = [f for f in found if f.mailbox in ("one", one.mailbox)]
        assert not any(f.steps <= one.steps and f.memory < one.memory for f in plainer)


def test_the_search_trades_memory_for_time_in_the_sharded_puzzles() -> None:
    assert [(f.steps, f.memory) for f in search(4)] == [(19.3, 2_228_224), (19.6, 1_966_080)]
    assert search(7)[0].steps == 13.1
    assert (search(6)[0].steps, search(6)[0].mailbox) == (32.1, "each")


def test_counting_outputs_shows_more() -> None:
    for puzzle in PUZZLES:
        models = puzzle.reference()
        assert score(models, "all")[1] > score(models)[1]
        assert score(models, "all")[0] == score(models)[0]


def test_1f1b_without_a_head_start_needs_a_mailbox_per_sender() -> None:
    puzzle = PUZZLES[6]
    plain = PipelineProgram((1, 1, 1, 1))
    with pytest.raises(PlanError, match="rank 1 waits in send for rank 2; rank 2 waits in send"):
        puzzle.run_program(plain)
    assert score(puzzle.run_program(plain, "each")) == (32.9, 2_490_368)


def test_timelines_can_be_drawn() -> None:
    line = puzzle_timeline(6, "ours")
    assert line.unit == "steps"
    assert (line.ranks, line.held_unit) == (4, "numbers")
    assert line.facts["score"] == "32.9 steps, memory 2,752,512"
    assert found_timeline(7).facts["score"].startswith("13.1 steps")
    with pytest.raises(PlanError, match=r"puzzles are 0 to 7; try: 7"):
        puzzle_timeline(8)
    with pytest.raises(PlanError, match="try: ours"):
        puzzle_timeline(1, "our")
    with pytest.raises(PlanError, match="the search found 1; try: 0"):
        found_timeline(2, 4)


def test_other_costs_for_the_same_programs() -> None:
    """With a backward of twice the forward and free links the pipeline fills as formulas say."""
    table = AnalyticalCosts({"forward": 0.5, "backward": 1.0, "loss": 0.0, "update": 0.0})
    line = puzzle_run_timeline(PUZZLES[6].reference(), costs=table)
    assert line.end_s == pytest.approx((4 + 4 - 1) * (1 + 2))


def broken(program: Program, ranks: int = 1, layers: int = 1, batches: int = 1) -> str:
    with pytest.raises(PlanError) as error:
        run_puzzle(program, ranks, layers, batches)
    return str(error.value)


def backward(m: PuzzleRank, batches: int) -> None:
    m.load(0)
    m.input(range(batches), 0)
    m.forward(0, 0, 1, 0)
    m.loss(1, 1)
    m.backward(0, 0, 1, 0, 0, 0)


def test_the_rules() -> None:
    async def shard(m: PuzzleRank) -> None:
        m.load(0, None, m.rank, 2)
        m.input([0], 0)
        m.forward(0, 0, 1, 0)

    async def half(m: PuzzleRank) -> None:
        backward(m, 1)
        m.update(0, 0, 0)

    async def lazy(m: PuzzleRank) -> None:
        backward(m, 1)

    async def late(m: PuzzleRank) -> None:
        backward(m, 1)
        m.load(0, "again")

    async def twice(m: PuzzleRank) -> None:
        m.input([0], 0)
        m.input([0], 1)

    async def nothing(m: PuzzleRank) -> None:
        m.load(0)
        m.forward(0, 0, 1, 0)

    async def early(m: PuzzleRank) -> None:
        m.load(0)
        m.input([0], 0)
        m.loss(0, 0)

    async def other_batches(m: PuzzleRank) -> None:
        backward(m, 1)
        m.input([1], "x")
        m.backward(0, "x", 1, 0, 0, 0)

    async def whole_for_shard(m: PuzzleRank) -> None:
        m.load(0, None, 0, 2)
        m.load(0, "whole")
        m.input([0], 0)
        m.forward(0, 0, 1, "whole")
        m.loss(1, 1)
        m.backward(0, 0, 1, 0, 0, "whole")
        await m.reduce_scatter(0)
        m.update(0, 0, "whole")

    assert "lacks its whole weight" in broken(shard, 2)
    assert "lacks the gradients of batches [1]" in broken(half, batches=2)
    assert "layer 0 ends without its whole weight" in broken(lazy)
    assert "weights of layer 0 are loaded after the start" in broken(late)
    assert "input [0] is fetched twice" in broken(twice)
    assert "rank 0 holds no activations[0]" in broken(nothing)
    assert "the loss reads layer 0, not the last" in broken(early)
    assert "input and gradient of different batches" in broken(other_batches, batches=2)
    assert "shards do not match" in broken(whole_for_shard, 2)


def two_layers(m: PuzzleRank) -> None:
    """Layers 0 and 1 loaded, an activation of layer 0 and one of layer 1 held."""
    for layer in range(2):
        m.load(layer)
    m.input([0], 0)
    m.forward(0, 0, 1, 0)


def test_the_rules_about_layers_and_shards() -> None:
    async def beyond(m: PuzzleRank) -> None:
        m.input([1], 0)

    async def wrong_weight(m: PuzzleRank) -> None:
        two_layers(m)
        m.forward(1, 1, 2, 0)

    async def wrong_input(m: PuzzleRank) -> None:
        two_layers(m)
        m.forward(1, 0, 2, 1)

    async def backward_weight(m: PuzzleRank) -> None:
        two_layers(m)
        m.forward(1, 1, 2, 1)
        m.loss(2, 2)
        m.backward(1, 1, 2, 1, 1, 0)

    async def backward_input(m: PuzzleRank) -> None:
        two_layers(m)
        m.forward(1, 1, 2, 1)
        m.loss(2, 2)
        m.backward(1, 0, 2, 1, 1, 1)

    async def sum_of_layers(m: PuzzleRank) -> None:
        m.empty(0, "a")
        m.empty(1, "b")
        m.add("a", "b")

    async def overwrite(m: PuzzleRank) -> None:
        m.empty(0, "a")
        m.empty(0, "b")
        m.rename("weight_grads", "a", "b")

    async def other_update(m: PuzzleRank) -> None:
        m.load(0)
        m.empty(1, 1)
        m.update(0, 1, 0)

    async def twice(m: PuzzleRank) -> None:
        backward(m, 1)
        m.update(0, 0, 0, "new")
        m.stores["states"]["new"] = m.stores["states"][0]
        m.update(0, 0, "new")

    async def shard_again(m: PuzzleRank) -> None:
        m.empty(0, 0)
        await m.reduce_scatter(0)
        await m.reduce_scatter(0)

    assert "batches end before" in broken(beyond)
    assert "forward of layer 1 lacks its whole weight" in broken(wrong_weight, layers=2)
    assert "forward of layer 1 got the input of 0" in broken(wrong_input, layers=2)
    assert "backward of layer 1 lacks its whole weight" in broken(backward_weight, layers=2)
    assert "backward of layer 1 got 0 and 1" in broken(backward_input, layers=2)
    assert "gradients a and b are not of the same shard" in broken(sum_of_layers, layers=2)
    assert "weight_grads[b] exists" in broken(overwrite)
    assert "update of layer 0 got gradient 1, weight 0" in broken(other_update, layers=2)
    assert "weight at step 1, state at 0" in broken(twice)
    assert "reduce-scatter of a shard" in broken(shard_again, 2)


def test_ranks_that_wait_for_each_other() -> None:
    async def wait(m: PuzzleRank) -> None:
        await m.receive(1 - m.rank, 0)

    async def differ(m: PuzzleRank) -> None:
        m.load(m.rank)
        m.empty(m.rank, 0)
        await m.all_reduce(0)

    async def race(m: PuzzleRank) -> None:
        m.input([0], 0)
        if m.rank < 2:
            await m.send(2, "activations", 0)
        else:
            await m.receive(1, 1)

    assert "rank 2 waits for rank 1, its mailbox holds a message of rank 0" in broken(race, 3)
    says = broken(wait, 2)
    assert "deadlock: rank 0 waits in receive for rank 1; rank 1 waits in receive" in says
    says = broken(differ, 2, 2)
    assert "ranks meet in different collectives: all-reduce of layer 0, all-reduce of layer" in says
