"""State of a run in a checkpoint: collect it for a save, and load it at a restore.

Tensors: `model.NAME` for parameters and persistent buffers, `optimizer.NAME.KEY` for optimizer
state by parameter name; tied weights once. Everything else is one JSON record: step, the loader's
state (one integer), seed, layout, batch arithmetic, optimizer settings, versions. Randomness needs
no state of its own: it is keyed by (seed, step, micro-batch).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Protocol

import msgspec
import torch

from shoal.base.errors import CheckpointError, ConfigError
from shoal.base.plans.tensor_shards import Shard, check_savable
from shoal.checkpoint.format.checkpoint_faults import DamagedFileError
from shoal.checkpoint.format.folders import delete_later_steps
from shoal.checkpoint.format.hub_folder import ADAPTER
from shoal.checkpoint.format.listing import step_folder
from shoal.checkpoint.format.manifest import FILE_NAME, Manifest
from shoal.checkpoint.load.read import open_newest
from shoal.checkpoint.save.write import Piece
from shoal.optim.average import WeightAverage
from shoal.optim.named_state import list_changed_settings, merge_records, split_state
from shoal.optim.restore_state import (
    check_optimizer_class,
    restore_group_settings,
    restore_optimizer_state,
)
from shoal.parallel.build.full_state import local_state
from shoal.parallel.build.mmap_init import mmap_init
from shoal.parallel.program import LocalParameter, Part, Program, dtype_of
from shoal.trainer.guards import RunGuards
from shoal.trainer.guards.optimizer_checks import LearningRateSetter
from shoal.trainer.loaders.epochs import EpochCounter
from shoal.trainer.loaders.run_loaders import RunLoaders
from shoal.trainer.metrics_recorder import MetricsRecorder
from shoal.trainer.run_folder.extra_state import decode_value
from shoal.trainer.run_folder.run_saves import RunSaver
from shoal.trainer.step.loss_scale import LossScale
from shoal.trainer.step.skipped_steps import SkipCounter, SpikeDetector
from shoal.wire.phases import phase

Count = Annotated[int, msgspec.Meta(ge=0)]
MODEL, OPTIMIZER, AVERAGE = "model.", "optimizer.", "average."


class ExtraState(Protocol):
    """Extra tensors that a checkpoint stores with the model, sharded as parameters are."""

    def parts(self) -> dict[str, Part]:
        """Return this rank's shards, by their names in the checkpoint."""

    def record(self) -> dict[str, Any]:
        """Return the JSON values of the state; the same on every rank."""

    def list_wanted_shards(self, manifest: Manifest) -> list[Shard]:
        """Return this rank's shards of the tensors that a checkpoint holds of this state."""

    def load(self, tensors: Mapping[str, torch.Tensor], record: dict[str, Any]) -> None:
        """Load the state from a checkpoint."""


class CheckpointedRun(Protocol):
    """The attributes of a run (`run.py`) that a checkpoint stores, or a save or restore needs."""

    program: Program
    optimizer: torch.optim.Optimizer
    rate: LearningRateSetter
    recorder: MetricsRecorder
    feed: RunLoaders
    epochs_done: EpochCounter
    loss_scale: LossScale | None
    average: WeightAverage | None
    extra_state: ExtraState | None
    extra_record: dict[str, Any]
    extra: dict[str, Any]
    tokenizer: Any
    step_count: int
    guards: RunGuards
    skips: SkipCounter
    spikes: SpikeDetector

    @property
    def checkpoint_saver(self) -> RunSaver:
        """The saver of the run's checkpoints."""


def resolve_tag_folder(folder: Path, tag: str) -> Path:
    """Return the folder that holds the checkpoint of a tag.

    Raises:
        ConfigError: the tag is no plain name.
    """
    if tag and not re.fullmatch(r"\w[\w.-]*", tag):
        near = re.sub(r"[^\w.-]+", "-", tag).strip("-.") or "best"
        raise ConfigError(f"tag = {tag!r}: a plain name is wanted; try: tag={near!r}")
    return folder / "tags" / tag if tag else folder


