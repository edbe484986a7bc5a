"""Sinks: hooks that write a run's numbers to TensorBoard or Weights & Biases.

A hook is any function that takes a record, a dict: each event of the run, and each step's row
(`"event": "step"`). Shoal calls it in every process. It may return "stop" or "save", which all
ranks do after the next step.

    run.add_callback(TensorBoard("runs/x/tensorboard"))      in a training loop of your own
    train.on=shoal.sinks:TensorBoard                 for `shoal train`, which makes it for the run
"""

from __future__ import annotations

import atexit
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.base.errors import ConfigError

__all__ = ["TensorBoard", "WandB", "scalars"]

CURVES = ("loss", "grad_norm", "lr", "step_s", "tokens_per_s", "mfu", "data_wait_s", "loss_scale")
"""Keys of a step's row that are drawn."""

FLUSH_S = 10
"""Seconds until values appear in TensorBoard."""


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a record to draw, by name: train/loss, train/NAME, validation/NAME.

    Args:
        record: of rank 0; {} for other ranks and for records without finite numbers.
    """
    kind = {"step": "train", "validated": "validation"}.get(str(record.get("event")))
    if kind is None or record.get("rank") != 0:
        return {}
    keys = CURVES if kind == "train" else ("loss", "accuracy")
    found = {key: record.get(key) for key in keys} | dict(record.get("metrics") or {})
    return {
        f"{kind}/{name}": float(value)
        for name, value in found.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }


class TensorBoard:
    """A hook that draws each step's and each validation's numbers; rank 0 writes.

    Args:
        folder: where its files go; made with the first number.

    Raises:
        ConfigError: tensorboard is not installed; raised before the first step.
    """

    def __init__(self, folder: str | Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as failure:
            raise ConfigError(
                _missing_package_text("tensorboard", "shoal.sinks.TensorBoard")
            ) from failure
        self.folder = Path(folder)
        self._make: Any = SummaryWriter
        self._writer: Any = None

    def __call__(self, record: Mapping[str, Any]) -> None:
        """Draw a record."""
        values = scalars(record)
        if not values:
            return
        if self._writer is None:
            # After a resume, steps are drawn again from its first step.
            first = int(record["step"])
            self._writer = self._make(str(self.folder), purge_step=first, flush_secs=FLUSH_S)
            atexit.register(self._writer.close)
        for name, value in values.items():
            self._writer.add_scalar(name, value, int(record["step"]))


class WandB:
    """A hook that logs each step's and each validation's numbers; rank 0 writes.

    Args:
        folder: where its files go: `wandb sync FOLDER/wandb/offline-run-…` uploads them later; the
            name of the run is the folder's.
        settings: further arguments of `wandb.init`: project, name, id, config, …

    Raises:
        ConfigError: wandb is not installed; raised before the first step.
    """

    def __init__(self, folder: str | Path, **settings: Any) -> None:
        try:
            import wandb
        except ImportError as failure:
            raise ConfigError(_missing_package_text("wandb", "shoal.sinks.WandB")) from failure
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
        # wandb's own counter refuses a step that was logged before, as steps after a resume are.
        self._run.log({**values, "step": int(record["step"])})


def _missing_package_text(package: str, what: str) -> str:
    """Return the error line for a library that is not installed."""
    return f"{what}: needs {package}, which is not installed; try: pip install 'shoal[sinks]'"
