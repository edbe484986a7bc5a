"""Forecast of a run that is about to start: step time, peak memory, bytes sent.

The model's facts come from arithmetic for Shoal's own models, else from a trace of shapes; the
machine's facts come from measurements. Runs store the prediction with the plan, so that their end
can report its error.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import psutil
import torch

from shoal.base.errors import PlanError, ShoalError
from shoal.base.estimates.cluster import Cluster
from shoal.base.estimates.estimate import ModelFacts, PlanningCase
from shoal.base.estimates.facts import read_machine_facts
from shoal.base.plans.comm_volume import CommVolume
from shoal.base.plans.plan import Plan
from shoal.base.runlog.atomic_files import cache_folder
from shoal.config.sections import Config
from shoal.data.loading.dataset_kind import is_indexed, join_samples
from shoal.data.loading.sample_seeds import preserved_rng
from shoal.data.sources import Source
from shoal.fabric import World
from shoal.fabric.device import is_accelerator
from shoal.forecast.fit.memory_instants import predict_run
from shoal.forecast.fit.peak_memory import validation_micro_batch
from shoal.forecast.machines.measured_machine import estimate_this_machine, machine_path
from shoal.forecast.machines.refit_rates import rate_share, read_corrections, record_run
from shoal.forecast.memory.framework_memory import own_kernels
from shoal.forecast.memory.model_states import WIDTHS
from shoal.forecast.models.model_facts import LANGUAGE, family_of
from shoal.forecast.models.own_transformers import own_shape
from shoal.forecast.models.transformer_costs import transformer_facts
from shoal.forecast.search.case_settings import case_settings
from shoal.forecast.time.model_traffic import predict_busiest_traffic
from shoal.forecast.time.step_time import predict_time
from shoal.trainer.autotune.rank_layouts import (
    ModelFactsGetter,
    read_measured_cluster,
    trace_facts_from_sample,
)
from shoal.trainer.jobs.configured_run import build_model, import_loss
from shoal.trainer.step.call_contract import split_batch
from shoal.wire.phases import phase

LEAST_STEPS = 20
"""Steps that a run needs before its step time corrects the machine's facts."""

EXAMPLES = 2
"""Samples of the batch that a trace uses."""


def collect_model_facts(
    config: Config, source: Source, *, kernels: str, element_bytes: int
) -> ModelFacts:
    """Return the planner's facts of the configured model, per sample.

    On GPUs arithmetic yields them for Shoal's own models. On a CPU every model is traced, because
    there single operations take most of the time outside matrix products, and arithmetic does not
    count them one by one.

    Args:
        kernels: cpu or gpu: the kernels that decide which activations are kept.

    Raises:
        PlanError: a model that cannot run on shapes alone, with the module's name, or data that can
            only be iterated, since a trace would consume its samples.
    """
    section = config.model
    own = not section.build and family_of(section.name) in LANGUAGE
    counted = own and not config.layout.names_blocks
    if counted and (kernels == "gpu" or not is_indexed(source.train)):
        known = {"sequence": config.data.sequence}
        if source.vocabulary:
            known["vocabulary"] = source.vocabulary
        shape = own_shape(section.name, section.arguments, **known)
        residual = config.precision.residual
        kept = own_kernels(kernels, config.data.sequence, element_bytes, residual)
        return transformer_facts(shape, config.data.sequence, element_bytes, kept)
    if not is_indexed(source.train):
        raise PlanError(
            "data.source: can only be iterated, so a trace has no sample to look at; try: "
            "a dataset with __getitem__ and __len__"
        )
    with preserved_rng():
        samples = [source.train[place] for place in range(min(EXAMPLES, len(source.train)))]
        inputs, targets = split_batch(join_samples(samples, source.collate, "the first samples"))
    return trace_facts_from_sample(
        lambda: build_model(config, source),
        (inputs, targets),
        import_loss(section),
        section.call,
        kernels=kernels,
        element_bytes=element_bytes,
        residual=config.precision.residual,
        blocks=config.layout,
        name=section.build or section.name,
    )


