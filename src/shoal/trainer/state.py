"""What a checkpoint holds of a run, and how a run takes it back.

Tensors: `model.NAME` for parameters and persistent buffers, `optimizer.NAME.KEY` for optimizer
state by parameter name; tied weights once. Everything else is one JSON record: step, the loader's
state (one integer), seed, layout, batch arithmetic, optimizer settings, versions. Randomness needs
no state of its own: it is keyed by (seed, step, micro-batch).
"""

from __future__ import annotations

import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from shoal.base.errors import CheckpointError, ConfigError
from shoal.base.shards import Shard
from shoal.checkpoint.manifest import Manifest
from shoal.checkpoint.read import open_newest
from shoal.checkpoint.tensorfile import DTYPES
from shoal.checkpoint.write import Piece, save
from shoal.optim.state import check_class, join_state, split_state

if TYPE_CHECKING:
    from shoal.trainer.run import Run

MODEL, OPTIMIZER = "model.", "optimizer."


def save_run(run: Run, folder: Path) -> Path | None:
    """Write `folder/checkpoints/step-N`; None if it could not be written (an event says why)."""
    tensors, record = run_state(run)
    pieces = [
        Piece(Shard.whole(name, tuple(t.shape), _dtype(t)), t.detach())
        for name, t in tensors.items()
    ]
    aliases = {
        MODEL + second: MODEL + first
        for second, first in run.program.aliases.items()
        if MODEL + first in tensors
    }
    try:
        saved = save(
            folder / "checkpoints",
            run.step_count,
            pieces,
            record,
            run.world,
            run.recorder.events.emit,
            keep=run.settings.keep,
            aliases=aliases,
        )
    except CheckpointError as failure:
        run.recorder.notice(str(failure))
        return None  # the run is worth more than this save
    return saved.path


def run_state(run: Run) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """(tensors by name, JSON record) of a run, the same on every rank under `ddp`."""
    tensors = {MODEL + name: t for name, t in model_tensors(run).items()}
    names = {p: n for n, p in run.model.named_parameters()}
    state, optimizer_record = split_state(run.optimizer, names)
    tensors.update({OPTIMIZER + name: t for name, t in state.items()})
    plan = run.plan
    record = {
        "step": run.step_count,
        "data": run.feed.state,
        "seed": run.settings.seed,
        "layout": plan.layout.text(),
        "batch": plan.batch,
        "micro_batch": plan.micro_batch,
        "precision": plan.precision,
        "optimizer": optimizer_record,
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        **run.extra_record,
    }
    return tensors, record


def model_tensors(run: Run) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by first name.

    Errors: ConfigError for a module whose state holds something that is no tensor.
    """
    kept: dict[str, torch.Tensor] = {}
    for name, value in run.model.state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor):
            raise ConfigError(
                f"model: {name} keeps a {type(value).__name__} in its state; tensors can be saved "
                f"(register_buffer), other objects cannot"
            )
        if name not in run.program.aliases:
            kept[name] = value
    check_savable(kept, "model")
    return kept


def check_savable(tensors: dict[str, torch.Tensor], where: str) -> None:
    """Errors: ConfigError for a dtype that no checkpoint can hold."""
    for name, tensor in tensors.items():
        if _dtype(tensor) not in DTYPES:
            raise ConfigError(
                f"{where}: {name} is {_dtype(tensor)}, which checkpoints cannot hold; they hold "
                f"{', '.join(DTYPES)}"
            )


def restore_run(run: Run, folder: Path) -> bool:
    """Take the newest complete checkpoint of `folder` back; False if there is none.

    Errors: CheckpointError when its tensors or its optimizer are not those of this run.
    """
    here = model_tensors(run)

    def wanted(manifest: Manifest) -> list[Shard]:
        _check_names(manifest, here)
        return [
            Shard.whole(name, tuple(stored.shape), stored.dtype)
            for name, stored in manifest.tensors.items()
        ]

    loaded = open_newest(folder / "checkpoints", wanted, run.world, run.recorder.events.emit)
    if loaded is None:
        return False
    record = loaded.manifest.record
    check_class(run.optimizer, record["optimizer"])  # before anything moves
    run.feed.restore(record["data"])
    with torch.no_grad():
        for name, tensor in here.items():
            tensor.copy_(loaded.tensors[MODEL + name])
    state = {n.removeprefix(OPTIMIZER): t for n, t in loaded.tensors.items() if _is_state(n)}
    differences = join_state(run.optimizer, run.program.parameters, state, record["optimizer"])
    if run.settings.schedule is None:
        _restore_lr(run, record["optimizer"]["groups"])
    run.step_count = int(record["step"])
    run.recorder.cut(run.step_count)
    differences += _differences(run, record)
    if run.world.is_first:
        run.recorder.events.emit(
            "resumed", step=run.step_count, folder=str(loaded.path), differs=differences
        )
    return True


def _is_state(name: str) -> bool:
    return name.startswith(OPTIMIZER)


def _check_names(manifest: Manifest, here: dict[str, torch.Tensor]) -> None:
    stored = {n.removeprefix(MODEL) for n in manifest.tensors if n.startswith(MODEL)}
    for name in sorted(stored ^ set(here)):
        where = "the checkpoint" if name in stored else "this model"
        raise CheckpointError(
            f"model.{name}: only in {where}; the model was built with other arguments than at step "
            f"{manifest.step}: compare [model] with the run.toml of that run"
        )
    for name, tensor in here.items():
        kept = manifest.tensors[MODEL + name]
        if tuple(kept.shape) != tuple(tensor.shape) or kept.dtype != _dtype(tensor):
            raise CheckpointError(
                f"model.{name}: {list(kept.shape)} {kept.dtype} in the checkpoint, "
                f"{list(tensor.shape)} {_dtype(tensor)} in this model; compare [model] and "
                f"[precision] with the run.toml of that run"
            )


def _differences(run: Run, record: dict[str, Any]) -> list[str]:
    """Lines on what is not as it was when the checkpoint was written."""
    plan = run.plan
    now = {
        "layout": plan.layout.text(),
        "batch": plan.batch,
        "micro_batch": plan.micro_batch,
        "precision": plan.precision,
        "seed": run.settings.seed,
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
    }
    return [f"{k} was {record[k]}, is {v}" for k, v in now.items() if record.get(k) != v]


def _restore_lr(run: Run, saved: list[dict[str, Any]]) -> None:
    """Without a schedule of ours the learning rate is state: the user may have set it.

    `initial_lr` comes along: torch's own schedulers want it in order to go on.
    """
    names = {id(p): n for n, p in run.model.named_parameters()}
    then = {name: group for group in saved for name in group["names"]}
    for group in run.optimizer.param_groups:
        old = then.get(names[id(group["params"][0])], {}) if group["params"] else {}
        for key in ("lr", "initial_lr"):
            if key not in old:
                continue
            if isinstance(group.get(key), torch.Tensor):
                group[key].fill_(old[key])
            else:
                group[key] = old[key]


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
