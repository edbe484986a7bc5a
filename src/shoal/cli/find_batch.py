"""Find the largest micro-batch that fits: the planner's answer first, then real tries around it.

    tried    powers of two, three steps each, in fresh processes under the run's own layout
    fits     the answer; twice as many ran out of memory, or exceeds the data
    limit    GPUs: their memory; a CPU: --memory, else what is free (also in its cgroup), shared
             by the processes; each process enforces its share
If a rank dies of anything else, the search ends with that rank's error.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from shoal.base.errors import ClusterError, ConfigError, UserError
from shoal.base.plans.plan import Plan
from shoal.base.runlog.atomic_files import write_atomically
from shoal.base.runlog.events import EventLog
from shoal.config.load import LoadedConfig
from shoal.machine.free_memory import free_bytes

UNITS = {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "b": 1}
MOST = 2**16
"""Largest number of samples in a forward pass that is tried."""


@dataclass
class MicroBatchSearch:
    """Results of a micro-batch search.

    Attributes:
        foreseen: the planner's largest micro-batch; 0 if it has no answer.
        most: the largest micro-batch that the data set allows.
        tries: micro-batch → "" if it fitted, else the rank's error.
    """

    foreseen: int
    limit_bytes: int
    most: int
    tries: dict[int, str] = field(default_factory=dict)

    @property
    def micro_batch(self) -> int:
        """Return the largest micro-batch that fitted; 0 if none did."""
        return max((size for size, why in self.tries.items() if not why), default=0)


def parse_bytes(text: str) -> int:
    """Return the bytes of a size with its unit.

    Raises:
        ConfigError: the text is no size.

    >>> parse_bytes("1.5 GiB"), parse_bytes("512mib")
    (1610612736, 536870912)
    """
    word = text.strip().lower()
    for unit, size in UNITS.items():
        number = word.removesuffix(unit).strip()
        if word.endswith(unit) and number.replace(".", "", 1).isdecimal() and float(number) > 0:
            return int(float(number) * size)
    raise ConfigError(f"--memory {text}: a size above 0 with its unit is wanted; try: 2GiB")


def search_power_of_two(foreseen: int, most: int, fits: Callable[[int], bool]) -> int:
    """Return the largest power of two that fits, starting from a guess; 0 if 1 does not fit.

    Args:
        fits: tries one size; no size is tried twice.

    >>> [search_power_of_two(guess, 64, lambda size: size <= 8) for guess in (1, 8, 64)]
    [8, 8, 8]
    >>> (
    ...     search_power_of_two(4, 16, lambda size: True),
    ...     search_power_of_two(4, 16, lambda size: False),
    ... )
    (16, 0)
    """
    size = max(1, min(foreseen, most))
    if fits(size):
        while size * 2 <= most and fits(size * 2):
            size *= 2
        return size
    while size > 1:
        size //= 2
        if fits(size):
            return size
    return 0


def find_micro_batch(
    loaded: LoadedConfig, plan: Plan, memory: str, say: Callable[[str], None]
) -> MicroBatchSearch:
    """Search the largest micro-batch under the layout of a settled run.

    Raises:
        UserError, ClusterError: a rank died of anything but memory.
    """
    from shoal.data.loading.dataset_kind import is_indexed
    from shoal.data.sources import open_source
    from shoal.fabric.device import accelerator_type
    from shoal.planning.settle import layout_keys

    config, layout = loaded.config, plan.layout
    processes = config.launch.processes
    source = open_source(config.data, config.train.seed)
    share = layout.data_degree
    samples = len(source.train) if is_indexed(source.train) else MOST * share
    most = 2 ** ((max(1, min(MOST, samples // share))).bit_length() - 1)
    on_cpu = accelerator_type() is None
    limit = parse_bytes(memory) if memory else (free_bytes() // processes if on_cpu else 0)
    with tempfile.TemporaryDirectory(prefix="find-") as scratch:
        foreseen, capacity = _predict_micro_batch(loaded, plan, source, limit, most)
        found = MicroBatchSearch(foreseen, limit or capacity, most)
        said = f"{foreseen} foreseen by the planner" if foreseen else "nothing foreseen"
        say(f"{layout.text()}: {said}")

        def fits(size: int) -> bool:
            loaded.replace(
                "train",
                "tried",
                micro_batch=size,
                batch=size * share * _micro_batches_per_step(plan),
            )
            folder = Path(scratch, str(size))
            folder.mkdir()
            asked = {"limit_bytes": limit, "layout": layout_keys(layout)}
            found.tries[size] = _run_trial(loaded, plan, folder, asked)
            say(f"micro-batch {size}: {found.tries[size] or 'fits'}")
            return not found.tries[size]

        search_power_of_two(foreseen or 1, most, fits)
    return found


def _micro_batches_per_step(plan: Plan) -> int:
    """Return the micro-batches of a rank's step: enough to sum gradients and fill a pipeline."""
    return 2 * plan.layout.pp


