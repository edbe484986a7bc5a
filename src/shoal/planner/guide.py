"""`auto` by rule: the field's selection guide, where the planner has nothing to weigh yet.

The guide people pass on: below 1B parameters data parallel (ddp), 1–10B sharded (fsdp), above that
tensor × pipeline × data (3-D). It ignores memory, so on a CPU what fits is asked as well (a GPU's
memory is not looked into yet). The rule that spoke is said in one line, with what else is possible.
"""

from __future__ import annotations

from shoal.base.degrees import check_degrees
from shoal.base.errors import PlanError
from shoal.base.facts import MachineFacts, default_processes
from shoal.base.layout import PIPELINES, STAGES, STRATEGIES, Layout, expand
from shoal.base.schedules import canonical, copies, settle_schedule
from shoal.base.units import bytes_text, count_text

DDP_BELOW, FSDP_UP_TO = 1_000_000_000, 10_000_000_000
"""Parameters: the guide's bounds."""

AUTO_AXES = ("dp_replicate", "dp_shard")
"""Axes that `auto` splits at first; the others where they are asked for, or nothing else fits."""

WEIGHT_BYTES = 4
STATE_BYTES_PER_PARAMETER = 16
"""fp32 parameter, gradient and two Adam moments; the same for bf16 with fp32 masters, nearly."""


MOST_PER_CORE = 64
"""Processes that a core may be shared by: more do nothing but wait for each other."""


def check_cores(processes: int, machine: MachineFacts) -> None:
    """Refuse more than 64 processes per core of this machine; with GPUs refuse nothing.

    Errors   PlanError with the number that a run without launch.processes would take here

    >>> check_cores(3000, MachineFacts(cores=2, memory_bytes=2**34, gpus=0))
    Traceback (most recent call last):
    shoal.base.errors.PlanError: launch.processes = 3000: this machine has 2 cores; nearest: \
launch.processes=2
    """
    if machine.gpus or processes <= MOST_PER_CORE * machine.cores:
        return
    cores = f"{machine.cores} core{'s' if machine.cores > 1 else ''}"
    raise PlanError(
        f"launch.processes = {processes}: this machine has {cores}; nearest: "
        f"launch.processes={default_processes(machine)}"
    )


def choose_layout(
    strategy: str,
    degrees: dict[str, int],
    processes: int,
    parameters: int | None,
    machine: MachineFacts,
    *,
    zero: int | None = None,
    threads: int = 0,
    schedule: str = "",
    chunks: int = 0,
) -> tuple[Layout, str]:
    """The layout to run and the line that says why.

    strategy    `auto` or a name · degrees  axes given by the user, which then must multiply out
    parameters  elements of the model; None when it is a builder that was not called yet
    zero        what `dp_shard` splits, if the user says · threads  replicas of `dp`
    schedule, chunks   of the pipeline, if the user says
    Errors      PlanError: unknown or unbuilt strategy, wrong world size, rule without a layout here

    >>> machine = MachineFacts(cores=2, memory_bytes=2**34, gpus=0)
    >>> layout, why = choose_layout("auto", {}, 2, 4_200_000, machine)
    >>> layout.strategy, why.split(": ", 2)[2].split(";")[0]
    ('ddp', 'ddp on 2 processes')
    """
    if degrees:
        named = zero if zero is not None or strategy == "auto" else STAGES.get(strategy)
        if strategy in PIPELINES and strategy != "pp":
            schedule = schedule or strategy
        layout = check_degrees(
            degrees, processes, named, threads=threads, schedule=schedule, chunks=chunks
        )
        _check_name(strategy, layout)
        return layout, f"layout given: {layout.text()}"
    if strategy == "auto" and (threads or zero is not None):  # what else would carry them
        strategy = "dp" if threads else {0: "ddp", 1: "zero1", 2: "zero2"}.get(zero or 0, "zero3")
    if strategy != "auto":
        layout = expand(
            strategy, processes, threads=threads, zero=zero, schedule=schedule, chunks=chunks
        )
        alone = strategy not in ("single", "dp") and processes == 1
        given = f"{strategy} on one process = " if alone else ""
        return layout, f"strategy given: {given}{layout.text()}"
    settle_schedule(schedule, chunks, 1)  # what auto takes here has no pipeline
    check_guide(parameters)
    size = (
        "a model of unknown size" if parameters is None else f"{count_text(parameters)} parameters"
    )
    if processes == 1:
        if not _fits("single", parameters, 1, machine):
            raise PlanError(_too_large(parameters or 0, 1, machine))
        return (
            Layout(),
            f"auto: {size}, one process: single; also possible: ddp (launch.processes=2)",
        )
    chosen, span = "ddp", "" if parameters is None else ", below 1B"
    if parameters is not None and parameters >= DDP_BELOW:
        chosen, span = "fsdp", ", 1–10B"
    elif not _fits("ddp", parameters, processes, machine):
        chosen, span = "fsdp", f", too many for {processes} replicas"
    if not _fits(chosen, parameters, processes, machine):
        raise PlanError(_too_large(parameters or 0, processes, machine))
    aside = ""
    if not machine.gpus and machine.cores <= processes:
        aside = f" (on {machine.cores} cores one process may be as fast)"
    others = "single, zero1, zero2, fsdp" if chosen == "ddp" else "zero2"
    return (
        expand(chosen, processes),
        f"auto: {size}{span}: {chosen} on {processes} processes; also possible: {others}{aside}",
    )


