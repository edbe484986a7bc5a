"""SparseLoCo: DiLoCo with sparse messages of the largest changes and error feedback.

    e_i ← 0.95·e_i + (W − w_i)      sent_i = code(e_i)      e_i ← e_i − sent_i
    W   ← W − 1.0·Σ c_i·n_i·sent_i / Σ n_i
    c_i = min(1, median_j ‖sent_j‖ / ‖sent_i‖)

There is no outer momentum: the residual is sent later, which has a similar smoothing effect. e_i is
the codec's error feedback, which decays by `keeps`. A message with a norm above the median is
scaled down to it, so that one island cannot dominate.

Source: Sarfi et al. 2025, "SparseLoCo"; clipping to the median as in templar, which clips every
tensor by itself and divides each place by the islands that sent it; here, as in the paper, by all
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from shoal.islands.method import MergeMethod


def median_clip_factors(norms: Sequence[float]) -> list[float]:
    """Return the factors c_i that clip every norm to the median, in their order.

    >>> median_clip_factors([1.0, 2.0, 8.0])
    [1.0, 1.0, 0.25]
    """
    most = median(norms) if norms else 0.0
    return [most / norm if norm > most else 1.0 for norm in norms]


class SparseLoCo(MergeMethod):
    """Averaging of sparse messages with decaying error feedback, clipped to the median norm."""

    name = "sparse-loco"
    keeps = 0.95

    def message_weights(
        self, sizes: Sequence[float], norms: Sequence[float], admitted: Sequence[bool]
    ) -> tuple[list[float], float]:
        """Return message weights clipped to the median norm; the divisor counts them in full."""
        weights, divisor = super().message_weights(sizes, norms, admitted)
        counting = [place for place, counts in enumerate(admitted) if counts]
        for place, clip in zip(
            counting, median_clip_factors([norms[k] for k in counting]), strict=True
        ):
            weights[place] *= clip
        return weights, divisor
