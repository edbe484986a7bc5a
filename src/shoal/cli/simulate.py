"""`shoal simulate`: show how distributed training works, step by step and over time.

WHAT is one of the table `WHATS`: collectives and sharding as step-throughs with real numbers,
pipeline schedules and the LLM-Training-Puzzles as timelines, calculators as one screen each. All of
it is arithmetic on this machine: no process is started, torch is never imported.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from shoal.base.errors import ConfigError, nearest_word
from shoal.teach.simulate_table import ALIASES, CALCULATOR, WHATS, Entry, SimulateRequest

if TYPE_CHECKING:
    from shoal.teach.simulate_shows import SimulateContents

WORDS = typer.Argument(None, metavar="WHAT", help="What to look at.")
RANKS = typer.Option(None, "--ranks", metavar="N", help="Ranks; default 4.")
MICRO = typer.Option(
    None, "--micro-batches", metavar="M", help="Micro-batches per step; default 8 (fsdp: 1)."
)
CHUNKS = typer.Option(
    None, "--chunks", metavar="V", help="Pieces of the model per rank (interleaved); default 2."
)
FORWARD = typer.Option(None, "--forward", metavar="S", help="Seconds of a forward; default 1.")
BACKWARD = typer.Option(
    None, "--backward", metavar="S", help="Seconds for the input's gradient; default 1."
)
WEIGHT = typer.Option(
    None, "--weight", metavar="S", help="Seconds for the weights' gradients; default 1."
)
BYTES = typer.Option(None, "--bytes", metavar="B", help="Message of a collective; default 64 MiB.")
PROGRAM = typer.Option(None, "--program", metavar="FILE", help="Your own program of a puzzle.")
SVG = typer.Option(None, "--svg", metavar="FILE", help="Also write the picture there.")
TRACE = typer.Option(
    None, "--trace", metavar="FILE", help="Also write a trace for ui.perfetto.dev there."
)
JSON = typer.Option(False, "--json", help="Print the data instead of drawing it.")


def simulate(
    words: list[str] = WORDS,
    ranks: int = RANKS,
    micro_batches: int = MICRO,
    chunks: int = CHUNKS,
    forward_s: float = FORWARD,
    backward_s: float = BACKWARD,
    weight_s: float = WEIGHT,
    message_bytes: float = BYTES,
    program: Path = PROGRAM,
    svg: Path = SVG,
    trace: Path = TRACE,
    as_json: bool = JSON,
) -> None:
    """Look at a technique step by step or over time; without arguments: the list of all.

    For example: shoal simulate ring --ranks 4, or shoal simulate 1f1b --svg 1f1b.svg

    A rank's seconds per micro-batch are --forward + --backward + --weight; schedules that do not
    split the backward spend the last two together. Calculators take NAME=VALUE instead.

    Exit status: 0, or 2 with one line for something to correct.
    """
    if not words:
        _print_entries()
        return
    what, entry = find_entry(words[0])
    given: dict[str, float | None] = {
        "--ranks": ranks,
        "--micro-batches": micro_batches,
        "--chunks": chunks,
        "--forward": forward_s,
        "--backward": backward_s,
        "--weight": weight_s,
        "--bytes": message_bytes,
    }
    check_options(what, entry, given, words[1:])
    if program is not None and "--program" not in entry.takes:
        raise ConfigError("--program: only a puzzle takes it; try: shoal simulate puzzle 0")
    if entry.function == CALCULATOR:
        _print_calculator(what, words[1:], svg, trace, as_json)
        return
    from shoal.teach import simulate_shows

    asked = SimulateRequest(
        what,
        tuple(words[1:]),
        {k: v for k, v in given.items() if v is not None},
        "" if program is None else str(program),
    )
    shown: SimulateContents = getattr(simulate_shows, entry.function)(asked)
    kept = simulate_shows.write_files(shown, what, svg, trace)
    if as_json:
        typer.echo(
            json.dumps(simulate_shows.contents_record(shown, what), indent=1, ensure_ascii=False)
        )
        return
    simulate_shows.print_contents(shown, sys.stdout)
    for path, how in kept:
        typer.echo(f"kept: {path}{how}")


def find_entry(word: str) -> tuple[str, Entry]:
    """Return the entry of a name, or of one of its aliases.

    Raises:
        ConfigError: the name is unknown; the message names the nearest.

    >>> find_entry("afab")[0]
    'gpipe'
    """
    name = ALIASES.get(word, word)
    if name in WHATS:
        return name, WHATS[name]
    close = nearest_word(word, [*WHATS, *ALIASES])
    hint = f"; try: shoal simulate {close}" if close else "; shoal simulate lists them all"
    raise ConfigError(f"shoal simulate {word}: there is no such thing{hint}")


def check_options(
    what: str, entry: Entry, given: dict[str, float | None], words: list[str]
) -> None:
    """Refuse options that this entry does not read, and values out of range.

    Raises:
        ConfigError: an option or a value is refused.
    """
    for name, value in given.items():
        if value is None:
            continue
        if name not in entry.takes:
            takes = ", ".join(entry.takes) or "none of these options"
            if entry.function == CALCULATOR:
                takes = "NAME=VALUE instead of this option"
            raise ConfigError(f"{name}: shoal simulate {what} takes {takes}")
        if name in ("--forward", "--backward", "--weight") and not 0 <= value < float("inf"):
            raise ConfigError(f"{name} = {value:g}: seconds are 0 or more; try: {name} 1")
        if name not in ("--forward", "--backward", "--weight") and not 1 <= value < float("inf"):
            raise ConfigError(f"{name} = {value:g}: must be at least 1; try: {name} 1")
    if words and not entry.words:
        raise ConfigError(f"shoal simulate {what} {words[0]}: {what} takes options only")


def _print_calculator(
    what: str, words: list[str], svg: Path | None, trace: Path | None, as_json: bool
) -> None:
    """Print one screen of a calculator.

    Raises:
        ConfigError: --trace was given.
        PlanError: an argument of the calculator is wrong.
    """
    from shoal.teach.calculate import calculate

    if trace is not None:
        raise ConfigError(f"--trace: shoal simulate {what} has no timeline")
    calculate(what, words, json=as_json, options={} if svg is None else {"svg": str(svg)})


def _print_entries() -> None:
    """Print all entries, one line each."""
    from shoal.teach.calculate import SCREENS

    group = ""
    for name, entry in WHATS.items():
        if entry.group != group:
            typer.echo(f"{'' if not group else chr(10)}{entry.group}")
            group = entry.group
        text = SCREENS[name][0] if entry.function == CALCULATOR else entry.text
        typer.echo(f"  {f'{name} {entry.words}'.strip():<18} {text}")
    typer.echo("\nFor example: shoal simulate ring --ranks 4 --svg ring.svg")
    typer.echo("             shoal simulate goodput gpus=16384 mtbf_hours=3.1")
