"""The proof before a training run, asked for inside a world of processes."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import cases
from planted import BUGS
from shoal.base.errors import ShoalError
from shoal.base.layouts.layout import Layout
from shoal.base.plans.plan import Plan
from shoal.fabric import World
from shoal.models.loss import token_loss
from shoal.proof import Battery, ProofCase, prove_layout, start_proof
from shoal.wire.phases import Phase, set_phase_listener


def ask(
    world: World, folder: str, bug: str = "nothing", environ: dict[str, str] | None = None, **other
) -> dict[str, Any]:
    """What `prove_layout` says of the mlp case on ddp, with the cache in `folder`.

    layout   another one; it is told as well what the proof was busy with
    """
    heard: list[list[str]] = []

    def hear(phases: list[Phase]) -> None:
        heard.extend([names] if (names := [p.name for p in phases]) not in heard else [])

    torch.set_num_threads(1)
    case = other.pop("case", "mlp")
    budget_s, twin = start_proof.BUDGET_S, Battery.twin
    start_proof.BUDGET_S = other.pop("budget_s", budget_s)
    if other.pop("without_twin", False):
        Battery.twin = None
    os.environ["SHOAL_CACHE"] = str(Path(folder) / "cache")
    layout = other.pop("layout", "ddp")
    made = ProofCase(
        lambda: cases.build(case),
        cases.loss(case) or token_loss,
        cases.dataset(case),
        None,
        layout,
        replace(Plan(Layout(), 24, 2), **other),
    )
    set_phase_listener(hear)
    try:
        with BUGS[bug](world):
            told = prove_layout(made, world, Path(folder) / "run", environ or {})
        return {"line": told, "phases": heard}
    except ShoalError as failure:
        return {"error": str(failure), "code": failure.exit_code}
    finally:
        set_phase_listener(None)
        del os.environ["SHOAL_CACHE"]
        start_proof.BUDGET_S, Battery.twin = budget_s, twin


def begun_meanwhile(world: World, folder: str) -> dict[str, Any]:
    """What the run's folder says of the proof while it is under way."""
    told: list[dict[str, Any]] = [{}]
    whole = Battery.prove

    def looking(self: Battery, *arguments: Any) -> Any:
        if world.is_first:
            told.append(json.loads((Path(folder) / "run" / "proof.json").read_text()))
        return whole(self, *arguments)

    with mock.patch.object(Battery, "prove", looking):
        ask(world, folder)
    return told[-1]
