"""Rule-based `auto`: choose a layout by parameter count, as the field's selection guide does.

The guide: below 1B parameters data parallel (ddp), 1–10B sharded (fsdp), above that tensor ×
pipeline × data (3-D). The guide ignores memory, so on a CPU this module also checks whether the
states fit; it does not check GPU memory yet. The reason line names the rule and the alternatives.
"""

from __future__ import annotations

from shoal.base.errors import PlanError
from shoal.base.estimates.facts import MachineFacts, default_processes
from shoal.base.layouts.layout import Layout
from shoal.base.text.units import bytes_text, count_text

DDP_BELOW, FSDP_UP_TO = 1_000_000_000, 10_000_000_000
"""The guide's bounds, in parameters."""

AUTO_AXES = ("dp_replicate", "dp_shard")
"""Axes that `auto` splits first; it uses the others on request, or if nothing else fits."""

WEIGHT_BYTES = 4
STATE_BYTES_PER_PARAMETER = 16
"""fp32 parameter, gradient and two Adam moments; the same for bf16 with fp32 masters, nearly."""


MOST_PER_CORE = 64
"""Most processes that may share one core: more of them only wait for each other."""


def check_cores(processes: int, machine: MachineFacts) -> None:
    """Refuse more than 64 processes per core of this machine; with GPUs refuse nothing.

    Raises:
        PlanError: too many processes; names the number that Shoal would start by default here.

    >>> check_cores(3000, MachineFacts(cores=2, memory_bytes=2**34, gpus=0))
    Traceback (most recent call last):
    shoal.base.errors.PlanError: launch.processes = 3000: this machine has 2 cores; try: \
launch.processes=2
    """
    if machine.gpus or processes <= MOST_PER_CORE * machine.cores:
        return
    cores = f"{machine.cores} core{'s' if machine.cores > 1 else ''}"
    raise PlanError(
        f"launch.processes = {processes}: this machine has {cores}; try: "
        f"launch.processes={default_processes(machine)}"
    )


def choose_by_size(
    processes: int, parameters: int | None, machine: MachineFacts
) -> tuple[Layout, str]:
    """Choose a layout by the guide; return the layout and the line with the reason.

    Args:
        parameters: elements of the model; None for a builder that has not run yet.

    Raises:
        PlanError: the guide's rule has no layout here.

    >>> machine = MachineFacts(cores=2, memory_bytes=2**34, gpus=0)
    >>> layout, why = choose_by_size(2, 4_200_000, machine)
    >>> layout.strategy, why.split(": ", 2)[2].split(";")[0]
    ('ddp', 'ddp on 2 processes')
    """
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
    from shoal.base.layouts.strategies import expand_strategy  # one process has no use for it

    return (
        expand_strategy(chosen, processes),
        f"auto: {size}{span}: {chosen} on {processes} processes; also possible: {others}{aside}",
    )


def _fits(strategy: str, parameters: int | None, processes: int, machine: MachineFacts) -> bool:
    """Return whether the states of all ranks fit this machine's memory; always true with GPUs."""
    if parameters is None or machine.gpus:
        return True
    return _required_bytes(strategy, parameters, processes) <= machine.memory_bytes


def _required_bytes(strategy: str, parameters: int, processes: int) -> int:
    """Return the bytes of states of all processes on one machine.

    A rank of fsdp holds all weights at its start.

    >>> _required_bytes("ddp", 1000, 2), _required_bytes("fsdp", 1000, 2)
    (32000, 24000)
    """
    if strategy == "fsdp":
        return parameters * (STATE_BYTES_PER_PARAMETER + WEIGHT_BYTES * processes)
    return parameters * STATE_BYTES_PER_PARAMETER * processes


def _too_large(parameters: int, processes: int, machine: MachineFacts) -> str:
    strategy = "fsdp" if processes > 1 else "single"
    need = bytes_text(_required_bytes(strategy, parameters, processes))
    fewer = f"launch.processes={processes // 2}, or " if processes > 2 else ""
    return (
        f"layout.strategy = auto: {count_text(parameters)} parameters take {need} of states even "
        f"with {strategy} on {processes} process{'es' if processes > 1 else ''}, this machine has "
        f"{bytes_text(machine.memory_bytes)}; try: {fewer}a smaller model"
    )


def check_guide(parameters: int | None) -> None:
    """Refuse a model size for which the guide names a layout that `auto` does not choose.

    Raises:
        PlanError: with the guide's rule and the alternatives.
    """
    if parameters is None or parameters <= FSDP_UP_TO:
        return
    raise PlanError(
        f"layout.strategy = auto: {count_text(parameters)} parameters, above 10B: the guide says "
        f"3d (tp × pp × dp), whose degrees auto does not choose; try: layout.strategy=3d, or "
        f"layout.strategy=fsdp, if {bytes_text(parameters * STATE_BYTES_PER_PARAMETER)} of states "
        f"fit on all ranks together"
    )
