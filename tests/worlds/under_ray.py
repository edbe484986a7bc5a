"""A driver: a script of one's own as the loop of Ray's TorchTrainer, in the second attempt too.

under_ray.py SCRIPT KILL_RANK AFTER_STEP WORDS…      KILL_RANK −1: nobody is killed
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any


def loop(job: dict[str, Any]) -> None:
    """One worker: the script, as it stands."""
    import ray.train

    os.chdir(job["folder"])
    rank = ray.train.get_context().get_world_rank()
    if rank == job["kill"] and not Path("killed").exists():
        threading.Thread(target=killed_at, args=(job["after"],), daemon=True).start()
    sys.argv = job["words"]
    runpy.run_path(job["words"][0], run_name="__main__")


def killed_at(step: int) -> None:
    """SIGKILL this process once so many steps are committed."""
    told = Path("run/metrics.jsonl")
    while not told.exists() or told.read_text().count("\n") < step:
        time.sleep(0.01)
    Path("killed").touch()
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    script, kill, after, *words = sys.argv[1:]
    folder = os.getcwd()
    job = {"folder": folder, "kill": int(kill), "after": int(after), "words": [script, *words]}
    ray.init(num_cpus=2, include_dashboard=False, _temp_dir=f"{folder}/t")
    trainer = TorchTrainer(
        loop,
        train_loop_config=job,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            storage_path=f"{folder}/ray", failure_config=FailureConfig(max_failures=1)
        ),
    )
    error = trainer.fit().error
    ray.shutdown()
    sys.exit(str(error) if error else 0)


if __name__ == "__main__":
    main()
