"""Quick proofs that this machine has made: a hash of all that a proof depends on → its verdict.

A start whose proof is known reads this file and no more of the proof. "equal" alone is kept, in
`proofs.json` of the cache folder.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shoal import __version__
from shoal.base.layouts.policies import (
    CompilePolicy,
    CompressPolicy,
    KeepPolicy,
    LoopPolicy,
    Policies,
    PrecisionPolicy,
    ReadPolicy,
    UpdatePolicy,
)
from shoal.base.package_source import PACKAGE
from shoal.base.plans.plan import Plan
from shoal.base.runlog.atomic_files import cache_folder, write_atomically
from shoal.fabric import World
from shoal.planning.settle import Words

OTHERS = (
    *(PrecisionPolicy, UpdatePolicy, CompressPolicy, CompilePolicy, LoopPolicy, ReadPolicy),
    KeepPolicy,
)
"""Policies that change numbers on purpose, and those that a proof sets for itself."""

PROVEN = tuple(
    key.name
    for key in fields(Policies)
    if key.name not in {other.name for policy in OTHERS for other in fields(policy)} | {"call"}
)
"""Policies of the layout's side alone, from the plan."""

PLAIN = (bool, int, float, str)


def proof_key(
    module: nn.Module, *, loss: Any, collate: Any, layout: Words, plan: Plan, world: World
) -> str:
    """Return a hash of all that a quick proof depends on.

    Args:
        module: the model, whole; its numbers do not matter.
        loss, collate: functions of the run.
        layout: in words.
        plan: micro-batch, policies and the form of the model's call; its layout is not read.
    """
    parts = [
        model_parts(module),
        hash_source(loss),
        hash_source(collate),
        min(plan.micro_batch, 2),
        package_signature(),
        layout if isinstance(layout, str) else dict(layout),
        {key: getattr(plan, key) for key in PROVEN},
        world.size,
        world.device.type,
        plan.call,
        [torch.__version__, __version__],
    ]
    text = json.dumps(parts, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def model_parts(module: nn.Module) -> list[Any]:
    """Return names, shapes and settings of a module, and a hash of the code of its classes."""
    tensors = [
        [name, list(p.shape), p.requires_grad]
        for name, p in module.named_parameters(remove_duplicate=False)
    ]
    kinds = {type(part) for part in module.modules()}
    code = sorted(f"{k.__module__}.{k.__qualname__} {hash_source(k)}" for k in kinds)
    settings = [
        {k: v for k, v in vars(part).items() if k != "training" and isinstance(v, PLAIN)}
        for part in module.modules()
    ]
    return [tensors, repr(module), code, settings]


def hash_source(thing: Any) -> str:
    """Return a hash of the source around a class or function; its name if no source can be read.

    The whole module counts, since it usually holds the functions that a class calls.
    """
    module = getattr(thing, "__module__", "") or ""
    if module.partition(".")[0] == "torch":  # the version identifies it
        return module
    name = f"{module}.{getattr(thing, '__qualname__', type(thing).__qualname__)}"
    try:
        text = name + inspect.getsource(sys.modules[module])
    except (OSError, TypeError, KeyError):
        text = name
    return hashlib.sha256(text.encode()).hexdigest()


def read_known_proofs() -> dict[str, Any]:
    """Return the kept verdicts by key; {} if the file cannot be read."""
    try:
        return dict(json.loads(_cache_path().read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}


def keep_proof(key: str, verdict: Mapping[str, Any]) -> None:
    """Keep a verdict under its key; do nothing if the folder cannot be written."""
    try:
        _cache_path().parent.mkdir(parents=True, exist_ok=True)
        known = {**read_known_proofs(), key: dict(verdict)}
        write_atomically(_cache_path(), json.dumps(known, indent=1))
    except OSError:
        return  # the cache only saves time


@functools.cache
def package_signature() -> str:
    """Hash names, sizes and times of change of Shoal's own source, at a tenth of `package_digest`.

    Only for a cache of one machine: a new installation of the same source has another one.
    """
    found = hashlib.sha256()
    folders = [str(PACKAGE)]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in sorted(entries, key=lambda one: one.name):
                if entry.is_dir(follow_symlinks=False):
                    if entry.name != "__pycache__":
                        folders.append(entry.path)
                elif entry.name.endswith(".py"):
                    told = entry.stat()
                    found.update(f"{entry.path} {told.st_size} {told.st_mtime_ns}\n".encode())
    return found.hexdigest()


def _cache_path() -> Path:
    return cache_folder() / "proofs.json"
