"""Real islands whose layouts, numbers of processes, precisions and micro-batches differ."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import cases
from changing_islands import Coming, check_drawn_faults
from cli_run import lines
from shoal.checkpoint.format.listing import list_checkpoints, read_manifest

UNLIKE: list[dict[str, Any]] = [
    {"layout": "single", "precision": "fp32"},
    {"layout": "fsdp", "precision": "bf16", "micro_batch": 1},
    {"layout": {"tp": 2}, "precision": "fp32", "micro_batch": 4},
]
SMALL = 1500
"""Numbers of a unit here: the model has some 8,000, so that each rank has units of its own."""


@pytest.fixture
def unlike(islands, tmp_path: Path) -> Iterator[Coming]:
    """Islands of one, two and two processes."""
    found = Coming(islands(3, (1, 2, 2)), tmp_path, model="llama", batch=4, unit=SMALL)
    yield found
    for index in found.asked_of:
        found.islands.worlds[index].kill()


def check_equal_digests(coming: Coming, told: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All islands finished, with the same weights and the same digest after each turn."""
    assert [one.get("finished") for one in told] == [True] * len(told), told
    assert len({one["weights"] for one in told}) == 1
    turns = [{e["round"]: e["digest"] for e in coming.turns(index)} for index in range(len(told))]
    for turn, digest in turns[0].items():
        assert {one.get(turn, digest) for one in turns} == {digest}, turn
    return coming.turns(0)


def test_unlike_islands_hold_equal_digests_after_each_round(unlike: Coming) -> None:
    """One process in fp32, fsdp × 2 in bf16, tp × 2: AdamW inside, momentum outside."""
    for index, own in enumerate(UNLIKE):
        unlike.start(index, rounds=3, optimizer="adamw", **own)
    turns = check_equal_digests(unlike, unlike.collect(0, 1, 2))
    assert [turn["admitted"] for turn in turns] == [[0, 1, 2]] * 3
    assert len({turn["digest"] for turn in turns}) == 3
    check_equal_slices(unlike.folder)
    said = [e for e in lines(unlike.folder / "island-2" / "events.jsonl") if e["event"] == "notice"]
    assert not [e for e in said if "was changed between steps" in e["text"]], "Shoal wrote them"


def check_equal_slices(folder: Path) -> None:
    """A checkpoint has the same slices of merged weights as of the model: a copy needs them once."""
    for index in range(len(UNLIKE)):
        newest = list_checkpoints(folder / f"island-{index}" / "checkpoints")[0]
        tensors = read_manifest(newest.path).tensors
        for name in [one for one in tensors if one.startswith("model.")]:
            model, merged = (
                {one.box: one.sha256 for one in tensors[full].slices}
                for full in (name, name.replace("model.", "outer.", 1))
            )
            assert model == merged, (index, name)


@pytest.mark.parametrize(
    ("model", "layout"),
    [*(("llama", one) for one in ("ddp", "zero2", "fsdp", {"tp": 2}, {"pp": 2})), ("cnn", "ddp")],
    ids=str,
)
def test_canonical_numbers_do_not_depend_on_the_layout(worlds, model: str, layout: Any) -> None:
    """The flat tensors are those of one process, and each rank gets its own parts back."""
    asked = {"unit": SMALL if model == "llama" else 200, "model": model, "batch": 4}
    (alone,) = worlds(1).call("member_case:canonical", **asked)
    told = worlds(2).call("member_case:canonical", layout=layout, **asked)
    for kind in range(2):
        assert {one[kind][1] for one in told} == {alone[kind][1]}
    assert all(dict(one[0][0]) for one in told), "each rank has units"
    assert bool(alone[1][0]) == (model == "cnn"), "running statistics"


@pytest.mark.proof
def test_running_statistics_are_merged_whatever_the_layout(unlike: Coming) -> None:
    """BatchNorm: equal on all islands after the last round, as the weights are."""
    for index, own in enumerate(["single", "ddp", "fsdp"]):
        unlike.start(index, rounds=3, model="cnn", layout=own, precision="fp32", unit=200)
    told = unlike.collect(0, 1, 2)
    assert [one.get("finished") for one in told] == [True] * 3, told
    first, *others = (torch.load(unlike.folder / f"weights-{index}.pt") for index in range(3))
    numbers = [name for name, one in first.items() if one.is_floating_point()]
    assert [name for name in numbers if "running_mean" in name]
    for other in others:  # batches are counted by each island for itself
        assert [name for name in numbers if not torch.equal(other[name], first[name])] == []


@pytest.mark.proof
@pytest.mark.parametrize(
    "more",
    [{"codec": "none"}, {"codec": "int8"}, {"method": "fedprox"}, {"method": "fedopt"}],
    ids=lambda more: next(iter(more.values())),
)
def test_unlike_layouts_train_as_alike_ones(
    unlike: Coming, islands, tmp_path: Path, more: dict[str, Any]
) -> None:
    """In float64 the same weights as of three islands of one process, but for the order of sums."""
    asked = {"rounds": 4, "optimizer": "momentum", "precision": "fp64", **more}
    for index, own in enumerate(UNLIKE):
        unlike.start(index, **{**own, **asked, "micro_batch": 2})
    check_equal_digests(unlike, unlike.collect(0, 1, 2))
    alike = Coming(islands(3), tmp_path / "alike", model="llama", batch=4, unit=SMALL)
    for index in range(3):
        alike.start(index, **asked)
    check_equal_digests(alike, alike.collect(0, 1, 2))
    one, other = (torch.load(c.folder / "weights-0.pt") for c in (unlike, alike))
    for name, weight in one.items():
        assert (weight - other[name]).abs().max() <= 1e-9 * other[name].abs().max(), name


