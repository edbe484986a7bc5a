"""The command `shoal`: find the verb, turn errors into one line and an exit code."""

from __future__ import annotations

import os
import sys
from functools import cache
from typing import Any

import typer
from typer.core import TyperGroup

from shoal import __version__
from shoal.base.errors import ShoalError
from shoal.base.operating_systems import untested_system_warning
from shoal.base.runlog.atomic_files import (
    cache_folder,
    check_cache_folder,
    make_temporary_cache,
    replace_compiler_caches,
)
from shoal.cli import (
    checkpoint,
    compare,
    config_import,
    data,
    diagnose,
    docs,
    doctor,
    find,
    island_key,
    island_witness,
    launch,
    links,
    plan,
    prove,
    replay,
    report,
    run,
    runs,
    sample,
    serve,
    simulate,
    trace,
    train,
    watch,
)
from shoal.cli.terminal import GOES_ON, OutputLostError, Terminal, check_encoding, output_lost_text

HEADINGS = {
    "Train": {
        "train": "Train a model, from run.toml and section.key=value.",
        "run": "Run a script of Accelerate, DeepSpeed or Lightning as it is.",
        "sample": "Write on from a prompt with a run's newest checkpoint.",
    },
    "Before a run": {
        "plan": "Rank layouts: step time, memory, what fills it.",
        "find": "Try learning rates, or the largest micro-batch.",
        "compare": "Measure layouts × process counts in one table.",
        "prove": "Compare a layout with one process, on your model.",
        "simulate": "Draw a technique, or calculate a formula.",
        "data": "`data look`: rows as the model gets them, or those of a step.",
    },
    "The machine": {
        "doctor": "Check clock, disk, memory, processes and devices.",
        "links": "Measure the collectives between processes.",
    },
    "A run's folder": {
        "runs": "List runs: state, step, loss, rate, last sign of life.",
        "watch": "Show a run live: ranks, curves, waits, events.",
        "report": "Write one HTML file of a run, or compare several runs in one.",
        "replay": "Repeat a step, or compare two runs tensor by tensor.",
        "trace": "Merge the traces of all ranks into one file, with a summary.",
        "diagnose": "Name what went wrong or is slow, and what to try; sessions.",
        "islands": "List who merged in each round; make an island's key.",
        "checkpoint": "List, verify, export and import checkpoints.",
    },
    "Other tools": {
        "launch": "Write a job for Slurm or Kubernetes, or start by SSH.",
        "config": "Import a configuration of DeepSpeed or Accelerate.",
        "serve": "Serve the metrics of all runs, for Prometheus.",
        "docs": "List the pages of the documentation, or print one.",
    },
}
"""Heading of `shoal --help` → its verbs in the order in which a user meets them, in a line each."""


class GroupedVerbs(TyperGroup):
    """The verbs of `shoal --help` under their headings."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write each heading with its verbs."""
        width = max(map(len, self.commands))
        for heading, verbs in HEADINGS.items():
            with formatter.section(heading):
                formatter.write_dl([(verb.ljust(width), line) for verb, line in verbs.items()])


