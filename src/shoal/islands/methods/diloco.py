"""DiLoCo: islands train alone for H AdamW steps; an outer Nesterov step moves by their mean change.

    D = mean of W − w_i        u ← 0.9·u + D        W ← W − 0.7·(D + 0.9·u)        w_i ← W

For a constant D this goes 1.33·D in round 1, 1.90·D in round 2, 7·D in the limit. The inner
optimizer's state stays with its island: it is neither sent nor reset. With one island it is an
outer optimizer around an ordinary run, which helps too.

Source: Douillard et al. 2023, "DiLoCo", algorithm 1; one island: Charles et al. 2025 (scaling laws)
"""

from __future__ import annotations

from shoal.islands.method import Method


class DiLoCo(Method):
    """The base class as it is, with the settings of the paper."""

    name = "diloco"
