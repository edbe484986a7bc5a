"""`shoal data look`: show the rows of a run as its model gets them, and those of one step."""

from __future__ import annotations

import contextlib
import glob
import json
import mmap
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import typer

from shoal.base.errors import ConfigError, shorten
from shoal.base.runlog.damaged_lines import (
    iter_newest_lines,
    parse_event,
    parse_step,
    read_newest_steps,
)
from shoal.base.text.event_sentences import event_text
from shoal.cli.words import TRUST, split_arguments
from shoal.config.paths import suggest_path

if TYPE_CHECKING:  # these import torch, or their checks are of this verb alone
    from shoal.config.load import LoadedConfig

app = typer.Typer(help="See the rows that a model gets.", no_args_is_help=True)
RUN_FILE = "run.toml"
MOST_EVENTS, MOST_SAMPLES, MOST_PARENTS = 4, 2**20, 4
ENDINGS = ("run_finished", "resumed", "restarting")
"""Events of a run that name a step, and say nothing of it."""
ARGUMENTS = typer.Argument(
    None,
    metavar="[RUN.TOML|RUN] [SECTION.KEY=VALUE …]",
    help="A configuration or a run folder, and overrides.",
)
STEP = typer.Option(None, "--step", min=1, help="The samples of this step of a run folder.")
ROWS = typer.Option(
    None, "--rows", min=0, help="So many rows with their texts; default: 3, about a screen."
)
NORMS = typer.Option(
    False, "--norms", help="Of a step: each sample's gradient norm too, by a backward pass each."
)
IDS = typer.Option(False, "--ids", help="List tokens with ids, positions and labels in columns.")
CHANGED = typer.Option(False, "--changed", help="Show a step although its data has changed.")
NO_LOSS = typer.Option(False, "--no-loss", help="Load no checkpoint for the samples' losses.")
JSON = typer.Option(False, "--json", help="One JSON document; of a step with all its rows.")


@app.callback()
def options() -> None:
    """See the rows that a model gets."""


@app.command("look")
def show_rows(
    arguments: list[str] = ARGUMENTS,
    step: int = STEP,
    rows: int = ROWS,
    ids: bool = IDS,
    changed: bool = CHANGED,
    no_loss: bool = NO_LOSS,
    norms: bool = NORMS,
    as_json: bool = JSON,
    trust: bool = TRUST,
) -> None:
    """Show data as the model gets it: decoded, packed, cut, with the learnt tokens marked.

    Without --step: sizes, lengths and shares of the data, and its first rows. With --step N of a
    run folder: the samples that this step consumed, each with its source and text, by loss under
    the newest checkpoint before the step, else under the oldest later one. It uses the run's own
    loader on one process, and writes nothing but the cache of tokens that a run would write.
    """
    from shoal.cli.data_lines import data_lines
    from shoal.cli.row_style import RowStyle
    from shoal.view.diagnosis.run_folders import find_named_run
    from shoal.view.phase_lines import show_phases

    path, overrides = split_arguments(arguments or [])
    path = find_named_run(path) if path is not None else None
    folder = path if path is not None and path.is_dir() else None
    if folder is not None:
        from shoal.view.diagnosis.run_folders import explain_no_run, is_run_folder

        if not is_run_folder(folder) and not (folder / "run.toml").exists():
            raise ConfigError(explain_no_run(folder))
    found = _find_step(folder, path, step)
    loaded = _load(path, folder, overrides, trust=trust)
    is_of_run = folder is not None and loaded.origins.get("data.source") == f"{folder / RUN_FILE}"
    if folder is not None and is_of_run:
        check_relative_source(folder, loaded.config.data.source, "shoal data look", step)
    # A pipe gets the document alone: seconds of waiting mean nothing in it afterwards.
    with show_phases(sys.stderr) if sys.stderr.isatty() else contextlib.nullcontext():
        document = _collect(loaded, path, folder, found, rows, changed, not no_loss, norms)
    if as_json:
        typer.echo(json.dumps(document))
        return
    coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    style = RowStyle(
        width=shutil.get_terminal_size().columns,
        coloured=coloured,
        with_ids=ids,
        encoding=getattr(sys.stdout, "encoding", None) or "utf-8",
    )
    most = rows if rows is not None else 3
    sys.stdout.write("\n".join(data_lines(document, style, most)) + "\n")


