"""Sinks for experiment trackers: Weights & Biases, MLflow, trackio. All write local files.

Their stores only grow: a step that a resume or a rewind makes again has two entries, and the later
one counts.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import json
import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

from shoal.base.runlog.atomic_files import write_atomically
from shoal.base.runlog.damaged_lines import read_object
from shoal.sinks.scalar_columns import ScalarSink, missing_package, require_package

FLUSH_S = 5.0
"""Seconds between two writes to MLflow's store."""
BATCH = 1000
"""Numbers that MLflow accepts in one call."""
MOST_WAITING = 200_000
"""Numbers that wait for a store that refuses them; older ones are dropped."""
CLOSE_S = 120.0
"""Seconds that the end of a process waits for the last write."""


class WandB(ScalarSink):
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
            raise missing_package("wandb", "WandB") from failure
        super().__init__(folder)
        self._settings, self._wandb = settings, wandb
        self._run: Any = None

    def write(self, step: int, values: dict[str, float]) -> None:
        """Log the numbers of a step."""
        if self._run is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            mode = os.environ.get("WANDB_MODE", "offline")
            given = {"mode": mode, "dir": str(self.folder), "name": self.folder.name}
            self._run = self._wandb.init(**{**given, **self._settings})
        # wandb's own counter refuses a step that was logged before, as steps after a resume are.
        self._run.log({**values, "step": step})


class Trackio(ScalarSink):
    """A hook that logs to trackio, in a local folder; rank 0 writes, and a resume goes on.

        TRACKIO_DIR=FOLDER/trackio trackio show

    Args:
        folder: its database goes into FOLDER/trackio, or into TRACKIO_DIR if that is set; the name
            of the run is the folder's.
        settings: further arguments of `trackio.init`: project, name, config, space_id, …

    Raises:
        ConfigError: trackio is not installed; raised before the first step.
    """

    def __init__(self, folder: str | Path, **settings: Any) -> None:
        require_package("trackio", "Trackio")
        super().__init__(folder)
        self._settings = settings
        self._run: Any = None

    def write(self, step: int, values: dict[str, float]) -> None:
        """Log the numbers of a step."""
        if self._run is None:
            # trackio reads this name once, when it is imported.
            os.environ.setdefault("TRACKIO_DIR", str(self.folder.absolute() / "trackio"))
            import trackio

            given: dict[str, Any] = {"project": "shoal", "name": self.folder.absolute().name}
            given |= {"resume": "allow", "auto_log_cpu": False, "auto_log_gpu": False}
            with contextlib.redirect_stdout(io.StringIO()):  # its banner, amid the step lines
                self._run = trackio.init(**{**given, **self._settings})
            atexit.register(self._close)
        self._run.log(values, step=step)

    def _close(self) -> None:
        import trackio

        with contextlib.redirect_stdout(io.StringIO()):
            # It also finishes its current run at exit, and prints a line then.
            with contextlib.suppress(RuntimeError):
                trackio.finish()
            self._run.finish()


class MLflow(ScalarSink):
    """A hook that logs to MLflow, in a local database; rank 0 writes, and a resume goes on.

        mlflow ui --backend-store-uri sqlite:///FOLDER/mlflow.db

    A thread of its own imports MLflow, makes the database and writes every 5 s, so that no step
    waits. Numbers that the store refuses wait for the next write, and a warning reports it once.

    Args:
        folder: its database is FOLDER/mlflow.db, unless MLFLOW_TRACKING_URI is set; the name of
            the run is the folder's. FOLDER/mlflow.json keeps the run's id for a resume.
        experiment: name of the experiment.

    Raises:
        ConfigError: mlflow is not installed; raised before the first step.
    """

    def __init__(self, folder: str | Path, experiment: str = "shoal") -> None:
        super().__init__(folder)
        self.uri = os.environ.get("MLFLOW_TRACKING_URI")
        require_package("mlflow", "MLflow", "mlflow")
        if self.uri is None:  # mlflow-skinny has no database
            require_package("sqlalchemy", "MLflow", "mlflow")
            self.uri = f"sqlite:///{self.folder.absolute() / 'mlflow.db'}"
        self.experiment = experiment
        self._waiting: list[tuple[str, float, int, int]] = []
        self._lock, self._end = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None
        self._client: Any = None
        self._run_id, self._warned = "", False

    def write(self, step: int, values: dict[str, float]) -> None:
        """Hand the numbers of a step to the thread."""
        now_ms = time.time_ns() // 1_000_000
        with self._lock:
            self._waiting += [(name, value, now_ms, step) for name, value in values.items()]
            del self._waiting[:-MOST_WAITING]
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_all, name="mlflow", daemon=True)
            self._thread.start()
            atexit.register(self._close)

    def _close(self) -> None:
        self._end.set()
        if self._thread is not None:
            self._thread.join(CLOSE_S)

    def _write_all(self) -> None:
        while True:
            ended = self._end.wait(FLUSH_S if self._client is not None else 0.0)
            try:
                if self._client is None:
                    self._start()
                self._flush()
                if ended:
                    self._client.set_terminated(self._run_id)
            except Exception as failure:  # a store's own errors; none of them may end a training
                if not self._warned:
                    self._warned = True
                    text = str(failure).strip().partition("\n")[0]
                    logging.getLogger("shoal").warning("shoal: MLflow: %s: %s", self.uri, text)
                self._end.wait(FLUSH_S)
            if ended:
                return

    def _start(self) -> None:
        """Open the store, and resume this folder's run in it or create one."""
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        self.folder.mkdir(parents=True, exist_ok=True)
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient

        for name in ("alembic", "mlflow.store.db.utils"):  # a line for each table that is made
            logging.getLogger(name).setLevel(logging.WARNING)
        client = MlflowClient(tracking_uri=self.uri, registry_uri=self.uri)
        note = self.folder / "mlflow.json"
        run_id = read_object(note).get("run_id")
        with contextlib.suppress(MlflowException):  # of another store
            if isinstance(run_id, str):
                client.update_run(run_id, status="RUNNING")
                self._run_id = run_id
        if not self._run_id:
            found = client.get_experiment_by_name(self.experiment)
            number = found.experiment_id if found else client.create_experiment(self.experiment)
            run = client.create_run(number, run_name=self.folder.absolute().name)
            self._run_id = run.info.run_id
            write_atomically(note, json.dumps({"run_id": self._run_id, "uri": self.uri}) + "\n")
        self._client = client

    def _flush(self) -> None:
        from mlflow.entities import Metric

        while self._waiting:
            with self._lock:
                part, self._waiting = self._waiting[:BATCH], self._waiting[BATCH:]
            try:
                self._client.log_batch(self._run_id, [Metric(*row) for row in part])
            except Exception:
                with self._lock:
                    self._waiting = part + self._waiting
                raise
