"""Real islands compute what the algorithm says: against one process, data parallelism, flat islands."""

from __future__ import annotations

import math
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import cases
from cli_run import lines
from netns import Forbidden, Net, skip
from shoal.base.layouts.island_options import IslandsPolicy
from shoal.checkpoint.format.listing import list_checkpoints, read_manifest
from shoal.forecast.time.island_costs import IslandsFacts, islands_cost
from shoal.islands.methods.noloco import draw_pairs
from shoal.trainer.islands.island_join import list_held_rounds
from worlds import Failed, Islands

DILOCO = {"method": "diloco", "period": 3}


@pytest.mark.parametrize("count", [pytest.param(2, marks=pytest.mark.proof), 3])
def test_islands_are_the_same_islands_one_after_another(worlds, islands, count: int) -> None:
    """Bit for bit: momentum, tokens as weights, unequal counts of targets, dropout."""
    asked = {"rounds": 2, "period": 2, "batch": 4, "optimizer": "adamw"}
    told = islands(count).call("island_case:train", method="diloco", **asked)
    outer = {"lr": 0.7, "momentum": 0.9}
    alone = worlds(1).call("island_case:in_turn", count=count, **asked, **outer)[0]
    assert {island[0]["weights"] for island in told} == {alone["weights"]}
    assert all(island[0]["committed"] == [True, True] for island in told)
    assert len({tuple(island[0]["digests"]) for island in told}) == 1


TWO_TIERS = {
    "period": 4, "regions": 2, "far_period": 2, "fragments": 2, "overlap": 1, "batch": 2,
    "model": "towers", "optimizer": "adamw",
}  # fmt: skip


def test_streaming_over_two_tiers_is_the_same_in_one_process(worlds, islands) -> None:
    """Bit for bit, each island's own weights too: four islands in two regions, two fragments."""
    asked = {"rounds": 4, **TWO_TIERS}
    told = islands(4).call("island_case:train", method="streaming-diloco", codec="none", **asked)
    assert all(island[0]["committed"] == [True] * 4 for island in told)
    (alone,) = worlds(1).call("island_case:two_tiers_in_turn", count=4, **asked)
    assert [island[0]["own"] for island in told] == alone["own"]
    assert {island[0]["weights"] for island in told} == {alone["weights"]}
    near, far, *_ = ({island[0]["digests"][place] for island in told} for place in range(4))
    assert (len(near), len(far)) == (2, 1), "regions differ between far rounds"


def test_a_far_round_without_one_fragment_is_no_place_to_resume(islands, tmp_path: Path) -> None:
    """The regions differ in that fragment until they all meet again."""
    trouble = [{"island": k, "round": 1, "what": "nan", "fragment": 0} for k in range(2)]
    asked = {**TWO_TIERS, "folder": str(tmp_path), "trouble": trouble}
    two = islands(2)
    told = two.call("island_case:train", rounds=4, method="streaming-diloco", **asked)
    digests = [{island[0]["digests"][place] for island in told} for place in range(4)]
    assert [len(one) for one in digests] == [2, 2, 2, 1]
    for index in range(2):
        assert list(list_held_rounds(tmp_path / f"island-{index}", 4)) == ["4"]
    again = two.call("island_case:train", rounds=5, method="streaming-diloco", **asked)
    assert [island[0]["began"] for island in again] == [4, 4]


@pytest.mark.proof
def test_the_kernel_counts_the_bytes_of_both_tiers_as_foreseen(tmp_path: Path) -> None:
    """Runs of 2, 3 and 4 rounds: the third one is near, the fourth far; what all begin with drops out."""
    try:
        net = Net(4)
    except Forbidden as why:
        skip("bytes of two tiers on real links NOT TESTED", str(why))
    asked = {**TWO_TIERS, "model": cases.WIDE, "method": "streaming-diloco", "codec": "none"}
    far, counted = Islands(4, 1, tmp_path / "logs", [net.inside(k) for k in range(4)]), []
    try:
        for rounds in (2, 3, 4):
            before = sum(net.sent_bytes(island) for island in range(4))
            told = far.call("island_case:train", rounds=rounds, host=net.addresses[0], **asked)
            assert all(island[0]["committed"] == [True] * rounds for island in told)
            counted.append(sum(net.sent_bytes(island) for island in range(4)) - before)
    finally:
        far.close()
        net.close()
    numbers = sum(one.numel() for one in cases.build(cases.WIDE).parameters())
    of_all = IslandsPolicy("streaming-diloco", count=4, fragments=2, codec="none", period=4)
    facts = IslandsFacts(numbers, 1.0, 1e9, element_bytes=8)
    tiers = [replace(of_all, count=2), of_all]
    foreseen = [4 * islands_cost(policy.resolved(), facts).sent_bytes for policy in tiers]
    near, distant = counted[1] - counted[0], counted[2] - counted[1]
    print(f"near {near} bytes, foreseen {foreseen[0]:.0f}; far {distant}, {foreseen[1]:.0f}")
    assert near == pytest.approx(foreseen[0], rel=0.02)
    assert distant == pytest.approx(foreseen[1], rel=0.02)
    two = replace(of_all, regions=2, far_period=2)
    mean = 4 * islands_cost(two.resolved(), facts).sent_bytes
    assert (near + distant) / 2 == pytest.approx(mean, rel=0.02)


