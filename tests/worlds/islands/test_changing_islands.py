"""Real islands that come and go: killed, back, new, left alone; the others go on with the right divisor."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from changing_islands import Coming, check_drawn_faults
from shoal.base.plans.tensor_shards import Shard
from shoal.checkpoint.format.listing import list_checkpoints, read_manifest
from shoal.checkpoint.load.read import load
from shoal.islands.changing.island_addresses import read_addresses
from shoal.islands.outer_optimizer import hash_tensors


@pytest.fixture
def coming(islands, tmp_path: Path) -> Iterator[Coming]:
    found = Coming(islands(4), tmp_path)
    yield found
    for index in found.asked_of:  # nobody collected its answer: a check failed
        found.islands.worlds[index].kill()


@pytest.fixture
def coming_by_two(islands, tmp_path: Path) -> Iterator[Coming]:
    """Three islands of two processes each."""
    found = Coming(islands(3, 2), tmp_path)
    yield found
    for index in found.asked_of:
        found.islands.worlds[index].kill()


def test_one_of_four_is_killed_and_comes_back(coming: Coming, worlds) -> None:
    """The others go on at once with the right divisor; all end with the bits of one process."""
    trouble = [{"island": 3, "round": 1, "what": "die"}]
    for index in range(4):
        coming.start(index, rounds=7, trouble=trouble, step_s=0.15)
    coming.ended(3)
    coming.start(3, rounds=7, step_s=0.15, clock_s=-3600.0)  # the clock was set back meanwhile
    told = coming.collect(0, 1, 2, 3)
    assert [one.get("finished") for one in told] == [True] * 4, told
    assert len({one["weights"] for one in told}) == 1
    turns = coming.turns(0)
    merged = [[name for name, *_ in turn["members"]] for turn in turns]
    assert merged[0] == merged[-1] == [0, 1, 2, 3]
    assert [0, 1, 2] in merged
    for turn in turns:
        assert turn["divisor"] == sum(tokens for *_, tokens in turn["members"])
    asked = {key: coming.asked[key] for key in ("model", "batch", "period")}
    alone = worlds(1).call("member_case:repeated", turns=turns, first=[0, 1, 2, 3], **asked)
    assert alone == [told[0]["weights"]]


def test_one_of_two_goes_on_with_a_witness(coming: Coming, worlds) -> None:
    """The witness joins, island 1 dies, island 0 goes on, island 1 is back; the witness ends too."""
    coming.start_witness(2, known=2)
    for index in range(2):
        coming.start(index, known=2, rounds=20, step_s=0.1)
    coming.wait_for(0, lambda turn: turn["joined"] == [10_000])
    coming.kill(1)
    coming.start(1, known=2, rounds=20, step_s=0.1)
    *told, witness = coming.collect(0, 1, 2)
    assert [one.get("finished") for one in told] == [True] * 2, told
    assert len({one["weights"] for one in told}) == 1
    turns = coming.turns(0)
    merged = [[name for name, *_ in turn["members"]] for turn in turns]
    assert merged[0] == merged[-1] == [0, 1]
    assert [0] in merged
    assert [10_000] in [turn["joined"] for turn in turns]
    assert witness["ended"], witness
    assert any("island 0 and the witness decide the next one" in line for line in witness["lines"])
    asked = {key: coming.asked[key] for key in ("model", "batch", "period")}
    alone = worlds(1).call("member_case:repeated", turns=turns, first=[0, 1], **asked)
    assert alone == [told[0]["weights"]]


@pytest.mark.proof
def test_a_witness_dies_or_all_islands_do(coming: Coming) -> None:
    """Without the witness two islands go on; with it alone they start together again."""
    coming.start_witness(2, known=2)
    trouble = [{"island": index, "round": 12, "what": "die"} for index in range(2)]
    for index in range(2):
        coming.start(index, known=2, rounds=20, step_s=0.1, trouble=trouble)
    coming.wait_for(0, lambda turn: turn["joined"] == [10_000])
    coming.kill(2)
    coming.wait_for(0, lambda turn: "10000" in turn["left"])
    coming.start_witness(2, known=2)
    for index in range(2):
        coming.ended(index)
        coming.start(index, known=2, rounds=20, step_s=0.1)
    *told, witness = coming.collect(0, 1, 2)
    assert [one.get("finished") for one in told] == [True] * 2, told
    assert len({one["weights"] for one in told}) == 1
    assert witness["ended"], witness


@pytest.mark.proof
def test_a_turn_that_only_the_witness_knows_is_trained_again(coming: Coming, worlds) -> None:
    """Island 1 dies, island 0 merges a round alone and dies before its disk has it."""
    coming.start_witness(2, known=2)
    asked = {"known": 2, "rounds": 20, "step_s": 0.1}
    coming.start(0, **asked, trouble=[{"island": 0, "round": -1, "what": "die alone"}])
    coming.start(1, **asked)
    coming.wait_for(0, lambda turn: turn["joined"] == [10_000])
    coming.kill(1)
    coming.ended(0)
    coming.start(0, **asked)
    coming.wait_for_line(0, "its islands died before a disk had it: it is trained again")
    told, witness = coming.collect(0, 2)
    assert told.get("finished"), told
    assert witness["ended"], witness
    turns = coming.turns(0)
    rounds = [turn["round"] for turn in turns]
    (twice,) = {number for number in rounds if rounds.count(number) > 1}
    lost, again = [turn for turn in turns if turn["round"] == twice]
    assert lost["digest"] == again["digest"], "the same samples from the same weights"
    turns.remove(lost)
    assert [turn["round"] for turn in turns] == list(range(20))
    asked = {key: coming.asked[key] for key in ("model", "batch", "period")}
    alone = worlds(1).call("member_case:repeated", turns=turns, first=[0, 1], **asked)
    assert alone == [told["weights"]]


BY_TWO = {"layout": "fsdp", "batch": 4, "rounds": 6}


def test_an_island_of_two_processes_loses_one_and_comes_back(coming_by_two: Coming, worlds) -> None:
    """Sharded weights: one process dies, so its island ends; it comes back, and all end alike."""
    check_one_comes_back(coming_by_two, worlds, dying_rank=1)


@pytest.mark.proof
@pytest.mark.parametrize("layout", ["ddp", "tp", "zero2"])
def test_islands_of_two_processes_in_other_layouts(
    coming_by_two: Coming, worlds, layout: str
) -> None:
    """The first rank dies."""
    asked = {"layout": {"tp": 2}, "model": "llama"} if layout == "tp" else {"layout": layout}
    check_one_comes_back(coming_by_two, worlds, dying_rank=0, **asked)


def check_one_comes_back(coming: Coming, worlds, *, dying_rank: int, **more: Any) -> None:
    """One rank of island 2 dies; the other ends as under a launcher, and both start again."""
    coming.asked |= BY_TWO | more
    trouble: list[dict[str, Any]] = [
        {"island": 2, "round": 1, "what": "die", "rank": dying_rank},
        {"island": 0, "round": 3, "what": "await", "for": 2},
    ]
    for index in range(3):
        coming.start(index, trouble=trouble)
    first, until_s = coming.islands.worlds[2].processes, time.monotonic() + 60.0
    while all(process.poll() is None for process in first):
        assert time.monotonic() < until_s, coming.describe_stacks()
        time.sleep(0.02)
    coming.kill(2)
    coming.start(2)
    told = coming.collect(0, 1, 2)
    assert [one.get("finished") for one in told] == [True] * 3, told
    assert len({one["weights"] for one in told}) == 1
    turns = coming.turns(0)
    merged = [[name for name, *_ in turn["members"]] for turn in turns]
    assert merged[0] == merged[-1] == [0, 1, 2]
    assert [0, 1] in merged
    for turn in turns:
        assert turn["divisor"] == sum(tokens for *_, tokens in turn["members"])
    asked = {key: coming.asked[key] for key in ("model", "period", "layout", "batch")}
    alone = worlds(2).call("member_case:repeated", turns=turns, first=[0, 1, 2], **asked)
    assert alone == [told[0]["weights"]] * 2


def outer_digest(folder: Path) -> str:
    """The digest of the merged weights and outer momentum in the newest checkpoint of island 0."""
    newest = list_checkpoints(folder / "island-0" / "checkpoints")[0].path
    tensors = read_manifest(newest).tensors.items()
    wanted = [Shard.whole(n, one.shape, one.dtype) for n, one in tensors if n.startswith("outer.")]
    assert any(one.name.endswith(".momentum_buffer") for one in wanted)
    return hash_tensors(load(newest, wanted))


@pytest.mark.proof
@pytest.mark.parametrize("codec", ["none", "int8"])
def test_ranks_of_a_list_that_does_not_change_give_the_bits_of_a_fixed_list(
    coming_by_two: Coming, islands, tmp_path_factory: pytest.TempPathFactory, codec: str
) -> None:
    """Momentum outside and AdamW inside; three islands of two sharded processes."""
    tmp_path = tmp_path_factory.mktemp("fixed")
    asked = {"model": "llama", "optimizer": "adamw", "batch": 4, "rounds": 3, "layout": "fsdp"}
    for index in range(3):
        coming_by_two.start(index, **asked, codec=codec)
    told = coming_by_two.collect(0, 1, 2)
    assert len({one["weights"] for one in told}) == 1
    if codec == "none":  # a fixed list codes the sum a second time
        asked |= {"method": "diloco", "period": 2, "folder": str(tmp_path)}
        fixed = islands(3, 2).call("island_case:train", **asked)
        assert {one["weights"] for one in told} == {island[0]["weights"] for island in fixed}
        assert outer_digest(coming_by_two.folder) == outer_digest(tmp_path)


@pytest.mark.proof
def test_a_clock_set_back_and_an_emptied_disk(coming: Coming) -> None:
    """The others know a later start of the island than its clock says; it counts above that one."""
    for index in range(3):
        trouble = [{"island": 2, "round": 1, "what": "die"}]
        coming.start(index, known=3, rounds=20, step_s=0.1, trouble=trouble)
    coming.ended(2)
    shutil.rmtree(coming.folder / "island-2")
    coming.start(2, known=3, rounds=20, step_s=0.1, clock_s=-3600.0)
    told = coming.collect(0, 1, 2)
    assert [one.get("finished") for one in told] == [True] * 3, told
    assert [name for name, *_ in coming.turns(0)[-1]["members"]] == [0, 1, 2]


@pytest.mark.proof
def test_many_come_and_go(coming: Coming, worlds) -> None:
    """Two die in different rounds, one is back with an old disk, a new one comes, the first dies."""
    asked = {"rounds": 30, "step_s": 0.1, "trouble": [{"island": 2, "round": 1, "what": "die"}]}
    for index in range(3):
        coming.start(index, known=3, **asked)
    coming.ended(2)
    old = coming.folder / "old"
    shutil.copytree(coming.folder / "island-2", old)
    coming.start(3, **asked)  # it knows all addresses; the others learn its own from it
    coming.wait_for(0, lambda turn: turn["seats"] == [0, 1, 3])
    coming.kill(1)
    shutil.rmtree(coming.folder / "island-2")
    old.rename(coming.folder / "island-2")
    coming.start(2, known=3, rounds=30, step_s=0.1)
    coming.start(1, known=3, rounds=30, step_s=0.1)
    coming.wait_for(0, lambda turn: turn["seats"] == [0, 1, 2, 3])
    coming.kill(0)
    assert read_addresses(coming.folder / "island-0")[3] == coming.addresses[3], "for its resume"
    told = coming.collect(1, 2, 3)
    assert [one.get("finished") for one in told] == [True] * 3, told
    assert len({one["weights"] for one in told}) == 1
    turns = {turn["round"]: turn for index in range(4) for turn in coming.turns(index)}
    ordered = [turns[number] for number in range(30)]
    assert [name for name, *_ in ordered[-1]["members"]] == [1, 2, 3]
    asked = {key: coming.asked[key] for key in ("model", "batch", "period")}
    alone = worlds(1).call("member_case:repeated", turns=ordered, first=[0, 1, 2], **asked)
    assert alone == [told[0]["weights"]]


@pytest.mark.proof
def test_two_of_four_die_in_one_round_and_the_others_wait_for_one(coming: Coming) -> None:
    trouble = [{"island": index, "round": 1, "what": "die"} for index in (2, 3)]
    for index in range(4):
        coming.start(index, rounds=6, step_s=0.1, trouble=trouble)
    coming.ended(2)
    coming.ended(3)
    coming.wait_for_line(0, "waits for islands 2 and 3")
    coming.start(2, rounds=6, step_s=0.1)
    told = coming.collect(0, 1, 2)
    assert [one.get("finished") for one in told] == [True] * 3, told
    assert len({one["weights"] for one in told}) == 1


def test_the_survivor_of_two_waits_names_the_other_and_the_way_on(coming: Coming) -> None:
    """Then both resume from the round that both hold, and go on."""
    trouble = [{"island": 1, "round": 1, "what": "die"}]
    for index in range(2):
        coming.start(index, known=2, rounds=3, trouble=trouble, wait_s=1.5)
    coming.ended(1)
    (told,) = coming.collect(0)
    assert told["round"] == 1
    assert "waited 1.5 s (islands.wait_s) for island 1; the last round is saved" in told["line"]
    assert re.search(r"--resume \S+/island-0 islands\.count=1$", told["line"])
    for index in range(2):
        coming.start(index, known=2, rounds=3)
    told = coming.collect(0, 1)
    assert [one.get("finished") for one in told] == [True] * 2, told
    assert len({one["weights"] for one in told}) == 1
    assert [turn["round"] for turn in coming.turns(0)] == [0, 1, 2], "no round twice, none lost"


@pytest.mark.proof
def test_a_goodbye_lets_the_others_go_on_without_a_wait(coming: Coming) -> None:
    trouble = [{"island": 2, "round": 1, "what": "stop"}]
    for index in range(3):
        coming.start(index, known=3, rounds=4, trouble=trouble)
    told = coming.collect(0, 1, 2)
    assert [one.get("finished") for one in told] == [True, True, False], told
    turns = coming.turns(0)
    assert [name for name, *_ in turns[1]["members"]] == [0, 1, 2], "its last change counts"
    assert turns[1]["left"] == {"2": "island 2: it said goodbye"}


@pytest.mark.proof
def test_two_of_three_die_and_all_start_together(coming: Coming) -> None:
    """One process that never restarted is too few for a vote: it meets the new ones."""
    trouble = [{"island": index, "round": 1, "what": "die"} for index in (1, 2)]
    for index in range(3):
        coming.start(index, known=3, rounds=4, step_s=0.1, trouble=trouble)
    for index in (1, 2):
        coming.ended(index)
        coming.start(index, known=3, rounds=4, step_s=0.1)
    told = coming.collect(0, 1, 2)
    assert [one.get("finished") for one in told] == [True] * 3, told
    assert len({one["weights"] for one in told}) == 1


@pytest.mark.proof
def test_a_list_that_does_not_change_gives_the_bits_of_a_fixed_list(
    coming: Coming, islands, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Momentum outside and AdamW inside, unequal counts of targets."""
    tmp_path = tmp_path_factory.mktemp("fixed")
    asked = {"model": "llama", "optimizer": "adamw", "batch": 4, "rounds": 3}
    for index in range(3):
        coming.start(index, known=3, **asked)
    told = coming.collect(0, 1, 2)
    asked |= {"method": "diloco", "period": 2, "folder": str(tmp_path)}
    fixed = islands(3).call("island_case:train", **asked)
    assert {one["weights"] for one in told} == {island[0]["weights"] for island in fixed}
    assert outer_digest(coming.folder) == outer_digest(tmp_path)


