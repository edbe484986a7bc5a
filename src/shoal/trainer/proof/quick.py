"""Two small steps on the layout and in one process, before a training run on several processes.

    fresh start only    a restart, or a run that goes on from a checkpoint, was proven when it began
    once                per model (its code, names, shapes), loss, layout, processes and versions,
                        Shoal's own source among them; "equal" is kept in the cache folder
    in the workers      which have met already; nothing is started and nothing is written to the run
    refuses             on a proven difference only; what cannot be proven is said and let through

Source: design §5; nobody else ships it, so the cost must stay at seconds: `BUDGET_S` bounds it.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shoal import __version__
from shoal.base.errors import TrainingError
from shoal.base.files import cache_folder, write_whole
from shoal.checkpoint.catalog import find
from shoal.data.cache import content_key
from shoal.fabric import World
from shoal.trainer.parallelize import build_module
from shoal.trainer.proof.battery import OPTIMIZERS, SGD, Battery, Report
from shoal.trainer.proof.material import Material

BUDGET_S = 30.0
"""For the one process; what needs longer is proven by `shoal prove`, not before each run."""

STEPS = 2
PLAIN = (bool, int, float, str)
RESTARTS = ("SHOAL_ATTEMPT", "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")


def prove_before(
    material: Material, world: World, folder: Path, environ: Mapping[str, str] = os.environ
) -> str:
    """Prove a layout on two small steps, unless that is known; every rank calls it.

    folder   the run's own folder: with a checkpoint in it there is nothing fresh to prove
    Gives    the line that the user should read; empty where nothing was done
    Errors   TrainingError with the first difference and its likely cause if they differ
    """
    if world.size == 1 or not fresh(world, folder, environ):
        return ""
    if isinstance(material.data, Iterator):
        return "proof: not proven: the data can be read once only; training goes on"
    known: Any = None
    key = ""
    if world.is_first:
        key = proof_key(material, world)
        known = _read().get(key)
    if world.broadcast_json(known) is not None:
        return ""
    report = quick_battery(material, world.size).prove(world, material.layout, material.policies)
    if report["verdict"] == "different":
        raise TrainingError(refusal(report))
    if world.is_first and report["verdict"] == "equal":
        kept = {k: report[k] for k in ("verdict", "reason", "layout", "processes", "seconds")}
        _write({**_read(), key: kept})
    return line(report)


def quick_battery(material: Material, degree: int) -> Battery:
    """Two steps of SGD on small micro-batches, the second step a short one."""
    return Battery(
        material.small(degree).trial(),
        optimizers={SGD: OPTIMIZERS[SGD]},
        steps=STEPS,
        seed=material.seed,
        budget_s=BUDGET_S,
    )


def fresh(world: World, folder: Path, environ: Mapping[str, str]) -> bool:
    """Whether the run begins here: no restart of any launcher, no checkpoint. Rank 0 decides."""
    restarted = any(environ.get(name, "0") not in ("", "0") for name in RESTARTS)
    return bool(world.broadcast_json(not restarted and not find(folder / "checkpoints")))


def line(report: Report) -> str:
    """What a proof before a run says: one line."""
    if report["verdict"] == "not proven":
        return f"proof: not proven: {report['reason']}; training goes on"
    (trajectory,) = report["trajectories"]
    return (
        f"proof: {report['layout']} computes what one process computes: "
        f"{len(trajectory['parameters'])} parameters, {report['steps']} steps in float64, largest "
        f"difference {trajectory['largest']['gradient']:.0e} ({report['seconds']:.1f} s; once per "
        f"model, layout and versions)"
    )


def refusal(report: Report) -> str:
    """Why training is refused: layout, first difference, likely cause, what to do."""
    return (
        f"proof: {report['layout']} on {report['processes']} processes does not compute what one "
        f"process computes: {report['cause']['text']}. `shoal prove` shows every parameter; "
        f"train.prove=off trains all the same"
    )


def proof_key(material: Material, world: World) -> str:
    """A hash of all that a quick proof depends on; builds the model once to see its code."""
    module = build_module(material.build, material.seed)
    layout = material.layout
    return content_key(
        model_parts(module),
        source_of(material.loss),
        source_of(material.collate),
        min(material.micro_batch, 2),
        own_source(),
        layout if isinstance(layout, str) else dict(layout),
        dict(material.policies),
        world.size,
        world.device.type,
        material.call,
        [torch.__version__, __version__],
    )


def model_parts(module: nn.Module) -> list[Any]:
    """Names, shapes and settings of a module, and a hash of the code of every class in it."""
    tensors = [
        [name, list(p.shape), p.requires_grad]
        for name, p in module.named_parameters(remove_duplicate=False)
    ]
    kinds = {type(part) for part in module.modules()}
    code = sorted(f"{k.__module__}.{k.__qualname__} {source_of(k)}" for k in kinds)
    settings = [
        {k: v for k, v in vars(part).items() if k != "training" and isinstance(v, PLAIN)}
        for part in module.modules()
    ]
    return [tensors, repr(module), code, settings]


def own_source() -> str:
    """A hash of Shoal's own source: an edited layout is another layout."""
    found = hashlib.sha256()
    for path in sorted(Path(__file__).resolve().parents[2].rglob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()


def source_of(thing: Any) -> str:
    """A hash of the source around a class or function; its name where there is none to be read.

    The whole module counts, since what a class calls usually lies beside it.
    """
    module = getattr(thing, "__module__", "") or ""
    if module.partition(".")[0] == "torch":  # the version says it
        return module
    name = f"{module}.{getattr(thing, '__qualname__', type(thing).__qualname__)}"
    try:
        text = name + inspect.getsource(sys.modules[module])
    except (OSError, TypeError, KeyError):
        text = name
    return hashlib.sha256(text.encode()).hexdigest()


def _path() -> Path:
    return cache_folder() / "proofs.json"


def _read() -> dict[str, Any]:
    try:
        return dict(json.loads(_path().read_text()))
    except (OSError, ValueError, TypeError):
        return {}


def _write(known: dict[str, Any]) -> None:
    try:
        _path().parent.mkdir(parents=True, exist_ok=True)
        write_whole(_path(), json.dumps(known, indent=1))
    except OSError:
        return  # the cache only saves time
