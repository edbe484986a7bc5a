"""Steps on simulated devices run behind the host's back, and give the CPU's bits where kernels agree."""

from __future__ import annotations

import pytest
from ranks import on_cpu, world

LLAMAS = {2: ("ddp", "fsdp", "tp", "pp", "ep"), 4: ("hsdp", "pp fsdp")}
PLAIN = {2: ("plain ddp", "plain zero1", "plain zero2", "plain fsdp"), 4: ("plain hsdp",)}
WAITS = {"aten::equal"}
"""Operators of a step for which the host waits, as on a GPU: what they give depends on numbers. This
one asks, once in a run, whether the optimizer moved the model."""


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.proof)])
def test_kernels_begin_after_their_launch(environ: dict[str, str], size: int) -> None:
    told = world("counted_case.py", size, (*LLAMAS[size], *PLAIN[size]), environ)
    assert told.pop("device") == "cuda:0"
    for name in LLAMAS[size]:
        step = told[name]
        assert step["all"] > 500, name
        assert step["begun"] <= 0.05 * step["all"], name
        assert set(step["waits"]) <= WAITS, name
    expected = world("counted_case.py", size, PLAIN[size], on_cpu())
    assert expected["device"] == "cpu"
    for name in PLAIN[size]:
        assert told[name]["bits"] == expected[name]["bits"], name
