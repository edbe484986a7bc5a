"""Sinks: hooks that write a run's numbers where their users look at them.

A hook is any function that takes a record, a dict: each event of the run, and each step's row
(`"event": "step"`). It is called in every process, and may give "stop" or "save", which all ranks
do after the next step.

    run.hear(TensorBoard("runs/x/tensorboard"))      in a loop of one's own
    train.on=shoal.sinks:TensorBoard                 for `shoal train`, which makes it for the run
"""

from __future__ import annotations

from shoal.sinks.tensorboard import TensorBoard
from shoal.sinks.wandb import WandB

__all__ = ["TensorBoard", "WandB"]