@pytest.mark.proof  # the next one goes on to the same steps
def test_period_1_is_data_parallelism(worlds, islands, tmp_path: Path) -> None:
    """Inner SGD, outer learning rate 1, no momentum: a step of 16 samples, dropout included."""
    asked = {"optimizer": "sgd", "model": "llama", "folder": str(tmp_path)}
    told = islands(2).call("island_case:train", rounds=3, method="local-sgd", period=1, **asked)
    worlds(1).call("island_case:data_parallel", steps=3, batch=16, **asked)
    ours, theirs = (torch.load(tmp_path / f"weights-{w}.pt") for w in ("0", "dp"))
    apart = torch.sqrt(sum(((ours[n] - theirs[n]) ** 2).sum() for n in theirs))
    assert apart <= 1e-12 * told[0][0]["norm"]


def test_a_run_without_islands_goes_on_as_islands(worlds, islands, tmp_path: Path) -> None:
    """Two steps of one process, a round of period 1 with inner SGD: as three steps."""
    asked = {"optimizer": "sgd", "model": "llama", "folder": str(tmp_path)}
    plain = tmp_path / "plain"
    alone = {"batch": 16, **asked}
    worlds(1).call("island_case:data_parallel", steps=2, kept=str(plain), **alone)
    for index in range(2):
        shutil.copytree(plain / "checkpoints", tmp_path / f"island-{index}" / "checkpoints")
    told = islands(2).call("island_case:train", rounds=3, method="local-sgd", period=1, **asked)
    assert [island[0]["began"] for island in told] == [2, 2]
    said = [line.get("text", "") for line in lines(tmp_path / "island-0" / "events.jsonl")]
    assert any("goes on from step 2 of a run without islands" in line for line in said)
    worlds(1).call("island_case:data_parallel", steps=3, **alone)
    ours, theirs = (torch.load(tmp_path / f"weights-{w}.pt") for w in ("0", "dp"))
    apart = torch.sqrt(sum(((ours[n] - theirs[n]) ** 2).sum() for n in theirs))
    assert apart <= 1e-12 * told[0][0]["norm"]
    held = list_held_rounds(tmp_path / "island-0", 1)
    assert list(held) == ["3", "2"]


STREAMS = {"method": "streaming-diloco", "period": 4, "fragments": 2, "overlap": 1, "batch": 4}


def test_what_travels_is_resumed(islands, tmp_path: Path) -> None:
    """3 rounds are 1 and 2 more, bit for bit; island 1 is refused in the second."""
    trouble = [{"island": 1, "round": 1, "what": "nan"}]
    asked = {"optimizer": "adamw", "model": "towers", **STREAMS}
    two = islands(2)
    whole = two.call("island_case:train", rounds=3, trouble=trouble, **asked)
    asked["folder"] = str(tmp_path)
    two.call("island_case:train", rounds=1, **asked)
    again = two.call("island_case:train", rounds=3, trouble=trouble, **asked)
    for (resumed,), (straight,) in zip(again, whole, strict=True):
        assert resumed["began"] == 1
        for key in ("own", "weights", "stream", "dealt"):
            assert resumed[key] == straight[key], key
        assert resumed["tokens"] == straight["tokens"][1:]
    assert whole[0][0]["refused"][1].keys() == {"1"}
    assert whole[0][0]["tokens"][2][0] > whole[0][0]["tokens"][0][0], "those of the last step"


