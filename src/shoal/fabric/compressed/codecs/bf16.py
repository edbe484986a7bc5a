"""Codec `bf16`: the upper half of fp32, with its range and three digits.

A number is rounded to the nearest bf16, of two equally near ones to that with an even last bit;
float64 is rounded to float32 first. The error is at most 1/256 of a number.

Source: IEEE 754, round half to even
Limits: which NaN a NaN becomes is the machine's own
"""

from __future__ import annotations

import torch

from shoal.fabric.compressed.codecs.plain import UncompressedCodec


class Bf16Codec(UncompressedCodec):
    """The codec `bf16`: numbers are cast to bfloat16."""

    name = "bf16"

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.wire = torch.bfloat16