@pytest.mark.proof
@pytest.mark.parametrize("lost", [0, 1, 2])
def test_an_unlike_island_dies_and_takes_the_state_of_another(unlike: Coming, lost: int) -> None:
    """It comes back with an empty disk, and resumes from a checkpoint of another layout."""
    trouble: list[dict[str, Any]] = [
        {"island": lost, "round": 1, "what": "die"},
        {"island": (lost + 1) % 3, "round": 3, "what": "await", "for": lost},
    ]
    for index, own in enumerate(UNLIKE):
        unlike.start(index, rounds=6, optimizer="adamw", trouble=trouble, **own)
    unlike.ended(lost)
    (unlike.folder / f"island-{lost}").rename(unlike.folder / f"lost-{lost}")
    unlike.start(lost, rounds=6, optimizer="adamw", **UNLIKE[lost])
    check_equal_digests(unlike, unlike.collect(0, 1, 2))
    assert unlike.turns((lost + 1) % 3)[-1]["admitted"] == [0, 1, 2]


def test_a_fixed_list_goes_on_as_unlike_islands(unlike: Coming, islands) -> None:
    """A fixed list names its weights by the parts of its layout; one island has an older round."""
    asked = {"optimizer": "adamw", "model": "llama", "batch": 4, "precision": "fp32"}
    folder = str(unlike.folder)
    islands(3).call(
        "island_case:train", rounds=2, method="diloco", period=2, folder=folder, **asked
    )
    shutil.rmtree(unlike.folder / "island-1" / "checkpoints" / "step-4")
    for index, own in enumerate(UNLIKE):
        unlike.start(index, rounds=4, **{**asked, **own})
    turns = check_equal_digests(unlike, unlike.collect(0, 1, 2))
    assert [turn["round"] for turn in turns][-2:] == [2, 3]


@pytest.mark.proof
@pytest.mark.parametrize("seed", [1, 2])
def test_drawn_faults_of_unlike_islands(unlike: Coming, seed: int) -> None:
    """Whoever comes back takes over a checkpoint of another layout; some have an empty disk."""
    unlike.own = UNLIKE
    check_drawn_faults(unlike, seed, rounds=120)


SEEDS = range(5)


@pytest.mark.proof
def test_unlike_islands_learn_as_much_as_alike_ones(
    unlike: Coming, islands, tmp_path: Path
) -> None:
    """The loss after equal tokens, of five seeds: within 1 % in the mean.

    Without dropout, since its masks belong to micro-batches, which differ.
    """
    asked = {"rounds": 30, "period": 4, "optimizer": "adamw"}
    losses = dict[str, list[float]]()
    for seed in SEEDS:
        for kind, own in (("unlike", UNLIKE), ("alike", UNLIKE[:1] * 3)):
            worlds = unlike.islands if kind == "unlike" else islands(3)
            folder = tmp_path / f"{kind}-{seed}"
            coming = Coming(worlds, folder, model=cases.WITHOUT_DROPOUT, batch=4, unit=SMALL)
            for index, one in enumerate(own):
                coming.start(index, seed=seed, **asked, **one)
            check_equal_digests(coming, coming.collect(0, 1, 2))
            losses.setdefault(kind, []).append(loss_of(coming.folder / "weights-0.pt"))
    start = loss_of(None)
    pairs = list(zip(losses["unlike"], losses["alike"], strict=True))
    print(f"loss before {start:.4f}; unlike, alike: {pairs}")
    assert max(losses["alike"]) < 0.95 * start, (start, pairs)
    assert all(abs(one / other - 1) <= 0.01 for one, other in pairs), pairs
    ratio = sum(losses["unlike"]) / sum(losses["alike"])
    assert abs(ratio - 1) <= 0.01, pairs


def loss_of(weights: Path | None) -> float:
    """The mean loss of the model on all its samples, as it is built or with these weights."""
    model, data = cases.build("llama").eval(), cases.dataset("llama")
    if weights is not None:
        loaded = model.load_state_dict(torch.load(weights), strict=False)
        assert loaded.missing_keys == ["head.weight"], "tied to the embedding"
    batch = torch.utils.data.default_collate([data[k] for k in range(len(data))])
    with torch.no_grad():
        total, count = cases.plain_loss("llama", model, batch)
    return float(total / count)


def test_an_island_in_fp64_is_refused_by_name(islands, tmp_path: Path) -> None:
    """Merged weights are fp64 on all islands, or on none."""
    coming = Coming(islands(2), tmp_path, model="towers", wait_s=5.0)
    for index, precision in enumerate(["fp32", "fp64"]):
        coming.start(index, rounds=2, precision=precision)
    told = [one.get("line", "") for one in coming.collect(0, 1)]
    sides = ["fp32, bf16 or fp16 on island 0", "fp64 on island 1"]  # either may say it first
    why = "merged weights are fp64 on all islands, or on none; try: precision.compute=fp32"
    wanted = {f"precision.compute = {', '.join(one)}: {why}" for one in (sides, sides[::-1])}
    assert wanted & {*told}, told