def test_who_is_refused_last_keeps_nothing_of_the_round(islands) -> None:
    """Its samples go back, those of fragments that were merged before too: else they count twice."""
    trouble = [{"island": 1, "round": 1, "what": "nan", "fragment": 1}]
    told = islands(2).call(
        "island_case:train", rounds=2, trouble=trouble, optimizer="adamw", model="towers", **STREAMS
    )
    assert [island[0]["own"] == island[0]["weights"] for island in told] == [False, True]
    assert told[0][0]["refused"][1].keys() == {"1"}


def test_who_goes_on_from_anothers_checkpoint_brings_nothing(islands, tmp_path: Path) -> None:
    """What the lost disk had trained on is dealt again, and nobody sends island 0's steps twice."""
    asked = {"optimizer": "adamw", "model": "towers", "folder": str(tmp_path), **STREAMS}
    two = islands(2)
    before = two.call("island_case:train", rounds=2, **asked)
    assert before[0][0]["stream"]["open"] == []
    shutil.rmtree(tmp_path / "island-1" / "checkpoints")
    shutil.copytree(tmp_path / "island-0" / "checkpoints", tmp_path / "island-1" / "checkpoints")
    told = two.call("island_case:train", rounds=2, **asked)
    assert [island[0]["own"] == island[0]["weights"] for island in told] == [False, True]
    opened = told[0][0]["stream"]["open"]
    assert [stop - start for start, stop in opened] == [4], "the step that island 1 had on the way"
    assert told[0][0]["stream"] == told[1][0]["stream"]
    other = {**asked, "fragments": 1}
    again = two.call("island_case:train", rounds=3, **other)
    assert [island[0]["committed"] for island in again] == [[True]] * 2, "as one part from now on"
    manifests = sorted(tmp_path.glob("island-*/checkpoints/step-*/manifest.json"))
    assert len(manifests) >= 2
    for manifest in manifests:
        manifest.write_bytes(manifest.read_bytes()[:-20])
    rows = (tmp_path / "island-0" / "metrics.jsonl").read_bytes()
    with pytest.raises(Failed, match="to begin anew move these folders away"):
        two.call("island_case:train", rounds=3, **other)
    assert (tmp_path / "island-0" / "metrics.jsonl").read_bytes() == rows, "nothing began anew"


