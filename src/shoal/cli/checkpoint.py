"""`shoal checkpoint`: list, verify, export and import the checkpoints of a run."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from shoal.base.errors import CheckpointError, ConfigError
from shoal.base.text.units import bytes_text
from shoal.wire.phases import phase

if TYPE_CHECKING:  # these modules import torch
    from shoal.checkpoint.export.export_file import ExportTensors
    from shoal.checkpoint.export.export_folder import HubTranslation
    from shoal.checkpoint.foreign.import_weights import ImportResult

app = typer.Typer(
    help="List, verify and export the checkpoints of a run; import other tools'.",
    rich_markup_mode=None,
    no_args_is_help=True,
)
RUN = typer.Argument(..., metavar="PATH", help="A run folder, or one checkpoint in it.")


PICKLES = (".pt", ".pth", ".bin", ".ckpt", ".pkl")
"""Suffixes of files that torch.load opens."""

OUT = typer.Argument(
    ..., metavar="FOLDER|FILE.safetensors", help="The folder, or the one file, to write."
)
AVERAGED = typer.Option(False, "--average", help="The averaged weights (optimizer.average).")
ADAPTER = typer.Option(False, "--adapter", help="The adapters of peft alone, as peft's folder.")

JSON = typer.Option(False, "--json", help="One JSON document instead of lines.")
SOURCE = typer.Argument(
    ...,
    help="A folder of transformers, DCP or DeepSpeed, or one file of safetensors or torch.save.",
)
FOLDER = typer.Argument(..., help="The folder to write model.safetensors into; made if missing.")
KEY = typer.Option("", help="Which part is the model, where several could be, as app.model.")


@app.command("list")
def list_(path: Path = RUN, as_json: bool = JSON) -> None:
    """Show the complete checkpoints of a run, newest first, then those of its tags.

    The last line says how many steps the newest checkpoint is behind the run, if it is.
    """
    from shoal.checkpoint.format.listing import read_manifest
    from shoal.view.diagnosis.run_folders import find_named_run
    from shoal.view.progress import local_time_text

    path = find_named_run(path)
    rows: list[dict[str, object]] = []
    times_s = _save_times_s(path)
    for step_folder in list_run_checkpoints(path, tags=True):
        try:
            manifest = read_manifest(step_folder)
        except CheckpointError as failure:
            rows.append({"path": str(step_folder), "damaged": str(failure)})
            if not as_json:
                typer.echo(f"{step_folder}  damaged: {failure}")
            continue
        layout = manifest.record.get("layout", "")
        saved_s = times_s.get(manifest.step) or (step_folder / "manifest.json").stat().st_mtime
        rows.append(
            {
                "path": str(step_folder),
                "step": manifest.step,
                "saved_s": saved_s,
                "bytes": manifest.size_bytes,
                "tensors": len(manifest.tensors),
                "layout": layout,
            }
        )
        if not as_json:
            typer.echo(
                f"{step_folder}  step {manifest.step}  {bytes_text(manifest.size_bytes)}  "
                f"{len(manifest.tensors)} tensors  {layout}  "
                f"saved {local_time_text(saved_s, '%m-%d %H:%M:%S') or '–'}"
            )
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
    elif line := _behind_line(path, rows):
        typer.echo(line)


def _save_times_s(path: Path) -> dict[int, float]:
    """Return step → when its checkpoint was saved last, seconds since 1970, from a run's events."""
    from shoal.base.runlog.damaged_lines import is_number
    from shoal.view.diagnosis.folder_evidence import read_event_history

    saves = [one for one in read_event_history(path) if one["event"] == "checkpoint_saved"]
    known = [one for one in saves if is_number(one.get("step")) and is_number(one.get("time_s"))]
    return {int(one["step"]): float(one["time_s"]) for one in known}


def _behind_line(path: Path, rows: list[dict[str, object]]) -> str:
    """Return how many steps the newest checkpoint of a run is behind its last step; "" for none."""
    from shoal.view.diagnosis.folder_evidence import read_step_rows

    steps = [step for row in rows if isinstance(step := row.get("step"), int)]
    last = next((int(row["step"]) for row in read_step_rows(path, 1)), 0)
    behind = last - max(steps, default=last)
    if behind <= 0:
        return ""
    count = "1 step" if behind == 1 else f"{behind} steps"
    return f"the newest is {count} behind the last step ({last})"


@app.command()
def verify(path: Path = RUN, as_json: bool = JSON) -> None:
    """Read every byte, of tags too, and compare with its hash; exit status 2 if any differs."""
    from shoal.checkpoint.format import listing
    from shoal.checkpoint.format.checkpoint_faults import short_path

    found: dict[str, list[str]] = {}
    for step_folder in list_run_checkpoints(path, tags=True):
        short = short_path(step_folder)
        found[str(step_folder)] = problems = [
            problem.replace(short, str(step_folder), 1) for problem in listing.verify(step_folder)
        ]
        if not as_json:
            for line in problems or [f"{step_folder}: every byte is as it was written"]:
                typer.echo(line)
    if as_json:
        told = [{"path": one, "problems": problems} for one, problems in found.items()]
        typer.echo(json.dumps(told, indent=1))
    if any(found.values()):
        raise typer.Exit(2)


