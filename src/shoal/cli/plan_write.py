"""`shoal plan --write FILE`: the chosen layout as a run.toml that `shoal train` takes."""

from __future__ import annotations

from pathlib import Path

from shoal.base.errors import ConfigError
from shoal.base.files import write_whole
from shoal.base.layout import AXES
from shoal.config.load import load
from shoal.config.save import to_toml
from shoal.planner.search import Candidate

ORIGIN = "shoal plan"


def write_plan(best: Candidate, arguments: list[str], path: Path) -> None:
    """Write what was asked with the plan's choices filled in.

    Errors   ConfigError if the file exists: a plan never replaces what a user wrote
    """
    if path.exists():
        raise ConfigError(f"--write {path}: exists; nearest: another name, or move it away")
    if not path.parent.is_dir():
        raise ConfigError(f"--write {path}: no folder {path.parent}; nearest: make it first")
    case = best.case
    paths = [Path(a) for a in arguments if "=" not in a]
    loaded = load(paths[0] if paths else None, [a for a in arguments if "=" in a])
    degrees = {axis: degree for axis, degree in case.layout.degrees.items() if degree > 1}
    degrees.pop("islands", None)
    given = {axis: degrees.get(axis, 0) for axis in AXES[1:]}
    single = case.layout.processes == 1
    loaded.replace("layout", ORIGIN, strategy="single" if single else "auto", **given)
    if case.layout.zero:
        loaded.replace("layout", ORIGIN, zero=case.layout.zero)
    loaded.replace("train", ORIGIN, batch=case.batch, micro_batch=case.micro_batch, accumulate=0)
    if case.model.sequence:
        loaded.replace("data", ORIGIN, sequence=case.model.sequence)
    loaded.replace("memory", ORIGIN, recompute=case.recompute, offload=case.offload)
    loaded.replace("precision", ORIGIN, compute=case.compute)
    cluster = case.cluster
    loaded.replace("launch", ORIGIN, processes=cluster.per_node, nodes=cluster.nodes)
    if case.layout.pp > 1:
        loaded.replace("layout", ORIGIN, schedule=case.schedule)
        if case.schedule == "interleaved":
            loaded.replace("layout", ORIGIN, chunks=case.chunks)
    write_whole(path, to_toml(loaded))