LAYOUTS = [
    "tp",
    *(pytest.param(n, marks=pytest.mark.proof) for n in ("pp", "ddp", "fsdp", "zero1")),
    pytest.param({"tp": 2, "pp": 2}, marks=pytest.mark.proof, id="tp-pp"),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_inside_an_island_does_not_matter(
    islands, tmp_path: Path, layout: str | dict[str, int]
) -> None:
    flat, split = tmp_path / "flat", tmp_path / "split"
    processes = 2 if isinstance(layout, str) else math.prod(layout.values())
    for folder, asked, size in ((flat, "single", 1), (split, layout, processes)):
        folder.mkdir()
        told = islands(2, size).call(
            "island_case:train", rounds=2, optimizer="momentum", layout=asked, folder=str(folder),
            **DILOCO,
        )  # fmt: skip
        assert len({one["weights"] for island in told for one in island}) == 1
    ours, theirs = (torch.load(one / "weights-0.pt") for one in (split, flat))
    apart = torch.sqrt(sum(((ours[n] - theirs[n]) ** 2).sum() for n in theirs))
    assert apart <= 1e-12 * told[0][0]["norm"]


def test_bad_changes_are_refused_and_the_others_go_on(islands) -> None:
    """NaN, the other way round, × 1000: each refused once, named, and taken back in the next round."""
    trouble = [
        {"island": 1, "round": 1, "what": "nan"},
        {"island": 2, "round": 2, "what": "flip"},
        {"island": 0, "round": 3, "what": "huge"},
    ]
    told = islands(3).call("island_case:train", rounds=5, trouble=trouble, **DILOCO)
    first = told[0][0]
    assert first["committed"] == [True] * 5
    assert [list(refused) for refused in first["refused"]] == [[], ["1"], ["2"], ["0"], []]
    assert "island 1: its change is not finite" in first["refused"][1]["1"]
    assert "points against the mean of the others" in first["refused"][2]["2"]
    assert "× the median of past rounds" in first["refused"][3]["0"]
    assert len({tuple(island[0]["digests"]) for island in told}) == 1
    assert {island[0]["weights"] for island in told} == {first["weights"]}
    for tokens, divisor in zip(first["tokens"], first["divisors"], strict=True):
        assert sum(tokens) == divisor, "those who count, and nobody else"
    assert [tokens.index(0) for tokens in first["tokens"][1:4]] == [1, 2, 0]


def test_broken_weights_are_healed_by_the_round(islands) -> None:
    """More steps in a row without numbers than a run without islands bears (train.skip_limit = 5)."""
    trouble = [{"island": 1, "round": 1, "what": "poison"}]
    asked = {"optimizer": "adamw", "method": "diloco", "period": 8, "batch": 2, "model": "towers"}
    told = islands(3).call("island_case:train", rounds=3, trouble=trouble, **asked)
    assert [list(refused) for refused in told[0][0]["refused"]] == [[], ["1"], []]
    assert {island[0]["weights"] for island in told} == {told[0][0]["weights"]}


def test_running_statistics_that_are_no_numbers_stay_on_their_island(islands) -> None:
    """Weights are well, BatchNorm's statistics are not: in nobody's mean, and healed by it."""
    trouble = [{"island": 1, "round": 1, "what": "statistics"}]
    asked = {"model": "cnn", "method": "diloco", "period": 1, "batch": 4}
    told = islands(3).call("island_case:train", rounds=2, trouble=trouble, **asked)
    assert list(told[0][0]["refused"][1]) == ["1"]
    assert all(math.isfinite(island[0]["norm"]) for island in told)


def test_a_round_that_only_some_islands_keep_is_over_for_all(islands) -> None:
    """NoLoCo: the one without a partner learns no numbers; its step did not happen, the round did."""
    alone = [next(p[0] for p in draw_pairs(3, r, 3) if len(p) == 1) for r in range(3)]
    trouble = [{"island": alone[1], "round": 1, "what": "nan"}]
    asked = {"model": "towers", "method": "noloco", "period": 2, "batch": 4}
    told = islands(3).call("island_case:train", rounds=3, trouble=trouble, **asked)
    for index, (island,) in enumerate(told):
        assert island["committed"] == [True, index != alone[1], True]
        assert [spread is None for spread in island["spread"]] == [index == one for one in alone]
    assert len({str(island[0]["stream"]) for island in told}) == 1
    assert told[0][0]["tokens"][1][alone[1]] == 0


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ("diloco", "islands 0 and 1: each came to another state"),
        ("noloco", "island 1: its own outer weights or momentum of "),
    ],
)
def test_a_flipped_bit_of_the_outer_state_is_never_committed(
    islands, method: str, said: str
) -> None:
    """The last bits of a weight of island 1: no number would show it, and no learning rate helps."""
    bit = {"island": 1, "round": 1, "what": "bit"}
    asked = {"model": "towers", "batch": 2, "period": 1, "refusals": 2, "trouble": [bit]}
    for (island,) in islands(2).call("island_case:train", rounds=9, method=method, **asked):
        assert (island["round"], island["code"]) == (1, 1)
        assert f"2 rounds in a row were discarded, last because {said}" in island["line"]
        assert "try: resume from the last round that all agreed on" in island["line"]


def test_what_codes_leave_out_is_kept_per_tier(islands) -> None:
    """A region of one island cuts other pieces than both islands do."""
    asked = {"period": 1, "batch": 4, "codec": "sign", "far_period": 2}
    told = islands(2).call("island_case:train", rounds=4, method="diloco", regions=2, **asked)
    assert all(island[0]["committed"] == [True] * 4 for island in told)
    assert {tag.split("/")[0] for tag in told[0][0]["left"]} == {"0", "0.near"}


@pytest.mark.parametrize("codec", ["sign", pytest.param("top2bit", marks=pytest.mark.proof)])
def test_what_codes_left_out_is_resumed(islands, tmp_path: Path, codec: str) -> None:
    """4 rounds are 2 and 2 more, bit for bit, on every rank; island 0 is refused in the last two.

    What it owes the others stays as it was, but not what it left out of the sums that it sent.
    """
    two = islands(2, 2)
    trouble = [{"island": 0, "round": r, "what": "nan"} for r in (2, 3)]
    asked = {"layout": "fsdp", "codec": codec, "method": "diloco", "period": 1, "model": "towers"}
    whole = two.call("island_case:train", rounds=4, trouble=trouble, **asked)
    asked["folder"] = str(tmp_path)
    first = two.call("island_case:train", rounds=2, **asked)
    again = two.call("island_case:train", rounds=4, trouble=trouble, **asked)
    for before, resumed, straight in zip(first, again, whole, strict=True):
        for rank in range(2):
            assert resumed[rank]["began"] == 2
            assert resumed[rank]["weights"] == straight[rank]["weights"]
            assert resumed[rank]["left"] == straight[rank]["left"]
            assert resumed[rank]["left"].keys() == before[rank]["left"].keys()
    assert again[0][0]["refused"][-1].keys() == {"0"}
    for rank in range(2):
        now, then = again[0][rank]["left"], first[0][rank]["left"]
        sums = {tag for tag in now if "sum" in tag}
        assert bool(sums) == (codec == "sign"), "island 0 owns all of so few numbers"
        assert {tag for tag in now if now[tag] != then[tag]} == sums