def save_run(run: CheckpointedRun, folder: Path, *, tag: str, wait: bool) -> Path | None:
    """Write `folder/checkpoints/step-N`; return None if that failed, or the save is asynchronous.

    Args:
        tag: names a folder inside, which holds the tag's last checkpoint, of any step.

    Raises:
        ClusterError: on all ranks, if bits of the state to be saved changed in memory.
    """
    if run.tokenizer is not None and run.program.world.writes_files:
        from shoal.trainer.run_folder.hub_files import write_user_tokenizer

        write_user_tokenizer(run.tokenizer, folder)
    from shoal.trainer.state.save_checks import print_save_notices

    print_save_notices(run)
    folder = resolve_tag_folder(folder, tag)
    run.guards.writes.drift.check_before_save(run.step_count)
    parts, record = collect_run_state(run)
    pieces = [Piece(shard, tensor) for tensor, shard in parts.values() if shard.slices]
    aliases = {
        MODEL + second: MODEL + first
        for second, first in run.program.aliases.items()
        if MODEL + first in parts
    }
    record |= _write_hub_files(run, folder)
    root, keep = folder / "checkpoints", 1 if tag else run.program.plan.keep
    in_files = run.program.plan.states_in_files  # an asynchronous save would copy them into memory
    if not (wait or tag or in_files):
        run.checkpoint_saver.start(root, run.step_count, pieces, record, keep=keep, aliases=aliases)
        return None
    saved = run.checkpoint_saver.save(
        root, run.step_count, pieces, record, keep=keep, aliases=aliases
    )
    if saved and tag and run.program.world.writes_files:
        with suppress(OSError):  # the next save of the tag deletes the rest
            delete_later_steps(root, run.step_count)
    return saved.path if saved else None  # the run is worth more than this save


def _write_hub_files(run: CheckpointedRun, folder: Path) -> dict[str, Any]:
    """Write the configuration of a transformers model; return keys for the record."""
    if "transformers" not in sys.modules:
        return {}
    from shoal.trainer.run_folder.hub_files import write_hub_config

    program = run.program
    chief = folder if program.world.writes_files else None
    if "peft" in sys.modules:
        from shoal.trainer.adapters import is_adapted, write_adapter_config

        if is_adapted(program.module):
            names = [row.name for row in program.plan.placements if not row.is_buffer]
            adapter = {ADAPTER: write_adapter_config(program.module, names, chief)}
            adapted: Any = program.module
            base = adapted.get_base_model()
            told, line = write_hub_config(
                base, {}, chief
            )  # ties are the base model's own, once merged
            if line:
                run.recorder.notice(line)
            return adapter | told
    told, line = write_hub_config(program.module, program.aliases, chief)
    if line:
        run.recorder.notice(line)
    return told


def collect_run_state(run: CheckpointedRun) -> tuple[dict[str, Part], dict[str, Any]]:
    """Return (this rank's shards of all tensors by name, the JSON record, equal on every rank)."""
    parts = {
        MODEL + name: (tensor, replace(shard, name=MODEL + name))
        for name, (tensor, shard) in collect_model_shards(run).items()
    }
    optimizer_parts, optimizer_record = collect_optimizer_state(run)
    parts.update(optimizer_parts)
    if run.average is not None:
        for name, tensor in run.average.tensors().items():
            shard = replace(
                run.program.local[name].shard, name=AVERAGE + name, dtype=dtype_of(tensor)
            )
            parts[AVERAGE + name] = (tensor, shard)
    for one in _extra_states(run):
        parts.update(one.parts())
    plan = run.program.plan
    record = {
        "step": run.step_count,
        "data": _collect_loader_states(run.feed),
        "seed": plan.seed,
        "layout": plan.layout.text(),
        "batch": plan.batch,
        "micro_batch": plan.micro_batch,
        "precision": plan.compute,
        "optimizer": optimizer_record,
        **({"loss_scale": run.loss_scale.state()} if run.loss_scale else {}),
        **({"average_updates": run.average.updates} if run.average else {}),
        **run.spikes.state(),
        **run.skips.state(),
        **{key: told for one in _extra_states(run) for key, told in one.record().items()},
        **({"epoch": run.epochs_done.state()} if run.epochs_done.used else {}),
        **run.extra_record,
    }
    if "code" in record:
        from shoal.trainer.run_folder.resume_checks import add_sample_digests

        record["data"] = add_sample_digests(run.feed, record["data"])
    return parts, record