app = typer.Typer(
    cls=GroupedVerbs,
    help="Shoal trains any PyTorch model on whatever its user has.\n\n"
    "First run: shoal train (a small Llama on the Python standard library's source text).\n\n"
    "Pages: shoal docs. One verb: shoal VERB --help.",
    rich_markup_mode=None,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
STARTING = ("train", "compare", "doctor", "links", "prove", "replay")
"""Verbs that start processes, and so need features that only some systems have."""


KEEPING = ("train", "compare", "prove", "replay", "find", "data")
"""Verbs that keep tokens, measurements and proofs in the cache folder."""
BUILDING = (*KEEPING, "plan", "run", "sample")
"""Verbs that build models, for which torch may import its compiler and make its cache folder."""


def check_caches(verb: str) -> None:
    """Report an unusable cache folder in one line, and use a temporary one for this command.

    Its workers take the folder from the environment. Among several ranks, only the first prints the
    line.
    """
    folder = cache_folder()
    own = cache(make_temporary_cache)
    lines = []
    if verb in KEEPING and (why := check_cache_folder(folder)):
        os.environ["SHOAL_CACHE"] = str(own())
        lines.append(
            f"cache folder {folder}: {why}; nothing is kept between runs; "
            f"try: SHOAL_CACHE=another folder"
        )
    lines += replace_compiler_caches(own)
    if os.environ.get("RANK", "0") == "0":
        sys.stderr.write("".join(f"shoal: {line}\n" for line in lines))


def _keys_help() -> str | None:
    """Return every key of run.toml by section for --help; else None, without an import."""
    if "--help" not in sys.argv:
        return None
    from textwrap import fill

    from shoal.config.sections import Config, keys

    lines = [
        fill(f"[{section}] " + " ".join(key.name for key in keys(values)), 78)
        for section, values in vars(Config()).items()
    ]
    told = "\n".join(lines)
    return f"\b\nKeys, each said in docs/reference/configuration.md:\n{told}"


app.command("train", epilog=_keys_help())(train.train)
app.command("compare")(compare.compare)
app.command("diagnose")(diagnose.diagnose)
app.command("docs")(docs.docs)
app.command("doctor")(doctor.doctor)
app.command("links")(links.links)
app.command("plan")(plan.plan)
app.command("prove")(prove.prove)
app.command("replay")(replay.replay)
app.command("trace")(trace.trace)
app.command("report")(report.report)
app.command("run")(run.run)
app.command("runs")(runs.runs)
runs.islands_app.command("key")(island_key.key)
runs.islands_app.command("witness")(island_witness.witness)
app.command("sample")(sample.sample)
app.command("serve")(serve.serve)
app.command("simulate")(simulate.simulate)
app.command("watch")(watch.watch)
GROUPS = {
    "checkpoint": checkpoint.app,
    "config": config_import.app,
    "data": data.app,
    "find": find.app,
    "islands": runs.islands_app,
    "launch": launch.app,
}
"""Groups of verbs: another word must follow."""
for _name, _group in GROUPS.items():
    app.add_typer(_group, name=_name)


def _print_version(asked: bool) -> None:
    if asked:
        from shoal.base.package_source import package_digest

        typer.echo(f"shoal {__version__} (source {package_digest()[:12]})")
        raise typer.Exit


@app.callback()
def options(
    context: typer.Context,
    version: bool = typer.Option(
        False,
        "--version",
        help="Show the version and exit.",
        callback=_print_version,
        is_eager=True,
    ),
) -> None:
    """Shoal trains any PyTorch model on whatever its user has."""
    if context.invoked_subcommand in STARTING and (line := untested_system_warning()):
        typer.echo(f"shoal: {line}", err=True)


def main() -> None:
    """Run the command line of sys.argv and exit; a ShoalError is one line and its exit code.

    So is a wrong option, and a file or folder that the system refuses: exit status 2, as the user
    can change it. Ctrl-C exits with 130, a closed pipe with 141; lines go to standard error. Any
    other exception propagates. `terminal.py` describes the standard streams.
    """
    verb = sys.argv[1] if len(sys.argv) > 1 else ""
    terminal = Terminal(verb)
    code = 1
    try:
        code = _run_command_line()
    finally:  # also for an exception that propagates
        if (lost := terminal.close()) is not None:
            line = output_lost_text(lost)
            sys.stderr.write(line)
            sys.stderr.flush()
            if not code and verb not in GOES_ON:
                code = 2 if line else 141
    sys.exit(code)


def _run_command_line() -> int:
    """Run the command line, print its error line if any, and return the exit status."""
    try:
        check_encoding(sys.argv[1:])
        if sys.argv[1:2] and sys.argv[1] in BUILDING and "--help" not in sys.argv:
            check_caches(sys.argv[1])
        # typer prints the help for an empty command line.
        bare = not sys.argv[1:] or (len(sys.argv) == 2 and sys.argv[1] in GROUPS)
        code = app() if bare else app(standalone_mode=False)
        return code if isinstance(code, int) else 0
    except SystemExit as ended:  # raised by typer after its help
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except ShoalError as failure:
        sys.stderr.write(f"shoal: {failure}\n")
        return failure.exit_code
    except OutputLostError:
        return 0  # `main` reports it, as it reports a failure of the last flush
    except BrokenPipeError:
        return 141
    except KeyboardInterrupt:
        return 130
    except OSError as failure:
        where = f"{failure.filename}: " if failure.filename else ""
        sys.stderr.write(f"shoal: {where}{failure.strerror or failure}\n")
        return 2
    except Exception as failure:
        # typer's own errors: what a version of it calls them differs, that they can format does not
        if type(failure).__name__ == "Abort":
            return 130
        if not hasattr(failure, "format_message"):
            raise
        from shoal.cli.usage_errors import format_usage_error

        sys.stderr.write(f"shoal: {format_usage_error(failure, sys.argv[1:], GROUPS)}\n")
        return 2
