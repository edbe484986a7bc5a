"""The calculators of `shoal simulate`: a name, `key=value` options, one screen or JSON.

    shoal simulate goodput gpus=16384 mtbf_hours=3.1 stall_s=60 restart_s=600

The options of a calculator are the parameters of its screen function; their defaults show the kind:
a count (16384, 16k, 7b), a number, a word, or several counts (2,4,8). A parameter that is a section
of run.toml takes that section's keys, as section.key=value. Every calculator also takes `svg=FILE`,
which saves its plot. An unknown key or a bad value raises one line that names the nearest.
"""

from __future__ import annotations

import dataclasses
import inspect
import json as json_text
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from shoal.base.errors import PlanError, nearest_word
from shoal.base.text.terminal_encoding import READABLE
from shoal.config.load import load_config
from shoal.teach.drawings.plot_svg import plot_svg
from shoal.teach.drawings.screen import Screen, screen_lines, screen_record
from shoal.teach.screens import distant, drawn, links, reliability, speed

WIDTH = 100
SUFFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
LARGEST = 1e18
"""Largest accepted number: no training reaches it."""
MAY_BE_ZERO = frozenset({
    "alpha_us", "apply_ms", "inside_alpha_us", "interval_s", "latency_ms", "node_share", "outer_s",
    "overlap", "overlap_steps", "repair_hours", "restart_s", "seed", "serial", "slow_share",
    "spares", "speedup", "spread", "write_s",
})  # fmt: skip

SCREENS: dict[str, tuple[str, Callable[..., Screen]]] = {
    "amdahl": ("speed-up when a share of the step stays serial", speed.amdahl_screen),
    "scaling": ("step time and speed-up with communication", speed.scaling_screen),
    "collectives": ("all-reduce by ring, tree, halving-doubling, levels", links.collectives_screen),
    "bubble": ("idle share of a pipeline, by schedule", links.bubble_screen),
    "mfu": ("share of the peak that a run uses", speed.mfu_screen),
    "checkpoints": ("how often to save (Young, Daly, exact)", reliability.checkpoints_screen),
    "goodput": ("share of a run that is progress", reliability.goodput_screen),
    "failures": ("a long run drawn: failures, spares, restarts", drawn.failures_screen),
    "stragglers": ("time lost waiting for the slowest device", drawn.stragglers_screen),
    "servers": ("a parameter server with a slow worker, three ways", speed.servers_screen),
    "diloco": ("bytes of averaging weights every H steps", distant.diloco_screen),
    "islands": ("slow links: time, utilisation, the smallest period", distant.islands_screen),
}
"""Name → the question that it answers, and its screen function."""


def calculate(
    word: str,
    arguments: Sequence[str] = (),
    *,
    json: bool = False,
    options: Mapping[str, object] | None = None,
) -> None:
    """Print one calculator's screen, or its figures as JSON, to standard output.

    Args:
        word: name of a calculator in SCREENS.
        arguments: `key=value` texts.
        options: the same as a mapping, which wins. Its key `svg` is a file for the plot.

    Raises:
        PlanError: unknown word or key, a value of the wrong kind or out of range.
        ConfigError: a key or value of a section of run.toml is wrong.
        OSError: svg cannot be written.
    """
    _, function = SCREENS[check_calculator(word)]
    texts = {**_split_arguments(word, arguments), **{k: str(v) for k, v in (options or {}).items()}}
    path = texts.pop("svg", "")
    values = parse_options(word, function, texts)
    try:
        screen = function(**values)
    except (OverflowError, ZeroDivisionError):
        raise PlanError(
            f"{word}: these numbers are too far apart to compute with; try: its defaults"
        ) from None
    if path:
        named = dataclasses.replace(screen.chart, title=screen.title)
        Path(path).write_text(plot_svg(named), encoding="utf-8")
    if json:
        plain = {k: dataclasses.asdict(v) if is_section(v) else v for k, v in values.items()}
        record = {"calculator": word, **screen_record(screen, plain)}
        typer.echo(json_text.dumps(record, ensure_ascii=False, allow_nan=False))
        return
    encoding = sys.stdout.encoding or "utf-8"
    for line in screen_lines(screen, WIDTH, ascii_only=not _can_encode_plot(encoding)):
        typer.echo(line.encode(encoding, READABLE).decode(encoding))
    if path:
        typer.echo(f"plot: {path}")


