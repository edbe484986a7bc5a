"""The bytes of every codec, as they were recorded: what one machine sends, all others read.

    python tests/fabric/test_codecs_golden.py     records anew: only where the format changes on purpose

`codecs.json` holds, per codec and format, the exact bytes and the exact decoded numbers of a few
numbers that can be checked by hand (hexadecimal, little-endian), and digests for 200,005 numbers.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.fabric.compressed.codecs import CODECS, find_codec

RECORDED = Path(__file__).parent / "codecs.json"
FORMATS = {"fp32": torch.float32, "fp64": torch.float64}
DEADLINE_S = 60
# Among them both zeros, borders between codes, and what is too small for any code.
FEW = [
    0.0, -0.0, 1.0, -1.0, 127.0, -126.5, 0.5, 1.5, 2.5, -2.5, 95.9, 96.0, 96.1, -48.0, 3.14159265,
    1e-3, -1e-3, 1e-30, -1e-42, 64.0, 33.3, 1.9921875, 0.99609375,
]  # fmt: skip


@functools.cache
def many(dtype: torch.dtype) -> torch.Tensor:
    """Several blocks and chunks, each block of another size, no two magnitudes equal in a block.

    All are multiples of a power of two that sums hold exactly, so that means are exact as well.
    """
    place = torch.arange(200_005, dtype=torch.float64)
    mixed = (place * 40_503) % 65_536
    return ((mixed - 20_000.25) * 2.0 ** (-4 * (place // 65_536)) / 1024).to(dtype)


def cases() -> list[tuple[str, str]]:
    return [(name, spelt) for name in CODECS for spelt in FORMATS]


def made(name: str, spelt: str) -> dict[str, Any]:
    """Bytes and decoded numbers, as they are recorded."""
    told: dict[str, Any] = {}
    dtype = FORMATS[spelt]
    codec = find_codec(name, dtype)
    for which, numbers in (("few", torch.tensor(FEW, dtype=dtype)), ("many", many(dtype))):
        packed = torch.empty(codec.size_bytes(numbers.numel()), dtype=torch.uint8)
        codec.encode(numbers, packed)
        decoded = torch.empty_like(numbers)
        codec.decode(packed, decoded)
        summed = numbers.flip(0).contiguous()
        codec.decode(packed, summed, weight=0.7, add=True)
        for kind, tensor in (("packed", packed), ("decoded", decoded), ("summed", summed)):
            raw = tensor.numpy().tobytes()
            told[f"{which} {kind}"] = (
                raw.hex() if which == "few" else hashlib.sha256(raw).hexdigest()
            )
    return told


@pytest.mark.parametrize(("name", "spelt"), cases())
def test_bytes_and_numbers_are_those_recorded(name: str, spelt: str) -> None:
    recorded = json.loads(RECORDED.read_text())
    assert made(name, spelt) == recorded[f"{name} {spelt}"]


def test_neither_vectors_nor_threads_change_a_bit() -> None:
    """As a machine without wide registers computes them, with its work divided."""
    done = subprocess.run(
        [sys.executable, __file__, "--print"],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=True,
        env={**os.environ, "ATEN_CPU_CAPABILITY": "default", "OMP_NUM_THREADS": "2"},
    )
    assert json.loads(done.stdout) == json.loads(RECORDED.read_text())


def values(text: str, dtype: torch.dtype = torch.float32) -> list[float]:
    return torch.frombuffer(bytearray.fromhex(text), dtype=dtype).tolist()


def test_the_recorded_ones_are_right() -> None:
    """By hand, for the first numbers: the largest is 127, so int8's scale is 1 and E3M0Codec's 128."""
    recorded = json.loads(RECORDED.read_text())
    assert FEW[:14] == [0, -0.0, 1, -1, 127, -126.5, 0.5, 1.5, 2.5, -2.5, 95.9, 96, 96.1, -48]
    few = {name: recorded[f"{name} fp32"]["few decoded"] for name in CODECS}
    assert values(few["int8"])[:10] == [0, 0, 1, -1, 127, -126, 0, 2, 2, -2]
    assert recorded["int8 fp32"]["few packed"].startswith("0000803f" + "000001ff7f82000202fe")
    assert values(few["e3m0"])[:14] == [0, 0, 2, -2, 128, -128, 0, 2, 2, -2, 64, 128, 128, -64]
    assert recorded["e3m0 fp32"]["few packed"].startswith("00000043" + "80" + "91" + "f7")
    assert values(few["bf16"])[:10] == [0, 0, 1, -1, 127, -126.5, 0.5, 1.5, 2.5, -2.5]
    assert values(few["none"])[4:6] == [127, -126.5]
    assert values(few["top2bit"])[4] == 127
    assert sum(map(bool, values(few["top2bit"]))) == 1


def main() -> None:
    told = {f"{name} {spelt}": made(name, spelt) for name, spelt in cases()}
    if "--print" in sys.argv:
        print(json.dumps(told))
    else:
        RECORDED.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
