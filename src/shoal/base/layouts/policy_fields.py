"""Declarations of policy keys: one of a few words, or a number within bounds.

`policies.check_value` enforces the declarations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import field
from typing import Any


def choice_field(legal: tuple[str, ...], others: Mapping[str, str] | None = None) -> Any:
    """Declare a policy key that is one of a few words, the first by default.

    Args:
        others: other spellings → the legal word, which `check_value` proposes.
    """
    return field(default=legal[0], metadata={"legal": legal, "others": others or {}})


def number_field(
    default: float,
    *,
    least: float,
    below: float = math.inf,
    usual: float | None = None,
    **more: Any,
) -> Any:
    """Declare a policy key that is a number of at least `least` and less than `below`.

    Args:
        usual: number that `check_value` proposes instead of a refused one; default: `least`.
        more: further arguments of `dataclasses.field`; the value is checked by `check_value`.
    """
    near = least if usual is None else usual
    bounds = {"least": least, "below": below, "usual": near}
    return field(default=default, metadata=bounds, **more)
