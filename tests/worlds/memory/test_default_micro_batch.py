"""Without a micro-batch a pass takes a rank's whole share, kept by resumes on other ranks.

Samples are neither lost nor doubled where the micro-batch changes in mid-epoch; one line says that
it does. One process computes what a plain loop computes, BatchNorm included.
"""

from __future__ import annotations

import tarfile
from collections import Counter
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import default_cut_case
from default_cut_case import BATCH, SAMPLES, Numbers
from shoal.fabric import start_world
from shoal.trainer.parallelize import parallelize

LEGS = [(1, 2), (2, 1), (3, 2), (4, 1), (1, 3)]
SIZES = [24, 12, 8, 6, 6]


def legs(worlds: Any, folder: Path, wanted: list[tuple[int, int]], **more: Any) -> list[Any]:
    """What every rank of every leg gave."""
    told = []
    for size, steps in wanted:
        asked = {"folder": str(folder), "steps": steps, **more}
        if size == 1:
            told.append([default_cut_case.leg(start_world({}), **asked)])
        else:
            told.append(worlds(size).call("default_cut_case:leg", **asked))
    return told


def seen(told: list[Any]) -> Counter[int]:
    """How often each sample was trained on."""
    return Counter(chain.from_iterable(chain(*(rank["ids"] for leg in told for rank in leg))))


def test_a_loop_goes_on_on_other_ranks(worlds, tmp_path: Path) -> None:
    told = legs(worlds, tmp_path / "run", LEGS)
    assert [leg[0]["micro_batch"] for leg in told] == SIZES
    assert [leg[0]["began"] for leg in told] == [0, 2, 3, 5, 6]
    assert seen(told) == Counter(range(SAMPLES)), "an epoch of nine steps"
    assert {n for leg in told[:4] for rank in leg for n in rank["passes"]} == {1}
    assert told[4][0]["passes"][:2] == [4, 4], "6 samples a pass stay"
    lines = told[4][0]["told"]
    for size, less in ((24, 12), (12, 8), (8, 6)):
        assert any(f"micro_batch: {size} → {less}" in line for line in lines), lines
    assert sum("micro_batch:" in line for line in lines) == 3


def test_shards_go_on_on_other_ranks(worlds, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    (tmp_path / "s").mkdir()
    for shard in range(4):
        with tarfile.open(tmp_path / "s" / f"s-{shard}.tar", "w") as tar:
            for n in range(51):
                info = tarfile.TarInfo(f"{shard * 51 + n:06}.cls")
                info.size = 1
                tar.addfile(info, BytesIO(b"0"))
    wanted = [(1, 2), (2, 2), (4, 2), (1, 3)]
    told = legs(worlds, tmp_path / "run", wanted, shards=str(tmp_path / "s" / "*.tar"))
    assert [leg[0]["micro_batch"] for leg in told] == [24, 12, 6, 6]
    assert seen(told) == Counter(range(SAMPLES))


def test_one_process_is_a_plain_loop(tmp_path: Path) -> None:
    """The same order of samples, in float64, running statistics included."""

    def made() -> nn.Module:
        torch.manual_seed(5)
        return nn.Sequential(
            nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)
        ).double()

    run = parallelize(
        made(), lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), batch=BATCH, seed=3,
        precision="fp64", world=start_world({}),
    )  # fmt: skip
    data, order, losses = Numbers(), [], []
    for _ in range(2):
        for batch in run.loader(data):
            assert len(batch) == 1, "one pass"
            order.append(batch.sample_ids[0])
            losses.append(run.step(batch).loss)
    plain = made()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
    for ids, loss in zip(order, losses, strict=True):
        inputs, targets = (torch.stack(part) for part in zip(*(data[n] for n in ids), strict=True))
        optimizer.zero_grad()
        value = nn.functional.cross_entropy(plain(inputs), targets)
        value.backward()
        optimizer.step()
        assert abs(value.item() - loss) <= 1e-12
    for (name, one), other in zip(
        run.model.state_dict().items(), plain.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12, msg=name)
    run.close()


def test_a_model_that_cannot_be_counted_is_tried_while_it_is_whole(worlds, tmp_path: Path) -> None:
    """What reads its numbers in Python has no shapes to be traced by; under fsdp it is in parts."""
    world = worlds(2)
    for told in world.call("default_cut_case:uncounted", folder=str(tmp_path / "a"), layout="ddp"):
        assert told["passes"] == [1]
        assert not [line for line in told["told"] if line.startswith("micro-batch:")]
    for told in world.call("default_cut_case:uncounted", folder=str(tmp_path / "b"), layout="fsdp"):
        assert told["passes"] == [4], "of a share of 12, three at a time"
        (line,) = [line for line in told["told"] if line.startswith("micro-batch:")]
        assert line.startswith("micro-batch: 3 samples, an eighth of the batch, since what a pass")
        assert line.endswith("; faster where it fits; try: batch=24 and micro_batch=12")


@pytest.mark.parametrize("given", [4, 8])
def test_a_given_size_stays_given(worlds, tmp_path: Path, given: int) -> None:
    """As it is for everybody: on ranks that it does not fit, refused with the nearest."""
    legs(worlds, tmp_path / "run", [(1, 1)], micro_batch=given)
    (first,) = legs(worlds, tmp_path / "other", [(2, 1)], micro_batch=4)
    assert {tuple(rank["passes"]) for rank in first} == {(3,)}
