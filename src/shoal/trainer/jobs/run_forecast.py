"""What the planner foresees of a run that is about to start: step time, peak memory, bytes.

The model's facts come from arithmetic where it is one of ours, else from a trace of shapes; the
machine's from what was measured here. Runs store the prediction beside the plan, so that their end
can say how far it was from what happened.
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
from shoal.base.estimates.estimate import Case, ModelFacts
from shoal.base.estimates.facts import this_machine
from shoal.base.plans.comm_volume import Travel
from shoal.base.plans.plan import Plan
from shoal.base.runlog.atomic_files import cache_folder
from shoal.config.sections import Config
from shoal.data.loading.dataset_kind import is_indexed, join
from shoal.data.loading.sample_seeds import kept_draws
from shoal.data.sources import Source
from shoal.fabric import World
from shoal.fabric.device import is_accelerator
from shoal.forecast.fit.memory_instants import predict_run
from shoal.forecast.fit.peak_memory import validation_micro_batch
from shoal.forecast.machines.measured_machine import machine_path, this_cluster
from shoal.forecast.machines.refit_rates import learnt, note_run, share_of
from shoal.forecast.memory.framework_memory import own_kernels
from shoal.forecast.memory.model_states import WIDTHS
from shoal.forecast.models.model_facts import LANGUAGE, family_of
from shoal.forecast.models.own_transformers import own_family
from shoal.forecast.models.transformer_costs import model_facts
from shoal.forecast.search.case_settings import beside
from shoal.forecast.time.model_traffic import busiest
from shoal.forecast.time.step_time import predict_time
from shoal.trainer.autotune.rank_layouts import FindFacts, facts_by_sample, measured_here
from shoal.trainer.jobs.configured_run import build_model, import_loss
from shoal.trainer.step.call_contract import split_batch
from shoal.wire.phases import phase

LEAST_STEPS = 20
"""Steps of a run that says something about the machine."""

EXAMPLES = 2
"""Samples of the batch that a trace looks at."""


def facts_of(config: Config, source: Source, *, kernels: str, element_bytes: int) -> ModelFacts:
    """Find the facts of the configured model that the planner reckons with, per sample.

    Ours by arithmetic on GPUs; on a CPU every model is traced, because there single operations cost
    most of what is no matrix product, and arithmetic does not count them one by one.

    Args:
        kernels: cpu or gpu: whose kernels keep what.

    Raises:
        PlanError: for a model that shapes alone cannot run, naming the module, and for data that
            can only be iterated, of which no sample can be looked at without taking it.
    """
    section = config.model
    own = not section.build and family_of(section.name) in LANGUAGE
    counted = own and not config.layout.names_blocks
    if counted and (kernels == "gpu" or not is_indexed(source.train)):
        known = {"sequence": config.data.sequence}
        if source.vocabulary:
            known["vocabulary"] = source.vocabulary
        shape = own_family(section.name, section.arguments, **known)
        kept = own_kernels(kernels, config.data.sequence, element_bytes)
        return model_facts(shape, config.data.sequence, element_bytes, kept)
    if not is_indexed(source.train):
        raise PlanError(
            "data.source: can only be iterated, so a trace has no sample to look at; try: "
            "a dataset with __getitem__ and __len__"
        )
    with kept_draws():
        samples = [source.train[place] for place in range(min(EXAMPLES, len(source.train)))]
        inputs, targets = split_batch(join(samples, source.collate, "the first samples"))
    return facts_by_sample(
        lambda: build_model(config, source),
        (inputs, targets),
        import_loss(section),
        section.call,
        kernels=kernels,
        element_bytes=element_bytes,
        blocks=config.layout,
        name=section.build or section.name,
    )


def cluster_here(processes: int, device: torch.device, held_bytes: int = 0) -> Cluster:
    """This machine with so many ranks, as it was measured, or as machines of its kind are.

    Args:
        device: of a rank: a machine with GPUs may be told to do without.
        held_bytes: CPU: what this process holds before its model is there (data, libraries).
    """
    found = measured_here(processes, device) or this_cluster(this_machine(), processes)
    if held_bytes and found.device.kind == "cpu":
        found = replace(found, device=replace(found.device, reserved_bytes=held_bytes))
    return found


def held_now_bytes() -> int:
    """What this process holds in memory now."""
    return int(psutil.Process().memory_info().rss)


def case_of(config: Config, plan: Plan, model: ModelFacts, cluster: Cluster) -> Case:
    """The run as the planner sees it."""
    return Case(model, cluster, plan, **beside(config))


class Learner:
    """Listens to a run's steps, and tells the machine's facts at the end how long they took."""

    def __init__(self, predicted: dict[str, Any], compute: str, world: World) -> None:
        self.predicted, self.compute = predicted, compute
        kind = "gpu" if is_accelerator(world.device) else "cpu"
        self.machine = machine_path(cache_folder(), world.size, kind, torch.get_num_threads())
        # What a machine that was never measured is said to do, no run may correct.
        self.measured = os.path.exists(self.machine)  # a Path raises where it may not look
        self.known = learnt(self.machine).get(compute, 1.0)
        self.steps_s: list[float] = []

    def hear(self, row: dict[str, Any]) -> None:
        """A listener of events."""
        if row.get("event") == "step":
            self.steps_s.append(row["step_s"])
        elif row.get("event") == "run_finished" and row.get("how") == "completed":
            self.teach()

    def teach(self) -> None:
        """After the last step. Short runs say more about warming up than about the machine."""
        steady = self.steps_s[2:]
        if len(steady) < LEAST_STEPS or "time" not in self.predicted or not self.measured:
            return
        share = share_of(self.predicted["time"], statistics.median(steady), self.known)
        if share is not None:
            note_run(self.machine, self.compute, share)


def prediction(case: Case, travel: Travel | None = None, *, saves: bool = False) -> dict[str, Any]:
    """Predict step time, memory and bytes of a run, as plan.json keeps them.

    Args:
        case: the run.
        travel: what the divided model sends, where that is known; of the rank that sends most.
        saves: whether the run saves before its last step; on a CPU the copy that is written beside
            training lies in the memory that the run measures.

    Returns:
        The prediction; seconds and bytes.
    """
    memory, time = predict_run(case), predict_time(case)
    peak_bytes = memory.most_bytes
    if saves and case.cluster.device.kind == "cpu":
        saving = [one.device_bytes for one in memory.instants if one.name == "saving"]
        peak_bytes = max(peak_bytes, *saving)
    sent = busiest(case, travel).total_bytes if travel else sum(time.bytes.values())
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
def foresee(
    config: Config,
    facts: FindFacts,
    plan: Plan,
    cluster: Cluster,
    travel: Callable[[], Travel] | None = None,
) -> dict[str, Any]:
    """The prediction for a run, or {"reason": why there is none}: training goes on without.

    Args:
        travel: tells what dividing the model makes travel (`Program.travel`).
    """
    width = WIDTHS[plan.compute]
    if plan.layout.threads > 1 and cluster.device.kind == "cpu":
        return {"reason": "dp: threads of one process are not foreseen"}
    try:
        known = facts(kernels=cluster.device.kind, element_bytes=width)
        case = case_of(config, plan, known, cluster)
        saves = config.checkpoint.every < config.train.steps  # 0: five times, and at the end
        return prediction(case, travel() if travel else None, saves=saves)
    except ShoalError as failure:
        return {"reason": str(failure)}
