"""`shoal checkpoint`: list, verify and export what a run has saved; import what others have."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import typer

from shoal.base.errors import CheckpointError, ConfigError
from shoal.base.phases import listen, phase

app = typer.Typer(
    help="List, verify and export the checkpoints of a run; import other tools'.",
    rich_markup_mode=None,
    no_args_is_help=True,
)
RUN = typer.Argument(..., metavar="PATH", help="A run folder, or one checkpoint in it.")


PICKLES = (".pt", ".pth", ".bin", ".ckpt", ".pkl")
"""Endings of files that torch.load opens."""

OUT = typer.Argument(..., metavar="FILE", help="The safetensors file to write.")

SOURCE = typer.Argument(
    ...,
    help="A folder of transformers, DCP or DeepSpeed, or one file of safetensors or torch.save.",
)
FOLDER = typer.Argument(..., help="The folder to write model.safetensors into; made if missing.")
KEY = typer.Option("", help="Which part is the model, where several could be, as app.model.")


@app.command("list")
def list_(path: Path = RUN) -> None:
    """Show the complete checkpoints of a run, newest first."""
    from shoal.base.units import bytes_text
    from shoal.checkpoint.listing import read_manifest

    for step_folder in _checkpoints(path):
        try:
            manifest = read_manifest(step_folder)
        except CheckpointError as failure:
            typer.echo(f"{step_folder}  damaged: {failure}")
            continue
        record = manifest.record
        typer.echo(
            f"{step_folder}  step {manifest.step}  {bytes_text(manifest.size_bytes)}  "
            f"{len(manifest.tensors)} tensors  {record.get('layout', '')}"
        )


@app.command()
def verify(path: Path = RUN) -> None:
    """Read every byte and compare with its hash; exit status 2 if anything differs."""
    from shoal.checkpoint import listing

    damaged = 0
    for step_folder in _checkpoints(path):
        problems = listing.verify(step_folder)
        damaged += bool(problems)
        for problem in problems:
            typer.echo(problem)
        if not problems:
            typer.echo(f"{step_folder}: every byte is as it was written")
    if damaged:
        raise typer.Exit(2)


@app.command()
def export(
    path: Path = RUN,
    out: Path = OUT,
) -> None:
    """Write the model of the newest checkpoint as one safetensors file, under its own names."""
    from shoal.base.units import bytes_text
    from shoal.view.phases import PhaseLine

    _check_out(out)
    newest, waiting = _checkpoints(path)[0], PhaseLine(sys.stdout)
    listen(waiting.hear)
    with phase("import"):
        from shoal.checkpoint.export import export as write
    try:
        size_bytes = write(newest, out)
    finally:
        listen(None)
        waiting.finish()
    typer.echo(f"{out}: {bytes_text(size_bytes)} from {newest}")


@app.command("import")
def import_(source: Path = SOURCE, folder: Path = FOLDER, key: str = KEY) -> None:
    """Write the weights that another tool saved as model.safetensors, bit for bit.

    Pickles are read as data: nothing in them is executed. The configuration and the tokenizer of
    transformers come along, so that model.name=hf:FOLDER trains from it.
    """
    from shoal.base.units import bytes_text
    from shoal.checkpoint.foreign import counted
    from shoal.checkpoint.import_weights import import_weights
    from shoal.view.phases import PhaseLine

    waiting = PhaseLine(sys.stdout)
    listen(waiting.hear)
    try:
        done = import_weights(source, folder, key)
    finally:
        listen(None)
        waiting.finish()
    for line in done.said:
        typer.echo(line)
    typer.echo(
        f"{done.file}: {bytes_text(done.size_bytes)}, {counted(done.tensors)} from {source} "
        f"({done.kind})"
    )
    if "config.json" in done.beside:
        typer.echo(f"train from it: shoal train model.name=hf:{folder}")
    else:
        typer.echo(
            f'train from it: safetensors.torch.load_model(model, "{done.file}"), then '
            f"shoal.parallelize"
        )


def _checkpoints(path: Path) -> list[Path]:
    """The checkpoint folders that a path means, newest first. Errors: ConfigError if none."""
    from shoal.checkpoint.listing import find

    if (path / "manifest.json").exists():
        return [path]
    for root in (path / "checkpoints", path):
        found = [f.path for f in find(root)] if root.is_dir() else []
        if found:
            return found
    from shoal.cli.islands import islands_of

    islands = islands_of(path)
    near = f"nearest: {islands[0]}" if islands else "a run folder keeps them in checkpoints/"
    raise ConfigError(f"{path}: no complete checkpoint there; {near}")


def _check_out(out: Path) -> None:
    """Errors: ConfigError for a folder, no folder to write into, a name that promises a pickle."""
    if not out.parent.is_dir():
        raise ConfigError(
            f"{out}: there is no folder {out.parent}; "
            f"nearest: mkdir -p {shlex.quote(str(out.parent))}"
        )
    if out.is_dir():
        raise ConfigError(f"{out}: is a folder; nearest: {out / 'model.safetensors'}")
    if out.suffix in PICKLES:
        raise ConfigError(
            f"{out}: a safetensors file is written, which torch.load does not open; nearest: "
            f"{out.with_suffix('.safetensors')}, for safetensors.torch.load_file"
        )