@pytest.mark.proof
def test_a_silent_island_is_left_out_and_heals(coming: Coming) -> None:
    """SIGSTOP: its connections stay open, so only the window's end leaves it out."""
    for index in range(3):
        coming.start(index, known=3, rounds=20, step_s=0.1)
    coming.wait_for(0, lambda turn: turn["round"] >= 1)
    (process,) = coming.islands.worlds[2].processes
    os.kill(process.pid, signal.SIGSTOP)
    coming.wait_for(0, lambda turn: turn["seats"] == [0, 1])
    os.kill(process.pid, signal.SIGCONT)
    told = coming.collect(0, 1, 2)
    assert [one.get("finished") for one in told] == [True] * 3, told
    assert len({one["weights"] for one in told}) == 1
    merged = [[name for name, *_ in turn["members"]] for turn in coming.turns(0)]
    assert [0, 1] in merged
    assert merged[-1] == [0, 1, 2]
    (line,) = {turn["why"] for turn in coming.turns(0) if turn["left"]}
    assert line == "island 2: no change of it came in time"


@pytest.mark.proof
@pytest.mark.parametrize("seed", [1, 2])
def test_drawn_kills_restarts_and_pauses(coming: Coming, seed: int) -> None:
    """25 s of them, some with an empty disk; then all end with the same bits and one history."""
    check_drawn_faults(coming, seed)