def _load(
    path: Path | None, folder: Path | None, overrides: list[str], *, trust: bool
) -> LoadedConfig:
    """Load the configuration of the command line.

    Raises:
        ConfigError: as `load_trusted`; a folder without a run.toml.
    """
    from shoal.config.trust import load_trusted

    file = path if folder is None else folder / RUN_FILE
    if folder is not None and file is not None and not file.is_file():
        if not any(one.startswith("data.source=") for one in overrides):
            raise ConfigError(
                f"{folder}: has no run.toml, so its data is not known here; try: shoal data look "
                f"{folder} data.source=SOURCE, with the further keys of its open_data"
            )
        file = None
    if file is not None and not file.exists():
        raise ConfigError(f"{file}: no such run.toml or run folder; {suggest_path(file)}")
    return load_trusted(file, overrides, trust=trust)


def check_relative_source(folder: Path, source: str, command: str, step: int | None) -> None:
    """Refuse the data of a run if its relative path has no files, as seen from this folder.

    The proposed folder is the nearest one above the run in which the path has files.

    Args:
        command: that the user typed, "shoal data look".

    Raises:
        ConfigError: says that the path begins in the folder where the run started.
    """
    from shoal.config.mixture_syntax import split_mixture
    from shoal.config.paths import check_function, split_source

    kind, argument = split_source(source)
    if kind == "function":
        check_function(argument, "data.source", folder / RUN_FILE)
    mixed = split_mixture(argument, "data.source") if kind == "mix" else [(1.0, source)]
    patterns = [one for _, part in mixed if (one := _relative_pattern(part))]
    if all(_has_files(Path(), one) for one in patterns):
        return
    whole, hint = folder.resolve(), "this command in that folder"
    for start in whole.parents[:MOST_PARENTS] if "**" not in argument else ():
        if all(_has_files(start, one) for one in patterns):
            step_words = f" --step {step}" if step is not None else ""
            inside = shlex.quote(str(whole.relative_to(start)))
            hint = f"cd {shlex.quote(str(start))}; {command} {inside}{step_words}"
            break
    raise ConfigError(
        f"{folder}: its data.source = {source} is relative to the folder where the run started, "
        f"and has no files as seen from {Path.cwd()}; try: {hint}"
    )


def _relative_pattern(source: str) -> str:
    """Return the path or pattern of a data source; "" if it reads no files or is absolute."""
    from shoal.config.paths import ON_DISK, is_remote, split_source

    kind, argument = split_source(source)
    path = argument.partition("#")[0] if kind in ("images", "hf") else argument
    if kind not in ON_DISK or is_remote(path) or Path(path).expanduser().is_absolute():
        return ""
    return path


def _has_files(start: Path, pattern: str) -> bool:
    """Return whether a pattern matches a file or folder, as seen from a folder."""
    return next(glob.iglob(pattern, root_dir=start, recursive=True), None) is not None


def _find_step(folder: Path | None, path: Path | None, step: int | None) -> dict[str, Any] | None:
    """Return the line of a step in metrics.jsonl; None if no step is wanted.

    Raises:
        ConfigError: no run folder, or a step that was not run.
    """
    if step is None:
        return None
    if folder is None and path is not None and not path.exists():
        raise ConfigError(f"{path}: no such folder; {suggest_path(path)}")
    if folder is None:
        raise ConfigError(f"--step {step}: goes with a run folder; try: shoal data look RUN")
    return _find_step_row(folder, step)


def _read_events(folder: Path | None, step: int) -> list[str]:
    """Return sentences on the newest events of a step: a spike, a skip, a save, a validation."""
    found: list[str] = []
    if folder is None:
        return found
    for line in iter_newest_lines(folder / "events.jsonl"):
        event = parse_event(line) if str(step).encode() in line else None
        if event is None or event.get("step") != step or event["event"] in ENDINGS:
            continue
        if text := event_text(event):
            found.append(text)
        if len(found) == MOST_EVENTS:
            break
    return found[::-1]


