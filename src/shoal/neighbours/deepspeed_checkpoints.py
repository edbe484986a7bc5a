"""Tags and the file `latest` of DeepSpeed, for checkpoints in a run folder of Shoal's.

    DIR/latest                     the tag that `load_checkpoint(DIR)` takes
    DIR/TAG/checkpoints/step-N     of a tag, its last one; a script may delete DIR/TAG

Older folders of Shoal have DIR/checkpoints/step-N (of global_stepN) and DIR/tags/TAG. All ranks
take one tag: ranks list their own disks, since nodes may not share one, and the
first `latest` counts for all. Source: deepspeed/runtime/engine.py, 0.19.8.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from shoal.base.errors import CheckpointError, ConfigError, nearest_word, shorten
from shoal.base.plans.tensor_shards import Shard
from shoal.base.runlog.atomic_files import list_saved_steps, write_atomically
from shoal.checkpoint.export.export_file import select_tensors
from shoal.checkpoint.format.listing import list_checkpoints, read_manifest
from shoal.checkpoint.load.read import load_from
from shoal.fabric import World
from shoal.neighbours.outputs.final_saves import report_final_saves
from shoal.trainer.restore_weights import restore_weights
from shoal.trainer.run import Run
from shoal.trainer.run_folder.extra_state import MOST_BYTES, decode_value, encode_value

LATEST, RECOVERY = "latest", "zero_to_fp32.py"
RECOVERY_TEXT = '''"""Merge weights: python zero_to_fp32.py CHECKPOINTS OUTPUT [-t TAG]."""
import argparse

import shoal.neighbours.deepspeed
from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict as convert

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("checkpoint_dir")
parser.add_argument("output_dir")
parser.add_argument("-t", "--tag")
parser.add_argument("--max_shard_size", help="not read: one file is written")
parser.add_argument("--safe_serialization", action="store_true")
convert(**vars(parser.parse_args()))
'''
STEP_TAG = re.compile(r"global_step([0-9]+)")
KEEP_ALL = 2**30
"""Checkpoints of a folder that stay: DeepSpeed deletes none."""


@dataclass(frozen=True)
class TagCheckpoint:
    """Folder and step of a tag's checkpoint.

    Attributes:
        folder: holds `checkpoints/`.
        step: of the checkpoint; None: the newest one there.
    """

    folder: Path
    step: int | None


def agree_on_tag(run: Run, tag: str, call: str) -> str:
    """Return rank 0's tag, and print one line if ranks' tags differ; every rank calls it."""
    tags = run.world.gather_json(tag)
    other = next((rank for rank, one in enumerate(tags) if one != tags[0]), None)
    if other is not None:
        run.recorder.notice(
            f"deepspeed: {call}: tag = {tags[0]!r} on rank 0 and {tags[other]!r} on rank {other}; "
            f"all ranks take rank 0's, since they share one checkpoint"
        )
    return str(tags[0])


def folder_name(tag: str) -> str:
    """Return the name of a tag's folder: the tag itself, where it is a plain name.

    >>> folder_name("epoch1"), folder_name("epoch=1/best")
    ('epoch1', 'epoch-1-best-5dab6517')
    """
    plain = re.sub(r"[^\w.-]+", "-", tag).strip("-.")
    if plain == tag:
        return tag
    return f"{plain}-{hashlib.sha256(tag.encode()).hexdigest()[:8]}".strip("-")


def keep_one_step(run: Run, saved: Path) -> None:
    """Delete the other steps of a saved tag's folder; every rank calls it."""
    if run.world.writes_files:
        for other in saved.parent.glob("step-*"):
            if other.name != saved.name:
                shutil.rmtree(other, ignore_errors=True)
    run.world.barrier()


def write_recovery_script(run: Run, folder: Path) -> None:
    """Write `folder/zero_to_fp32.py`, which users start after training, as DeepSpeed does."""
    if run.world.writes_files and not (folder / RECOVERY).exists():
        write_atomically(folder / RECOVERY, RECOVERY_TEXT)


def write_latest(run: Run, folder: Path, tag: str) -> None:
    """Write the tag of the newest checkpoint on every disk that has one; every rank calls it."""
    if run.world.writes_files:
        write_atomically(folder / LATEST, tag)
    run.world.barrier()


def find_latest(run: Run, folder: Path) -> str | None:
    """Return the tag of `folder/latest`; every rank calls it.

    Folders of Shoal 0.1.0 have no such file: of them the newest checkpoint without a tag of its own
    counts, unless it was saved with `save_latest=False`. If nothing is found, one line reports it,
    as DeepSpeed's does, and the script trains from the start.

    Returns:
        The tag; None where `load_checkpoint` returns `(None, None)`.
    """
    seen = run.world.gather_json(read_latest(folder))
    for tag in seen:
        if tag is not None:
            return str(tag)
    tags = gather_tags(run.world, folder)
    held = f"; it holds the tags {shorten(', '.join(tags))}" if tags else ""
    why = f"{folder} has no file {LATEST}{held}" if folder.is_dir() else f"{folder} is no folder"
    near = f'tag="{tags[-1]}"' if tags else "the folder that save_checkpoint was given"
    run.recorder.notice(
        f"deepspeed: load_checkpoint: nothing was loaded, and training starts anew: {why}; "
        f"try: {near}"
    )
    return None


