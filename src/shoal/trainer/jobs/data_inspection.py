"""The document of `shoal data look`: facts of a run's data, and some of its rows.

loaded run.toml ──open_source──> facts          (data/inspection/source_facts.py)
                ──run's loader──> joined micro-batches ──> rows of tokens or tensors
step N ──metrics.jsonl: samples [from, to)──> the same loader at `from`

The document is JSON; `cli/data_lines.py` draws it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shoal.base.errors import CheckpointError, ConfigError
from shoal.base.plans.batches import default_turn
from shoal.base.plans.plan import Plan
from shoal.base.pretrained_folders import TOKENIZER, pretrained_folder
from shoal.base.runlog.damaged_lines import read_object
from shoal.checkpoint.format.hub_folder import HUB
from shoal.checkpoint.format.listing import list_checkpoints, read_manifest
from shoal.config.load import LoadedConfig
from shoal.config.paths import add_working_folder
from shoal.config.resolve import make_plan, resolve_batch
from shoal.config.sections import Config
from shoal.data.inspection.decoded_text import decode_segments, token_text
from shoal.data.inspection.example_facts import add_last_targets, find_notable_rows
from shoal.data.inspection.sample_fields import (
    count_misplaced,
    count_padding,
    describe_sample,
    mark_tokens,
)
from shoal.data.inspection.sample_origins import find_origins
from shoal.data.inspection.source_facts import measure_source
from shoal.data.loading.dataset_kind import is_indexed
from shoal.data.loading.step_samples import StepBatch
from shoal.data.sources import Source, open_source
from shoal.data.text.finetuning_samples import ExampleRows
from shoal.data.text.text_files import load_tokenizer
from shoal.trainer.jobs.data_samples import (
    describe_samples,
    first_batches,
    open_stream,
    step_batch,
)
from shoal.trainer.jobs.sample_losses import compute_losses, describe_failure, find_checkpoint
from shoal.trainer.run_folder.resume_checks import compare_digests, digest_samples

DEFAULT_ROWS = 3


@dataclass(frozen=True)
class InspectedStep:
    """A step of a run whose samples are wanted.

    Attributes:
        row: its line in metrics.jsonl.
        start, stop: its samples in the stream.
        despite_changes: show what lies at these positions now, also if the data has changed.
        with_norms: compute the gradient norm of each sample too.
    """

    row: dict[str, Any]
    start: int
    stop: int
    despite_changes: bool = False
    with_norms: bool = False


@dataclass
class InspectedData:
    """Opened data of a run, for its facts and its rows.

    Attributes:
        folder: of the run; None: a configuration alone.
        notices: lines for the user.
    """

    config: Config
    plan: Plan
    source: Source
    tokenizer: Any
    tokenizer_path: str
    folder: Path | None
    notices: list[str]


def open_inspected(loaded: LoadedConfig, folder: Path | None) -> InspectedData:
    """Open the data of a configuration as a run does, on this process.

    Args:
        loaded: the configuration; its batch is settled in place.
        folder: of the run that trained with it, whose micro-batch counts; None: no run.

    Raises:
        ConfigError: all errors of the data that `shoal train` reports.
    """
    plan = settle_plan(loaded, folder)
    config = loaded.config
    add_working_folder()
    source = open_source(config.data, config.train.seed)
    tokenizer, path = source.tokenizer, config.data.tokenizer
    if tokenizer is None:
        path, tokenizer = _find_tokenizer(config, folder, source)
    return InspectedData(config, plan, source, tokenizer, path, folder, [])


def settle_plan(loaded: LoadedConfig, folder: Path | None) -> Plan:
    """Return the plan by which the run cuts its samples; an open micro-batch gets its default.

    Raises:
        ConfigError: neither the folder nor the command line names the seed of a run.
    """
    resolve_batch(loaded, 1)
    plan = make_plan(loaded.config)
    if not plan.micro_batch:
        plan = replace(plan, micro_batch=default_turn(plan.batch))
    if folder is None:
        return plan
    numbers = _read_cut(folder)
    if not numbers and not (folder / "run.toml").is_file() and "train.seed" not in loaded.origins:
        raise ConfigError(
            f"{folder}: has neither plan.json nor a checkpoint, so the order of its samples is not "
            f"known; try: train.seed=SEED train.batch=BATCH, as in parallelize(seed=…, batch=…)"
        )
    return replace(plan, **numbers)


def _read_cut(folder: Path) -> dict[str, Any]:
    """Return batch, micro_batch and seed of a run that started, from its files; {} if unknown."""
    records = [read_object(folder / "plan.json"), *read_records(folder)]
    for record in records:
        numbers = {key: record.get(key) for key in ("batch", "micro_batch", "seed")}
        whole = {key: value for key, value in numbers.items() if type(value) is int}
        if len(whole) == len(numbers) and min(whole["batch"], whole["micro_batch"]) > 0:
            return whole
    return {}


def _find_tokenizer(config: Config, folder: Path | None, source: Source) -> tuple[str, Any]:
    """Return path and tokenizer for tokens whose source has none: the run's, or the model's."""
    if source.kind != "tokens":
        return "", None
    pretrained = pretrained_folder("" if config.model.build else config.model.name)
    places = [folder / HUB / TOKENIZER] if folder is not None else []
    places += [Path(pretrained) / TOKENIZER] if pretrained is not None else []
    for path in places:
        if path.is_file():
            return str(path), load_tokenizer(path)
    return "", None


def describe_data(data: InspectedData, *, measured: bool = True) -> dict[str, Any]:
    """Return the head of the document: names and settings, if measured also sizes and shares."""
    config, source = data.config, data.source
    head: dict[str, Any] = {
        "source": config.data.source,
        "description": source.description,
        "kind": source.kind,
        "batch": data.plan.batch,
        "micro_batch": data.plan.micro_batch,
        "seed": data.plan.seed,
        "classes": list(source.classes),
    }
    if source.kind == "tokens":
        head |= {
            "sequence": config.data.sequence,
            "packing": config.data.packing,
            "tokenizer": data.tokenizer_path,
            "vocabulary": source.vocabulary,
        }
    return head | (measure_source(source, config.data.source) if measured else {})


def inspect_rows(
    data: InspectedData, rows: int | None, is_cut_by_user: bool
) -> list[dict[str, Any]]:
    """Return rows of the training samples.

    Args:
        rows: the first so many of the stream; None: DEFAULT_ROWS, of fine-tuning data also the
            longest example and one of several answers, whose `position` is None.
    """
    notable: dict[int, str] = {}
    if rows is None:
        rows = DEFAULT_ROWS
        if isinstance(data.source.train, ExampleRows) and data.source.collate is None:
            notable = find_notable_rows(data.source.train)
    if rows < 1:
        return []
    loader = open_stream(data.source, data.plan, data.notices, is_cut_by_user)
    found: list[dict[str, Any]] = []
    for batch in first_batches(loader, rows):
        found += describe_samples(batch, rows - len(found))
    others = [row for row in found if row["sample"] not in notable]
    found = others[: max(0, rows - len(notable))]
    for index, note in notable.items():
        pair = data.source.train[index]
        place = {"position": None, "sample": index, "epoch": 0, "micro_batch": None, "note": note}
        found.append({**place, **describe_sample(*pair)})
    return complete_rows(data, found)


def inspect_step(
    data: InspectedData, step: InspectedStep, is_cut_by_user: bool, *, with_losses: bool
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return all samples of a step in the order of the stream, and the facts of their losses.

    Args:
        with_losses: compute each sample's loss under the checkpoint that is nearest, if any.

    Returns:
        Rows, and {"checkpoint", "checkpoint_step", "checkpoint_loss"} or {"why_no_loss"}.
    """
    states = read_loader_states(data.folder)
    state = states[0] if states else None
    if state is not None and (line := compare_with_saved(data.source.train, state)):
        if not step.despite_changes:
            refuse_changed_data(f"--step {step.row['step']}", line)
        data.notices.append(line)
    loader = open_stream(data.source, data.plan, data.notices, is_cut_by_user, state)
    batch = step_batch(loader, step.start, step.stop, states)
    rows = complete_rows(data, describe_samples(batch))
    return rows, _add_losses(data, step, batch, rows) if with_losses else {}


