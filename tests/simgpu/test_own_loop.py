"""A loop of one's own on simulated devices: the numbers of the same loop on the CPU, and its launches.

One world of 2 ranks on devices and one on the CPU take every row, since a start costs more than one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from ranks import world

MOVED = ("recompute", "compress", "offload activations", "offload optimizer")
SAMPLE = {
    2: ("ddp", "zero1", "zero2", "fsdp", "tp", "pp", "cp", "ep", *MOVED),
    4: ("hsdp", "pp fsdp"),
}
PLAIN = {2: ("plain ddp", "plain zero1", "plain zero2", "plain fsdp"), 4: ("plain hsdp",)}
ELSEWHERE = ("zero2", "plain ddp", "plain zero1", "plain zero2")
"""Left to `make proof`: zero 1 and fsdp do what they do."""
COUNTED = {2: ("ddp", "fsdp", "tp", "pp", "ep"), 4: ("hsdp", "pp fsdp")}
ALL_OF_FOUR = ("hsdp", "tp fsdp", "pp fsdp")
WAITS = {"aten::equal"}
"""Operators of a step for which the host waits, as on a GPU: what they give depends on numbers. This
one asks, once in a run, whether the optimizer moved the model."""

Told = dict[str, Any]


def both(
    forks: Any, cpu_forks: Any, size: int, names: tuple[str, ...], **settings: str
) -> tuple[Told, Told]:
    """What devices told, and the CPU. No copy may begin from memory that is not pinned: it waits.

    cpu_forks   of processes without the device's library; None: of the same, told to leave it
    """
    ours = world("own_loop.py", size, names, {"SIM_UNPINNED": "refuse", **settings}, forks.start)
    if cpu_forks is None:
        expected = world("own_loop.py", size, (*names, "--cpu"), {}, forks.start)
    else:
        expected = world("own_loop.py", size, names, {}, cpu_forks.start)
    assert ours["device"] == "cuda:0"
    assert expected["device"] == "cpu"
    return ours, expected


def compare(told: tuple[Told, Told], names: Sequence[str]) -> None:
    """Kernels are the same, so numbers are, to what sums of ranks in another order make."""
    ours, expected = (one["rows"] for one in told)
    for name in names:
        assert isinstance(expected[name], list), (name, expected[name])
        assert ours[name] == pytest.approx(expected[name], rel=1e-14, abs=0), name


SIZES = [(2, ELSEWHERE), *(pytest.param((k, ()), marks=pytest.mark.proof) for k in (2, 4))]
"""The short row's CPU is that of processes which have the device: a start of others costs 5 CPU s."""


@dataclass
class Trained:
    """Rows of a world, and what devices and the CPU told of them."""

    rows: list[str]
    plain: list[str]
    counted: tuple[str, ...]
    told: tuple[Told, Told]


@pytest.fixture(scope="module", params=SIZES, ids=["2, short", "2", "4"])
def trained(request, forks) -> Trained:
    size, left = request.param
    cpu_forks = None if left else request.getfixturevalue("cpu_forks")
    rows, plain = ([n for n in names if n not in left] for names in (SAMPLE[size], PLAIN[size]))
    told = both(forks, cpu_forks, size, (*rows, *plain))
    return Trained(rows, plain, COUNTED[size], told)


def test_every_layout_computes_what_it_computes_on_the_cpu(trained: Trained) -> None:
    compare(trained.told, trained.rows)


def test_a_plain_module_has_the_bits_of_the_cpu(trained: Trained) -> None:
    ours, expected = trained.told
    for name in trained.plain:
        assert ours["steps"][name]["bits"] == expected["steps"][name]["bits"], name
        assert ours["rows"][name] == expected["rows"][name], name


def test_kernels_begin_after_their_launch(trained: Trained) -> None:
    """A step runs behind the host's back."""
    ours, _ = trained.told
    for name in trained.counted:
        step = ours["steps"][name]
        assert step["all"] > 500, name
        assert step["begun"] <= 0.05 * step["all"], name
        assert set(step["waits"]) <= WAITS, name


@pytest.mark.proof
@pytest.mark.parametrize("seed", range(20))
def test_every_seed_computes_it(forks, cpu_forks, seed: int) -> None:
    compare(both(forks, cpu_forks, 2, SAMPLE[2], SIM_SEED=str(seed)), SAMPLE[2])


@pytest.mark.proof
@pytest.mark.parametrize("mode", ["eager", "lazy"])
def test_other_schedules_compute_it(forks, cpu_forks, mode: str) -> None:
    for size, names in ((2, SAMPLE[2]), (4, ALL_OF_FOUR)):
        compare(both(forks, cpu_forks, size, names, SIM_MODE=mode), names)