def test_a_round_that_was_taken_back_leaves_nothing(islands, tmp_path: Path) -> None:
    """Island 0 had written the second round, island 1 had not: the second one is written anew."""
    two = islands(2)
    asked = {"model": "towers", "batch": 4, "folder": str(tmp_path), "method": "diloco"}
    two.call("island_case:train", rounds=2, period=1, **asked)
    newest = list_checkpoints(tmp_path / "island-1" / "checkpoints")[0].path
    shutil.rmtree(newest)
    told = two.call("island_case:train", rounds=2, period=1, outer_lr=0.5, **asked)
    assert [island[0]["began"] for island in told] == [1, 1]
    held = [list_held_rounds(tmp_path / f"island-{index}", 1) for index in range(2)]
    assert held[0] == held[1]
    assert held[0]["2"][0] == told[0][0]["digests"][-1]


def test_a_slow_island_takes_fewer_steps_and_counts_as_what_it_did(islands) -> None:
    """Steps of 20 and of 80 ms: a quarter of the steps, a quarter of the weight."""
    slow = [
        {"island": island, "round": -1, "what": "slow", "seconds": 0.08 if island == 2 else 0.02}
        for island in range(3)
    ]
    told = islands(3).call(
        "island_case:train", rounds=3, trouble=slow, model="towers", method="diloco", period=8,
        batch=2, pace="speed",
    )  # fmt: skip
    first = told[0][0]
    samples = [sum(stop - start for start, stop in spans) for spans in first["dealt"]]
    assert max(samples) >= 12
    assert samples[2] <= 0.6 * max(samples), "a quarter, but for a busy machine and short steps"
    assert {island[0]["weights"] for island in told} == {first["weights"]}


SMALL = {"model": "towers", "batch": 2, "period": 4}
FRAGMENTS = {"method": "streaming-diloco", "fragments": 2, "overlap": 1, **SMALL}


def test_an_island_that_cannot_save_holds_the_others_back(islands, tmp_path: Path) -> None:
    """Its disk is full after round 2, once: round 3 is discarded, round 2 saved, and all go on.

    What islands have in common is the same in all checkpoints of a round, whenever they were written.
    """
    two = islands(2)
    full = {"island": 1, "round": 2, "what": "full", "saves": 1}
    asked = {"folder": str(tmp_path), "trouble": [full], "refusals": 2, **FRAGMENTS}
    told = two.call("island_case:train", rounds=4, **asked)
    for index, (island,) in enumerate(told):
        assert island["committed"] == [True, True, False, True]
        assert "island 1: round 2 is not on its disk: No space left on device" in island["why"][2]
        events = lines(tmp_path / f"island-{index}" / "events.jsonl")
        discarded = [event["why"] for event in events if event["event"] == "round_discarded"]
        assert discarded == [island["why"][2]]
        found = [
            read_manifest(one.path)
            for one in list_checkpoints(tmp_path / f"island-{index}/checkpoints")
        ]
        kept = [one.record["islands"] for one in found]
        assert [(one["round"], one["failures"]) for one in kept] == [(3, 0), (2, 0)]
    held = [list_held_rounds(tmp_path / f"island-{index}", 1) for index in range(2)]
    assert {r: d for r, (d, _) in held[0].items()} == {r: d for r, (d, _) in held[1].items()}
    asked["trouble"] = [{**full, "round": 4, "saves": 9}]
    stopped = two.call("island_case:train", rounds=9, **asked)
    for (island,) in stopped:
        assert island["round"] == 4
        assert "2 rounds in a row were discarded, last because island 1: round 4" in island["line"]
        assert "No space left on device; try: mend that, and resume" in island["line"]
    again = two.call("island_case:train", rounds=4, **{**asked, "trouble": []})
    assert [island[0]["began"] for island in again] == [3, 3], "the newest that both hold"


