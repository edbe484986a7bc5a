"""Restore only the weights of a checkpoint, for a warm start or an inspection.

    parameters, persistent buffers     loaded, each rank its own part, whatever layout wrote them
    optimizer, counters, loaders       stay as they are in the run

`Run.restore` loads everything. Training loops of other libraries also need the weights alone
(`load_module_only` of DeepSpeed's engine).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from shoal.base.plans.tensor_shards import Shard
from shoal.checkpoint.format.manifest import Manifest
from shoal.checkpoint.load.read import open_newest
from shoal.trainer.run import Run
from shoal.trainer.state.run_state import MODEL, check_model_tensors, collect_model_shards
from shoal.wire.phases import phase


@phase("restore weights")
def restore_weights(
    run: Run, folder: Path, step: int | None = None, *, strict: bool = True
) -> dict[str, Any] | None:
    """Load the model's weights, and nothing else, from the newest checkpoint of a folder.

    Every rank must call it.

    Args:
        run: the run; it drops a step that has begun and has no update yet.
        folder: holds `checkpoints/step-N`.
        step: load the checkpoint of this step only.
        strict: refuse names that only one of model and checkpoint has; False: ignore these names.

    Returns:
        The checkpoint's record; None if there is no checkpoint.

    Raises:
        CheckpointError: a tensor has another shape or format than in the model.
    """
    run.step_state.written = None
    run.checkpoint_saver.wait_pending()
    here = collect_model_shards(run)
    known = {name for names in run.world.gather_json(list(here)) for name in names}

    def wanted(manifest: Manifest) -> list[Shard]:
        stored = {name.removeprefix(MODEL) for name in manifest.tensors if name.startswith(MODEL)}
        check_model_tensors(
            manifest,
            {name: here[name] for name in here if name in stored},
            known if strict else stored,
            added=" (step {step}); try: the model as it was built then, or "
            "load_module_strict=False",
            changed="; try: the model as it was built then",
        )
        return [
            replace(shard, name=MODEL + name)
            for name, (_, shard) in here.items()
            if name in stored and shard.slices
        ]

    emit = run.recorder.events.emit
    loaded = open_newest(folder / "checkpoints", wanted, run.world, emit, step)
    if loaded is None:
        return None
    with torch.no_grad():
        for name, (tensor, _) in here.items():
            if MODEL + name in loaded.tensors:
                tensor.copy_(loaded.tensors[MODEL + name].reshape(tensor.shape))
    if run.program.reducer is not None:
        run.program.reducer.publish()
    run.guards.writes.updated(run.step_count)
    return dict(loaded.manifest.record)
