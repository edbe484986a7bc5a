"""`shoal run --as deepspeed -- script.py …`: run a script of another library on Shoal.

The verb is the same as the line `import shoal.neighbours.deepspeed` before the script's own, and
`--exact` as `shoal.neighbours.exact.install()` after it. Under torchrun or srun every process runs
the same command; `--processes` starts them by torchrun.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys

import typer

from shoal.base.errors import ConfigError, ShoalError, nearest_word

NEIGHBOURS = ("accelerate", "deepspeed")
OTHERS = dict.fromkeys(
    ("lightning", "pytorch_lightning", "pytorch-lightning", "fabric"),
    'Trainer(strategy="shoal"), after import shoal.neighbours.lightning',
)
"""Libraries that Shoal supports in another way."""
WORDS = typer.Argument(..., help="The script, and its own arguments, after --.")


def run(
    words: list[str] = WORDS,
    library: str = typer.Option(..., "--as", help="deepspeed, or accelerate."),
    processes: int = typer.Option(0, help="Start as many, by torchrun; 0: this one."),
    folder: str = typer.Option(
        "", metavar="FOLDER", help="Keep metrics and events there: for watch, report and replay."
    ),
    exact: bool = typer.Option(
        False, "--exact", help="Weigh losses by their counts of targets, not each mean alike."
    ),
) -> None:
    """Run a script of another library's as it is: Shoal answers its import."""
    if library not in NEIGHBOURS:
        first = OTHERS.get(library) or nearest_word(library, NEIGHBOURS) or " or ".join(NEIGHBOURS)
        raise ConfigError(f"--as {library}: not one of {', '.join(NEIGHBOURS)}; try: {first}")
    from shoal.cli.script_path import find_script

    script = find_script(words, f"shoal run --as {library}")
    if folder:
        os.environ["SHOAL_FOLDER"] = folder
    if processes > 0:
        start = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        weighs = ["--exact"] if exact else []
        again = ["-m", "shoal", "run", "--as", library, *weighs, "--", *words]
        os.execv(sys.executable, [sys.executable, *start, *again])
    importlib.import_module(f"shoal.neighbours.{library}")
    if exact:
        importlib.import_module("shoal.neighbours.exact").install()
    sys.argv = list(words)
    sys.path.insert(0, str(script.resolve().parent))
    sys.excepthook = sys.__excepthook__  # typer's would stay in the place of the run's
    try:
        runpy.run_path(str(script), run_name="__main__")
    except Exception as error:
        if isinstance(error, ShoalError) and sys.excepthook is sys.__excepthook__:
            raise  # no run began
        sys.excepthook(type(error), error, error.__traceback__)  # as `python SCRIPT` would
        sys.exit(1)
