"""Texts of errors and notices of guards, imported when there is something to print.

A guard imports this package, and each module is loaded by its first use, since few runs need one.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType

    from shoal.trainer.guards.reports import (
        batch_report,
        corruption_report,
        first_step_report,
        kernel_notices,
        model_notices,
        optimizer_report,
        own_loaders,
        start_report,
        writes_report,
    )

__all__ = [
    "batch_report",
    "corruption_report",
    "first_step_report",
    "kernel_notices",
    "model_notices",
    "optimizer_report",
    "own_loaders",
    "start_report",
    "writes_report",
]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> ModuleType:
        """Import a module of error texts."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return importlib.import_module(f"{__name__}.{name}")
