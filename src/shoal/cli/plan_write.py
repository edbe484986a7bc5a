"""`shoal plan --write FILE`: write the chosen layout as a run.toml that `shoal train` takes."""

from __future__ import annotations

import shlex
from pathlib import Path

from shoal.base.errors import ConfigError
from shoal.base.layouts.layout import AXES
from shoal.base.runlog.atomic_files import write_atomically
from shoal.base.text.units import count_text
from shoal.cli.words import split_arguments
from shoal.config.load import load_config
from shoal.config.resolve import set_policies
from shoal.config.save import to_toml
from shoal.forecast.search.layout_search import LayoutCandidate

ORIGIN = "shoal plan"


TEXT_UP_TO = 100_000_000
"""Parameters above which Python's own source text is too small a data set."""


def write_plan(best: LayoutCandidate, arguments: list[str], path: Path) -> tuple[str, list[str]]:
    """Write the request as a run.toml, with the plan's choices filled in.

    Returns:
        the command that starts it ("" if none can), and the keys that the user must still set.

    Raises:
        ConfigError: the file exists: a plan never replaces a file of the user.
    """
    if path.exists():
        raise ConfigError(f"--write {path}: exists; try: another name, or move it away")
    if not path.parent.is_dir():
        raise ConfigError(f"--write {path}: no folder {path.parent}; try: make it first")
    case = best.case
    loaded = load_config(*split_arguments(arguments))
    given = {axis: getattr(case.layout, axis) for axis in (*AXES[1:], "ep")}
    given = {axis: degree if degree > 1 else 0 for axis, degree in given.items()}
    single = case.layout.processes == 1
    loaded.replace("layout", ORIGIN, strategy="single" if single else "auto", **given)
    if case.layout.zero:
        loaded.replace("layout", ORIGIN, zero=case.layout.zero)
    loaded.replace("train", ORIGIN, batch=case.batch, micro_batch=case.micro_batch, accumulate=0)
    if case.model.sequence:
        loaded.replace("data", ORIGIN, sequence=case.model.sequence)
    set_policies(loaded, case.plan, ORIGIN)
    cluster = case.cluster
    loaded.replace("launch", ORIGIN, processes=cluster.per_node, nodes=cluster.nodes)
    if case.layout.pp > 1:
        loaded.replace("layout", ORIGIN, schedule=case.schedule)
        if case.layout.chunks > 1:
            loaded.replace("layout", ORIGIN, chunks=case.layout.chunks)
    write_atomically(path, to_toml(loaded))
    notes = []
    if "data.source" not in loaded.origins and case.model.trainable > TEXT_UP_TO:
        notes.append(
            f"data.source not given: {path} says {loaded.config.data.source}, Python's own source "
            f"text; nearest for {count_text(case.model.trainable)} parameters: "
            f"data.source=tokens:FOLDER"
        )
    start, other = _start_command(best, path)
    return start, [*notes, *other]


def _start_command(best: LayoutCandidate, path: Path) -> tuple[str, list[str]]:
    """Return the command that starts the run, here or by Slurm, and notes on other ways."""
    if not best.fits:
        return "", [f"{path} is written, and does not start on these devices"]
    train = f"train {shlex.quote(str(path))}"
    cluster = best.case.cluster
    if cluster.nodes == 1:
        return f"shoal {train}", []
    tasks = f"--nodes={cluster.nodes} --ntasks-per-node={cluster.per_node}"
    nodes = f"--nnodes={cluster.nodes} --nproc-per-node={cluster.per_node}"
    rendezvous = "--rdzv-backend=c10d --rdzv-endpoint=HOST:29500"
    return (
        f"srun {tasks} shoal {train}",
        [f"without Slurm, on every node: torchrun {nodes} {rendezvous} -m shoal {train}"],
    )
