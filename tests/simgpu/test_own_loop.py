"""A loop of one's own on simulated devices gives the numbers of the same loop on the CPU."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
DEADLINE_S = 400.0
MOVED = ("recompute", "compress", "offload activations", "offload optimizer")
SAMPLE = {
    2: ("ddp", "zero1", "zero2", "fsdp", "tp", "pp", "cp", "ep", *MOVED),
    4: ("hsdp",),
}
ALL_OF_FOUR = ("hsdp", "tp fsdp", "pp fsdp")


def world(size: int, names: tuple[str, ...], environ: dict[str, str]) -> dict[str, Any]:
    """What rank 0 says of these layouts."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, str(HERE / "own_loop.py"), *names],
            env={
                **environ,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "WORLD_SIZE": str(size),
                "LOCAL_WORLD_SIZE": str(size),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "OMP_NUM_THREADS": "1",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        told = [rank.communicate(timeout=DEADLINE_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * size, "\n".join(e[-3000:] for _, e in told)
    answer = json.loads(told[0][0].splitlines()[-1])
    answer["said"] = "".join(e for _, e in told)
    return answer


def plain() -> dict[str, str]:
    """On the CPU."""
    path = os.pathsep.join((str(ROOT / "src"), os.environ.get("PYTHONPATH", "")))
    return {**os.environ, "PYTHONPATH": path}


def compare(size: int, names: tuple[str, ...], environ: dict[str, str]) -> dict[str, Any]:
    expected = world(size, names, plain())
    ours = world(size, names, environ)
    assert expected["device"] == "cpu"
    assert ours["device"] == "cuda:0"
    for name in names:
        assert isinstance(expected["rows"][name], list), (name, expected["rows"][name])
        assert ours["rows"][name] == pytest.approx(expected["rows"][name], rel=1e-14, abs=0), name
    return ours


@pytest.mark.parametrize("size", sorted(SAMPLE))
def test_every_layout_computes_what_it_computes_on_the_cpu(environ, size: int) -> None:
    ours = compare(size, SAMPLE[size], environ)
    waiting = ours["launches"]["waiting"]
    assert sum(waiting.values()) <= 0.05 * ours["launches"]["all"], waiting


@pytest.mark.proof
@pytest.mark.parametrize("seed", range(20))
def test_every_seed_computes_it(environ, seed: int) -> None:
    compare(2, SAMPLE[2], {**environ, "SIM_SEED": str(seed)})


@pytest.mark.proof
@pytest.mark.parametrize("mode", ["eager", "lazy"])
def test_other_schedules_compute_it(environ, mode: str) -> None:
    for size, names in ((2, SAMPLE[2]), (4, ALL_OF_FOUR)):
        compare(size, names, {**environ, "SIM_MODE": mode})
