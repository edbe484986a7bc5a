"""A loop of one's own on simulated devices gives the numbers of the same loop on the CPU."""

from __future__ import annotations

import pytest
from ranks import on_cpu, world

MOVED = ("recompute", "compress", "offload activations", "offload optimizer")
SAMPLE = {
    2: ("ddp", "zero1", "zero2", "fsdp", "tp", "pp", "cp", "ep", *MOVED),
    4: ("hsdp",),
}
ALL_OF_FOUR = ("hsdp", "tp fsdp", "pp fsdp")


def compare(size: int, names: tuple[str, ...], environ: dict[str, str]) -> None:
    expected = world("own_loop.py", size, names, on_cpu())
    ours = world("own_loop.py", size, names, environ)
    assert expected["device"] == "cpu"
    assert ours["device"] == "cuda:0"
    for name in names:
        assert isinstance(expected["rows"][name], list), (name, expected["rows"][name])
        assert ours["rows"][name] == pytest.approx(expected["rows"][name], rel=1e-14, abs=0), name


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.proof)])
def test_every_layout_computes_what_it_computes_on_the_cpu(environ, size: int) -> None:
    compare(size, SAMPLE[size], environ)


@pytest.mark.proof
@pytest.mark.parametrize("seed", range(20))
def test_every_seed_computes_it(environ, seed: int) -> None:
    compare(2, SAMPLE[2], {**environ, "SIM_SEED": str(seed)})


@pytest.mark.proof
@pytest.mark.parametrize("mode", ["eager", "lazy"])
def test_other_schedules_compute_it(environ, mode: str) -> None:
    for size, names in ((2, SAMPLE[2]), (4, ALL_OF_FOUR)):
        compare(size, names, {**environ, "SIM_MODE": mode})
