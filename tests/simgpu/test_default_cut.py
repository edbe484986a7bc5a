"""The default micro-batch never runs out of memory where an eighth of the batch fits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("default_cut.py")
NAMES = (
    *("CNN with BatchNorm", "ViT", "LSTM", "U-Net", "hf Llama", "experts", "large embeddings"),
    *("MLP", "encoder", "residual", "deep encoder", "CNN, plain"),
)
COUNTED = 10
"""Of twelve models so many are counted, and do without an eighth for lack of knowledge."""


def ran(environ: dict[str, str], name: str, size: int, limit_bytes: int = 0) -> dict[str, object]:
    """What the program says; its error where it ends in one."""
    limit = {"SIM_MEMORY_BYTES": str(limit_bytes)} if limit_bytes else {}
    done = subprocess.run(
        [sys.executable, str(PROGRAM), name, str(size)],
        env={**environ, **limit}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, (
        f"{name}, {size} a pass, {limit_bytes} bytes: {done.stderr[-1500:]}"
    )
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.proof("share")
def test_it_fits_wherever_an_eighth_does(environ: dict[str, str]) -> None:
    uncounted, sizes = [], {}
    for name in NAMES:
        eighth = ran(environ, name, 4)
        reserved = int(str(eighth["reserved_bytes"]))
        tight, wide = ran(environ, name, 0, int(1.3 * reserved)), ran(environ, name, 0)
        sizes[name] = (tight["micro_batch"], wide["micro_batch"])
        uncounted += [name] * any("micro-batch:" in str(line) for line in wide["told"])  # type: ignore[union-attr]
    print(sizes, uncounted)
    assert len(NAMES) - len(uncounted) >= COUNTED, uncounted
    assert all(wide == 32 for name, (_, wide) in sizes.items() if name not in uncounted), sizes
