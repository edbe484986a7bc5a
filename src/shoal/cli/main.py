"""The command `shoal`: finds the verb, turns errors into one line and an exit code."""

from __future__ import annotations

import sys

import typer

from shoal import __version__
from shoal.base.errors import ShoalError
from shoal.cli import checkpoint, compare, plan, prove, simulate, train

app = typer.Typer(
    help="Shoal trains any PyTorch model on whatever its user has.\n\n"
    "First run: shoal train (a small Llama on the Python standard library's source text).",
    rich_markup_mode=None,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command("train")(train.train)
app.command("compare")(compare.compare)
app.command("plan")(plan.plan)
app.command("prove")(prove.prove)
app.command("simulate")(simulate.simulate)
app.add_typer(checkpoint.app, name="checkpoint")


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"shoal {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: bool = typer.Option(
        False, "--version", help="Show the version and exit.", callback=_version, is_eager=True
    ),
) -> None:
    """Shoal trains any PyTorch model on whatever its user has."""


def main() -> None:
    """Run the command line; a ShoalError is one line on standard error and its exit code.

    So is a file or folder that the system refuses: exit status 2, as the user can change it.
    """
    try:
        app()
    except ShoalError as failure:
        sys.stderr.write(f"shoal: {failure}\n")
        sys.exit(failure.exit_code)
    except BrokenPipeError:
        sys.exit(141)
    except OSError as failure:
        where = f"{failure.filename}: " if failure.filename else ""
        sys.stderr.write(f"shoal: {where}{failure.strerror or failure}\n")
        sys.exit(2)