def read_latest(folder: Path) -> str | None:
    """Return the content of `latest` on this rank's disk; None without one."""
    try:
        return (folder / LATEST).read_text(encoding="utf-8").strip()
    except (FileNotFoundError, NotADirectoryError):
        pass
    for found in list_checkpoints(folder / "checkpoints"):
        try:
            extra = read_manifest(found.path).record.get("extra", {})
        except CheckpointError:
            continue  # `restore` names the damage
        if decode_value(extra).get("save_latest", True):
            return f"global_step{found.step}"
    return None


def list_tags(folder: Path) -> list[str]:
    """List the tags of a folder as this rank's disk has them, oldest steps first."""
    plain = {f"global_step{step}": step for step in list_saved_steps(folder)}
    for place in (*folder.glob("tags/*"), *folder.glob("*")):
        if place.name != "tags" and (steps := list_saved_steps(place)):
            plain[place.name] = steps[-1]
    return sorted(plain, key=lambda tag: (plain[tag], tag))


def gather_tags(world: World, folder: Path) -> list[str]:
    """List the tags of a folder that any rank sees; every rank calls it."""
    seen = world.gather_json(list_tags(folder))
    return list(dict.fromkeys(tag for tags in seen for tag in tags))


def find_checkpoint(
    folder: Path, tag: str, tags: Sequence[str], call: str = "load_checkpoint"
) -> TagCheckpoint:
    """Return the location of a tag's checkpoint.

    Args:
        folder: that `save_checkpoint` was given.
        tag: as the script names it.
        tags: of the folder.
        call: for the message.

    Raises:
        ConfigError: there is none; the line lists the tags, also those that DeepSpeed wrote.
    """
    name, step = folder_name(tag), STEP_TAG.fullmatch(tag)
    if name in tags:
        places = (folder / name, folder / "tags" / name)
        found = next((place for place in places if (place / "checkpoints").is_dir()), None)
        if found is None and step:
            return TagCheckpoint(folder, int(step[1]))
        return TagCheckpoint(found or places[0], None)
    if any((folder / tag).glob("*model_states.pt")):
        raise ConfigError(
            f"{call}: {folder / tag} was written by DeepSpeed, in pickles; try: "
            f"shoal checkpoint import {folder} {folder.name}-imported, and model.load_state_dict "
            f"before initialize"
        )
    close = nearest_word(tag, tags) or (tags[-1] if tags else "")
    near = f'tag="{close}"; tags there: {shorten(", ".join(tags))}' if close else "another folder"
    raise ConfigError(f"{call}: {folder} holds no checkpoint of the tag {tag}; try: {near}")


