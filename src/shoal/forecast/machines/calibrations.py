"""Calibration of predicted step times for types of machines that were not measured.

Fitted to published runs; each calibration has its error and source.

A coefficient is seconds measured per second of arithmetic (`efficiency`) or seconds per event
(`constants_s`); step_terms.py defines the terms. No coefficient belongs to one model or one run.

    A100, Megatron-DeepSpeed   fp16, attention in several kernels, nothing overlapped: fitted by
                               benchmarks/planner/vtrain.py to vTrain's runs (errors out of fold:
                               docs/proof/planner-time.md), several nodes and one node apart
    GPU                        fused attention in one kernel: defaults for every other framework,
                               from the throughput that projects publish (benchmarks/planner/
                               throughput.py prints how far they are off)
    CPU                        operations add up, nothing is hidden; `shoal plan` on a machine that
                               was measured uses that instead

Sources: VIA-Research/vTrain (MIT), validation runs; torchtitan, llm-foundry, Megatron-LM.
"""

from __future__ import annotations

from dataclasses import replace

from shoal.base.estimates.cluster import Calibration
from shoal.base.estimates.estimate import PlanningCase

MEGATRON_DEEPSPEED = Calibration(
    efficiency={
        "matrix": 1.2, "attention": 3.0, "elementwise": 1.3, "loss": 2.0, "weights": 1.0,
        "launch": 8.0, "tensor": 1.2, "tensor_shared": 1.2, "tensor_both": 1.2,
        "pipeline": 1.0, "pipeline_across": 1.0, "gradients": 1.0, "gradients_shared": 1.0,
        "gradients_across": 1.5, "gradients_both": 1.5, "optimizer": 1.0,
    },
    constants_s={"block": 5e-4, "micro_batch": 1e-3, "step": 5e-3},
    source="before any fit: what Megatron's kernels of 2021 cost, in round figures",
)  # fmt: skip
"""Start of this framework's fits, and the values of coefficients that a fit does not determine."""
GPU_PRIOR = Calibration(
    efficiency={
        "matrix": 1.1, "attention": 2.0, "elementwise": 1.6, "loss": 1.5, "weights": 1.0,
        "launch": 1.0, "tensor": 1.2, "context": 1.0, "experts": 1.2, "pipeline": 1.0,
        "gradients": 1.2, "parameters": 1.2, "optimizer": 1.2,
    },
    constants_s={"block": 1e-4, "micro_batch": 1e-3, "step": 5e-3},
    source="before any fit: round figures",
)  # fmt: skip
"""Start of the default for GPUs."""

GPU = Calibration(
    efficiency={
        "matrix": 1.14, "attention": 2.89, "elementwise": 2.17, "loss": 1.54, "weights": 1.03,
        "launch": 1.0, "tensor": 0.93, "context": 1.0, "experts": 1.2, "pipeline": 1.0,
        "gradients": 1.27, "gradients_both": 1.40, "parameters": 1.27, "parameters_both": 1.42,
        "optimizer": 1.24,
    },
    constants_s={"block": 1e-4, "micro_batch": 1e-3, "step": 5.1e-3},
    source=(
        "44 published runs on A100 and H100 (torchtitan, llm-foundry, Korthikanti et al. 2022), "
        "bf16 and fp16: median 4 % off; a project left out, 5 %"
    ),
    time_error=0.15,
)  # fmt: skip
"""Default of every GPU and framework without its own fit."""

CPU = Calibration(
    efficiency={"matrix": 1.08, "elementwise": 4.9, "launch": 2.5},
    constants_s={"micro_batch": 2.6e-3},
    source=(
        "32 runs of 8 models on two cores (benchmarks/planner/at_hand.py), on top of rates that "
        "were measured there: a model left out, 11 % off (median)"
    ),
    time_error=0.2,
)  # fmt: skip
"""CPU cores: operations add up and nothing is hidden. Element-wise operations allocate their
outputs, and single operations start with cold caches: both cost more than in a loop."""

FITTED = {
    ("megatron-deepspeed", True): Calibration(
        efficiency={
            "matrix": 1.17, "attention": 3.12, "elementwise": 1.24, "loss": 1.98, "weights": 1.10,
            "launch": 8.02, "tensor": 0.80, "tensor_shared": 1.60, "tensor_both": 1.09,
            "pipeline": 1.0, "pipeline_across": 0.917, "gradients": 1.0, "gradients_across": 1.61,
            "gradients_both": 1.81, "optimizer": 1.01,
        },
        constants_s={"block": 6.11e-4, "micro_batch": 1.01e-3, "step": 5.01e-3},
        source="vTrain, 88 runs on 64 to 512 A100: 6.2 % mean error out of fold",
        time_error=0.15,
    ),
    ("megatron-deepspeed", False): Calibration(
        efficiency={
            "matrix": 0.931, "attention": 1.54, "elementwise": 1.39, "loss": 3.29, "weights": 1.20,
            "launch": 9.51, "tensor": 1.37, "tensor_shared": 0.812, "pipeline": 1.05,
            "gradients": 0.744, "gradients_shared": 0.81, "optimizer": 0.477,
        },
        constants_s={"block": 9.47e-4, "micro_batch": 1.9e-3, "step": 4.43e-3},
        source="vTrain, 732 runs on 2 to 8 A100: 5.9 % mean error out of fold",
        time_error=0.15,
    ),
}  # fmt: skip
"""Fits by framework, for one node and for several; by benchmarks/planner/vtrain.py."""


def calibration_of(case: PlanningCase) -> Calibration:
    """Return the calibration for a case's step time.

    It is the cluster's own, if that was fitted (it has a `matrix` term). Else it is the fit to runs
    of the case's framework on one node or several, or the default of the kind of device. Values
    measured on the cluster override it, and a measured ladder needs no correction.
    """
    own, device = case.cluster.calibration, case.cluster.device
    if "matrix" in own.efficiency:
        return own
    kind = CPU if device.kind == "cpu" else GPU
    base = FITTED.get((case.framework, case.cluster.nodes > 1), kind)
    if not (own.efficiency or own.constants_s or device.ladders):
        return base
    rated = {"matrix": 1.0} if device.ladders and device.kind != "cpu" else {}
    return replace(
        base,
        efficiency={**base.efficiency, **rated, **own.efficiency},
        constants_s={**base.constants_s, **own.constants_s},
        allocator=own.allocator,
        source=own.source or base.source,
        time_error=own.time_error or base.time_error,
    )
