"""`dp` over several simulated devices of one process, held against one process: {check: what went wrong}.

python replicas.py CHECK …     in SIM_MODE, SIM_SEED; the last line is JSON
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "worlds"))

import trajectory
from shoal.fabric import start_world
from shoal.proof.battery import SGD
from shoal.view.proof import proof_text

STEPS = 3


def equals_one_process(case: str, devices: int) -> None:
    """By design §6, in float64: losses, gradients and weights of whole steps and a short one."""
    report = trajectory.prove(start_world({}), case, "dp", devices, steps=STEPS, optimizer=SGD)
    assert report["verdict"] == "equal", proof_text(report)
    assert report["layout"] == f"dp (threads = {devices})"


def main() -> None:
    torch.set_num_threads(1)
    wrong: dict[str, str] = {}
    for name in sys.argv[1:]:
        case, _, devices = name.partition("-")
        try:
            with sdpa_kernel(SDPBackend.MATH):  # what the device has
                equals_one_process(case, int(devices))
        except Exception:
            wrong[name] = traceback.format_exc()
    print(json.dumps({"checks": sys.argv[1:], "wrong": wrong}), flush=True)


if __name__ == "__main__":
    main()