@app.command()
def export(
    path: Path = RUN,
    out: Path = OUT,
    average: bool = AVERAGED,
    adapter: bool = ADAPTER,
    as_json: bool = JSON,
) -> None:
    """Write the model of the newest checkpoint as a folder for from_pretrained, or as one file.

    A folder gets the weights, in files of at most 5 GB, and what the run keeps in hub/: of a model
    of transformers config.json and generation_config.json, of `shoal train` on text the tokenizer.
    A llama of ours becomes transformers' Llama; adapters of peft are merged into their layers, or
    with --adapter written as peft's own folder. What it replaces must be empty or an earlier
    export. FILE.safetensors gets the weights alone, under the module's own names.
    """
    from shoal.view.phase_lines import show_phases

    _check_export_path(out)
    newest = list_run_checkpoints(path)[0]
    with show_phases(sys.stderr if as_json else sys.stdout):
        line, facts = (
            _export_adapter(newest, out, average)
            if adapter
            else _export_model(newest, out, average)
        )
    typer.echo(json.dumps({"path": str(out), "from": str(newest), **facts}) if as_json else line)


@app.command("import")
def import_(
    source: Path = SOURCE, folder: Path = FOLDER, key: str = KEY, as_json: bool = JSON
) -> None:
    """Write the weights that another tool saved as model.safetensors, bit for bit.

    Pickles are read as data: nothing in them is executed. The configuration and the tokenizer of
    transformers come along, so that model.name=hf:FOLDER trains from it.
    """
    from shoal.checkpoint.foreign.foreign_weights import format_count
    from shoal.checkpoint.foreign.import_weights import import_weights
    from shoal.view.phase_lines import show_phases

    with show_phases(sys.stderr if as_json else sys.stdout):
        done = import_weights(source, folder, key)
    if as_json:
        typer.echo(json.dumps(_import_facts(done)))
        return
    for line in done.said:
        typer.echo(line)
    typer.echo(
        f"{done.file}: {bytes_text(done.size_bytes)}, {format_count(done.tensors)} from {source} "
        f"({done.kind})"
    )
    if "config.json" in done.beside:
        typer.echo(f"train from it: shoal train model.name=hf:{folder}")
    else:
        typer.echo(
            f'train from it: safetensors.torch.load_model(model, "{done.file}"), then '
            f"shoal.parallelize"
        )


def _import_facts(done: ImportResult) -> dict[str, object]:
    """Return the result of an import as --json prints it."""
    return {
        "path": str(done.file),
        "bytes": done.size_bytes,
        "tensors": done.tensors,
        "kind": done.kind,
        "beside": sorted(done.beside),
        "notices": list(done.said),
    }


def _export_model(newest: Path, out: Path, average: bool) -> tuple[str, dict[str, Any]]:
    """Export a checkpoint's model; return the lines that report it, and the facts for --json."""
    with phase("import"):
        from shoal.checkpoint.export import export_file, export_folder
    if out.suffix == ".safetensors" and not out.is_dir():
        size_bytes = export_file.export_file(newest, out, average=average)
        line = f"{out}: {bytes_text(size_bytes)} from {newest}"
        return line, {"bytes": size_bytes, "files": [out.name], "notices": []}
    from shoal.checkpoint.format.hub_folder import TOKENIZER

    translated = _translate_llama(newest)
    whole = _merge_adapters(newest, average)
    written = export_folder.export_folder(
        newest, out, average=average, translated=translated, merged=whole
    )
    line = f"{out}: {bytes_text(written.size_bytes)} from {newest}; {', '.join(written.files)}"
    notice = ""
    if written.has_config and TOKENIZER in written.files and translated is None:
        from shoal.models.huggingface import describe_tokenizer_mismatch

        with phase("tokenizer"):
            notice = describe_tokenizer_mismatch(out)
    elif not written.has_config:
        notice = (
            "no config.json: the run keeps none in hub/, as its model is none of transformers "
            "(or was saved by an earlier Shoal); the weights have the names of its own module"
        )
    facts = {"bytes": written.size_bytes, "files": list(written.files)}
    notices = [notice] if notice else []
    return "\n".join([line, *notices]), {**facts, "notices": notices}


def _export_adapter(newest: Path, out: Path, average: bool) -> tuple[str, dict[str, Any]]:
    """Export a checkpoint's adapters; return the line that reports it, and the facts for --json.

    Raises:
        ConfigError: `out` is one file; adapters are written as a folder.
    """
    if out.suffix == ".safetensors" and not out.is_dir():
        raise ConfigError(
            f"{out}: adapters are written as peft's folder; try: --adapter {out.with_suffix('')}"
        )
    with phase("import"):
        from shoal.checkpoint.export.export_adapter import export_adapter
    written = export_adapter(newest, out, average=average)
    line = f"{out}: {bytes_text(written.size_bytes)} from {newest}; {', '.join(written.files)}"
    return line, {"bytes": written.size_bytes, "files": list(written.files), "notices": []}


