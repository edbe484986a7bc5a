"""What codecs cost: coded bytes of an element, and how fast one core codes, for predictions.

The codecs themselves are in `fabric/codecs`; the sizes here are theirs, a test holds them together.
Rates are of one core of a 2-core cloud machine, rounded; `benchmarks/codecs.py` measures them.
"""

from __future__ import annotations

from dataclasses import dataclass

SCALE_BYTES = 4 / 65536
"""Of an element's share in its block's scale: fp32, one per 64k elements."""

MEMORY_BYTES_PER_S = 5e9
"""Read and written by one core in a plain loop over numbers that lie in no cache."""


@dataclass(frozen=True)
class Coding:
    """How numbers travel; the codecs themselves are in `fabric/codecs`.

    Attributes:
        bytes_each: coded bytes per element, its share of the scales included; 0: as they are.
        gathers: coded messages go whole to all, for their sums do not stay small.
        feedback: what a code leaves out is kept for the next round.

    encode, decode_bytes_per_s   of uncoded numbers on one core
    """

    bytes_each: float
    encode_bytes_per_s: float
    decode_bytes_per_s: float
    gathers: bool = False
    feedback: bool = False


CODINGS = {
    "none": Coding(0.0, MEMORY_BYTES_PER_S, MEMORY_BYTES_PER_S),
    "bf16": Coding(2.0, MEMORY_BYTES_PER_S, MEMORY_BYTES_PER_S),
    "int8": Coding(1 + SCALE_BYTES, 3e9, 4.8e9),
    "e3m0": Coding(0.5 + SCALE_BYTES, 1.5e9, 3.5e9, feedback=True),
    "top2bit": Coding(
        64 * 14 / 8 / 4096 + 2 * SCALE_BYTES, 0.35e9, 5e9, gathers=True, feedback=True
    ),
    "sign": Coding(1 / 8 + SCALE_BYTES, 1.5e9, 2.2e9, feedback=True),
}
"""By the name of the codec."""


def coded_bytes(codec: str, elements: float, element_bytes: int = 4) -> float:
    """Bytes of so many coded numbers, scales included.

    >>> coded_bytes("int8", 65536), coded_bytes("top2bit", 65536), coded_bytes("none", 10, 8)
    (65540.0, 1800.0, 80)
    """
    return elements * (CODINGS[codec].bytes_each or element_bytes)
