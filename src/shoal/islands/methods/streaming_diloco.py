"""Streaming DiLoCo: the model travels in fragments, while the islands train on.

    after step ⌊(p+1)·H/P⌋ − τ   send fragment p, coded in 4 bits: W_p − w_p;  s_p ← w_p
    after step ⌊(p+1)·H/P⌋       W_p, u_p ← outer step;  w_p ← w_p + (1 − α)·(W_p − s_p)      α = 0

Peak bandwidth falls by P, and what is sent hides behind τ inner steps. The paper takes
w_p ← α·w_p + (1 − α)·W_p with α = 0.5, which drops half of what an island learns in those τ steps
and leaves islands half apart; added to the merged weights, all of it is kept and travels with the
next message. With α = 0, one island alone trains exactly as if it were none
(`docs/decisions/0011-what-is-learnt-on-the-way.md` has the measurement).

Source: Douillard et al. 2025, "Streaming DiLoCo with overlapping communication"
"""

from __future__ import annotations

from shoal.islands.method import Method


class StreamingDiLoCo(Method):
    """DiLoCo by fragments: which and when stands in `fragments.py`, α in `Method.adopt`."""

    name = "streaming-diloco"
