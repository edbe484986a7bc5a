"""Model, length, data, held-out part, optimizer and saves of a run, for `shoal train --dry-run`.

Counts are of files and rows, without reading them through a tokenizer: exact for tokens: and
digits, rows for jsonl and parquet, bytes for texts. A source of the user's own is not called.
"""

from __future__ import annotations

import glob
import os
from dataclasses import replace
from pathlib import Path

from shoal.base.text.units import bytes_text, count_text
from shoal.config.owners import select_owner
from shoal.config.paths import GLOBS, is_remote, list_token_files, split_source
from shoal.config.sections import Config, DataSection

DIGITS = 1797
COUNTED_BYTES = 64 << 20
"""Most bytes whose lines are counted."""
ITEM_BYTES = {"uint8": 1, "uint16": 2, "uint32": 4, "int32": 4, "int64": 8}


def outline_lines(config: Config, folder: Path) -> list[str]:
    """Return what a person checks before the start, in six lines.

    Args:
        config: settled, as the run would start with it.
        folder: the run folder.
    """
    optimizer, checkpoint = config.optimizer, config.checkpoint
    data = select_owner(config.data, "*")
    kind = split_source(data.source)[0]
    texts = kind in (*GLOBS, "stdlib", "hf") and kind != "wds"
    samples, counted = count_samples(data)
    share = _held_share(data)
    trained = samples - max(1, round(share * samples)) if samples and share else samples
    tokens = texts or kind == "tokens"
    lines = [_model_line(config), _length_line(config, trained, tokens=tokens)]
    told = [f"data: {data.source}{f': {counted}' if counted else ''}"]
    told += [f"tokenizer {data.tokenizer}"] if texts and not config.model.build else []
    lines.append("; ".join([*told, *(["packed"] if data.packing == "on" else [])]))
    lines.append(_validation_line(replace(config, data=data), samples))
    warmup = f", warm-up {optimizer.warmup_steps} steps" if optimizer.warmup_steps > 0 else ""
    rate = f"lr {optimizer.lr:g} {optimizer.schedule}"
    lines.append(f"optimizer: {optimizer.name}, {rate}{warmup}")
    every = f"every {checkpoint.every} steps and " if checkpoint.every else ""
    lines.append(f"saves: {every}at the end, in {folder}; keeps {checkpoint.keep}")
    return lines


def _model_line(config: Config) -> str:
    if config.model.build:
        return f"model: {config.model.build}"
    from shoal.forecast.models.model_facts import count_model_parameters

    name, sequence = config.model.name, config.data.sequence
    count = count_model_parameters(name, config.model.arguments, sequence=sequence)
    return f"model: {name}{f', {count_text(count)} parameters' if count else ''}"


def _length_line(config: Config, trained: int, *, tokens: bool) -> str:
    """Return the length of the run.

    Args:
        trained: samples of an epoch, 0 if unknown.
    """
    train, each = config.train, f"{config.train.batch} samples"
    size = train.batch
    if tokens and not config.model.build:
        each += f" of {config.data.sequence} tokens"
        size *= config.data.sequence
    if not train.steps:
        unit = "epoch" if train.epochs == 1 else "epochs"
        about = f", about {-(-trained // train.batch) * train.epochs} steps" if trained else ""
        return f"length: {train.epochs} {unit}, in steps of {each}{about}"
    whole = f"{count_text(train.steps * size)} {'tokens' if size > train.batch else 'samples'}"
    return f"length: {train.steps} steps × {each} = {whole}"


def _held_share(data: DataSection) -> float:
    try:
        return float(data.validation)
    except ValueError:
        return 0.0  # a second source


def _validation_line(config: Config, samples: int) -> str:
    data, train = config.data, config.train
    when = f"every {train.validate_every} steps and " if train.validate_every else ""
    kind, argument = split_source(data.source)
    share = _held_share(data)
    is_folder = kind == "tokens" and not is_remote(argument)
    if is_folder and list_token_files(Path(argument).expanduser(), "val"):
        return f"held out: the files val* of {argument}, validated {when}at the end"
    if not share:
        zero = data.validation.strip("0.") == ""
        held = "nothing (data.validation = 0)" if zero else f"all of {data.validation}"
        return f"held out: {held}{'' if zero else f', validated {when}at the end'}"
    held = f", about {max(1, round(share * samples))} of {samples}" if samples else ""
    return f"held out: {share:.4g} of the data{held}, validated {when}at the end"


def count_samples(data: DataSection) -> tuple[int, str]:
    """Return the samples or rows of a source, 0 if unknown, and what lies there in words."""
    kind, argument = split_source(data.source)
    if is_remote(argument):
        return 0, "remote, listed at the start"
    if kind == "digits":
        return DIGITS, f"{DIGITS} images"
    if kind == "tokens":
        return _count_tokens(Path(argument).expanduser(), data)
    if kind not in GLOBS:
        return 0, ""
    names = glob.glob(str(Path(argument).expanduser()), recursive=True)
    paths = [Path(name) for name in sorted(set(names)) if os.path.isfile(name)]
    size = sum(path.stat().st_size for path in paths)
    told = f"{len(paths)} file{'s' if len(paths) > 1 else ''}, {bytes_text(size)}"
    if kind != "jsonl" or size > COUNTED_BYTES or any(path.suffix != ".jsonl" for path in paths):
        return 0, told
    rows = sum(path.read_bytes().count(b"\n") for path in paths)
    return rows, f"{told}, {count_text(rows)} rows"


def _count_tokens(folder: Path, data: DataSection) -> tuple[int, str]:
    paths = list_token_files(folder, "train")
    size = sum(path.stat().st_size for path in paths)
    told = f"{len(paths)} file{'s' if len(paths) > 1 else ''}, {bytes_text(size)}"
    each = ITEM_BYTES.get(data.dtype)
    if each is None or any(path.suffix != ".bin" for path in paths):
        return 0, told
    samples = size // each // data.sequence
    return samples, f"{told}, {count_text(size // each)} tokens, {samples} samples"
