"""Sinks: hooks that write a run's numbers to TensorBoard, W&B, MLflow, trackio or a CSV file.

A hook is any function that takes a record, a dict: each event of the run, and each step's row
(`"event": "step"`). Shoal calls it in every process. It may return "stop" or "save", which all
ranks do after the next step.

    run.add_callback(TensorBoard("runs/x/tensorboard"))      in a training loop of your own
    train.on=shoal.sinks:TensorBoard                 for `shoal train`, which makes it for the run

    scalar_columns.py      a record's numbers by name; every 10 s those of host, ranks and devices
    event_files.py         TensorBoard, CSV
    experiment_trackers.py WandB, MLflow, Trackio
"""

from shoal.sinks.event_files import CSV, TensorBoard
from shoal.sinks.experiment_trackers import MLflow, Trackio, WandB
from shoal.sinks.scalar_columns import scalars

__all__ = ["CSV", "MLflow", "TensorBoard", "Trackio", "WandB", "scalars"]