def check_calculator(word: str) -> str:
    """Return the word if it names a calculator.

    Raises:
        PlanError: the word is unknown; the message names the nearest.

    >>> check_calculator("goodput")
    'goodput'
    """
    if word in SCREENS:
        return word
    close = nearest_word(word, SCREENS)
    raise PlanError(
        f"simulate {word}: no calculator, there are {', '.join(SCREENS)}; "
        f"try: shoal simulate {close or 'goodput'}"
    )


def parse_options(
    word: str, function: Callable[..., Screen], texts: Mapping[str, str]
) -> dict[str, Any]:
    """Parse all options of a calculator, with the defaults of those that are absent.

    Raises:
        PlanError: an unknown key or a value of the wrong kind; the message names the nearest.

    >>> parse_options("bubble", links.bubble_screen, {"ranks": "16"})["ranks"]
    16
    """
    defaults = {k: p.default for k, p in inspect.signature(function).parameters.items()}
    sections = {k: default for k, default in defaults.items() if is_section(default)}
    options = [*(k for k in defaults if k not in sections), *(f"{k}.…" for k in sections)]
    for key in texts:
        section, dot, _ = key.partition(".")
        if key not in options and not (dot and section in sections):
            raise PlanError(
                f"simulate {word}: {key} is not an option, there are {', '.join(options)}, svg; "
                f"try: {_nearest_option(key, [*options, 'svg'], sections)}"
            )
    values = {
        key: _parse_value(key, texts[key], default) if key in texts else default
        for key, default in defaults.items()
    }
    return values | {key: _parse_section(key, default, texts) for key, default in sections.items()}


def _nearest_option(key: str, options: Sequence[str], sections: Mapping[str, Any]) -> str:
    of_sections = {
        name: f"{section}.{name}" for section in sections for name in vars(sections[section])
    }
    return of_sections.get(key) or nearest_word(key, options) or options[0]


def is_section(value: object) -> bool:
    """Return whether a parameter of a screen function is a section of run.toml."""
    return dataclasses.is_dataclass(value)


def _parse_section(name: str, default: Any, texts: Mapping[str, str]) -> Any:
    """Parse a section with the user's keys, as `shoal train` parses it."""
    plain = type(default)()
    own = [
        f"{name}.{key}={value}"
        for key, value in vars(default).items()
        if value != getattr(plain, key)
    ]
    typed = [f"{key}={text}" for key, text in texts.items() if key.startswith(f"{name}.")]
    return getattr(load_config(None, [*own, *typed]).config, name)


def _split_arguments(word: str, arguments: Sequence[str]) -> dict[str, str]:
    texts: dict[str, str] = {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals or not value:
            raise PlanError(
                f"simulate {word}: {argument} has no value; try: {key or 'key'}=…, as in "
                f"shoal simulate {word} {_example(word)}"
            )
        if key in texts:
            raise PlanError(f"simulate {word}: {key} is given twice; try: {key}={value}")
        texts[key] = value
    return texts


def _example(word: str) -> str:
    first = next(iter(inspect.signature(SCREENS[word][1]).parameters.values()))
    return f"{first.name}={first.default}"


def _parse_value(key: str, text: str, default: object) -> object:
    """Parse a text as the kind of its default: several counts, a count, a number or a word."""
    if isinstance(default, tuple):
        return tuple(sorted({_parse_count(key, one, default[0]) for one in text.split(",")}))
    if isinstance(default, int):
        return _parse_count(key, text, default)
    if isinstance(default, float):
        return _parse_number(key, text, default)
    return text


def _parse_number(key: str, text: str, default: object) -> float:
    found = re.fullmatch(r"([-+]?[0-9._]*(?:[eE][-+]?[0-9]+)?)([kmbtKMBT]?)", text.strip())
    try:
        value = float(found[1]) * SUFFIXES[found[2].lower()] if found else math.nan
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise PlanError(f"{key} = {text}: not a number; try: {key}={default}")
    if value < 0 or (value == 0 and key not in MAY_BE_ZERO):
        least = "0 or more" if key in MAY_BE_ZERO else "more than 0"
        raise PlanError(f"{key} = {text}: must be {least}; try: {key}={default}")
    if value > LARGEST:
        raise PlanError(f"{key} = {text}: at most {LARGEST:g}; try: {key}={default}")
    return value


def _parse_count(key: str, text: str, default: object) -> int:
    value = _parse_number(key, text, default)
    if value != int(value):
        raise PlanError(f"{key} = {text}: a whole number; try: {key}={max(1, round(value))}")
    return int(value)


def _can_encode_plot(encoding: str) -> bool:
    """Return whether the terminal's encoding has the characters of a plot."""
    try:
        "●○◆◇▲△┊└┤█√τα".encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True
