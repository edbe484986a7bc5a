"""Writes a run's curves for Weights & Biases, offline unless WANDB_MODE says otherwise."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.base.errors import ConfigError
from shoal.sinks.scalars import missing, scalars


class WandB:
    """A hook that logs each step's and each validation's numbers; rank 0 writes.

    folder    where its files go: `wandb sync FOLDER/wandb/offline-run-…` sends them later; the
              name of the run is the folder's
    settings  further arguments of `wandb.init`: project, name, id, config, …
    Errors    ConfigError where wandb is not installed, before the first step
    """

    def __init__(self, folder: str | Path, **settings: Any) -> None:
        try:
            import wandb
        except ImportError as failure:
            raise ConfigError(missing("wandb", "shoal.sinks.WandB")) from failure
        self.folder, self._settings, self._wandb = Path(folder), settings, wandb
        self._run: Any = None

    def __call__(self, record: Mapping[str, Any]) -> None:
        """Log a record."""
        values = scalars(record)
        if not values:
            return
        if self._run is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            mode = os.environ.get("WANDB_MODE", "offline")
            given = {"mode": mode, "dir": str(self.folder), "name": self.folder.name}
            self._run = self._wandb.init(**{**given, **self._settings})
        # Its own counter refuses a step that was logged before, as steps after a resume are.
        self._run.log({**values, "step": int(record["step"])})
