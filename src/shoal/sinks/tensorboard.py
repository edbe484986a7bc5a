"""Writes a run's curves as TensorBoard's event files: `tensorboard --logdir FOLDER`."""

from __future__ import annotations

import atexit
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.base.errors import ConfigError
from shoal.sinks.scalars import missing, scalars

FLUSH_S = 10
"""Seconds after which what was written can be seen."""


class TensorBoard:
    """A hook that draws each step's and each validation's numbers; rank 0 writes.

    folder   where its files go; made with the first number
    Errors   ConfigError where tensorboard is not installed, before the first step
    """

    def __init__(self, folder: str | Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as failure:
            raise ConfigError(missing("tensorboard", "shoal.sinks.TensorBoard")) from failure
        self.folder = Path(folder)
        self._make: Any = SummaryWriter
        self._writer: Any = None

    def __call__(self, record: Mapping[str, Any]) -> None:
        """Draw a record."""
        values = scalars(record)
        if not values:
            return
        if self._writer is None:
            # After a resume steps are drawn again from where they begin anew.
            first = int(record["step"])
            self._writer = self._make(str(self.folder), purge_step=first, flush_secs=FLUSH_S)
            atexit.register(self._writer.close)
        for name, value in values.items():
            self._writer.add_scalar(name, value, int(record["step"]))
