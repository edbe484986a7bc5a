"""`shoal links`: measure each collective between processes, beside the α–β model.

Alone it starts as many processes as a run would; under torchrun or srun the same command runs on
every rank, and rank 0 prints. The collectives are timed bare
(`fabric/exchanges/timed_collectives.py`); on gloo a reduce-scatter is an all-to-all and a sum, as
in runs. Groups are neighbours, all groups of a size at once as in a run, and one rank of each
machine; pairs communicate one pair at a time.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from shoal.base.errors import ClusterError, ConfigError
from shoal.base.text.units import bytes_text, seconds_text

if TYPE_CHECKING:
    from shoal.fabric import World
    from shoal.teach.drawings.plot import Chart

Document = dict[str, Any]
NAMES = {
    "all_reduce": "all-reduce",
    "reduce_scatter": "reduce-scatter",
    "all_gather": "all-gather",
    "broadcast": "broadcast",
    "all_to_all": "all-to-all",
}
DOUBLINGS = tuple(2**power for power in range(1, 20))
USUAL = (2**12, 2**15, 2**18, 2**20, 2**22, 2**24)
UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30} | {"k": 2**10, "m": 2**20}
LEAST_BYTES, MOST_BYTES = 256, 2**32
TOLD = "told.json"
"""File in the folder of the started ranks: their results."""

PROCESSES = typer.Option(0, "--processes", help="As launch.processes; 0: as many as a run starts.")
SIZES = typer.Option("", "--sizes", metavar="4KiB,1MiB,…", help="Whole messages, two or more.")
GROUPS = typer.Option("", "--groups", metavar="2,4,…", help="Ranks of a group; default: doublings.")
REPEATS = typer.Option(20, "--repeats", help="Calls that are timed of each size.")
PLOT = typer.Option(False, "--plot", help="Also draw the times in the terminal.")
HTML = typer.Option(None, "--html", metavar="FILE", help="Also write table and pictures there.")
AS_JSON = typer.Option(False, "--json", help="Print the data instead, as one JSON document.")


def links(
    processes: int = PROCESSES,
    sizes: str = SIZES,
    groups: str = GROUPS,
    repeats: int = REPEATS,
    plot: bool = PLOT,
    html: Path = HTML,
    as_json: bool = AS_JSON,
) -> None:
    """Measure all-reduce, all-gather, reduce-scatter, broadcast, all-to-all, and every pair.

    Exit status: 0 measured, 1 processes did not talk, 2 wrong input.
    """
    from shoal.base.estimates.facts import default_processes, read_machine_facts
    from shoal.cli.torchrun import is_launched

    asked: Document = {
        "sizes": _parse_sizes(sizes),
        "groups": _parse_group_sizes(groups),
        "repeats": repeats,
    }
    for name, value, least, most in (
        ("--processes", processes, 0, 1024),
        ("--repeats", repeats, 1, 10_000),
    ):
        if not least <= value <= most:
            nearest = most if value > most else least
            raise ConfigError(f"{name} {value}: from {least} to {most}; try: {nearest}")
    if html is not None and not html.parent.is_dir():
        raise ConfigError(f"--html {html}: {html.parent} is no folder")
    if is_launched():
        document = _measure_all_ranks(asked)
    else:
        document = _measure_local_ranks(
            processes or max(2, default_processes(read_machine_facts())), asked
        )
    if document is None:  # another rank prints
        return
    if html is not None:
        html.write_text(links_html(document), encoding="utf-8")
    if as_json:
        typer.echo(json.dumps(document))
        return
    lines = links_table(document)
    if plot:
        from shoal.teach.drawings.plot import plot_lines

        lines += [line for chart in links_charts(document) for line in ["", *plot_lines(chart)]]
    if html is not None:
        lines += ["", f"written: {html}"]
    typer.echo("\n".join(lines))


def _parse_sizes(text: str) -> list[int]:
    """Return the message sizes in bytes, as a user writes them; the default sizes for ""."""
    if not text:
        return list(USUAL)
    found = []
    for word in text.split(","):
        bare = word.strip().lower()
        digits = bare.rstrip("bgikm")
        unit = bare[len(digits) :]
        if unit not in UNITS or not digits.isdecimal():
            raise ConfigError(f"--sizes {word.strip()}: bytes are written 4096, 32KiB, 1MiB, 1GiB")
        size = int(digits) * UNITS[unit]
        if not LEAST_BYTES <= size <= MOST_BYTES:
            nearest = f"{LEAST_BYTES}" if size < LEAST_BYTES else "4GiB"
            raise ConfigError(f"--sizes {word.strip()}: from 256 bytes to 4GiB; try: {nearest}")
        found.append(size)
    if len(set(found)) < 2:
        raise ConfigError(f"--sizes {text}: a line needs two sizes; try: {text},16MiB")
    return sorted(set(found))


def _parse_group_sizes(text: str) -> list[int]:
    words = [word.strip() for word in text.split(",")] if text else []
    for word in words:
        if not word.isdecimal() or int(word) < 2:
            raise ConfigError(f"--groups {word}: a group has two ranks or more; try: 2")
    return sorted({int(word) for word in words})


def _measure_local_ranks(processes: int, asked: Document) -> Document:
    """Start processes on this machine and return their measurements."""
    if processes < 2:
        raise ConfigError(f"--processes {processes}: one process has no links; try: 2")
    _check_groups(asked["groups"], processes)
    return dict(run_ranks("shoal.cli.links", processes, json.dumps(asked)))


def run_ranks(program: str, processes: int, *words: str) -> Any:
    """Start processes that run a module; return what rank 0 passed to `write_rank_result`.

    Args:
        program: name of the module.
        words: its arguments.

    Raises:
        ClusterError: the processes could not connect.
    """
    from shoal.base.runlog.events import EventLog
    from shoal.launch import supervise

    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        outcome = supervise(
            [sys.executable, "-m", program, *words],
            processes=processes,
            folder=place,
            restarts=0,
            emit=EventLog(place / "events.jsonl", rank=None).emit,
            environ=dict(os.environ),
            imports=("shoal.fabric", "shoal.machine.link_check"),
        )
        if outcome.status == "stopped":
            raise typer.Exit(outcome.exit_code)
        if outcome.exit_code:
            line = " ".join(outcome.message.split())
            raise ClusterError(f"{processes} processes did not talk: {line}")
        return json.loads((place / TOLD).read_text(encoding="utf-8"))


def write_rank_result(found: Any) -> None:
    """Write a JSON value for the parent of the ranks; rank 0 calls it."""
    (Path(os.environ["SHOAL_RUN_FOLDER"]) / TOLD).write_text(json.dumps(found), encoding="utf-8")


def _measure_all_ranks(asked: Document) -> Document | None:
    """Measure as a rank of a launcher; return None on all ranks but the first."""
    from shoal.fabric import start_world

    world = start_world()
    if world.size < 2:
        world.close()
        raise ConfigError("shoal links: one process has no links; try: --nproc-per-node=2")
    _check_groups(asked["groups"], world.size)
    document = measure_collectives(world, asked)
    first = world.is_first
    world.close()
    return document if first else None


def _check_groups(groups: list[int], ranks: int) -> None:
    for size in groups:
        if ranks % size:
            fit = [n for n in range(2, ranks + 1) if not ranks % n]
            near = min(fit, key=lambda n: abs(n - size))
            raise ConfigError(f"--groups {size}: {ranks} ranks make no such groups; try: {near}")


def measure_collectives(world: World, asked: Document) -> Document:
    """Return all measurements as one document, the same on every rank; each rank calls it."""
    from itertools import combinations

    import torch

    from shoal.fabric.axis_worlds import axis_world
    from shoal.fabric.device import process_group_backend
    from shoal.fabric.exchanges.point_to_point import PointToPoint
    from shoal.machine.link_check import MOST_RANKS, measure_pairs
    from shoal.machine.link_rates import measure_groups

    size, hosts = world.size, world.gather_json(socket.gethostname())
    wanted = asked["groups"] or [n for n in DOUBLINGS if n < size and not size % n] + [size]
    groups: dict[str, World] = {}
    for ranks in wanted:
        name = f"all {size} ranks" if ranks == size else f"{ranks} neighbours"
        groups[name] = axis_world(world, {"apart": size // ranks, "inside": ranks}, ["inside"])
    firsts = sorted({host: hosts.index(host) for host in hosts}.values())
    local = world.local_size
    if len(firsts) > 1 and size == local * len(firsts) and local > 1:
        groups["one rank of each machine"] = axis_world(
            world, {"across": len(firsts), "inside": local}, ["across"]
        )
    members = range(size) if size <= MOST_RANKS else firsts
    return {
        "ranks": size,
        "hosts": hosts,
        "device": world.device.type,
        "backend": process_group_backend(world.device),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "repeats": asked["repeats"],
        "groups": measure_groups(world, groups, asked["sizes"], asked["repeats"]),
        "pairs": measure_pairs(world, PointToPoint(world), list(combinations(members, 2))),
    }


def links_table(document: Document) -> list[str]:
    """Format the result of `measure_collectives` as lines of at most 100 columns."""
    machines = len(set(document["hosts"]))
    where = f"{machines} machine{'s' * (machines > 1)}, {document['backend']}, {document['device']}"
    lines = [
        f"{document['ranks']} ranks on {where}; medians of {document['repeats']} calls, of the "
        f"slowest rank"
    ]
    for group in document["groups"]:
        several = f", {group['at_once']} groups at once" if group["at_once"] > 1 else ""
        for kind, told in group["links"].items():
            lines += [
                "",
                f"{NAMES[kind]} · {group['name']}{several} · model: "
                f"{_seconds_text(told['latency_s'])} a "
                f"round, {bytes_text(told['bytes_per_s'])}/s, off by {told['error']:.0%}",
                f"{'message':>12}{'median':>12}{'best':>12}{'model':>12}{'sent by a rank':>18}",
            ]
            lines += [
                f"{bytes_text(one['bytes']):>12}{_seconds_text(one['median_s']):>12}"
                f"{_seconds_text(one['best_s']):>12}{_seconds_text(one['model_s']):>12}"
                f"{bytes_text(one['bus_bytes_per_s']) + '/s':>18}"
                for one in told["points"]
            ]
    return [*lines, "", "pairs, one at a time:", *_pair_lines(document)]


def _pair_lines(document: Document) -> Iterator[str]:
    many = len(set(document["hosts"])) > 1
    for pair in document["pairs"]:
        a, b = int(pair["a"]), int(pair["b"])
        names = (
            f"{a} ({document['hosts'][a]}) – {b} ({document['hosts'][b]})" if many else f"{a} – {b}"
        )
        rate = f"{bytes_text(pair['bytes_per_s'])}/s"
        yield f"{names:>12}{_seconds_text(pair['latency_s']):>12}{rate:>18}"


def _seconds_text(seconds: float) -> str:
    """Format seconds; below a millisecond as microseconds.

    >>> _seconds_text(0.00004213), _seconds_text(0.0042)
    ('42.1 us', '4.2 ms')
    """
    return f"{seconds * 1e6:.1f} us" if seconds < 1e-3 else seconds_text(seconds)


def links_charts(document: Document) -> list[Chart]:
    """Draw one chart per collective: medians as dots and the fitted line, for every group."""
    from shoal.teach.drawings.plot import Chart, PlotAxis, Series

    found = []
    for kind, name in NAMES.items():
        lines, dots = [], []
        for group in document["groups"][-3:]:  # at most as many as there are colours
            points = group["links"][kind]["points"]
            lines.append(
                Series(
                    f"{group['name']}, model",
                    tuple((p["bytes"] / 1024, p["model_s"] * 1e3) for p in points),
                )
            )
            dots.append(
                Series(
                    f"{group['name']}, measured",
                    tuple((p["bytes"] / 1024, p["median_s"] * 1e3) for p in points),
                    dots=True,
                )
            )
        axes = PlotAxis("message, KiB", log=True, base=2), PlotAxis("ms", log=True)
        found.append(Chart(*axes, (*dots, *lines), title=name))
    return found


def links_html(document: Document) -> str:
    """Format the table and the charts as one self-contained HTML document."""
    from shoal.teach.drawings.plot_svg import plot_svg

    text = escape("\n".join(links_table(document)))
    pictures = "\n".join(plot_svg(chart) for chart in links_charts(document))
    return (
        '<!doctype html>\n<meta charset="utf-8">\n<title>shoal links</title>\n'
        f"<body>\n{pictures}\n<pre>{text}</pre>\n</body>\n"
    )


def main() -> int:
    """Run one of the measuring processes; rank 0 writes the results."""
    from shoal.fabric import start_world

    world = start_world()
    document = measure_collectives(world, json.loads(sys.argv[1]))
    if world.is_first:
        write_rank_result(document)
    world.close()
    return 0


if __name__ == "__main__":
    from shoal.launch import run_and_exit

    run_and_exit(main)
