"""The proof before a training run, asked for inside a world of processes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

import cases
from planted import BUGS
from shoal.base.errors import ShoalError
from shoal.fabric import World
from shoal.models.loss import token_loss
from shoal.trainer.proof import Material, prove_before


def ask(
    world: World, folder: str, bug: str = "nothing", environ: dict[str, str] | None = None, **other
) -> dict[str, Any]:
    """What `prove_before` says of the mlp case on ddp, with the cache in `folder`."""
    torch.set_num_threads(1)
    case = other.pop("case", "mlp")
    os.environ["SHOAL_CACHE"] = str(Path(folder) / "cache")
    material = Material(
        lambda: cases.build(case),
        cases.loss(case) or token_loss,
        cases.dataset(case),
        None,
        "ddp",
        **{"batch": 24, "micro_batch": 2, **other},
    )
    try:
        with BUGS[bug](world):
            told = prove_before(material, world, Path(folder) / "run", environ or {})
        return {"line": told}
    except ShoalError as failure:
        return {"error": str(failure), "code": failure.exit_code}
    finally:
        del os.environ["SHOAL_CACHE"]