def test_a_slow_disk_is_waited_for(islands, tmp_path: Path) -> None:
    """A save of 1.2 s where nobody is waited for longer than 0.8 s: it says that it still writes."""
    hasty = [{"island": k, "round": 1, "what": "hasty", "seconds": 0.8} for k in range(2)]
    slow = {"island": 1, "round": 1, "what": "stall", "seconds": 1.2}
    told = islands(2).call(
        "island_case:train", rounds=2, folder=str(tmp_path), trouble=[*hasty, slow],
        method="diloco", **SMALL,
    )  # fmt: skip
    assert [island[0].get("committed") for island in told] == [[True, True]] * 2, told
    first = told[0][0]
    assert first["exchange_s"][1] > first["learnt_s"][1] + 0.2, "a save is no silence"
    waits = {"meet the other islands", "merge with the other islands"}
    assert waits <= set(first["phases"]), "what the terminal says meanwhile"


USUAL = [("die", "voted")]
MORE = [("die", "steps"), ("stop", "reduce"), ("die", "reduce"), ("die", "commit")]


@pytest.mark.parametrize("faults", [USUAL, pytest.param(MORE, marks=pytest.mark.proof)])
def test_a_lost_island_stops_the_others_and_all_go_on_as_if_nothing_had_been(
    islands, tmp_path: Path, faults: list[tuple[str, str]]
) -> None:
    """SIGKILL and SIGSTOP in the phases of round 2: the end is bit for bit the uninterrupted one."""
    three = islands(3)
    asked = {"rounds": 4, "optimizer": "adamw", **DILOCO}
    (tmp_path / "whole").mkdir()
    whole = three.call("island_case:train", folder=str(tmp_path / "whole"), **asked)[0][0]
    for what, at in faults:
        folder = tmp_path / f"{what}-{at}"
        folder.mkdir()
        trouble = [{"island": 1, "round": 2, "what": what, "at": at}]
        told = three.call("island_case:train", folder=str(folder), trouble=trouble, ends=1, **asked)
        for island in (0, 2):
            lost = told[island][0]
            assert lost["islands"] == [1], (what, at, lost)
            assert "island 1" in lost["line"], lost
            assert lost["round"] == (3 if at == "voted" else 2), (what, at, lost)
        again = three.call("island_case:train", folder=str(folder), **asked)
        began = {one[0]["began"] for one in again}
        assert began in ({1}, {2}), "what the dead one had written, and not more"
        assert {one[0]["weights"] for one in again} == {whole["weights"]}, (what, at)
        assert again[0][0]["stream"] == whole["stream"]


@pytest.mark.proof
def test_a_cut_link_ends_a_run_for_good_or_only_delays_it(tmp_path: Path) -> None:
    """Namespaces and real links: gone for good, both sides stop and name the other; 5 s, nobody does."""
    try:
        net = Net(3)
    except Forbidden as why:
        skip("cut links between islands NOT TESTED", str(why))
    far = Islands(3, 1, tmp_path / "logs", [net.inside(island) for island in range(3)])
    folder = tmp_path / "run"
    folder.mkdir()
    slow = [{"island": k, "round": -1, "what": "slow", "seconds": 0.2} for k in range(3)]
    asked = {"folder": str(folder), "trouble": slow, "host": net.addresses[0], **DILOCO}

    def rounds() -> int:
        events = lines(folder / "island-0" / "events.jsonl")
        return sum(event["event"] == "round_committed" for event in events)

    def cut(after: int, seconds: float) -> None:
        until_s = time.monotonic() + 90
        while rounds() < after and time.monotonic() < until_s:
            time.sleep(0.02)
        net.cut(2)
        if seconds:
            time.sleep(seconds)
            net.mend(2)

    try:
        gone = threading.Thread(target=cut, args=(4, 0.0))
        gone.start()
        told = far.call("island_case:train", rounds=40, **asked)
        gone.join()
        assert [island[0]["islands"] for island in told[:2]] == [[2], [2]]
        assert told[2][0]["islands"] in ([0], [1], [0, 1])
        net.mend(2)
        before = rounds()
        back = threading.Thread(target=cut, args=(before + 2, 5.0))
        back.start()
        again = far.call("island_case:train", rounds=before + 6, **asked)
        back.join()
        assert all(all(island[0]["committed"]) for island in again)
        assert len({island[0]["weights"] for island in again}) == 1
        longest = max(e["exchange_s"] for e in lines(folder / "island-0" / "events.jsonl")
                      if e["event"] == "round_committed")  # fmt: skip
        assert longest > 3, "the cut was in an exchange"
    finally:
        far.close()
        net.close()
