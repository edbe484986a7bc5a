"""The files of a run to which one of everything happened, for tests of who reads them."""

from __future__ import annotations

import json
from pathlib import Path

from shoal.base.runlog.events import EventLog, append_line


def tell_run(folder: Path, steps: int) -> None:
    """Write the events, the steps' rows and the plan of a run of two ranks into a folder."""
    log = EventLog(folder / "events.jsonl", None)
    log.emit("run_started", processes=2)
    log.emit("compute_started", dtypes={})
    for step in range(1, steps + 1):
        row = {"step": step, "loss": 2.0, "grad_norm": 1.0, "lr": 0.1, "tokens": 8, "step_s": 0.1,
               "tokens_per_s": 80.0, "mfu": 0.3, "peak_memory_bytes": 10, "skipped": False,
               "peak_memory_bytes_by_rank": [9, 10], "comm_bytes": 4, "samples": [0, 8],
               "comm_bytes_by_kind": {"all_reduce": 4}, "comm_exposed_s": 0.1,
               "data_wait_s": 0.1, "gpu_utilisation": 0.5}  # fmt: skip
        append_line(folder / "metrics.jsonl", row)
    log.emit("step_skipped", step=2, culprits=[{"rank": 1, "samples": [3]}], reason="odd")
    log.emit("worker_died", rank=1, pid=3, how="killed", traceback="a\nb", fatal=False)
    log.emit("restarting", attempt=1, of=3, step=2)
    log.emit("resumed", step=2, folder="step-2", differs=["optimizer.lr: 1 → 2"])
    log.emit("compute_started", dtypes={})
    log.emit("checkpoint_saved", step=4, folder="c/step-4", bytes=5, seconds=0.1)
    log.emit("validated", step=4, loss=1.0, unigram_entropy=2.0, targets=4, seconds=0.1)
    log.emit("round_committed", round=1, admitted=[0], refused={}, tokens_all=3, sent_bytes=1,
             exposed_s=0.1, seconds=0.2)  # fmt: skip
    log.emit("stop_requested", signal="SIGTERM", step_s=0.1, steps=True)
    log.emit("run_finished", step=4, how="completed")
    plan = {"steps": steps, "device": "cpu", "predicted": {"step_s": 0.1, "peak_memory_bytes": 9}}
    (folder / "plan.json").write_text(json.dumps(plan))
