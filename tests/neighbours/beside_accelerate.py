"""Runs accelerate_script.py by Accelerate itself, and keeps what it found for the test of the facade.

.venv-proof/bin/python tests/neighbours/beside_accelerate.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).resolve().parent
CASES = [(1, 1, ""), (1, 4, ""), (2, 4, ""), (2, 4, "split"), (4, 1, "")]
"""Processes, accumulation, whether batches are split."""


def main() -> None:
    torchrun = Path(sys.executable).with_name("torchrun")
    kept = {}
    for size, accumulation, how in CASES:
        with tempfile.TemporaryDirectory() as folder:
            script = [str(HERE / "accelerate_script.py"), "out.json", str(accumulation), how]
            command = [str(torchrun), "--standalone", f"--nproc_per_node={size}", *script]
            environ = {**os.environ, "OMP_NUM_THREADS": "1"}
            subprocess.run(command, cwd=folder, env=environ, check=True)
            kept[f"{size} {accumulation} {how}".strip()] = json.loads(
                (Path(folder) / "out.json").read_text()
            )
    told = {"accelerate": version("accelerate"), "torch": version("torch"), "found": kept}
    (HERE / "accelerate_found.json").write_text(json.dumps(told) + "\n")


if __name__ == "__main__":
    main()