def _merge_adapters(newest: Path, average: bool) -> ExportTensors | None:
    """Merge a checkpoint's adapters into its base weights; return None if it has no adapters.

    Raises:
        ConfigError: peft is not installed.
    """
    from shoal.checkpoint.format.hub_folder import ADAPTER
    from shoal.checkpoint.format.listing import read_manifest

    if ADAPTER not in read_manifest(newest).record:
        return None
    from importlib.util import find_spec

    if find_spec("peft") is None:
        raise ConfigError(
            f"{newest}: merging its adapters needs peft, which is not installed; try: "
            f"pip install 'shoal[tune]', or the same with --adapter"
        )
    from shoal.trainer.merge_adapter import merge_adapters

    return merge_adapters(newest, average=average)


def _translate_llama(checkpoint: Path) -> HubTranslation | None:
    """Translate a checkpoint's Llama to transformers' names; return None for any other model.

    Raises: ConfigError the run.toml cannot be read.
    """
    from shoal.checkpoint.format.hub_folder import HUB, run_folder
    from shoal.config.load import load_config
    from shoal.forecast.models.model_facts import family_of, resolve_model

    folder = run_folder(checkpoint)
    if not (folder / "run.toml").is_file():
        return None
    config = load_config(folder / "run.toml").config
    if config.model.build or family_of(config.model.name) != "llama":
        return None
    from shoal.checkpoint.export.export_folder import HubTranslation
    from shoal.checkpoint.format.listing import read_manifest
    from shoal.models.as_transformers import llama_config, llama_name

    vocabulary = read_manifest(checkpoint).tensors["model.embedding.weight"].shape[0]
    resolved = resolve_model(
        config.model.name,
        config.model.arguments,
        vocabulary=vocabulary,
        sequence=config.data.sequence,
    )
    return HubTranslation(
        llama_name, llama_config(resolved.arguments, _end_of_text_id(folder / HUB))
    )


def _end_of_text_id(hub: Path) -> int | None:
    """Return the id of the token that ends a text, from a run's hub/; None if the run has none."""
    from shoal.checkpoint.format.hub_folder import TOKENIZER

    try:
        name = json.loads((hub / "tokenizer_config.json").read_text(encoding="utf-8"))["eos_token"]
        added = json.loads((hub / TOKENIZER).read_text(encoding="utf-8"))["added_tokens"]
        name = name["content"] if isinstance(name, dict) else name
        return next((one["id"] for one in added if one["content"] == name), None)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def list_run_checkpoints(path: Path, tags: bool = False) -> list[Path]:
    """Return the checkpoint folders that a path names, newest first.

    Args:
        path: a run folder, a folder of checkpoints, or one checkpoint.
        tags: also the tagged checkpoints of a run, after its other ones.

    Raises:
        ConfigError: the path holds no complete checkpoint.
    """
    from shoal.checkpoint.format.listing import list_checkpoints
    from shoal.view.diagnosis.run_folders import find_named_run

    path = find_named_run(path)
    if (path / "manifest.json").exists():
        return [path]
    roots = (path / "checkpoints", path)
    found: list[Path] = next(
        filter(None, ([f.path for f in list_checkpoints(root)] for root in roots)), []
    )
    tagged = [
        f.path for tag in sorted(path.glob("tags/*")) for f in list_checkpoints(tag / "checkpoints")
    ]
    if found or (tags and tagged):
        return [*found, *(tagged if tags else ())]
    raise ConfigError(_explain_no_checkpoint(path, [one.parent.parent for one in tagged]))


def _explain_no_checkpoint(path: Path, tagged: list[Path]) -> str:
    """Return why a path has no complete checkpoint, with what to type instead.

    Args:
        tagged: tags of the run that have one.
    """
    from shoal.cli.islands import island_folders
    from shoal.view.diagnosis.run_folders import explain_no_run, is_run_folder

    others = [*island_folders(path), *tagged]
    if not others and not is_run_folder(path) and not (path / "checkpoints").is_dir():
        return explain_no_run(path)
    if others:
        near = f"try: {others[0]}"
    elif is_run_folder(path):
        near = f"it has not saved one yet; try: shoal diagnose {shlex.quote(str(path))}"
    else:
        near = "a run folder keeps them in checkpoints/"
    return f"{path}: no complete checkpoint there; {near}"


def _check_export_path(out: Path) -> None:
    """Refuse an export path that cannot be written.

    Raises:
        ConfigError: its parent folder does not exist, its name is taken, or is a pickle's.
    """
    parent = Path(os.path.realpath(out)).parent
    if not parent.is_dir():
        raise ConfigError(
            f"{out}: there is no folder {out.parent}; try: mkdir -p {shlex.quote(str(out.parent))}"
        )
    if out.suffix in PICKLES and not out.is_dir():
        raise ConfigError(
            f"{out}: a safetensors file is written, which torch.load does not open; try: "
            f"{out.with_suffix('.safetensors')}, for safetensors.torch.load_file"
        )
    if out.suffix != ".safetensors" or out.is_dir():
        from shoal.checkpoint.export.export_target import check_target

        check_target(out)
