"""How a policy's key is declared: one of a few words, or a number within bounds.

What is declared here `policies.check_value` holds users to.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import field
from typing import Any


def word(legal: tuple[str, ...], others: Mapping[str, str] | None = None) -> Any:
    """Declare a policy's key that is one of a few words, the first by default.

    Args:
        others: what users write instead → the legal word that they mean; proposed by `check_value`.
    """
    return field(default=legal[0], metadata={"legal": legal, "others": others or {}})


def number(
    default: float,
    *,
    least: float,
    below: float = math.inf,
    usual: float | None = None,
    **more: Any,
) -> Any:
    """Declare a policy's key that is a number of at least `least` and less than `below`.

    Args:
        usual: proposed in the place of any number that is refused; default: `least`.
        more: further arguments of `dataclasses.field`; the value is checked by `check_value`.
    """
    near = least if usual is None else usual
    bounds = {"least": least, "below": below, "usual": near}
    return field(default=default, metadata=bounds, **more)
