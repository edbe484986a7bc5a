"""Bounds within which two sides count as equal: for float64 (design §6), fp32, bf16 and fp16.

float64   loss, gradient norm and every gradient within 1e-12 of the whole gradient's norm at every
          step of an SGD trajectory, and at step 1 of any other; weights within 1e-12 of the whole
          weights' norm after SGD, 1e-10 after five free steps of any other optimizer (Adam divides
          rounding noise by itself where the true gradient is 0)
fp32      the two sides add the same float32 gradients in another order: each addition errs by at
bf16      most 2⁻²⁴ of the sum, so step 1 agrees to 2⁻¹⁹ (32 additions on top of each other; errors
fp16      are random, so far more fit). Products are rounded to bf16 or fp16, but equally on both
          sides while the weights are equal, and sums stay float32: a sum kept in bf16 errs by 2⁻⁹
          and is caught. From step 2 on weights differ in their last bits, which flips roundings of
          the format itself; from then on only gross errors can be detected: 8 × its epsilon.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

AS_IS = 1e-6
"""Largest rounding by a model's own casts to float32: to 24 bits, several times."""

SUM_EPSILON = 2.0**-19
LATER_EPSILON = {"fp32": 8 * 2.0**-18, "bf16": 8 * 2.0**-8, "fp16": 8 * 2.0**-11}


@dataclass(frozen=True)
class EqualityBounds:
    """Largest differences that still are equal, as shares of the whole gradient or weight norm.

    Attributes:
        first: loss, gradient norm and gradients of step 1.
        later: of the steps after it (infinite: they are reported, not judged).
        weights, buffers: at the end.
    """

    first: float
    later: float
    weights: float
    buffers: float

    def of_step(self, step: int) -> float:
        """Return the bound on gradients at a step, counted from 1."""
        return self.first if step == 1 else self.later

    def is_judged(self, step: int) -> bool:
        """Return whether gradients at a step have a finite bound."""
        return self.of_step(step) < math.inf


def bounds_for(precision: str, optimizer: str) -> EqualityBounds:
    """Return the bounds of equality for a trajectory.

    Args:
        optimizer: "sgd" for plain SGD with momentum, any other name for everything else.

    >>> bounds_for("fp64", "sgd").weights, bounds_for("fp64", "adamw").weights
    (1e-12, 1e-10)
    """
    if precision == "fp64":
        if optimizer == "sgd":
            return EqualityBounds(1e-12, 1e-12, 1e-12, 1e-12)
        return EqualityBounds(1e-12, math.inf, 1e-10, 1e-10)
    later = LATER_EPSILON[precision]
    return EqualityBounds(SUM_EPSILON, later if optimizer == "sgd" else math.inf, later, later)


def bounds_with_casts(optimizer: str) -> EqualityBounds:
    """Return the bounds for a model that casts to float32 on its way, with its casts left in place.

    What AdamW makes of rounding noise where a gradient is 0 is no smaller than a step, so only
    gradients are judged there.

    >>> bounds_with_casts("sgd").weights, bounds_with_casts("adamw").weights
    (1e-06, inf)
    """
    if optimizer == "sgd":
        return EqualityBounds(AS_IS, AS_IS, AS_IS, AS_IS)
    return EqualityBounds(AS_IS, math.inf, math.inf, math.inf)