def describe_local_cluster(processes: int, device: torch.device, held_bytes: int = 0) -> Cluster:
    """Return this machine with so many ranks, as measured, or with figures of machines of its kind.

    Args:
        device: of a rank: a user may disable the GPUs of a machine.
        held_bytes: CPU: memory of this process before the model is built (data, libraries).
    """
    found = read_measured_cluster(processes, device) or estimate_this_machine(
        read_machine_facts(), processes
    )
    if held_bytes and found.device.kind == "cpu":
        found = replace(found, device=replace(found.device, reserved_bytes=held_bytes))
    return found


def read_resident_bytes() -> int:
    """Return the resident memory of this process in bytes."""
    return int(psutil.Process().memory_info().rss)


def make_case(config: Config, plan: Plan, model: ModelFacts, cluster: Cluster) -> PlanningCase:
    """Return the run as the planner's `PlanningCase`."""
    return PlanningCase(model, cluster, plan, **case_settings(config))


class StepTimeFeedback:
    """Listener that corrects the machine's facts by the measured step times of a run."""

    def __init__(self, predicted: dict[str, Any], compute: str, world: World) -> None:
        self.predicted, self.compute = predicted, compute
        kind = "gpu" if is_accelerator(world.device) else "cpu"
        self.machine = machine_path(cache_folder(), world.size, kind, torch.get_num_threads())
        # A run must not correct the default figures of a machine that was never measured.
        self.measured = os.path.exists(self.machine)  # a Path raises without permission
        self.known = read_corrections(self.machine).get(compute, 1.0)
        self.steps_s: list[float] = []

    def on_event(self, row: dict[str, Any]) -> None:
        """Handle an event of the run."""
        if row.get("event") == "step":
            self.steps_s.append(row["step_s"])
        elif row.get("event") == "run_finished" and row.get("how") == "completed":
            self.store_correction()

    def store_correction(self) -> None:
        """Store the correction after the last step, unless the run was too short to be steady."""
        steady = self.steps_s[2:]
        if len(steady) < LEAST_STEPS or "time" not in self.predicted or not self.measured:
            return
        share = rate_share(self.predicted["time"], statistics.median(steady), self.known)
        if share is not None:
            record_run(self.machine, self.compute, share)


def predict_figures(
    case: PlanningCase, travel: CommVolume | None = None, *, saves: bool = False
) -> dict[str, Any]:
    """Predict step time, memory and bytes of a run, as plan.json stores them.

    Args:
        case: the run.
        travel: traffic of the sharded model, if known, of the rank that sends most.
        saves: whether the run saves before its last step; on a CPU the copy that is written during
            training is part of the measured memory.

    Returns:
        The prediction; seconds and bytes.
    """
    memory, time = predict_run(case), predict_time(case)
    peak_bytes = memory.training_peak_bytes
    if saves and case.cluster.device.kind == "cpu":
        saving = [one.device_bytes for one in memory.instants if one.name == "saving"]
        peak_bytes = max(peak_bytes, *saving)
    sent = predict_busiest_traffic(case, travel).total_bytes if travel else sum(time.bytes.values())
    return {
        "step_s": time.step_s,
        "time": time.parts,
        "peak_memory_bytes": peak_bytes,
        "instants": [asdict(one) for one in memory.instants],
        "allocated_bytes": memory.allocated_bytes,
        "memory": memory.parts,
        "sent_bytes": sent,
        "validation_micro_batch": validation_micro_batch(case, memory),
        "machine": case.cluster.device.source,
    }


@phase("plan")
def forecast_run(
    config: Config,
    facts: ModelFactsGetter,
    plan: Plan,
    cluster: Cluster,
    travel: Callable[[], CommVolume] | None = None,
) -> dict[str, Any]:
    """Return the prediction for a run, or {"reason": …} if there is none: training runs without.

    Args:
        travel: returns the communication of the sharded model (`Program.travel`).
    """
    width = WIDTHS[plan.compute]
    if plan.layout.threads > 1 and cluster.device.kind == "cpu":
        return {"reason": "dp: threads of one process are not foreseen"}
    try:
        known = facts(kernels=cluster.device.kind, element_bytes=width)
        case = make_case(config, plan, known, cluster)
        saves = config.checkpoint.every < config.train.steps  # 0: five times, and at the end
        return predict_figures(case, travel() if travel else None, saves=saves)
    except ShoalError as failure:
        return {"reason": str(failure)}
