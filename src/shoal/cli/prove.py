"""`shoal prove`: compare a layout with one process, on the user's own model.

It settles the request as `shoal train` does, starts the layout's processes for a few steps, and
prints the result. Its folder lies beside the runs, under a hidden name, and is removed afterwards.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import typer

from shoal import __version__
from shoal.base.errors import BugError, ConfigError
from shoal.cli.words import ARGUMENTS, TRUST

JSON = typer.Option(False, "--json", help="The whole report as JSON.")
QUICK = typer.Option(False, "--quick", help="Two small steps, as before a training run.")
LAYOUTS = typer.Option(
    "", "--layouts", metavar="A,B,…", help="For a script: layouts in the place of its own."
)
STEPS = typer.Option(4, "--steps", metavar="N", min=1, help="For a script: optimizer steps.")
PROCESSES = typer.Option(
    0, "--processes", metavar="N", help="For a script: processes of a layout; default: 2."
)
BY_BLOCKS = typer.Option(
    False, "--by-blocks", help="One block of each kind and the ends, as for what memory lacks room."
)

FIRST_S, PATIENCE_S = 300.0, 180.0
"""Seconds of silence allowed before a step's time is known, and for a busy rank afterwards.

The sum is below the timeout of a collective, after which the supervisor would blame the waiting
ranks.
"""
EXIT_CODES = {"equal": 0, "not proven": 1, "refused": 2, "different": 3}


def prove(
    arguments: list[str] = ARGUMENTS,
    quick: bool = QUICK,
    by_blocks: bool = BY_BLOCKS,
    layouts: str = LAYOUTS,
    steps: int = STEPS,
    processes: int = PROCESSES,
    as_json: bool = JSON,
    trust: bool = TRUST,
) -> None:
    """Show that a layout computes what one process computes, or name what differs and why.

    Takes what `shoal train` takes: the same run.toml and overrides. Runs a few steps in float64 on
    the layout's processes and in one, from perturbed weights, and compares every loss, gradient and
    weight. Nothing is trained and nothing is kept. What memory has no room for is proven by blocks:
    one of each kind and the ends.
    With `-- train.py …` it proves a whole script of your own, whose text stays as it is.
    Exit status: 0 equal, 3 different, 1 not proven (the reason is told), 2 something to correct.
    """
    from shoal.cli import torchrun

    if torchrun.is_launched():
        raise ConfigError(
            "prove: starts its own processes on this machine, and another launcher started this "
            "one; try: the same command alone, with launch.processes=N"
        )
    if "--" in sys.argv:
        words = sys.argv[sys.argv.index("--") + 1 :]
        raise typer.Exit(_prove_script(words, layouts, steps, processes, as_json=as_json))
    modes = ["--quick"] * quick + ["--by-blocks"] * by_blocks
    report = _run_proof(arguments or [], modes, quiet=as_json, trust=trust)
    if as_json:
        typer.echo(json.dumps(report, indent=1))
    else:
        from shoal.view.proof_lines import proof_text

        typer.echo(proof_text(report))
    raise typer.Exit(EXIT_CODES[report["verdict"]])


def _prove_script(
    words: list[str], layouts: str, steps: int, processes: int, *, as_json: bool
) -> int:
    """Prove a script and print its reports; return the exit status."""
    from shoal.cli.prove_script import parse_script_layouts, prove_script
    from shoal.cli.script_path import find_script
    from shoal.cli.script_proof_lines import script_proof_text

    names = parse_script_layouts(layouts)
    script = find_script(words, "shoal prove")
    if not as_json:
        asked = layouts or "its own layout"
        typer.echo(
            f"shoal {__version__}: proving {script} under {asked} against one process, in "
            f"float64, {steps} steps"
        )
        sys.stdout.flush()
    reports = prove_script(script, words[1:], names, steps, processes)
    typer.echo(json.dumps(reports, indent=1) if as_json else script_proof_text(reports))
    codes = [one.get("exit_code") or EXIT_CODES[one["verdict"]] for one in reports]
    return next((code for code in (3, 2, 1) if code in codes), 0)


def _run_proof(
    arguments: list[str], modes: list[str], *, quiet: bool, trust: bool
) -> dict[str, Any]:
    """Start the processes and return the report that they wrote."""
    from shoal.cli.start import prepare_run, write_run_folder
    from shoal.cli.workers.worker import worker_environment, worker_imports
    from shoal.config.load import load_config
    from shoal.launch import supervise
    from shoal.view.phase_lines import PhaseLine, read_current_phases

    paths = [Path(a) for a in arguments if "=" not in a]
    run = load_config(paths[0] if paths else None, [a for a in arguments if "=" in a]).config.run
    with _hidden_folder(Path(run.folder)) as hidden:
        inside = [f"run.folder={hidden}", "run.name=proof"]
        prepared = prepare_run([*arguments, *inside], None, trust=trust)
        folder, config = prepared.folder, prepared.loaded.config
        folder.mkdir(parents=True, exist_ok=True)
        events = write_run_folder(prepared)
        if not quiet:
            count = config.launch.processes
            typer.echo(
                f"shoal {__version__}: proving {prepared.plan.layout.text()} on {count} "
                f"process{'es' if count > 1 else ''} against one, in float64"
            )
            sys.stdout.flush()
        waiting = PhaseLine(sys.stderr if quiet else sys.stdout)
        outcome = supervise(
            [sys.executable, "-m", "shoal.cli.workers.prove_worker", str(folder), *modes],
            processes=config.launch.processes,
            folder=folder,
            restarts=0,
            emit=_print_hangs(events.emit),
            first_s=FIRST_S,
            patience_s=PATIENCE_S,
            on_tick=lambda: waiting.show(read_current_phases(folder)),
            environ=worker_environment(),
            imports=worker_imports(config.model, prepared.plan.layout),
        )
        waiting.finish()
        if outcome.exit_code:
            sys.stderr.write(f"shoal: {outcome.message}\n")
            raise typer.Exit(outcome.exit_code)
        report: dict[str, Any] = json.loads((folder / "proof.json").read_text(encoding="utf-8"))
        asked = prepared.plan.layout.text()
        if report["verdict"] != "not proven" and report["layout"] != asked:
            raise BugError(f"prove: {report['layout']} was proven where {asked} was asked for")
        return report


def _print_hangs(emit: Callable[..., None]) -> Callable[..., None]:
    """Wrap `emit` to print a hang with its stacks, since the folder is removed afterwards."""
    from shoal.base.text.event_sentences import event_text

    def report(event: str, **fields: Any) -> None:
        emit(event, **fields)
        if event == "hang":
            path = fields.pop("stacks", "")
            stacks = Path(path).read_text(encoding="utf-8") if path else ""
            sys.stderr.write(f"shoal: {event_text({'event': event, **fields})}\n{stacks}")
            sys.stderr.flush()

    return report


@contextlib.contextmanager
def _hidden_folder(root: Path) -> Iterator[Path]:
    """Make a folder under `root` and remove it afterwards, `root` too if it did not exist."""
    existed = root.exists()
    root.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=".prove-", dir=root))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if not existed:
            with contextlib.suppress(OSError):
                root.rmdir()
