"""Streaming DiLoCo: the model travels in fragments, while the islands train on.

    after step ⌊(p+1)·H/P⌋ − τ   send fragment p, coded in 4 bits: W_p − w_p
    after step ⌊(p+1)·H/P⌋       W_p, u_p ← outer step;  w_p ← α·w_p + (1 − α)·W_p        α = 0.5

Peak bandwidth falls by P, and what is sent hides behind τ inner steps. α keeps half of what the
island learnt meanwhile, which plain overwriting would drop.

Source: Douillard et al. 2025, "Streaming DiLoCo with overlapping communication"
"""

from __future__ import annotations

from shoal.islands.method import Method


class StreamingDiLoCo(Method):
    """DiLoCo by fragments: which and when stands in `fragments.py`, α in `Method.adopt`."""

    name = "streaming-diloco"