def to_plain_state(run: Run, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return rank 0's client_state as plain values; every rank calls it.

    DeepSpeed pickles rank 0's object. A part that is no plain value, tensor, array or namespace is
    left out, and one line reports it: the checkpoint is worth more.
    """
    kept, lines = dict[str, Any](), list[str]()
    for name, value in state.items() if run.world.is_first else ():
        try:
            text = encode_value(_pack_state(value), f"client_state.{name}")
            if (size_bytes := len(str(text))) > MOST_BYTES // 2:
                raise ConfigError(f"client_state.{name}: {size_bytes} bytes of text are too many")
            kept[str(name)] = text
        except ConfigError as failure:
            lines.append(f"deepspeed: save_checkpoint: left out of the checkpoint: {failure}")
    for line in lines:
        run.recorder.notice(line)
    return decode_value(run.world.broadcast_json(kept))


def unpack_state(value: Any) -> Any:
    """Rebuild tensors, arrays and namespaces from the plain values of `_pack_state`.

    >>> unpack_state(_pack_state({"a": [torch.ones(2)], "b": (argparse.Namespace(c=1),)}))
    {'a': [tensor([1., 1.])], 'b': (Namespace(c=1),)}
    """
    if isinstance(value, list | tuple):
        return type(value)(map(unpack_state, value))
    if not isinstance(value, dict):
        return value
    if TENSOR in value:
        data = bytearray.fromhex(value["bytes"])
        kind = getattr(torch, value["dtype"])
        flat = torch.frombuffer(data, dtype=kind) if data else torch.empty(0, dtype=kind)
        whole = flat.reshape(value["shape"])
        return whole.numpy() if value[TENSOR] == "numpy" else whole
    if NAMESPACE in value:
        return argparse.Namespace(**unpack_state(value[NAMESPACE]))
    return {name: unpack_state(one) for name, one in value.items()}


def _pack_state(value: Any) -> Any:
    """Convert tensors, arrays and namespaces in a structure into plain values."""
    if type(value) in (list, tuple):
        return type(value)(map(_pack_state, value))
    if type(value) is dict:
        return {name: _pack_state(one) for name, one in value.items()}
    if isinstance(value, argparse.Namespace | SimpleNamespace):
        return {NAMESPACE: _pack_state(vars(value))}
    if isinstance(value, Path):
        return str(value)
    is_array = isinstance(value, np.ndarray) and value.dtype != object
    if is_array or (isinstance(value, torch.Tensor) and value.dim()):
        whole = torch.as_tensor(value).detach().cpu().contiguous()
        return {
            TENSOR: "numpy" if is_array else "torch",
            "dtype": str(whole.dtype).removeprefix("torch."),
            "shape": list(whole.shape),
            "bytes": whole.reshape(-1).view(torch.uint8).numpy().tobytes().hex(),
        }
    return value


TENSOR, NAMESPACE = "shoal.tensor", "shoal.namespace"
"""Keys of the JSON for a tensor, for a namespace."""


def list_older(place: TagCheckpoint, folder: Path, tags: Sequence[str]) -> list[TagCheckpoint]:
    """List the other checkpoints of a folder that are no newer than a tag's, newest first."""
    found = [find_checkpoint(folder, tag, tags) for tag in tags]
    newest = _step_of(place)
    older = [one for one in found if one != place and _step_of(one) <= newest]
    return sorted(older, key=_step_of, reverse=True)


def _step_of(place: TagCheckpoint) -> int:
    if place.step is not None:
        return place.step
    return max(list_saved_steps(place.folder), default=-1)


def load_whole(run: Run, places: Sequence[TagCheckpoint], *, strict: bool) -> None:
    """Restore everything of a checkpoint; if it is damaged, of the next one.

    Args:
        run: the run.
        places: of the checkpoint, and those that may take its place.
        strict: as `load_checkpoint`'s load_module_strict.

    Raises:
        ConfigError: no checkpoint is there any more, or the names of its tensors differ where
            that was allowed: an optimizer's state belongs to all of them.
    """
    known = run.world.broadcast_json([[str(one.folder), one.step] for one in places])
    for number, (folder, step) in enumerate(known):
        try:
            if run.restore(folder, step=step):
                return
        except CheckpointError as failure:
            if not strict and "only in" in str(failure):
                raise ConfigError(
                    f"load_checkpoint: load_module_strict=False: {failure}; try: "
                    f"load_module_only=True, since the optimizer's states belong to the model as "
                    f"it was"
                ) from None
            if "only in" in str(failure) or number == len(known) - 1:
                raise
            run.recorder.notice(f"deepspeed: load_checkpoint: {failure}; an older one is loaded")
    raise ConfigError(f"load_checkpoint: {known[0][0]} holds no complete checkpoint")


def load_weights(run: Run, place: TagCheckpoint, *, strict: bool) -> dict[str, Any]:
    """Restore the weights alone; return the record that `save_checkpoint` wrote, and the step.

    Raises:
        ConfigError: the checkpoint is not there any more.
    """
    record = restore_weights(run, place.folder, place.step, strict=strict)
    if record is None:
        raise ConfigError(f"load_checkpoint: {place.folder} holds no complete checkpoint")
    return {**decode_value(record.get("extra", {})), "step": int(record["step"])}


def read_whole(checkpoint_dir: Any, tag: Any = None) -> dict[str, torch.Tensor]:
    """Read the fp32 weights of a checkpoint, whole, on the CPU: `zero_to_fp32` of DeepSpeed.

    Without communication. Tied names are one tensor.

    Raises:
        ConfigError: there is no checkpoint of that tag.
    """
    call, folder = "get_fp32_state_dict_from_zero_checkpoint", Path(checkpoint_dir)
    chosen = str(tag) if tag is not None else read_latest(folder)
    if chosen is None:
        raise ConfigError(f"{call}: {folder} has no file {LATEST}; try: tag=…, or another folder")
    place = find_checkpoint(folder, chosen, list_tags(folder), call)
    found = [
        f.path
        for f in list_checkpoints(place.folder / "checkpoints")
        if place.step in (None, f.step)
    ]
    going = select_tensors(found[0])
    stored = {name: going.manifest.tensors[name] for name in going.names.values()}
    whole = [Shard.whole(name, tensor.shape, tensor.dtype) for name, tensor in stored.items()]
    read = load_from(going.path, going.manifest, whole)
    state = {outside: read[name] for outside, name in going.names.items()}
    return state | {alias: state[first] for alias, first in going.aliases.items()}


def report_saves(run: Run, engine: Any) -> None:
    """Report, before training, each save call of the script that behaves differently here."""
    report_final_saves(run, engine, MAKERS, "initialize", SAVES, gathers="GatheredParameters")


SAVES = "engine.save_16bit_model(folder), or engine.module_state_dict() on every rank"
"""The calls that save whole weights under stage 3."""
MAKERS = {"initialize", "DeepSpeedEngine"}
"""Functions that return an engine, as their first value."""
