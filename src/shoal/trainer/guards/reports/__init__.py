"""Texts of errors and notices of guards, imported when there is something to print.

A guard imports this package, and each module is loaded by its first use, since few runs need one.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType

    from shoal.trainer.guards.reports import (
        batch_report as batch_report,
    )
    from shoal.trainer.guards.reports import (
        corruption_report as corruption_report,
    )
    from shoal.trainer.guards.reports import (
        first_step_report as first_step_report,
    )
    from shoal.trainer.guards.reports import (
        model_notices as model_notices,
    )
    from shoal.trainer.guards.reports import (
        optimizer_report as optimizer_report,
    )
    from shoal.trainer.guards.reports import (
        start_report as start_report,
    )
    from shoal.trainer.guards.reports import (
        writes_report as writes_report,
    )
else:

    def __getattr__(name: str) -> ModuleType:
        """Import a module of error texts."""
        return importlib.import_module(f"{__name__}.{name}")