def collect_optimizer_state(run: CheckpointedRun) -> tuple[dict[str, Part], dict[str, Any]]:
    """Return (this rank's shards of the optimizer's state by name, its JSON record of all ranks).

    Raises:
        ConfigError: the state holds what cannot be saved.
    """
    local = run.program.local
    names: dict[Any, str] = {
        **{piece.parameter: name for name, piece in local.items()},
        **{p: name for name, p in run.program.frozen.items()},
    }
    state, record = split_state(run.optimizer, names)
    record["changed"] = list_changed_settings(run.optimizer, run.rate.initial_settings)
    layout = run.program.plan.layout
    if layout.zero or layout.serves or run.program.pipe.size > 1:
        record = merge_records(run.program.world.gather_json(record))
    sliced = set(record["sliced"])
    parts: dict[str, Part] = {}
    for full, tensor in state.items():
        name, _, key = full.rpartition(".")
        shard = whole = Shard.whole(OPTIMIZER + full, tuple(tensor.shape), dtype_of(tensor))
        # A rank that owns one vector cannot tell Adafactor's factors from moments by their shape.
        if key in sliced and name in local and tensor.shape == local[name].parameter.shape:
            shard = replace(local[name].shard, name=OPTIMIZER + full, dtype=whole.dtype)
        parts[OPTIMIZER + full] = (tensor.detach(), shard)
    return parts, record


def _extra_states(run: CheckpointedRun) -> list[ExtraState]:
    return [one for one in (run.extra_state, run.program.owed) if one is not None]


def _load_extra_states(
    run: CheckpointedRun, tensors: Mapping[str, torch.Tensor], record: dict[str, Any]
) -> None:
    for one in _extra_states(run):
        one.load(tensors, record)
    if run.program.owed is not None and run.program.owed.dropped:
        run.recorder.notice(run.program.owed.dropped)


def _collect_loader_states(feed: RunLoaders) -> list[dict[str, Any]]:
    """Return the states of the loaders, with each rank's own positions in streams that it reads."""
    if "datasets" not in sys.modules:
        return feed.state
    from shoal.data.streams.stream_loader import gather_places

    return [gather_places(kept, feed.world.gather_json) for kept in feed.state]


def collect_model_shards(run: CheckpointedRun) -> dict[str, Part]:
    """Return this rank's shards of parameters and persistent buffers, by first name.

    Raises:
        ConfigError: the state of the module holds an object that is no tensor.
    """
    parts = local_state(run.program)
    check_savable({name: dtype_of(tensor) for name, (tensor, _) in parts.items()}, "model")
    return parts


