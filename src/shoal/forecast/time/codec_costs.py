"""Predicted costs of gradient codecs: coded bytes per element, and coding rate of one core.

The codecs themselves are in `fabric/codecs`; a test compares the sizes here with theirs.
Rates are of one core of a 2-core cloud machine, rounded; `benchmarks/codecs.py` measures them.
"""

from __future__ import annotations

from dataclasses import dataclass

SCALE_BYTES = 4 / 65536
"""Bytes per element of a block's scale: one fp32 number per 64k elements."""

MEMORY_BYTES_PER_S = 5e9
"""Bytes per second that one core reads and writes in a plain loop without cache hits."""


@dataclass(frozen=True)
class CodecCost:
    """Costs of one codec of `fabric/codecs`.

    Attributes:
        bytes_each: coded bytes per element, its share of the scales included; 0: uncoded.
        encode_bytes_per_s, decode_bytes_per_s: uncoded bytes per second of one core.
        gathers: all ranks gather the coded messages, since sums do not stay compressed.
        feedback: the codec keeps its error for the next round (error feedback).
    """

    bytes_each: float
    encode_bytes_per_s: float
    decode_bytes_per_s: float
    gathers: bool = False
    feedback: bool = False


CODINGS = {
    "none": CodecCost(0.0, MEMORY_BYTES_PER_S, MEMORY_BYTES_PER_S),
    "bf16": CodecCost(2.0, MEMORY_BYTES_PER_S, MEMORY_BYTES_PER_S),
    "int8": CodecCost(1 + SCALE_BYTES, 3e9, 4.8e9),
    "e3m0": CodecCost(0.5 + SCALE_BYTES, 1.5e9, 3.5e9, feedback=True),
    "top2bit": CodecCost(
        64 * 14 / 8 / 4096 + 2 * SCALE_BYTES, 0.35e9, 5e9, gathers=True, feedback=True
    ),
    "sign": CodecCost(1 / 8 + SCALE_BYTES, 1.5e9, 2.2e9, feedback=True),
}
"""Costs by the name of the codec."""


def coded_bytes(codec: str, elements: float, element_bytes: int = 4) -> float:
    """Return the bytes of a number of coded elements, scales included.

    >>> coded_bytes("int8", 65536), coded_bytes("top2bit", 65536), coded_bytes("none", 10, 8)
    (65540.0, 1800.0, 80)
    """
    return elements * (CODINGS[codec].bytes_each or element_bytes)
