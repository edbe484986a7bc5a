"""Overlap, message sizes and recomputation of each framework's training step.

A published run can only be compared with a prediction of the same framework's step.
Sources: DeepSpeed's pipeline engine (gradients are reduced after the last backward pass, stages
send activations in parts), Megatron-LM's options, torchtitan's selective recompute (every second
product is kept), Korthikanti et al. 2022 (attention's core runs again).
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.base.errors import PlanError, check_choice


@dataclass(frozen=True)
class FrameworkOverlap:
    """Overlap, message sizes and recomputation of one framework.

    Attributes:
        hides_gradients, hides_parameters: sends them during compute, if the device can overlap.
        hides_update: zero 1 and 2: gathers the updated weights during the next forward pass.
        splits_messages: each tp rank sends its part of a pipeline's activations.
        selective: shares that selective recompute runs again: products, attention, the rest.
        root_bytes: bytes per gathered element of weights outside blocks, and of their gradients, if
            the compute format is narrower; 0: the compute format's.
        wait_share: σ − 1: the share of hidden communication that slows the overlapped compute.
    """

    hides_gradients: bool = True
    hides_parameters: bool = True
    hides_update: bool = False
    splits_messages: bool = False
    selective: tuple[float, float, float] = (0.0, 0.0, 1.0)
    root_bytes: int = 4
    wait_share: float = 0.15


MEGATRON_SELECTIVE = (0.0, 1.0, 0.3)
TORCHTITAN = FrameworkOverlap(selective=(0.5, 0.0, 1.0))

HABITS = {
    "shoal": FrameworkOverlap(),
    "torchtitan": TORCHTITAN,
    "torchtitan-2025": TORCHTITAN,
    "llm-foundry": FrameworkOverlap(root_bytes=0),
    "automodel": FrameworkOverlap(),
    "megatron": FrameworkOverlap(
        hides_update=True, splits_messages=True, selective=MEGATRON_SELECTIVE
    ),
    "megatron-deepspeed": FrameworkOverlap(
        hides_gradients=False,
        hides_parameters=False,
        splits_messages=True,
        selective=MEGATRON_SELECTIVE,
        root_bytes=0,
    ),
}
"""Overlap by `PlanningCase.framework`."""


def framework_overlap(framework: str) -> FrameworkOverlap:
    """Return the overlap of a framework.

    Raises:
        PlanError: unknown framework, with the nearest name.

    >>> framework_overlap("torchtitan").selective[0]
    0.5
    """
    check_choice("framework", framework, HABITS, kind=PlanError)
    return HABITS[framework]