def _predict_micro_batch(
    loaded: LoadedConfig, plan: Plan, source: Any, limit_bytes: int, most: int
) -> tuple[int, int]:
    """Return the planner's largest power of two that fits, 0 for none, and the limit in bytes."""
    import torch

    from shoal.base.errors import ShoalError
    from shoal.fabric.device import accelerator_type
    from shoal.forecast.fit.memory_instants import predict_run
    from shoal.forecast.memory.model_states import WIDTHS
    from shoal.forecast.search.case_settings import choose_format
    from shoal.trainer.jobs.run_forecast import (
        collect_model_facts,
        describe_local_cluster,
        make_case,
        read_resident_bytes,
    )

    device = torch.device(accelerator_type() or "cpu")
    held = read_resident_bytes()
    cluster = describe_local_cluster(loaded.config.launch.processes, device, held)
    limit = limit_bytes or int(cluster.device.memory_bytes)
    compute = choose_format(plan, cluster, [])
    try:
        kind = cluster.device.kind
        facts = collect_model_facts(
            loaded.config, source, kernels=kind, element_bytes=WIDTHS[compute]
        )
        size, best = 1, 0
        while size <= most:
            batch = size * plan.layout.data_degree * _micro_batches_per_step(plan)
            tried = replace(plan, compute=compute, micro_batch=size, batch=batch)
            if (
                predict_run(make_case(loaded.config, tried, facts, cluster)).training_peak_bytes
                > limit
            ):
                break
            size, best = size * 2, size
    except ShoalError:
        return 0, limit  # a search, like training, works without a plan
    return best, limit


def _run_trial(loaded: LoadedConfig, plan: Plan, folder: Path, asked: dict[str, Any]) -> str:
    """Train three steps in fresh processes; return "" or the error of an exhausted memory.

    Raises:
        UserError, ClusterError: a rank died of anything but memory.
    """
    from shoal.cli.workers.worker import worker_environment, worker_imports
    from shoal.config.save import to_toml
    from shoal.launch import supervise

    write_atomically(folder / "run.toml", to_toml(loaded))
    write_atomically(folder / "request.json", json.dumps(asked))
    deaths: list[dict[str, Any]] = []
    log = EventLog(folder / "events.jsonl", None)

    def emit(event: str, **fields: Any) -> None:
        if event == "worker_died":
            deaths.append(fields)
        log.emit(event, **fields)

    outcome = supervise(
        [sys.executable, "-m", "shoal.cli.workers.find_batch_worker", str(folder)],
        processes=loaded.config.launch.processes,
        folder=folder,
        restarts=0,
        emit=emit,
        environ=worker_environment(),
        imports=worker_imports(loaded.config.model, plan.layout),
    )
    if outcome.status == "finished":
        return ""
    if told := sorted(folder.glob("memory-*")):
        rank = told[0].name.removeprefix("memory-")
        return f"out of memory (rank {rank}: {told[0].read_text(encoding='utf-8')})"
    if any("SIGKILL" in death["how"] for death in deaths):
        return "killed by SIGKILL (often the kernel, out of memory)"
    if outcome.exit_code == 2:
        raise UserError(outcome.message)
    size = loaded.config.train.micro_batch
    raise ClusterError(f"micro-batch {size}: not memory, but {outcome.message or outcome.status}")