@phase("restore")
def restore_run(run: CheckpointedRun, folder: Path, step: int | None = None) -> bool:
    """Load the newest complete checkpoint of `folder`, or that of a step; return False without one.

    Raises:
        CheckpointError: its tensors or its optimizer are not those of this run.
    """
    here = collect_model_shards(run)
    local = run.program.local
    known = {name for names in run.program.world.gather_json(list(here)) for name in names}

    def wanted(manifest: Manifest) -> list[Shard]:
        from shoal.trainer.run_folder.resume_checks import (
            explain_config_changes,  # loaded only for a resume
        )

        _check_record(manifest, folder)
        with explain_config_changes(run, manifest.record):
            check_model_tensors(manifest, here, known)
            shards = _list_wanted_shards(manifest, here, local)
        if run.average is not None and "average_updates" in manifest.record:
            shards += _list_average_shards(manifest, local)
        return shards + [
            shard for one in _extra_states(run) for shard in one.list_wanted_shards(manifest)
        ]

    if run.program.world.keepers:
        from shoal.trainer.run_folder.node_local_resume import sync_newest_checkpoint

        step = sync_newest_checkpoint(run, folder, step, lambda: _fetch_remote(run, folder, step))
    else:
        _fetch_remote(run, folder, step)
    emit = run.recorder.events.emit
    with mmap_init() if run.program.plan.states_in_files else nullcontext():
        loaded = open_newest(folder / "checkpoints", wanted, run.program.world, emit, step)
    if loaded is None:
        return False
    record = loaded.manifest.record
    from shoal.trainer.run_folder.resume_checks import (
        compare_with_checkpoint,
        explain_config_changes,
        report_resume,
    )

    with explain_config_changes(run, record):
        check_optimizer_class(run.optimizer, record["optimizer"])  # before any state changes
        run.feed.restore(record["data"])
    differences, changes = compare_with_checkpoint(run, record)
    run.extra_record["extra"] = record.get("extra", {})
    run.extra = decode_value(run.extra_record["extra"])
    run.epochs_done.restore(record.get("epoch", {}), run.recorder.notice)
    _load_model(run, here, loaded.tensors)
    state = {
        n.removeprefix(OPTIMIZER): t for n, t in loaded.tensors.items() if n.startswith(OPTIMIZER)
    }
    stepped = {name: piece.parameter for name, piece in local.items()}
    if run.average is not None:
        kept = {name: loaded.tensors.get(AVERAGE + name, p) for name, p in stepped.items()}
        run.average.load(kept, int(record.get("average_updates", 0)))
    if run.rate.length.schedule is None:  # before the state: it compares what is left
        names = {parameter: name for name, parameter in stepped.items()}
        restore_group_settings(run.optimizer, names, record["optimizer"])
    with mmap_init() if run.program.plan.states_in_files else nullcontext():
        rates = restore_optimizer_state(run.optimizer, stepped, state, record["optimizer"])
        differences, changes = differences + rates, changes or bool(rates)
    if run.loss_scale is not None and "loss_scale" in record:
        run.loss_scale.load(record["loss_scale"])
    run.spikes.load(record)
    run.skips.lost = int(record.get("unreadable", 0))
    _load_extra_states(run, loaded.tensors, record)
    run.step_count = int(record["step"])
    here_now = folder == run.recorder.folder  # the folder of a tag may be another run's
    (run.recorder.cut if here_now else run.recorder.mark_rewind)(run.step_count)
    report_resume(run, loaded.path, differences, changes, here=here_now)
    return True


def _load_model(
    run: CheckpointedRun,
    here: Mapping[str, tuple[torch.Tensor, Shard]],
    tensors: Mapping[str, torch.Tensor],
) -> None:
    """Copy a checkpoint's slices into this rank's weights and buffers."""
    with torch.no_grad():
        for name, (tensor, shard) in here.items():
            if shard.slices:
                tensor.copy_(tensors[MODEL + name].reshape(tensor.shape))
    if run.program.reducer is not None:
        run.program.reducer.publish()


def _fetch_remote(run: CheckpointedRun, folder: Path, step: int | None) -> None:
    """Fetch a newer checkpoint from the run's remote folder, if it has one.

    Args:
        folder: the run's own, or one of a tag in it; other folders fetch nothing.
    """
    own, address = run.recorder.folder, run.program.plan.remote
    if not address or own is None or not folder.resolve().is_relative_to(own.resolve()):
        return
    from shoal.checkpoint.remote.fetch_step import fetch_newest
    from shoal.checkpoint.remote.remote_folder import RemoteFolder

    parts = folder.resolve().relative_to(own.resolve()).parts
    below = "".join(f"{part}/" for part in parts)
    root, world = folder / "checkpoints", run.program.world
    fetch_newest(root, RemoteFolder(address), below, world, run.recorder.notice, step)


class _Group(msgspec.Struct):
    names: list[str]


class _OptimizerRecord(msgspec.Struct):
    kind: str = msgspec.field(name="class")
    scalars: dict[str, dict[str, bool | int | float | str | None]]
    groups: list[_Group]
    sliced: list[str] = []
    changed: list[list[str]] | None = None
    """Settings that the run changed, by group; records before 0.2 have none."""


class _LoaderRecord(msgspec.Struct):
    position: Count = 0
    epoch: Count = 0
    epoch_start: Count = 0
    samples: Count = 0
    left_out: list[tuple[Count, Count]] = []


class _CheckpointRecord(msgspec.Struct):
    """Schema of the record keys that `restore_run` reads; other keys are only shown."""

    step: Count
    data: list[_LoaderRecord]
    optimizer: _OptimizerRecord
    loss_scale: dict[str, float] = {}
    extra: dict[str, Any] = {}
    average_updates: Count = 0
    spikes: dict[str, list[float]] = {}
    epoch: dict[str, Count] = {}
    unreadable: Count = 0