def _find_step_row(folder: Path, step: int) -> dict[str, Any]:
    """Return the newest line of a step in a run's metrics.jsonl, with its samples.

    Raises:
        ConfigError: no such file, no such step, or a line without samples.
    """
    path = folder / "metrics.jsonl"
    try:
        with path.open("rb") as file:
            row = _search_step(file, step)
            newest = read_newest_steps(path, 1)
    except OSError as failure:
        if islands := sorted(folder.glob("island-*/metrics.jsonl")):
            raise ConfigError(
                f"{folder}: is a run of islands, each with steps of its own; try: shoal data look "
                f"{islands[0].parent} --step {step}"
            ) from None
        raise ConfigError(
            f"{folder}/metrics.jsonl: cannot be read ({failure.strerror}), so no step of this run "
            f"is known; a run folder has one"
        ) from None
    if not newest:
        raise ConfigError(f"--step {step}: {folder} has run no step yet")
    last = int(newest[0]["step"])
    if row is not None and step <= last:  # else of an earlier attempt, which went further
        return _with_samples(folder, row)
    raise ConfigError(
        f"--step {step}: {folder} has no line of it; its newest step is {last}; try: --step {last}"
    )


def _search_step(file: BinaryIO, step: int) -> dict[str, Any] | None:
    """Return the newest whole line of a step in a metrics.jsonl; None without one.

    The search is for the text of the step, since a million lines take seconds to parse.
    """
    if not os.fstat(file.fileno()).st_size:
        return None
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        for between in ("", " "):
            needle, end = f'"step":{between}{step}'.encode(), len(text)
            while (at := text.rfind(needle, 0, end)) >= 0:
                end = at
                start, stop = text.rfind(b"\n", 0, at) + 1, text.find(b"\n", at)
                row = parse_step(text[start:stop]) if stop >= 0 else None
                if row is not None and row["step"] == step:
                    return row
    return None


def _with_samples(folder: Path, row: dict[str, Any]) -> dict[str, Any]:
    span = row.get("samples")
    spans = span if isinstance(span, list) and len(span) == 2 else [0, 0]
    if not all(type(n) is int for n in spans) or not 0 <= spans[0] < spans[1]:
        raise ConfigError(
            f"--step {row['step']}: its line in {folder}/metrics.jsonl names no samples: the "
            f"batches came from your own loop, not from run.loader"
        )
    if spans[1] - spans[0] > MOST_SAMPLES:
        raise ConfigError(
            f"--step {row['step']}: its line in {folder}/metrics.jsonl names {spans[1] - spans[0]} "
            f"samples, more than the {MOST_SAMPLES} that are shown"
        )
    return row


def _collect(
    loaded: LoadedConfig,
    path: Path | None,
    folder: Path | None,
    row: dict[str, Any] | None,
    rows: int | None,
    changed: bool,
    with_loss: bool,
    with_norms: bool,
) -> dict[str, Any]:
    from shoal.config.save import MICRO_BATCH
    from shoal.trainer.jobs import data_inspection

    name = str(path) if path is not None else "defaults"
    is_cut_by_user = loaded.origins.get(MICRO_BATCH, "derived") != "derived"
    data = data_inspection.open_inspected(loaded, folder)
    head = data_inspection.describe_data(data, measured=row is None)
    document: dict[str, Any] = {"of": name, "data": head}
    if row is None:
        document["rows"] = data_inspection.inspect_rows(data, rows, is_cut_by_user)
    else:
        start, stop = row["samples"]
        step = data_inspection.InspectedStep(row, start, stop, changed, with_norms)
        document["step"] = {key: row.get(key) for key in ("step", "loss", "grad_norm", "skipped")}
        document["step"] |= {"samples": [start, stop], "events": _read_events(folder, row["step"])}
        document["rows"], losses = data_inspection.inspect_step(
            data, step, is_cut_by_user, with_losses=with_loss
        )
        document["step"] |= losses
    document["notices"] = [shorten(line) for line in data.notices]
    return document
