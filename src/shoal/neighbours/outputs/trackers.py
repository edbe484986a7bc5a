"""Trackers: destinations of a script's logged values, by each library's name for them.

    tensorboard   LOGGING_DIR/PROJECT/events…, by torch.utils.tensorboard
    wandb         wandb.init(project=PROJECT, …)
    others        not supported: a line before training reports it, and the values stay in a file

A tracker that is not installed is a line, too: the training is worth more than its curves.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.base.errors import ConfigError, format_choice_error

ANSWERED = ("tensorboard", "wandb")
OTHERS = (
    *("comet_ml", "aim", "mlflow", "clearml", "dvclive", "swanlab", "trackio"),
    *("csv_monitor", "comet"),
)
"""Trackers that scripts may name, and that have no class here."""


class Tracker:
    """Destination of logged values.

    name   as scripts say it · tracker, writer  the library's own object
    """

    name = ""

    def __init__(self, tracker: Any) -> None:
        self.tracker = self.writer = tracker

    def log(self, values: Mapping[str, Any], step: int | None = None, **_how: Any) -> None:
        """Log values at a step."""

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Store the settings of a training."""

    def finish(self) -> None:
        """Flush the values."""


class TensorBoardTracker(Tracker):
    """Tracker that writes scalars, texts and groups of scalars for TensorBoard."""

    name = "tensorboard"

    def __init__(self, project: str, folder: Any, **settings: Any) -> None:
        from torch.utils.tensorboard import SummaryWriter

        super().__init__(SummaryWriter(os.path.join(folder or ".", project), **settings))

    def log(self, values: Mapping[str, Any], step: int | None = None, **_how: Any) -> None:
        """Log values at a step."""
        for name, value in values.items():
            if isinstance(value, str):
                self.tracker.add_text(name, value, global_step=step)
            elif isinstance(value, Mapping):
                self.tracker.add_scalars(name, dict(value), global_step=step)
            else:
                self.tracker.add_scalar(name, float(value), global_step=step)
        self.tracker.flush()

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Store the settings as a text."""
        lines = [f"    {name}: {value}" for name, value in values.items()]
        self.tracker.add_text("config", "\n".join(lines))
        self.tracker.flush()

    def log_images(self, values: Mapping[str, Any], step: int | None = None, **how: Any) -> None:
        """Log batches of images."""
        for name, images in values.items():
            self.tracker.add_images(name, images, global_step=step, **how)

    def finish(self) -> None:
        """Close the files."""
        self.tracker.close()


class WandBTracker(Tracker):
    """Tracker that logs to a run of wandb."""

    name = "wandb"

    def __init__(self, project: str, folder: Any, **settings: Any) -> None:
        import wandb

        self._image = wandb.Image
        if folder and "dir" not in settings:
            Path(folder).mkdir(parents=True, exist_ok=True)
            settings["dir"] = str(folder)
        super().__init__(wandb.init(project=project, **settings))

    def log(self, values: Mapping[str, Any], step: int | None = None, **how: Any) -> None:
        """Log values at a step."""
        self.tracker.log(dict(values), step=step, **how)

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Store the settings."""
        self.tracker.config.update(dict(values), allow_val_change=True)

    def log_images(self, values: Mapping[str, Any], step: int | None = None, **how: Any) -> None:
        """Log batches of images."""
        for name, images in values.items():
            self.log({name: [self._image(one) for one in images]}, step, **how)

    def finish(self) -> None:
        """End the run."""
        self.tracker.finish()


INSTALL = "pip install 'shoal[sinks]'"
KINDS = {kind.name: kind for kind in (TensorBoardTracker, WandBTracker)}


def start_trackers(
    asked: Any, project: str, folder: Any, config: Any, settings: Any, *, is_first: bool
) -> tuple[list[Tracker], list[tuple[str, str]]]:
    """Start the trackers that a script names.

    Args:
        asked: a name, names, "all" for those that are installed, or None.
        project: the name of the training.
        folder: where files go; None: the working folder.
        config: settings of the training, which trackers keep; None: none.
        settings: further arguments by a tracker's name.
        is_first: in other processes nothing is started.

    Returns:
        The trackers; of those that are not started, why, and what to do.

    Raises:
        ConfigError: a name that no library has.
    """
    listed = asked if isinstance(asked, list | tuple | set) else [asked] if asked else []
    names = [str(getattr(one, "value", one)).lower() for one in listed]
    made: list[Tracker] = []
    lines: list[tuple[str, str]] = []
    if "all" in names:
        names = [name for name in ANSWERED if importlib.util.find_spec(name)]
        if not names:
            lines.append((f"all: none of {', '.join(ANSWERED)} is installed", INSTALL))
    for name in dict.fromkeys(names):
        if name in OTHERS:
            lines.append((f"{name}: is not answered by Shoal", " or ".join(ANSWERED)))
        elif name not in KINDS:
            raise ConfigError(format_choice_error("log_with", name, (*ANSWERED, *OTHERS)))
        elif importlib.util.find_spec(name) is None:
            lines.append((f"{name}: is not installed", INSTALL))
        elif is_first:
            tracker = KINDS[name](project, folder, **dict((settings or {}).get(name) or {}))
            if config:
                tracker.store_init_configuration(_as_dict(config))
            made.append(tracker)
    return made, lines


def _as_dict(config: Any) -> dict[str, Any]:
    return dict(config) if isinstance(config, Mapping) else dict(vars(config))


def find_tracker(trackers: Sequence[Tracker], name: str, *, unwrap: bool) -> Any:
    """Return a tracker by name; without one, a tracker that discards all values."""
    for one in trackers:
        if one.name == name:
            return one.tracker if unwrap else one
    return Tracker(None)
