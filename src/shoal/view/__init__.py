"""Text views of run folders, without torch: live progress, diagnosis, a summary at a run's end.

Names load at first use: only the live view draws with rich, and most readers of folders need none.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.view.live import LiveView as LiveView
    from shoal.view.run_folder_reader import RunFolder as RunFolder
    from shoal.view.summary import summarise_run as summarise_run

_HOMES = {"LiveView": "live", "RunFolder": "run_folder_reader", "summarise_run": "summary"}

__all__ = ["LiveView", "RunFolder", "summarise_run"]


def __getattr__(name: str) -> Any:
    """Load a name of `__all__` at its first use."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"shoal.view.{_HOMES[name]}"), name)