def _check_record(manifest: Manifest, folder: Path) -> None:
    """Raise Damaged for a record that no run writes, so that an older checkpoint is tried."""
    path = step_folder(folder / "checkpoints", manifest.step) / FILE_NAME
    try:
        record = msgspec.convert(manifest.record, type=_CheckpointRecord)
    except (msgspec.ValidationError, RecursionError) as failure:
        text = (
            str(failure).replace("`$", "`record") if "`$" in str(failure) else f"record: {failure}"
        )
        raise DamagedFileError(path, f"has a record that no run writes: {text}") from failure
    if any(one and "position" not in one for one in manifest.record["data"]):
        raise DamagedFileError(
            path, "has a record that no run writes: `record.data` without position"
        )
    changed, groups = record.optimizer.changed, record.optimizer.groups
    if changed is not None and len(changed) != len(groups):
        raise DamagedFileError(
            path,
            "has a record that no run writes: `record.optimizer.changed` of "
            f"{len(changed)} groups, `record.optimizer.groups` of {len(groups)}",
        )
    if record.step != manifest.step:
        raise DamagedFileError(
            path, f"is of step {manifest.step}, its record of step {record.step}"
        )


def _list_wanted_shards(
    manifest: Manifest, here: dict[str, Part], local: Mapping[str, LocalParameter]
) -> list[Shard]:
    """Return this rank's shards of all tensors of the model and the optimizer in a checkpoint."""
    shards = [replace(shard, name=MODEL + name) for name, (_, shard) in here.items()]
    record = manifest.record["optimizer"]
    for full, stored in manifest.tensors.items():
        name, _, key = full.removeprefix(OPTIMIZER).rpartition(".")
        if not full.startswith(OPTIMIZER) or name not in local:
            continue
        shape = tuple(stored.shape)
        if _is_sliced(record, key, shape, local[name].shard):
            shards.append(replace(local[name].shard, name=full, dtype=stored.dtype))
        else:
            shards.append(Shard.whole(full, shape, stored.dtype))
    return [shard for shard in shards if shard.slices]


def _list_average_shards(manifest: Manifest, local: Mapping[str, LocalParameter]) -> list[Shard]:
    """Return this rank's shards of the averaged weights."""
    return [
        replace(one.shard, name=AVERAGE + name, dtype=manifest.tensors[AVERAGE + name].dtype)
        for name, one in local.items()
        if AVERAGE + name in manifest.tensors
    ]


def _is_sliced(record: dict[str, Any], key: str, shape: tuple[int, ...], shard: Shard) -> bool:
    """Return whether an optimizer tensor is sharded as its parameter; by shape in older records."""
    if "sliced" in record:
        return key in record["sliced"] and shape == shard.global_shape
    return bool(shape) and shape == shard.global_shape


def check_model_tensors(
    manifest: Manifest,
    here: Mapping[str, Part],
    known: set[str],
    *,
    added: str = "; the model was built with other arguments than at step {step}: compare [model] "
    "with the run.toml of that run",
    changed: str = "; compare [model] and [precision] with the run.toml of that run",
) -> None:
    """Refuse a checkpoint unless its model tensors have this model's names, shapes and dtypes.

    Args:
        here: this rank's parts.
        known: names on all ranks: stages of a pipeline hold different ones.
        added: advice for a name that only one of model and checkpoint has.
        changed: advice for another shape or dtype.

    Raises:
        CheckpointError: names the first tensor that differs.
    """
    stored = {n.removeprefix(MODEL) for n in manifest.tensors if n.startswith(MODEL)}
    for name in sorted(stored ^ known):
        where = "the checkpoint" if name in stored else "this model"
        raise CheckpointError(f"model.{name}: only in {where}{added.format(step=manifest.step)}")
    for name, (_, shard) in here.items():
        kept = manifest.tensors[MODEL + name]
        if tuple(kept.shape) != shard.global_shape or kept.dtype != shard.dtype:
            raise CheckpointError(
                f"model.{name}: {list(kept.shape)} {kept.dtype} in the checkpoint, "
                f"{list(shard.global_shape)} {shard.dtype} in this model{changed}"
            )
