"""Replace `shoal.parallelize` while a script runs, so that its arguments can be changed.

A proof (`argument_overrides.py`) and a replay (`replay/script_replay.py`) run a user's script as it
is. Both change what the script's calls of `shoal.parallelize` get.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import shoal
from shoal.base.attribute_patch import patch_attribute
from shoal.trainer import parallelize as parallelizing
from shoal.trainer.run import Run

Arguments = dict[str, Any]
Call = Callable[[Callable[..., Run], Arguments], Run]
"""Function that gets the real `parallelize` and the arguments of a script's call, by name."""


@contextmanager
def patch_parallelize(call: Call) -> Iterator[None]:
    """Let `call` answer each `shoal.parallelize` of a script while the context is open.

    Args:
        call: returns the run; policies stand among the arguments by their own names.
    """
    right = parallelizing.parallelize

    @wraps(right)
    def parallelize(*values: Any, **named: Any) -> Run:
        arguments = inspect.signature(right).bind(*values, **named).arguments
        arguments |= arguments.pop("policies", {})
        return call(right, dict(arguments))

    with patch_attribute(parallelizing, "parallelize", parallelize):
        shown = vars(shoal).pop("parallelize", None)
        try:
            yield
        finally:
            vars(shoal).pop("parallelize", None)
            if shown is not None:
                vars(shoal)["parallelize"] = right
