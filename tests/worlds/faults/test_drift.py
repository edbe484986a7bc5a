"""Bits that change in memory, and updates that go wrong on one rank: named before they are saved."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from cli_run import TOY_ARGUMENTS, CommandLine, final_hashes, trajectory

LAYOUTS: dict[str, tuple[int, Any]] = {
    "ddp": (2, "ddp"),
    "zero1": (2, "zero1"),
    "fsdp": (2, "fsdp"),
    "tp": (2, {"tp": 2}),
    "hsdp": (4, "hsdp"),
}


@pytest.mark.parametrize(
    "layout", [n if n != "zero1" else pytest.param(n, marks=pytest.mark.proof) for n in LAYOUTS]
)
def test_a_flipped_bit_is_named_and_never_saved(worlds, tmp_path: Path, layout: str) -> None:
    """Rank, tensor and bit, by the next step or the next save, whichever comes first."""
    size, words = LAYOUTS[layout]
    asked = {"layout": words, "folder": str(tmp_path), "count": 20, "seed": 1}
    for told in worlds(size).call("drift_case:flips", **asked):
        assert told["wrong"] == []
        assert told["told"] == 20
        assert told["false alarms"] == []
        assert len(told["hit"]) > 3, "weights and moments of more than one rank"


def test_by_default_nothing_that_replicas_hold_is_saved(worlds, tmp_path: Path) -> None:
    asked = {"layout": "ddp", "folder": str(tmp_path), "count": 12, "seed": 2}
    for told in worlds(2).call("drift_case:flips_by_default", **asked):
        assert told["wrong"] == []
        assert (told["saved"], told["named"] + told["gone"]) == (0, 12)
        assert told["named"] > 6


def test_a_flip_is_not_called_a_users_change(worlds) -> None:
    """Ranks compare weights in steps 1, 2, 4, 8, …: one element is no code's doing."""
    (flipped, _), (changed, _) = (
        worlds(2).call("drift_case:unlike_at_a_reading", noise=noise) for noise in (False, True)
    )
    assert flipped.startswith("ClusterError: step 7: 0.norm.weight on rank 0 ("), flipped
    assert changed.startswith("ConfigError: step 8: weights on rank 1 are not those"), changed


def test_without_a_look_the_same_bit_is_saved(worlds, tmp_path: Path) -> None:
    answers = worlds(2).call("drift_case:unwatched", layout="fsdp", folder=str(tmp_path))
    assert answers == [{"told": "nothing was raised", "kept": True}] * 2


@pytest.mark.parametrize(
    "layout",
    [name if name == "fsdp" else pytest.param(name, marks=pytest.mark.proof) for name in LAYOUTS],
)
def test_clean_steps_are_not_blamed(worlds, layout: str) -> None:
    size, words = LAYOUTS[layout]
    for drift in ("auto", "every"):
        answers = worlds(size).call("drift_case:clean_steps", layout=words, count=30, drift=drift)
        for told in answers:
            assert (told["told"], told["steps"]) == ("nothing was raised", 30)
            assert told["every"] == answers[0]["every"], "ranks look at the same steps"


@pytest.mark.parametrize("size", [2, 4])
def test_an_update_that_went_wrong_on_one_rank_is_named(worlds, size: int) -> None:
    """With four replicas by vote; of two it cannot be known which one is wrong."""
    answers = worlds(size).call("drift_case:wrong_update", layout="ddp")
    assert set(answers) == {answers[0]}
    if size == 2:
        assert re.match(
            r"ClusterError: step 4: 0\.down\.bias on rank 0 \(.*\), rank 1 \(.*\) differs, and "
            r"one of them is wrong",
            answers[0],
        ), answers[0]
    else:
        assert re.match(
            r"ClusterError: step 4: 0\.down\.bias on rank 1 \(.*\) is other than on 3 ranks that "
            r"hold the same",
            answers[0],
        ), answers[0]


@pytest.mark.parametrize("layout", [pytest.param("ddp", marks=pytest.mark.proof), "zero1"])
def test_what_all_ranks_write_is_meant(worlds, layout: str) -> None:
    answers = worlds(2).call("drift_case:written", layout=layout)
    assert answers == [["nothing was raised"] * 4] * 2


def test_an_all_reduce_that_adds_wrongly_ends_the_start(worlds) -> None:
    for wrong, right in worlds(2).call("drift_case:wrong_sum"):
        assert wrong == (
            "ClusterError: rank 1: an all-reduce of known numbers gave 40 at place 77, 39 is right "
            "(wrong on ranks 1 of 2): a link, a card or its library adds wrongly; try: leave "
            "that machine out, or another version of the library"
        )
        assert right == "nothing was raised"


FLIPPER = '''
import gc, os, time
from pathlib import Path
import torch, toy

def flip(event):
    """After step 7 one bit of one weight of rank 1, once; the run knows nothing of it."""
    mark = Path("flipped")
    if event["event"] == "step" and (event["step"], event["rank"]) == (7, 1) and not mark.exists():
        mark.touch()
        kept, until_s = Path("runs/run/checkpoints/step-6/manifest.json"), time.monotonic() + 30
        while not kept.exists() and time.monotonic() < until_s:  # its save goes on beside training
            time.sleep(0.005)
        module = next(one for one in gc.get_objects() if type(one) is toy.Toy)
        raw = module.net[4].weight.detach().reshape(-1).view(torch.uint8).numpy()
        raw[4 * 11 + 2] ^= 1 << 6
'''


def test_a_run_goes_on_from_the_last_checkpoint_as_if_nothing_had_been(tmp_path: Path) -> None:
    """Rank 1 is the one that died, and losses and weights are those of an unbroken run."""
    (tmp_path / "flipper.py").write_text(FLIPPER)
    arguments = (*TOY_ARGUMENTS, "launch.processes=2", "train.drift=every")
    broken = CommandLine(tmp_path, *arguments, "train.on=flipper:flip")
    code, output = broken.finish()
    assert code == 0, output
    (told,) = broken.events("drift")
    assert (told["step"], told["ranks"], told["tensor"]) == (8, [1], "net.4.weight")
    assert "bit 22 of one element flipped" in output
    assert [one["rank"] for one in broken.events("worker_died")] == [1]
    assert broken.events("restarting")[0]["saved"] == 6
    whole = CommandLine(tmp_path, *arguments, name="whole")
    code, output = whole.finish()
    assert code == 0, output
    assert whole.events("drift") == []
    assert trajectory(broken.run) == trajectory(whole.run)
    assert final_hashes(broken.run) == final_hashes(whole.run)
