"""Runs scripts as `python SCRIPT` would, and notes which weights each rank ends with.

Start, as each rank of torchrun: watched.py FOLDER SCRIPT [SCRIPT …]. Several scripts run one after the other in the
same processes, since importing torch costs more than they do. The generator is seeded differently on
every rank, as if nobody had, but so that the test knows what rank 0 builds; numbers are float64, so
that equality says more than agreement to rounding.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.nn.modules.module import register_module_forward_pre_hook

FIRST_SEED = 1000


def run(script: Path, rank: int) -> dict[str, torch.Tensor]:
    """The weights of the script's `Net` when the script ends."""
    nets: dict[str, torch.nn.Module] = {}

    def note(module: torch.nn.Module, _inputs: Any) -> None:
        if type(module).__name__ == "Net":
            nets["net"] = module

    torch.manual_seed(FIRST_SEED + rank)
    torch.set_default_dtype(torch.float64)
    hook = register_module_forward_pre_hook(note)
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        hook.remove()
        torch.set_default_dtype(torch.float32)
    return {name: tensor.detach().clone() for name, tensor in nets["net"].state_dict().items()}


if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    for path in map(Path, sys.argv[2:]):
        weights = run(path, rank)
        save_file(weights, Path(sys.argv[1]) / f"{path.stem}-{rank}.safetensors")
        sys.stdout.flush()
