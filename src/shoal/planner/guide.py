"""`auto` by rule: the field's selection guide, until the planner can weigh time and memory.

The guide people pass on: below 1B parameters data parallel (ddp), 1–10B sharded (fsdp), above that
tensor × pipeline × data (3-D). It ignores memory, so on a CPU what fits is asked as well (a GPU's
memory is not looked into yet). The rule that spoke is said in one line, with what else is possible.
"""

from __future__ import annotations

from shoal.base.errors import PlanError
from shoal.base.facts import MachineFacts
from shoal.base.layout import Layout, check_degrees, expand
from shoal.base.units import bytes_text, count_text

STATE_BYTES_PER_PARAMETER = 16
"""fp32 parameter, gradient and two Adam moments; the same for bf16 with fp32 masters, nearly."""


def default_processes(machine: MachineFacts) -> int:
    """Processes on one machine when nobody says: one per GPU, else two where there are two cores.

    >>> default_processes(MachineFacts(cores=2, memory_bytes=2**34, gpus=0))
    2
    """
    if machine.gpus:
        return machine.gpus
    return 2 if machine.cores >= 2 else 1


def choose_layout(
    strategy: str,
    degrees: dict[str, int],
    processes: int,
    parameters: int | None,
    machine: MachineFacts,
) -> tuple[Layout, str]:
    """The layout to run and the line that says why.

    strategy    `auto` or a name · degrees  axes given by the user, which then must multiply out
    parameters  elements of the model; None when it is a builder that was not called yet
    Errors      PlanError: unknown or unbuilt strategy, wrong world size, rule without a layout here

    >>> machine = MachineFacts(cores=2, memory_bytes=2**34, gpus=0)
    >>> layout, why = choose_layout("auto", {}, 2, 4_200_000, machine)
    >>> layout.strategy, why.split(": ", 2)[2].split(";")[0]
    ('ddp', 'ddp on 2 processes')
    """
    if degrees:
        layout = check_degrees(degrees, processes)
        return layout, f"layout given: {layout.text()}"
    if strategy != "auto":
        layout = expand(strategy, processes)
        return layout, f"strategy given: {layout.text()}"
    check_guide(parameters, machine)
    if parameters is not None and processes > 1 and not _fits(parameters, processes, machine):
        raise PlanError(_too_large(parameters, processes, machine))
    size = (
        "a model of unknown size" if parameters is None else f"{count_text(parameters)} parameters"
    )
    below = "" if parameters is None else ", below 1B"
    if processes == 1:
        return (
            Layout(),
            f"auto: {size}, one process: single; also possible: ddp (launch.processes=2)",
        )
    aside = ""
    if not machine.gpus and machine.cores <= processes:
        aside = f" (on {machine.cores} cores one process may be as fast)"
    return (
        expand("ddp", processes),
        f"auto: {size}{below}: ddp on {processes} processes; also possible: single{aside}",
    )


def _fits(parameters: int, processes: int, machine: MachineFacts) -> bool:
    """Whether that many replicas' states fit this machine; GPUs are not looked into yet."""
    return bool(machine.gpus) or (
        parameters * STATE_BYTES_PER_PARAMETER * processes <= machine.memory_bytes
    )


def _too_large(parameters: int, processes: int, machine: MachineFacts) -> str:
    need = bytes_text(parameters * STATE_BYTES_PER_PARAMETER * processes)
    return (
        f"layout.strategy = auto: the states of {processes} replicas of {count_text(parameters)} "
        f"parameters take {need}, this machine has {bytes_text(machine.memory_bytes)}; nearest: "
        f"launch.processes={max(1, processes // 2)}, or a smaller model"
    )


def check_guide(parameters: int | None, machine: MachineFacts) -> None:
    """Refuse a model for which the guide names a layout that this version does not build.

    Errors: PlanError with the rule, the memory that replicas would need, and what can be done.
    """
    if parameters is None or parameters < 1_000_000_000:
        return
    rule = "fsdp" if parameters <= 10_000_000_000 else "3d (tp × pp × dp)"
    span = "1–10B" if parameters <= 10_000_000_000 else "above 10B"
    needs = bytes_text(parameters * STATE_BYTES_PER_PARAMETER)
    has = bytes_text(machine.memory_bytes)
    raise PlanError(
        f"layout.strategy = auto: {count_text(parameters)} parameters, {span}: the guide says "
        f"{rule}, which this version does not build; if {needs} of states fit on every rank "
        f"(this machine has {has}): layout.strategy=ddp, else a smaller model"
    )