def _add_losses(
    data: InspectedData, step: InspectedStep, batch: StepBatch, rows: list[dict[str, Any]]
) -> dict[str, Any]:
    """Add the loss of each row in place; return which checkpoint it is of."""
    number = int(step.row["step"])
    near = find_checkpoint(data.folder, number) if data.folder is not None else None
    if near is None or data.folder is None:
        return {"why_no_loss": "the run keeps no checkpoint"}
    if not (data.folder / "run.toml").is_file():
        return {"why_no_loss": "the model is built by your own script"}
    try:
        losses = compute_losses(
            data.config,
            data.source,
            data.plan,
            data.folder,
            near.path,
            batch,
            with_norms=step.with_norms,
        )
    except Exception as error:  # a model of the user's may raise anything
        return {"why_no_loss": describe_failure(error)}
    found = [one for micro_batch in losses for one in micro_batch]
    for row, one in zip(rows, found, strict=True):
        row |= one.record() if one is not None else {}
    counted = [one for one in found if one is not None]
    targets = sum(one.count for one in counted)
    whole = sum(one.loss * one.count for one in counted) / targets if targets else None
    return {
        "checkpoint": str(near.path),
        "checkpoint_step": near.step,
        "checkpoint_loss": whole,
    }


def complete_rows(data: InspectedData, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add origin, decoded text and counts to described samples, in place."""
    samples = [row["sample"] for row in rows]
    origins = find_origins(data.source, data.config.data, samples)
    for row, origin in zip(rows, origins, strict=True):
        ends = origin.pop("ends", None) if "whole_micro_batch" not in row else None
        row |= {key: value for key, value in origin.items() if key != "ends"}
        if row["kind"] != "tokens":
            _name_classes(row, data.source.classes)
            continue
        tokens = mark_tokens(row)
        row["tokens"] = tokens
        row["learnt"] = sum(token["learnt"] for token in tokens)
        is_known = ends is not None and add_last_targets(tokens, ends)
        row["padding"] = ends["padding"] if ends and is_known else count_padding(tokens)
        if ends and is_known and ends["cut"]:
            row["cut"] = ends["cut"]
        row["documents"] = 1 + tokens[-1 - row["padding"]]["document"]
        row["misplaced"] = count_misplaced(row)
        if data.tokenizer is not None:
            row["segments"] = decode_segments(tokens, data.tokenizer, row["padding"])
            for token in tokens:
                token["text"] = token_text(token["id"], data.tokenizer)
    return rows


def _name_classes(row: dict[str, Any], classes: Sequence[str]) -> None:
    """Add the name of the class to the target of an image."""
    for entry in row["fields"]:
        label = entry.get("values", [None])[0]
        if entry["name"] == "targets" and type(label) is int and 0 <= label < len(classes):
            entry["class"] = classes[label]


def read_records(folder: Path | None) -> list[dict[str, Any]]:
    """Return the records of the readable checkpoints of a run, newest first."""
    records = []
    for entry in list_checkpoints(folder / "checkpoints") if folder is not None else ():
        with contextlib.suppress(CheckpointError):
            records.append(read_manifest(entry.path).record)
    return records


def read_loader_states(folder: Path | None) -> list[dict[str, Any]]:
    """Return the states of the run's first loader in its readable checkpoints, newest first."""
    loaders = [record.get("data") for record in read_records(folder)]
    return [one[0] for one in loaders if isinstance(one, list) and one and isinstance(one[0], dict)]


def compare_with_saved(train: Any, state: Mapping[str, Any]) -> str:
    """Return a line if data is not what a checkpoint was trained on; "" if it is.

    Args:
        train: the opened training data.
        state: of the run's loader in the checkpoint.
    """
    saved, here = state.get("samples"), len(train) if is_indexed(train) else None
    if type(saved) is int and here is not None and saved != here:
        return f"the data has {here} samples now, and had {saved} when the run was saved"
    if found := compare_digests(state.get("seen"), digest_samples(train, 0)):
        return f"the data has changed since the run was saved: {found.line}"
    return ""


def refuse_changed_data(where: str, line: str) -> None:
    """Raise ConfigError for samples that are not those of the run."""
    raise ConfigError(
        f"{where}: {line}, so its samples are not those of this step; try: the data as it was, or "
        f"--changed to see what lies there now"
    )
