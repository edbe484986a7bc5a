"""Codecs: number formats in which tensors travel, with error feedback for the loss.

    none      the numbers as they are                      4 or 8 bytes per number
    bf16      the upper half of fp32                        2
    int8      multiples of a scale per block                1
    e3m0      powers of two below a scale per block         ½
    sign      one bit, and a mean magnitude per block       ⅛
    top2bit   the largest 64 of 4096, with their places     0.027: 14 bits for each that is sent

`find_codec` returns a codec by name; a codec encodes each vector independently. `ErrorFeedback`
keeps the encoding error and adds it to the next message. `exchange` and the top-k functions in
`compressed_sums.py` sum gradients and are independent of codecs.

Source: `base.py` says what all codecs promise, each module where its code comes from
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from shoal.base.errors import BugError, check_choice
from shoal.fabric.compressed.codecs.base import ALIGNED, BLOCK, Codec
from shoal.fabric.compressed.codecs.bf16 import Bf16Codec
from shoal.fabric.compressed.codecs.e3m0 import E3M0Codec
from shoal.fabric.compressed.codecs.feedback import ErrorFeedback
from shoal.fabric.compressed.codecs.int8 import Int8Codec
from shoal.fabric.compressed.codecs.plain import UncompressedCodec
from shoal.fabric.compressed.codecs.sign import SignCodec
from shoal.fabric.compressed.codecs.top2bit import Top2BitCodec

__all__ = ["ALIGNED", "BLOCK", "CODECS", "Codec", "ErrorFeedback", "find_codec"]

CODECS: dict[str, Callable[[torch.dtype], Codec]] = {
    "none": UncompressedCodec,
    "bf16": Bf16Codec,
    "int8": Int8Codec,
    "e3m0": E3M0Codec,
    "top2bit": Top2BitCodec,
    "sign": SignCodec,
}
"""All codecs by the name that users write."""


def find_codec(name: str, dtype: torch.dtype) -> Codec:
    """Return the codec of a name in CODECS, for numbers of one dtype.

    Args:
        dtype: float32 or float64.

    Raises:
        ConfigError: no codec has this name; the message suggests the nearest.

    >>> find_codec("int8", torch.float32).size_bytes(65_536)
    65544
    """
    check_choice("islands.codec", name, CODECS)
    if dtype not in {torch.float32, torch.float64}:
        raise BugError(f"codec {name}: numbers travel from float32 or float64, not from {dtype}")
    return CODECS[name](dtype)
