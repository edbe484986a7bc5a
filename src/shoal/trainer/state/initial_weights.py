"""Weights with which a fresh run starts: those of a checkpoint, or the mean of several.

    W ← Σ_k a_k · W_k        in float64, rounded once to the model's format; Σ a_k = 1

Each rank reads its own part of every tensor, whatever layout wrote it. Optimizer, counters and
position in the data begin anew: the run is a new one. Buffers of whole numbers are those of the
first checkpoint. The digest of the weights names them, also on another layout.

Source: Li et al. 2022, "Branch-train-merge" (a branch grown from experts); Wortsman et al. 2022
(model soups)
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from shoal.base.plans.tensor_shards import Shard
from shoal.checkpoint.format.listing import list_checkpoints, read_manifest
from shoal.checkpoint.format.manifest import Manifest
from shoal.checkpoint.format.weighted_paths import find_weighted_checkpoints
from shoal.checkpoint.load.read import load_from
from shoal.islands.outer_optimizer import hash_tensors
from shoal.parallel.build.full_state import iterate_weights
from shoal.parallel.program import Program
from shoal.trainer.state.run_state import (
    MODEL,
    CheckpointedRun,
    check_model_tensors,
    collect_model_shards,
)

DIGEST_LETTERS = 12
"""Letters of the digest that a line shows; events have the whole."""


def average_tensors(shares: Sequence[float], tensors: Sequence[Tensor]) -> Tensor:
    """Return Σ share · tensor in the format of the first tensor, summed in float64 in this order.

    Args:
        shares: add up to 1.
        tensors: of one shape. Whole numbers have no mean: the first one is returned.

    >>> average_tensors([0.25, 0.75], [torch.zeros(2), torch.ones(2)])
    tensor([0.7500, 0.7500])
    """
    first = tensors[0]
    if len(tensors) == 1 or not first.is_floating_point():
        return first
    total = torch.zeros_like(first, dtype=torch.float64)
    for share, tensor in zip(shares, tensors, strict=True):
        total += share * tensor.double()
    return total.to(first.dtype)


@torch.no_grad()
def load_initial_weights(run: CheckpointedRun, text: str) -> None:
    """Load the weights that `checkpoint.initial_load_path` names; every rank calls it.

    It does nothing for "", and in a run folder that has a checkpoint.

    Args:
        run: before its first step. Its events get the digest of the loaded weights.

    Raises:
        ConfigError: a path without a checkpoint.
        CheckpointError: a checkpoint of another model.
    """
    folder = run.recorder.folder  # a resume restores all, and needs no parent any more
    if not text or run.program.world.broadcast_json(
        bool(folder and list_checkpoints(folder / "checkpoints"))
    ):
        return
    found = find_weighted_checkpoints(text)
    here = collect_model_shards(run)
    known = {name for names in run.program.world.gather_json(list(here)) for name in names}
    manifests = [read_manifest(path) for _, path in found]
    for (_, path), manifest in zip(found, manifests, strict=True):
        compare = f"; compare [model] with the run.toml of {path}"
        check_model_tensors(manifest, here, known, added=compare, changed=compare)
    for tensor, shard in here.values():
        if shard.slices:
            tensor.copy_(_read_mean(found, manifests, shard).reshape(tensor.shape))
    if run.program.reducer is not None:
        run.program.reducer.publish()
    run.guards.writes.updated(run.step_count)
    digest = hash_weights(run.program)
    mean = "+".join(f"{share:.3g}*{path}" for share, path in found)
    source = mean if len(found) > 1 else str(found[0][1])
    if run.program.world.writes_files:
        line = f"starts with the weights of {source}, digest {digest[:DIGEST_LETTERS]}"
        run.recorder.events.emit("notice", text=line, weights=digest, opening=4)


def _read_mean(
    found: Sequence[tuple[float, Path]], manifests: Sequence[Manifest], shard: Shard
) -> Tensor:
    """Return the mean of one tensor's part, read from all checkpoints."""
    full = replace(shard, name=MODEL + shard.name)
    parts = [
        load_from(path, manifest, [full])[full.name]
        for (_, path), manifest in zip(found, manifests, strict=True)
    ]
    return average_tensors([share for share, _ in found], parts)


def hash_weights(program: Program) -> str:
    """Return the SHA-256 of all weights and persistent buffers; every rank calls it.

    It depends on names, formats, shapes and bits, and on no layout.

    Returns:
        The same text on every rank.
    """
    each = {name: hash_tensors({name: tensor}) for name, tensor in iterate_weights(program)}
    whole = hashlib.sha256(repr(sorted(each.items())).encode()).hexdigest()
    return program.world.broadcast_json(whole)