def _check_name(strategy: str, layout: Layout) -> None:
    """Errors: PlanError where the name means something else than the degrees."""
    same = {"zero3": "fsdp"}.get(strategy, strategy)
    if strategy in PIPELINES and strategy != "pp" and canonical(strategy) == layout.schedule:
        same = "pp"
    if strategy != "auto" and same != layout.strategy:
        named = layout.strategy in STRATEGIES
        nearest = f"layout.strategy={layout.strategy}" if named else "leave layout.strategy out"
        raise PlanError(
            f"layout.strategy = {strategy}: the degrees given with it are {layout.text()}; "
            f"nearest: {nearest}, or leave the degrees out"
        )


def check_micro_batches(layout: Layout, batch: int, micro_batch: int) -> None:
    """Check that a pipeline's schedule can run a step's micro-batches.

    batch, micro_batch   samples per step over all ranks, samples per forward pass; that they divide
                         evenly is taken for granted
    Errors   PlanError with the nearest batch and micro-batch that it can run
    """
    if layout.pp == 1:
        return
    samples = batch // layout.data_degree
    count = samples // micro_batch
    name, ranks = layout.schedule, layout.pp
    if not runs(layout, count):
        fitting = [n for n in range(1, samples + 1) if samples % n == 0 and runs(layout, n)]
        cut = min(fitting, key=lambda n: abs(n - count), default=0)
        whole = next(n for n in range(count, count + 2 * ranks + 1) if runs(layout, n))
        nearest = [f"train.micro_batch={samples // cut}"] if cut else []
        nearest += [f"train.batch={whole * micro_batch * layout.data_degree}"]
        which = (
            f"an even number of micro-batches per step, at least {2 * ranks} (twice layout.pp)"
            if copies(name) > 1
            else f"micro-batches per step in a multiple of layout.pp = {ranks}"
        )
        raise PlanError(
            f"layout.schedule = {name}: needs {which}, got {count} per data-parallel rank "
            f"(train.batch {batch}, train.micro_batch {micro_batch}); nearest: "
            f"{', or '.join([*nearest, 'layout.schedule=1f1b'])}"
        )


def describe_bubble(layout: Layout, batch: int, micro_batch: int) -> str:
    """Describe how long the rank of a pipeline that idles most stands idle, as a line.

    batch, micro_batch   as `check_micro_batches` has let them pass
    Gives    the share of a step, and a finer micro_batch where there are fewer micro-batches than
             ranks; "" without a pipeline

    >>> describe_bubble(Layout(pp=4, schedule="1f1b"), 16, 2)
    'pipeline: 1f1b over 4 stages, 8 micro-batches per step: 27 % of it is bubble'
    >>> describe_bubble(Layout(pp=4, schedule="gpipe"), 16, 8).split("; ")[1]
    'fewer micro-batches than stages, more is better: train.micro_batch=4'
    """
    if layout.pp == 1:
        return ""
    samples = batch // layout.data_degree
    count = samples // micro_batch
    name, ranks = layout.schedule, layout.pp
    # A backward is about two forwards, half of it for the weights.
    from shoal.planner.bubble import bubble_s

    idle_s = bubble_s(name, ranks, count, 1.0, 1.0, 1.0, layout.chunks)
    text = (
        f"pipeline: {name} over {layout.stages} stages, {count} micro-batch"
        f"{'es' if count > 1 else ''} per step: {idle_s / (idle_s + 3 * count):.0%} of it is bubble"
    ).replace("%", " %")
    finer = next((m for m in range(micro_batch - 1, 0, -1) if samples % m == 0), 0)
    if count < ranks and finer:
        text += f"; fewer micro-batches than stages, more is better: train.micro_batch={finer}"
    return text


def runs(layout: Layout, micro_batches: int) -> bool:
    """Whether a schedule can run so many micro-batches."""
    from shoal.planner.schedules import legal

    try:
        legal(layout.schedule, layout.pp, micro_batches, layout.chunks)
    except PlanError:
        return False
    return True


def _fits(strategy: str, parameters: int | None, processes: int, machine: MachineFacts) -> bool:
    """Whether the states of all ranks fit this machine; GPUs are not looked into yet."""
    if parameters is None or machine.gpus:
        return True
    return _needs_bytes(strategy, parameters, processes) <= machine.memory_bytes


def _needs_bytes(strategy: str, parameters: int, processes: int) -> int:
    """States of all processes on one machine; a rank of fsdp holds the whole weights at its start.

    >>> _needs_bytes("ddp", 1000, 2), _needs_bytes("fsdp", 1000, 2)
    (32000, 24000)
    """
    if strategy == "fsdp":
        return parameters * (STATE_BYTES_PER_PARAMETER + WEIGHT_BYTES * processes)
    return parameters * STATE_BYTES_PER_PARAMETER * processes


def _too_large(parameters: int, processes: int, machine: MachineFacts) -> str:
    strategy = "fsdp" if processes > 1 else "single"
    need = bytes_text(_needs_bytes(strategy, parameters, processes))
    fewer = f"launch.processes={processes // 2}, or " if processes > 2 else ""
    return (
        f"layout.strategy = auto: {count_text(parameters)} parameters take {need} of states even "
        f"with {strategy} on {processes} process{'es' if processes > 1 else ''}, this machine has "
        f"{bytes_text(machine.memory_bytes)}; nearest: {fewer}a smaller model"
    )


def check_guide(parameters: int | None) -> None:
    """Refuse a model for which the guide names a layout that `auto` does not choose.

    Errors: PlanError with the rule and what can be done.
    """
    if parameters is None or parameters <= FSDP_UP_TO:
        return
    raise PlanError(
        f"layout.strategy = auto: {count_text(parameters)} parameters, above 10B: the guide says "
        f"3d (tp × pp × dp), whose degrees auto does not choose; nearest: layout.strategy=3d, or "
        f"layout.strategy=fsdp, if {bytes_text(parameters * STATE_BYTES_PER_PARAMETER)} of states "
        f"fit on all ranks together"
    )
